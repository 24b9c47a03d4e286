"""Worker threads of gloo that hold nothing when a run has ended, sends that can be polled, and network interfaces.

What can be tested of the network on one host; `tests/hosts` has two.
"""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

import camshaft.distributed as idist
from camshaft.distributed import job
from camshaft.distributed.backends import gloo_network
from camshaft.distributed.backends.gloo_network import Send, SendWaiter, find_interface, using
from tests.distributed.collectives.test_point_to_point import Work
from tests.guards import outlasting
from tests.limits import HANG


@pytest.fixture(autouse=True)
def ends():
    """Whatever a test leaves, the next one finds nothing."""
    yield
    idist.finalize()


@pytest.fixture
def patient(monkeypatch):
    """The run waits for a worker thread that stands still, however long that takes."""
    monkeypatch.setattr(gloo_network, "_PATIENCE", HANG)


def workers():
    """Return the threads that Python did not start: those of gloo have no names before torch 2.9."""
    return {int(task.name) for task in Path("/proc/self/task").iterdir()} - {
        one.native_id for one in threading.enumerate()
    }


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
@pytest.mark.parametrize("end", [idist.finalize, job.abandon])
@pytest.mark.usefixtures("patient")
def test_the_worker_threads_of_gloo_end_with_the_run(end):
    before = workers()
    idist.initialize("gloo")
    subgroup = idist.new_group([0])
    idist.all_reduce(torch.ones(3), group=subgroup)
    assert not outlasting(lambda: len(workers() - before) < 4)  # two for each group
    del subgroup
    end()
    assert not outlasting(lambda: workers() - before)


@pytest.mark.usefixtures("patient")
def test_no_worker_thread_holds_an_operation_after_the_run():
    """Also of a group that lives on in a model, which waits for the threads, and keeps the GIL, when it is freed."""
    idist.initialize("gloo")
    group = dist.group.WORLD
    held = Held(group)
    threading.Timer(0.1, held.let_go.set).start()
    idist.finalize()
    assert held.is_over


@pytest.mark.usefixtures("patient")
def test_what_passes_through_the_worker_threads_dies_in_the_thread_that_drains_them(monkeypatch):
    """A worker thread needs the GIL to free it, and whoever frees the group waits for that thread and keeps the GIL."""
    threads, references, empty = [], [], torch.empty

    def watched(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        references.append(weakref.ref(tensor, lambda _: threads.append(threading.get_ident())))
        return tensor

    idist.initialize("gloo")
    monkeypatch.setattr(torch, "empty", watched)
    assert gloo_network.drain(dist.group.WORLD)
    assert threads
    assert set(threads) == {threading.get_ident()}
    assert len(threads) == len(references)


@pytest.mark.usefixtures("patient")
def test_a_group_is_drained_when_neither_python_nor_c_plus_plus_counts_another_reference(monkeypatch):
    idist.initialize("gloo")
    counts = Mock(side_effect=[(2, 1), (3, 1), (2, 2), (2, 1)])
    monkeypatch.setattr(gloo_network, "_references", counts)
    assert gloo_network.drain(dist.group.WORLD)
    assert counts.call_count == 4
    counts.side_effect = itertools.chain([(2, 1)], itertools.repeat((3, 1)))
    monkeypatch.setattr(gloo_network, "_PATIENCE", 0.5)  # too short for a slow machine, with the same result
    assert not gloo_network.drain(dist.group.WORLD)


def test_a_run_can_end_during_an_operation_that_never_completes():
    idist.initialize("gloo")
    held = Held(dist.group.WORLD)
    job.abandon()
    assert not held.is_over
    assert not dist.is_initialized()
    held.let_go.set()
    idist.initialize("gloo")


PROGRAM = """
import atexit, os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import torch._dynamo  # as DistributedDataParallel does
import camshaft.distributed as idist
from camshaft.distributed.backends import gloo_network
from camshaft.engine import Engine
from tests.distributed.backends.test_gloo_network import Held

gloo_network._PATIENCE = float(sys.argv[1])  # with a worker thread that stands still

def adopted():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert idist.backend() == "gloo"
    return dist.group.WORLD

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
WAYS = (adopted, kept_in_a_cycle, destroyed_by_the_user, failed)
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
def test_no_worker_thread_aborts_the_process_at_its_exit():
    """A thread that asks for the GIL while the interpreter shuts down ends the process by SIGABRT."""
    command = [sys.executable, "-c", PROGRAM, str(HANG)]
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=HANG)
    codes = eval(done.stdout)
    assert len(codes) == 4
    assert set(codes.values()) == {0}, f"{codes}\n{done.stderr}"


def test_a_send_is_waited_for_once():
    waiter, works = SendWaiter(), [Work(), Work(OSError("gone"))]
    sends = [Send(work, waiter) for work in works]
    assert not any(send.is_completed() for send in sends)
    for work in works:
        work.end.set()
    for _ in range(2):
        sends[0].wait()
    with pytest.raises(OSError, match="gone"):
        sends[1].wait()
    assert all(send.is_completed() for send in sends)
    assert [work.waits for work in works] == [1, 1]


VARIABLE = "GLOO_SOCKET_IFNAME"


def store_at(address: str) -> dist.TCPStore:
    return dist.TCPStore(address, 0, 2, is_master=True, wait_for_workers=False)


def test_addresses_that_gloo_has_not_published_yet_are_read_later(monkeypatch):
    group, store = Mock(size=lambda: 1), dist.HashStore()
    monkeypatch.setitem(gloo_network._world.pg_map, group, ("gloo", store))
    assert gloo_network.addresses_of(group) == b""
    store.set("cpu//0/0", "address")
    assert gloo_network.addresses_of(group) == b"address"


@pytest.mark.parametrize(
    ("of_rank_1", "towards", "chosen", "published", "found"),
    [
        ("127.0.0.1", {}, None, None, None),  # all meet on the loopback interface
        # only ranks beside the store read the addresses of the others: rank 1 tells it nothing
        (None, {"127.0.0.1": "10.0.0.1"}, None, b"10.0.0.1", "interface with 10.0.0.1"),
        # their own name for the interface towards another node is a loopback address
        ("10.0.0.2", {"10.0.0.2": "10.0.0.1"}, None, None, "interface with 10.0.0.1"),
        (None, {"127.0.0.1": "10.0.0.1"}, "of the user", b"10.0.0.1", None),
    ],
)
def test_gloo_uses_the_interface_towards_the_other_nodes_unless_the_user_has_chosen_one(
    monkeypatch, of_rank_1, towards, chosen, published, found
):
    monkeypatch.delenv(VARIABLE, raising=False)
    if chosen is not None:
        monkeypatch.setenv(VARIABLE, chosen)
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    monkeypatch.setattr(gloo_network, "_address_towards", {"127.0.0.1": "127.0.0.1", **towards}.__getitem__)
    monkeypatch.setattr(gloo_network, "_interface_with", lambda address: f"interface with {address}")
    store = dist.PrefixStore("attempt", store_at("127.0.0.1"))
    if of_rank_1 is not None:
        store.set("camshaft/address/1", of_rank_1)
    assert find_interface(store, 0, 2) == found
    assert published is None or store.get("camshaft/address/0") == published
    for other, size in ((dist.HashStore(), 2), (store_at("127.0.0.1"), 1)):  # which need none
        assert find_interface(other, 0, size) is None


def test_the_variable_is_set_only_for_the_block_unless_the_user_has_set_it(monkeypatch):
    for before, found, meanwhile in ((None, "eth7", "eth7"), ("theirs", "eth7", "theirs"), (None, None, None)):
        monkeypatch.delenv(VARIABLE, raising=False)
        if before is not None:
            monkeypatch.setenv(VARIABLE, before)
        with pytest.raises(LookupError), using(found):
            assert os.environ.get(VARIABLE) == meanwhile
            raise LookupError
        assert os.environ.get(VARIABLE) == before
