"""Release of threads that wait for ranks that never arrive."""

from __future__ import annotations

import errno
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import camshaft.distributed as idist
from camshaft.distributed.backends import release
from camshaft.distributed.connections import connections, connections_to
from camshaft.distributed.failures import watcher
from camshaft.distributed.job import current
from tests.guards import outlasting
from tests.limits import HANG
from tests.ranks import on_ranks, run_on_ranks

AFTER = 0.2  # seconds in which a thread has begun to wait


PREPARED = {}
WAITS = {
    "all_reduce of camshaft": lambda: idist.all_reduce(torch.ones(3)),
    "all_gather of camshaft": lambda: idist.all_gather("text"),
    "all_reduce": lambda: dist.all_reduce(torch.ones(3)),
    "large all_reduce": lambda: dist.all_reduce(torch.ones(3_000_000)),
    "asynchronous all_reduce": lambda: dist.all_reduce(torch.ones(3), async_op=True).wait(),
    "objects": lambda: dist.all_gather_object([None] * dist.get_world_size(), "text"),
    "receive": lambda: dist.recv(torch.ones(3), dist.get_world_size() - 1),
    "subgroup": lambda: dist.barrier(PREPARED["group"]),
    "new group": lambda: dist.new_group(range(dist.get_world_size())),
    "new group of camshaft": lambda: idist.new_group(list(range(dist.get_world_size()))),
    "model": lambda: DistributedDataParallel(torch.nn.Linear(2, 1)),
    "backward pass": lambda: PREPARED["loss"].backward(),
}
CASES = [*((wait, 2) for wait in WAITS), *((wait, 3) for wait in ("all_reduce", "new group", "backward pass"))]


def prepare(store):
    """Make what a wait needs, and let the last rank leave when the others are done; return whether this is another."""
    PREPARED["group"] = dist.new_group(range(dist.get_world_size()))
    PREPARED["model"] = DistributedDataParallel(torch.nn.Linear(2, 1))
    PREPARED["loss"] = PREPARED["model"](torch.ones(3, 2)).sum()
    rank, others = dist.get_rank(), range(dist.get_world_size() - 1)
    if rank in others:
        return True
    for other in others:
        store.get(f"done/{other}")
    return False


def released(wait, backend):
    """Wait for a rank that never arrives, and return the error."""
    is_released = threading.Event()

    def release():
        while not is_released.wait(AFTER):  # again, if it had not begun to wait for a new group
            backend.release()

    releasing = threading.Thread(target=release)
    releasing.start()
    try:
        with pytest.raises(RuntimeError) as caught:
            wait()
    finally:
        is_released.set()
        releasing.join()
    return caught.value


@pytest.mark.parametrize(("wait", "size"), CASES)
def test_a_rank_that_waits_over_gloo_is_released(wait, size):
    run_on_ranks(size, release_one, wait)


def release_one(wait):
    backend = current()
    store = backend.store().underlying_store.clone()  # which outlasts what waits in the original
    watcher._LEARNING = 0.1  # seconds to wait for a verdict, which there is not
    if prepare(store):
        released(WAITS[wait], backend)
        store.set(f"done/{dist.get_rank()}", "yes")
        idist.finalize()


@on_ranks(2)
def test_connections_that_do_not_belong_to_the_job_outlast_a_release():
    """Neither Python nor torch knows of those of a library."""
    store, backend = current().store(), current()
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    accepted = server.accept()[0]
    of_a_library = [os.dup(one.fileno()) for one in (client, accepted, server)]
    for one in (client, accepted, server):
        one.close()
    pipe = multiprocessing.Pipe()
    if not prepare(store):
        return
    other = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    group = dist.new_group([0], backend="gloo")  # alone in it
    released(dist.barrier, backend)
    os.write(of_a_library[0], b"text")
    assert os.read(of_a_library[1], 4) == b"text"
    pipe[0].send("text")
    assert pipe[1].recv() == "text"
    other.set("still", "there")
    store.clone().set("done/0", "yes")
    del other, group
    for descriptor in of_a_library:
        os.close(descriptor)
    for one in pipe:
        one.close()


@on_ranks(2)
def test_adopting_a_group_waits_for_no_thread_that_waits_in_its_store():
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    clone = store.clone()
    waiting = threading.Thread(target=store.get, args=("asked",))
    waiting.start()
    time.sleep(AFTER)
    assert idist.get_rank() == rank
    clone.add("number of ranks", 1)
    while clone.add("number of ranks", 0) < 2:
        time.sleep(0.01)
    if rank == 0:
        clone.set("asked", "yes")
    waiting.join()


@on_ranks(3)
def test_a_group_that_camshaft_made_is_released_when_its_store_is_lost():
    """So is the default group. The process of rank 0 serves the store, and a rank that is stopped closes nothing."""
    group, backend, rank = idist.new_group([0, 1, 2]), current(), dist.get_rank()
    clone = backend.store().underlying_store.clone()
    if rank != 1:
        clone.get("done/1")
        return
    watcher._LEARNING = 0.1
    with mock.patch.object(dist.Store, "check", side_effect=dist.DistNetworkError("lost")):
        released(lambda: idist.barrier(group=group), backend)
    clone.set("done/1", "yes")


@pytest.fixture
def one_rank():
    """A job of one rank, which a release does not harm, nor one after its end."""
    idist.initialize("gloo")
    backend = current()
    backend.release()
    yield
    idist.finalize()
    backend.release()


def test_the_connections_of_a_store_are_those_to_its_server(monkeypatch):
    server = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    before = connections_to(dist.PrefixStore("part", server))
    assert len(before) == 1
    known = {descriptor for descriptor, *_ in connections()}
    clone = server.clone()
    assert len(connections_to(server) - before) == 1
    assert connections_to(dist.HashStore()) == frozenset()
    del clone
    assert not outlasting(lambda: {descriptor for descriptor, *_ in connections()} - known)  # the server closes its end
    descriptors = {descriptor: os.get_blocking(descriptor) for descriptor, _, _ in connections()}
    socket.setdefaulttimeout(5)  # which is not applied to the connections of others
    try:
        assert connections_to(server) == before
    finally:
        socket.setdefaulttimeout(None)
    assert {descriptor: os.get_blocking(descriptor) for descriptor in descriptors} == descriptors
    monkeypatch.setattr(os, "listdir", mock.Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
    assert connections_to(server) == frozenset()


@pytest.mark.parametrize(
    ("config", "is_aborted"), [("cuda:nccl", True), ("cpu:gloo,cuda:nccl", True), ("cpu:gloo", False)]
)
@pytest.mark.usefixtures("one_rank")
def test_nccl_is_aborted_once(monkeypatch, config, is_aborted):
    aborted = threading.Semaphore(0)

    def abort():
        aborted.release()
        raise RuntimeError("nccl is not initialized")

    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: config)
    monkeypatch.setattr(dist.ProcessGroup, "_get_backend", lambda group, device: SimpleNamespace(abort=abort))
    release.release_groups(None, ())
    assert aborted.acquire(timeout=HANG if is_aborted else 0.1) is is_aborted
    assert not aborted.acquire(timeout=0.1)


def test_a_group_that_can_release_itself_does_so(monkeypatch):
    calls = []

    class Group:
        def release(self):
            calls.append(1)

    monkeypatch.setattr(release, "_world", SimpleNamespace(pg_map={Group(): ("mpi", None)}))
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: "cpu:mpi")
    monkeypatch.setattr(release, "_shut_down", lambda is_meant: calls.append("shut down"))
    release.release_groups(None, ())
    assert calls == [1]


PROGRAM = """
import os, socket, sys, threading
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import torch._dynamo  # as DistributedDataParallel does
import camshaft.distributed as idist
from camshaft.distributed.backends import gloo_network
from camshaft.distributed.job import current

gloo_network._PATIENCE = float(sys.argv[2])  # with the worker threads, at the exit

def barrier():
    dist.barrier()

def in_a_model():
    model(torch.ones(3, 2)).sum().backward()

def new_group():
    dist.new_group([0, 1])

def leave_as_it_is():
    sys.exit(7)

def finalize():
    idist.finalize()
    sys.exit(7)

rounds, codes = int(sys.argv[1]), []
for number in range(rounds):
    wait = (barrier, in_a_model, new_group)[number % 3]
    end = (leave_as_it_is, finalize)[number // 2 % 2]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    host, pids = number % 2, []
    for rank in range(2):
        pids.append(os.fork())
        if pids[-1] == 0:
            store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == host)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
            model = DistributedDataParallel(torch.nn.Linear(2, 1))
            backend, clone = current(), store.clone()
            if rank == 1:
                try:
                    clone.get("done")
                except dist.DistNetworkError:  # the other one is the host, and has exited
                    pass
                os._exit(7)
            has_waited = threading.Event()
            def release():
                while not has_waited.wait(0.1):  # again, if it had not begun to wait for a new group
                    backend.release()
            releasing = threading.Thread(target=release)
            releasing.start()
            try:
                wait()
            except RuntimeError as error:
                has_waited.set()
                releasing.join()
                clone.set("done", "yes")
                end()
            sys.exit(8)
    codes += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
print(codes)
"""


@pytest.mark.jobs
def test_a_released_process_ends_with_its_own_exit_code():
    rounds = 12  # each wait with each end and each host
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(rounds), str(HANG)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=HANG)
    assert eval(done.stdout) == [7] * 2 * rounds, done.stderr
