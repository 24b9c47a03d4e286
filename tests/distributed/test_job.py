"""A run is begun once, ended once, and leaves nothing behind, whoever began it."""

from __future__ import annotations

import atexit
import os
import pickle
import re
import socket
import subprocess
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import camshaft.distributed as idist
from camshaft import activity
from camshaft.distributed import job
from camshaft.distributed.backends.contract import Job, Resource
from camshaft.distributed.failures import Watcher
from camshaft.distributed.topology import Topology
from camshaft.errors import RankFailedError
from tests.distributed.failures.stand_in import StoreOnly
from tests.distributed.observed import step
from tests.distributed.test_ranks import Somewhere
from tests.limits import TIMEOUT, wait_until
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


def test_initialize_and_finalize_leave_the_environment_alone():
    before = dict(os.environ)
    for _ in range(2):
        idist.initialize("gloo", timeout=TIMEOUT)
        assert (idist.backend(), idist.get_world_size(), idist.model_name()) == ("gloo", 1, "native-dist")
        assert dict(os.environ) == before
        with pytest.raises(RuntimeError, match="already initialized with backend 'gloo': call finalize first"):
            idist.initialize("gloo")
        assert idist.backend() == "gloo"
        for _ in range(2):
            idist.finalize()
            assert (idist.backend(), dist.is_initialized()) == (None, False)


def test_jobs_are_numbered_when_they_start_whether_or_not_a_rank_stores_anything():
    """Otherwise, ranks of which only some stored anything in an earlier job would wait for each other's keys."""
    names = []
    for stores in (True, False, True):
        job._serial.job.unique_name("of one rank alone")
        idist.initialize("gloo")
        if stores:
            names.append(job.current().job.unique_name("seed"))
        idist.finalize()
    first, last = (int(name.split("/")[1]) for name in names)
    assert last == first + 2


@pytest.mark.parametrize(
    ("begin", "error", "named"),
    [
        (lambda: job.install(lambda: idist.set_local_rank(-1), debug=True), ValueError, "index"),
        (lambda: idist.initialize("gloo", time_out=3), TypeError, r"got unknown options \['time_out'\]"),
        (lambda: idist.initialize("gloo", rank=2, world_size=2), ValueError, "rank"),
        (lambda: idist.initialize("gloo", init_method="file:///tmp/no"), ValueError, "rank and world_size"),
    ],
)
def test_a_failed_initialize_leaves_nothing(begin, error, named):
    with pytest.raises(error, match=named):
        begin()
    assert (idist.backend(), dist.is_initialized()) == (None, False)
    assert not job.current().job.compares_collectives


@pytest.mark.parametrize("end", [idist.finalize, job.abandon, dist.destroy_process_group])
def test_an_existing_group_is_adopted_and_dropped(end):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert (idist.backend(), idist.get_world_size()) == ("gloo", 1)
    end()
    assert (idist.backend(), dist.is_initialized()) == (None, False)


def test_finalize_after_the_user_destroyed_the_group():
    idist.initialize("gloo")
    dist.destroy_process_group()
    idist.finalize()
    idist.initialize("gloo")
    assert idist.get_world_size() == 1


@pytest.mark.parametrize("end", [idist.finalize, job.abandon])
def test_finalize_in_use_backend_closes_that_backend_only(end):
    of_the_process, of_the_thread = Closing(), Closing()
    job.install(lambda: of_the_process, debug=True)
    with idist.use_backend(of_the_thread):
        end()
    assert (of_the_process.closed, of_the_thread.closed) == (0, 1)
    assert job.current() is of_the_process
    assert job.current().job.compares_collectives
    end()
    assert of_the_process.closed == 1
    assert idist.backend() is None


@on_ranks(2)
def test_abandon_does_not_wait(tmp_path):
    left = tmp_path / "left"
    if idist.get_rank() == 0:
        idist.isend("never received", 1)
        job.abandon()
        left.touch()
    else:
        wait_until(left.exists)
        job.abandon()
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the test destroys one


def test_queries_under_srun_start_no_process_and_resolve_no_host(monkeypatch):
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
def test_unknown_numbers_of_nodes_are_not_guessed():
    """On three nodes with two processes each, ranks 0, 2 and 4 would infer 1, 3 and 2 nodes."""
    dist.barrier()
    rank = dist.get_rank()
    variables = {"RANK": rank, "WORLD_SIZE": 6, "LOCAL_RANK": rank % 2}
    for hint, environment in ((rank % 2, {}), (None, variables), (None, {"LOCAL_RANK": rank % 2})):
        job._local_rank = hint
        with told(**environment), use_fresh_adoption():
            assert (idist.get_rank(), idist.get_local_rank(), idist.get_world_size()) == (rank, rank % 2, 6)
            for query in QUERIES:
                with pytest.raises(RuntimeError, match="is unknown: .* Set LOCAL_WORLD_SIZE"):
                    query()
            idist.show_config()
    whole = {**variables, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": rank // 2, "GROUP_WORLD_SIZE": 3}
    with told(**whole), use_fresh_adoption():
        assert [query() for query in QUERIES] == [3, rank // 2, 2]


@contextmanager
def use_fresh_adoption():
    """Let the context adopt the process group anew, as in a process that has not asked before."""
    before, job._process = job._process, job._serial
    try:
        yield
    finally:
        job._process = before


@on_ranks(2)
def test_environment_variables_of_another_job_are_ignored_and_an_unknown_local_rank_warns():
    dist.barrier()
    rank = dist.get_rank()
    with told(RANK=3, WORLD_SIZE=4, LOCAL_RANK=3, LOCAL_WORLD_SIZE=4), use_fresh_adoption():
        assert (idist.get_local_rank(), idist.get_world_size()) == (rank, 2)  # as set_local_rank told
    with told(LOCAL_RANK=7), use_fresh_adoption():
        assert idist.get_local_rank() == rank
    job._local_rank = None
    with told(), use_fresh_adoption(), pytest.warns(UserWarning, match="is unknown.* set_local_rank first"):
        assert idist.get_local_rank() == rank


# --- processes that are forked from a rank ---------------------------------------------------------------------------


def ask():
    """Ask as a data set may, in a process that is not a rank, and clean up."""
    place = idist.get_rank(), idist.get_world_size(), idist.get_nproc_per_node()
    begun = [thread.name for thread in threading.enumerate()]
    idist.finalize()
    return place, begun, type(sys.excepthook).__name__


def ask_in_a_worker_that_imports_the_package():
    for name in [name for name in sys.modules if name.partition(".")[0] == "camshaft"]:
        del sys.modules[name]
    torch.utils.data._utils.worker._worker_info = object()
    import camshaft.distributed

    assert camshaft.distributed is not idist
    return *ask(), camshaft.distributed.get_rank()


def fail():
    """Report an error as the interpreter does, and tell how many waits for a watcher there were."""
    waits, wait = [], threading.Event.wait
    threading.Event.wait = lambda event, seconds=None: waits.append(seconds) or wait(event, seconds)
    error = RuntimeError("connection closed by peer")
    for explain in activity.explainers:
        explain(error)
    sys.excepthook(RuntimeError, error, None)
    return waits


def in_a_fork(function):
    """Return what a function returns in a child of this process, which then ends as interpreters do."""
    ready, tell = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            outcome = pickle.dumps((True, function()))
        except BaseException:
            outcome = pickle.dumps((False, traceback.format_exc()))
        with suppress(BaseException):
            os.write(tell, outcome)
            atexit._run_exitfuncs()
        os._exit(0)
    os.close(tell)
    with open(ready, "rb") as came:
        passed, outcome = pickle.loads(came.read())
    os.waitpid(pid, 0)
    assert passed, outcome
    return outcome


@on_ranks(2)
def test_a_forked_process_may_ask_but_is_not_a_rank():
    """Whether this process has asked before or not, and if the child imports the package itself."""
    rank = dist.get_rank()
    for ask_there, has_asked in ((ask, False), (ask_in_a_worker_that_imports_the_package, False), (ask, True)):
        if has_asked:
            assert idist.all_reduce(1) == 2
        found, threads, hook, *again = in_a_fork(ask_there)
        assert (found, again) == ((rank, 2, 2), [rank] * len(again))
        assert threads == ["MainThread"]
        assert has_asked or hook != "ExceptHook"
        assert in_a_fork(fail) == []
        dist.barrier()
    assert idist.all_reduce(1) == 2
    assert job.current().job.verdict is None


def become_a_rank():
    idist.initialize("gloo", rank=0, world_size=1, init_method=None)
    found = job.current().job.is_ours
    idist.finalize()
    return found


def test_a_forked_process_of_a_parent_without_a_job_may_join_one():
    assert in_a_fork(become_a_rank)
    with ThreadPoolExecutor(1) as thread:  # which does not exist in the child, and releases no lock there
        thread.submit(job._lock.acquire).result()
        assert in_a_fork(become_a_rank)
        thread.submit(job._lock.release).result()


# --- threads ---------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_threads_that_ask_first_adopt_the_group_once():
    together, watchers, really_adopt, start = threading.Barrier(4), [], job.adopt, Watcher.__init__

    def adopt(infer):
        with suppress(threading.BrokenBarrierError):
            together.wait(0.2)  # all of them, if nothing keeps them apart
        return really_adopt(infer)

    job.adopt = adopt
    Watcher.__init__ = lambda self, *args: (watchers.append(self), start(self, *args))[1]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: job.current(), range(4)))
    assert len(watchers) == 1
    assert found == [job.current()] * 4
    assert idist.all_reduce(1) == 2


def test_no_thread_adopts_a_group_that_initialize_is_making():
    def create():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        thread = threading.Thread(target=lambda: seen.append(idist.backend()))
        thread.start()
        thread.join()
        with pytest.raises(RuntimeError, match="initialize is already running"):
            idist.initialize("gloo")
        return Closing()

    seen = []
    job.install(create)
    assert seen == [None]
    assert isinstance(job.current(), Closing)
    job.abandon()


def test_threads_that_use_a_resource_first_get_the_same_one():
    together = threading.Barrier(2)

    class Slow(Resource):
        def __init__(self):
            together.wait()

    job = Job()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(job.resource, (Slow, Slow)))
    assert found == [job.find(Slow)] * 2


# --- several jobs in one process -------------------------------------------------------------------------------------


@pytest.fixture
def hooks_alone(monkeypatch):
    """Keep records out of the tests of hooks, and print what the hook before the job gets."""
    monkeypatch.setattr(job.failures, "Record", mock.Mock(side_effect=OSError("no space")))
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: print("Traceback", file=sys.stderr))


@pytest.mark.usefixtures("hooks_alone")
@pytest.mark.parametrize("wraps", ["never", "before", "after"])
def test_the_hook_of_each_job_goes_with_it_and_reports_once(monkeypatch, wraps):
    """torch, for one, adds a hook to the present one with each group, and never removes it."""
    printed = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: printed.append(error))
    original = sys.excepthook

    def wrap():
        previous = sys.excepthook
        sys.excepthook = lambda *args: previous(*args)

    def create():
        if wraps == "before":
            wrap()
        return StoreOnly(dist.HashStore(), 1, 2)  # rank 0 would wait for others to learn of its end

    for _ in range(3):
        job.install(create)
        if wraps == "after":
            wrap()
        error = ValueError("no data")
        sys.excepthook(ValueError, error, None)
        assert printed == [error]
        printed.clear()
        job.abandon()
    sys.excepthook(KeyError, (error := KeyError("after the end")), None)
    assert printed == [error]
    assert wraps != "never" or sys.excepthook is original


@pytest.mark.parametrize(("rank", "leaves"), [(0, True), (0, False), (1, True)])
@pytest.mark.usefixtures("hooks_alone")
def test_an_interrupt_of_all_ranks_is_reported_in_one_line(monkeypatch, capsys, rank, leaves):
    """Also if it has left the block of the job; hooks that do more than print are called."""
    called, print_error = [], sys.excepthook
    monkeypatch.setattr(sys, "excepthook", lambda *args: (called.append(args[1]), print_error(*args)))
    monkeypatch.setattr(Watcher, "fail", lambda self, error: error)
    job.install(lambda: StoreOnly(dist.HashStore(), 1, 3))
    job.current().job.find(job.ExceptHook)._rank = rank
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt as error:
        if leaves:
            job.abandon()
        error.__notes__ = ["raised in epoch 1, iteration 3"]
        raised = error
        sys.excepthook(KeyboardInterrupt, error, error.__traceback__)
    job.abandon()
    assert called == [raised]
    lines = [re.sub(":.*", "", line) for line in capsys.readouterr().err.splitlines()]
    assert lines == [f"KeyboardInterrupt, raised in epoch 1, iteration 3, at {__file__}"] * (rank == 0)


@pytest.mark.parametrize(
    ("later", "replaces", "lines"),
    [
        (RankFailedError("why"), True, ["rank 1, at : RankFailedError: why; see the report of rank 0"]),
        (RankFailedError("of another job"), False, ["Traceback"]),
        (KeyboardInterrupt(), False, ["Traceback"]),
    ],
)
@pytest.mark.usefixtures("hooks_alone")
def test_the_hook_of_a_job_that_has_ended_reports_the_error_that_ended_it(monkeypatch, capsys, later, replaces, lines):
    """Also if another error has replaced that one; what comes later is passed on."""
    monkeypatch.setattr(Watcher, "fail", lambda self, error: error)
    monkeypatch.setattr(Watcher, "reported_by", lambda self: nullcontext(0))
    job.install(lambda: StoreOnly(dist.HashStore(), 1, 2))
    try:
        raise RuntimeError("connection closed by peer")
    except RuntimeError as error:
        later.__context__ = error if replaces else None
        job.abandon()
    sys.excepthook(type(later), later, None)
    assert capsys.readouterr().err.splitlines() == lines
