"""A run is begun once, ended once, and leaves nothing behind, whoever began it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as of_torch

import camshaft.distributed as idist
from camshaft.distributed import agreement, context
from camshaft.distributed.topology import Topology
from tests.distributed.test_ranks import Somewhere
from tests.guards import content, outlasting
from tests.ranks import on_ranks


@pytest.fixture(autouse=True)
def ends():
    """Whatever a test leaves, the next one finds nothing."""
    yield
    idist.finalize()


class Closing(Somewhere):
    """A backend that counts how often it is closed."""

    def __init__(self):
        super().__init__(Topology())
        self.closed = 0

    def close(self):
        self.closed += 1


def test_a_run_is_begun_and_ended_without_touching_the_environment(monkeypatch):
    before = dict(os.environ)
    idist.initialize("gloo", timeout=timedelta(seconds=30))
    assert (idist.backend(), idist.get_world_size(), idist.model_name()) == ("gloo", 1, "native-dist")
    assert dict(os.environ) == before
    monkeypatch.setenv("OF_THE_USER", "stays")
    for _ in range(2):
        idist.finalize()
        assert (idist.backend(), dist.is_initialized()) == (None, False)
    assert os.environ["OF_THE_USER"] == "stays"


def test_a_second_beginning_is_refused_and_the_first_goes_on():
    idist.initialize("gloo")
    with pytest.raises(RuntimeError, match="initialize was called already, with 'gloo': call finalize first"):
        idist.initialize("gloo")
    assert idist.backend() == "gloo"
    idist.finalize()
    idist.initialize("gloo")


def test_a_beginning_that_fails_leaves_nothing():
    def fail():
        raise OSError("no network")

    with pytest.raises(OSError, match="no network"):
        context.install(fail, debug=True)
    assert idist.backend() is None
    assert not agreement.enabled()
    with pytest.raises(TypeError, match=r"\['time_out'\] are not known"):
        idist.initialize("gloo", time_out=3)
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="backend must be one of"):
        idist.initialize("unknown")


def test_debug_mode_is_over_with_the_run():
    context.install(Closing, debug=True)
    assert agreement.enabled()
    idist.finalize()
    assert not agreement.enabled()


@pytest.mark.parametrize("end", [idist.finalize, context.abandon])
def test_a_run_that_somebody_else_began_is_ended_too(end):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert idist.backend() == "gloo"
    end()
    assert (idist.backend(), dist.is_initialized()) == (None, False)


def test_a_run_whose_group_the_user_has_destroyed_is_ended_without_an_error():
    idist.initialize("gloo")
    dist.destroy_process_group()
    idist.finalize()
    idist.initialize("gloo")
    assert idist.get_world_size() == 1


@pytest.mark.parametrize("end", [idist.finalize, context.abandon])
def test_what_a_thread_talks_through_for_a_while_is_ended_alone(end):
    of_the_process, of_the_thread = Closing(), Closing()
    context.install(lambda: of_the_process, debug=True)
    with idist.use_backend(of_the_thread):
        end()
    assert (of_the_process.closed, of_the_thread.closed) == (0, 1)
    assert context.current() is of_the_process
    assert agreement.enabled()
    end()
    assert of_the_process.closed == 1
    assert idist.backend() is None


@on_ranks(2)
def test_abandon_waits_for_nobody(tmp_path):
    left = tmp_path / "left"
    if idist.get_rank() == 0:
        idist.isend("never received", 1)
        context.abandon()
        left.touch()
    else:
        deadline = time.monotonic() + 20
        while not left.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        context.abandon()
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the test destroys one


def test_groups_have_the_timeout_of_the_run():
    idist.initialize("gloo", timeout=timedelta(seconds=33))
    options = idist.new_group([0]).handle._get_backend(torch.device("cpu")).options
    assert options._timeout == timedelta(seconds=33)


def workers():
    """Count the worker threads of gloo, which name themselves once they run, and are listed until just after."""
    names = [content(file) for file in Path("/proc/self/task").glob("*/comm")]
    return names.count("pt_gloo_runloop\n")


class Held:
    """A worker thread that holds an operation which has ended, until another thread lets it go."""

    def __init__(self, group):
        self.is_over = False
        self.let_go = threading.Event()
        self._caller = threading.get_ident()
        self._is_held = threading.Event()
        while not self._is_held.is_set():  # an operation may end before its callback is added
            group.allreduce([torch.empty(0)]).get_future().add_done_callback(self._hold)
            self._is_held.wait(0.1)

    def _hold(self, _):
        if threading.get_ident() != self._caller:
            self._is_held.set()
            self.let_go.wait()
            time.sleep(0.1)  # without the GIL
            self.is_over = True


@pytest.mark.skipif(sys.platform != "linux", reason="threads have names on Linux")
@pytest.mark.parametrize("end", [idist.finalize, context.abandon])
def test_the_worker_threads_of_gloo_end_with_the_run(end, monkeypatch):
    """Also if torch.distributed.nn was imported during the run, as the first DistributedDataParallel does."""
    before = workers()
    idist.initialize("gloo")
    monkeypatch.setattr(of_torch.all_reduce, "__defaults__", (dist.ReduceOp.SUM, dist.group.WORLD))
    subgroup = idist.new_group([0])
    idist.all_reduce(torch.ones(3), group=subgroup)
    assert not outlasting(lambda: workers() != before + 4)
    del subgroup
    end()
    assert not outlasting(lambda: workers() != before)
    assert of_torch.all_reduce.__defaults__ == (dist.ReduceOp.SUM, None)


def test_no_worker_thread_holds_an_operation_once_the_run_has_ended():
    """Also of a group that lives on in a model, which waits for the threads, and keeps the GIL, when it is freed."""
    idist.initialize("gloo")
    group = dist.group.WORLD
    held = Held(group)
    threading.Timer(0.1, held.let_go.set).start()
    idist.finalize()
    assert held.is_over


def test_a_run_with_an_operation_that_never_ends_is_ended():
    idist.initialize("gloo")
    held = Held(dist.group.WORLD)
    context.abandon()
    assert not held.is_over
    assert not dist.is_initialized()
    held.let_go.set()
    idist.initialize("gloo")


PROGRAM = """
import atexit, os, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import torch._dynamo  # as DistributedDataParallel does
import camshaft.distributed as idist
from camshaft.engine import Engine
from tests.distributed.test_context import Held

def initialized():
    idist.initialize("gloo")
    return dist.group.WORLD

def adopted():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert idist.backend() == "gloo"
    return dist.group.WORLD

def kept_by_a_model():
    global model
    idist.initialize("gloo")
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    idist.finalize()
    return model.process_group

def kept_in_a_cycle():
    idist.initialize("gloo")
    cycle = [DistributedDataParallel(torch.nn.Linear(2, 1))]
    cycle.append(cycle)
    idist.finalize()
    return cycle[0].process_group

def destroyed_by_the_user():
    group = adopted()
    kept.append(group)
    dist.destroy_process_group()
    return group

def failed():
    try:
        with idist.Parallel("gloo"):
            kept.append(dist.group.WORLD)
            Engine(lambda engine, batch: 1 / 0).run([0])
    except ZeroDivisionError:
        return kept[0]

class Slow:
    def __del__(self):
        time.sleep(0.5)  # after the exit handlers: what asks for the GIL now is ended

kept, slow = [], Slow()
WAYS = (initialized, adopted, kept_by_a_model, kept_in_a_cycle, destroyed_by_the_user, failed)
codes = {}
for way in WAYS:
    child = os.fork()
    if child == 0:
        held = Held(way())
        atexit.register(held.let_go.set)  # it still holds the operation when the interpreter shuts down
        break
    codes[way.__name__] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
else:
    print(codes)
"""


@pytest.mark.jobs
@pytest.mark.timeout(310)
def test_no_worker_thread_aborts_the_process_at_its_exit():
    """A thread that asks for the GIL while the interpreter shuts down ends the process by SIGABRT."""
    command = [sys.executable, "-c", PROGRAM]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    codes = eval(done.stdout)
    assert len(codes) == 6
    assert set(codes.values()) == {0}, f"{codes}\n{done.stderr}"
