"""A run is begun once, ended once, and leaves nothing behind, whoever began it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as of_torch

import camshaft.distributed as idist
from camshaft.distributed import run
from camshaft.distributed.backends.native.backend import NativeBackend, check_options, create, device_of
from camshaft.distributed.topology import Launch, Topology
from tests.distributed.environments.observed import step
from tests.distributed.test_ranks import Somewhere
from tests.guards import outlasting
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
        run.install(fail, debug=True)
    assert idist.backend() is None
    assert not run.current().job.compares_collectives
    with pytest.raises(TypeError, match=r"\['time_out'\] are not known"):
        idist.initialize("gloo", time_out=3)
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="backend must be one of"):
        idist.initialize("unknown")


def test_debug_mode_is_over_with_the_run():
    run.install(Closing, debug=True)
    assert run.current().job.compares_collectives
    idist.finalize()
    assert not run.current().job.compares_collectives


@pytest.mark.parametrize("end", [idist.finalize, run.abandon])
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


@pytest.mark.parametrize("end", [idist.finalize, run.abandon])
def test_what_a_thread_talks_through_for_a_while_is_ended_alone(end):
    of_the_process, of_the_thread = Closing(), Closing()
    run.install(lambda: of_the_process, debug=True)
    with idist.use_backend(of_the_thread):
        end()
    assert (of_the_process.closed, of_the_thread.closed) == (0, 1)
    assert run.current() is of_the_process
    assert run.current().job.compares_collectives
    end()
    assert of_the_process.closed == 1
    assert idist.backend() is None


@on_ranks(2)
def test_abandon_waits_for_nobody(tmp_path):
    left = tmp_path / "left"
    if idist.get_rank() == 0:
        idist.isend("never received", 1)
        run.abandon()
        left.touch()
    else:
        deadline = time.monotonic() + 20
        while not left.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        run.abandon()
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the test destroys one


def test_a_query_under_srun_starts_no_program_and_asks_no_name_server(monkeypatch):
    for name, value in step(0, 0, [1]).items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: pytest.fail(f"{args} was started"))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: pytest.fail(f"{args} was looked up"))
    assert (idist.get_rank(), idist.get_world_size(), idist.get_nnodes()) == (0, 1, 1)


PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
QUERIES = (idist.get_nnodes, idist.get_node_rank, idist.get_nproc_per_node)


@contextmanager
def told(**variables):
    """Set the variables of a place, and no others of them."""
    before = {name: os.environ.pop(name) for name in PLACE if name in os.environ}
    os.environ.update({name: str(value) for name, value in variables.items()})
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(before)


@on_ranks(6)
def test_ranks_that_are_not_told_how_many_nodes_there_are_do_not_guess():
    """On three nodes with two processes each, ranks 0, 2 and 4 would infer 1, 3 and 2 nodes."""
    dist.barrier()
    rank = dist.get_rank()
    variables = {"RANK": rank, "WORLD_SIZE": 6, "LOCAL_RANK": rank % 2}
    for hint, environment in ((rank % 2, {}), (None, variables), (None, {"LOCAL_RANK": rank % 2})):
        run._local_rank = hint
        with told(**environment), use_fresh_adoption():
            assert (idist.get_rank(), idist.get_local_rank(), idist.get_world_size()) == (rank, rank % 2, 6)
            for query in QUERIES:
                with pytest.raises(RuntimeError, match="is not known: .* Set LOCAL_WORLD_SIZE"):
                    query()
            idist.show_config()
    whole = {**variables, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": rank // 2, "GROUP_WORLD_SIZE": 3}
    with told(**whole), use_fresh_adoption():
        assert [query() for query in QUERIES] == [3, rank // 2, 2]


@contextmanager
def use_fresh_adoption():
    """Let the context adopt the process group anew, as in a process that has not asked before."""
    before, run._process = run._process, run._serial
    try:
        yield
    finally:
        run._process = before


@on_ranks(2)
def test_a_local_rank_that_nothing_tells_is_taken_from_the_rank_with_a_warning():
    dist.barrier()
    run._local_rank = None
    with (
        told(),
        use_fresh_adoption(),
        pytest.warns(UserWarning, match="local rank of rank . is unknown.* set_local_rank first"),
    ):
        assert idist.get_local_rank() == dist.get_rank()


@on_ranks(2)
def test_variables_of_another_run_are_not_those_of_the_group():
    dist.barrier()
    rank = dist.get_rank()
    with told(RANK=3, WORLD_SIZE=4, LOCAL_RANK=3, LOCAL_WORLD_SIZE=4), use_fresh_adoption():
        assert (idist.get_local_rank(), idist.get_world_size()) == (rank, 2)  # as set_local_rank told
    with told(LOCAL_RANK=7), use_fresh_adoption():
        assert idist.get_local_rank() == rank


def see(monkeypatch, kind, count):
    """Let torch see so many devices of a kind."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: kind is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: kind and torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("kind", "count", "config", "local_rank", "device"),
    [
        ("cuda", 4, "cuda:nccl", 3, "cuda:3"),
        ("cuda", 1, "cuda:nccl", 3, "cuda:0"),  # each process sees its own GPU alone
        ("cuda", 2, "cuda:nccl", 3, "cuda:1"),
        ("cuda", 1, "cpu:gloo,cuda:gloo", 1, "cuda:0"),
        ("cuda", 4, "cpu:gloo,cuda:nccl", 2, "cuda:2"),
        ("xpu", 4, "xpu:xccl", 2, "xpu:2"),
        ("hpu", 2, "hpu:hccl", 1, "hpu:1"),
        ("xpu", 4, "cpu:gloo,cuda:gloo", 2, "cpu"),
        ("mps", 1, "cpu:gloo,cuda:gloo", 0, "cpu"),
        ("cuda", 0, "cpu:gloo,cuda:gloo", 0, "cpu"),
        (None, 0, "cpu:gloo,cuda:gloo", 0, "cpu"),
    ],
)
def test_a_process_has_one_of_the_accelerators_that_it_sees(monkeypatch, kind, count, config, local_rank, device):
    see(monkeypatch, kind, count)
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: config)
    assert device_of(local_rank) == torch.device(device)


@on_ranks(2)
def test_a_rank_that_sees_one_gpu_alone_adopts_a_group_and_has_that_gpu():
    dist.barrier()
    with pytest.MonkeyPatch.context() as monkeypatch, use_fresh_adoption():
        see(monkeypatch, "cuda", 1)
        assert (idist.get_rank(), idist.get_local_rank()) == (dist.get_rank(), dist.get_rank())
        assert idist.device() == torch.device("cuda", 0)


@on_ranks(2)
@pytest.mark.parametrize("fails", [False, True])
def test_ranks_that_see_one_gpu_each_begin_a_run_on_it(fails, tmp_path):
    dist.barrier()
    rank, chosen = dist.get_rank(), []
    idist.finalize()

    def meet(backend, group):
        if fails:
            raise dist.DistBackendError("Duplicate GPU detected")

    with pytest.MonkeyPatch.context() as monkeypatch:
        see(monkeypatch, "cuda", 1)
        monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
        monkeypatch.setattr(NativeBackend, "barrier", meet)
        place = {"init_method": f"file://{tmp_path}/store", "rank": rank, "world_size": 2}
        if fails:
            with pytest.raises(dist.DistBackendError, match="Duplicate GPU detected") as raised:
                idist.initialize("gloo", **place)
            assert f"rank {rank} uses cuda:0, one of 1 that it sees, and 2 processes" in "".join(notes_of(raised.value))
            assert not dist.is_initialized()
        else:
            idist.initialize("gloo", **place)
            assert chosen == [idist.device()] == [torch.device("cuda", 0)]
            assert (idist.get_nnodes(), idist.get_nproc_per_node(), idist.get_local_rank()) == (1, 2, rank)
            idist.finalize()


@on_ranks(2)
def test_a_rank_that_was_told_less_than_another_asks_for_the_hosts_alone(tmp_path):
    dist.barrier()
    rank = dist.get_rank()
    idist.finalize()
    if rank == 0:
        launch = Launch("horovodrun", Topology(world_size=2, local_world_size=2), host="n")
    else:
        launch = Launch("horovodrun", Topology(rank=1, world_size=2), assumed=("num_nodes",), host="n")
    backend = create("gloo", launch, init_method=f"file://{tmp_path}/store")
    assert backend.topology == Topology(rank, 2, rank, 2, 0, 1)
    backend.barrier(None)
    backend.close()


def notes_of(error):
    return [str(error), *getattr(error, "__notes__", ())]


@pytest.mark.parametrize(("kind", "device"), [("xpu", "xpu"), ("cuda", "cuda"), ("mps", "mps"), (None, "cpu")])
def test_a_single_process_has_the_accelerator_of_the_machine(monkeypatch, kind, device):
    see(monkeypatch, kind, 1)
    assert idist.device() == torch.device(device)


def test_a_backend_whose_devices_are_missing_is_refused_by_their_kind(monkeypatch):
    see(monkeypatch, "xpu", 1)
    with pytest.raises(RuntimeError, match="backend 'nccl' needs a CUDA device, and there is none"):
        check_options("nccl", {})
    check_options("xccl", {})
    see(monkeypatch, None, 0)
    with pytest.raises(RuntimeError, match="backend 'xccl' needs a xpu device"):
        check_options("xccl", {})


def test_groups_have_the_timeout_of_the_run():
    idist.initialize("gloo", timeout=timedelta(seconds=33))
    options = idist.new_group([0])._get_backend(torch.device("cpu")).options
    assert options._timeout == timedelta(seconds=33)


def workers():
    """Count the threads that Python did not start: those of gloo have no names before torch 2.9."""
    return len(list(Path("/proc/self/task").iterdir())) - threading.active_count()


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


@pytest.mark.skipif(sys.platform != "linux", reason="Linux lists the threads of a process")
@pytest.mark.parametrize("end", [idist.finalize, run.abandon])
def test_the_worker_threads_of_gloo_end_with_the_run(end, monkeypatch):
    """Also if torch.distributed.nn was imported during the run, as the first DistributedDataParallel does."""
    before = workers()
    idist.initialize("gloo")
    monkeypatch.setattr(of_torch.all_reduce, "__defaults__", (dist.ReduceOp.SUM, dist.group.WORLD))
    subgroup = idist.new_group([0])
    idist.all_reduce(torch.ones(3), group=subgroup)
    assert not outlasting(lambda: workers() < before + 4)  # two for each group
    del subgroup
    end()
    assert not outlasting(lambda: workers() > before)
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
    run.abandon()
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
from tests.distributed.test_run import Held

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
