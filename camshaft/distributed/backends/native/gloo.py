"""What gloo needs beside torch.distributed: groups whose members all stay until they are connected, worker threads
that are drained before the process exits, and sends that can be polled.

The worker threads of a gloo group may hold the last reference to an operation, and to its tensors, for a moment after
``wait`` has returned. To drop a tensor that Python knows they need the GIL. While the interpreter shuts down, Python
ends the threads that ask for it, which C++ answers by ``std::terminate``: a job that has done all its work ends by
SIGABRT. So the threads are drained: :func:`drain` returns when each of them has dropped what it held. This happens
before groups are destroyed, and once more at exit, as a model in ``DistributedDataParallel`` keeps its group alive.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections import deque
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_TRIES = 10  # to hold a worker thread in an operation
_PATIENCE = 1.0  # seconds for a worker thread to end an operation that has nothing to do

_world: Any = c10d._world
_known: weakref.WeakSet[Any] = weakref.WeakSet()  # groups that may outlive their end
_unfinished: list[Any] = []  # groups with operations that have not ended, for which their destruction would wait
_owner = 0  # the process whose groups these are; forked children have none of the threads


def members_make_groups() -> bool:
    """Return whether the members of a group can make it without the other ranks.

    They cannot where its communicator is a part of that of all ranks: nccl splits that if it is bound to a device, and
    so does torch's own MPI.
    """
    default: Any = _world.default_pg
    is_of_torch = type(default) is dist.ProcessGroup
    return default.bound_device_id is None and not (dist.get_backend() == "mpi" and is_of_torch)


def group_of_members(ranks: list[int], timeout: timedelta | None) -> Any:
    """Make a process group of some ranks, in the order of the ranks; only these ranks call this, and only once.

    ``torch.distributed.new_group(use_local_synchronization=True)`` names the group after the number of groups that a
    rank is in, so ranks that disagree on it would wait forever. Here the ranks are the name.
    """
    rank = dist.get_rank()
    if rank not in ranks:
        return dist.GroupMember.NON_GROUP_MEMBER
    name = "camshaft/" + "_".join(map(str, ranks))
    for known, other_name in _world.pg_names.items():
        if other_name == name:  # made when the default group was adopted before
            return known
    backend, store = _world.pg_map[_world.default_pg]
    timeout = timeout or c10d._get_default_timeout(dist.Backend(backend))
    make: Any = c10d._new_process_group_helper
    group, _ = make(len(ranks), ranks.index(rank), ranks, dist.Backend(backend), store, name, timeout=timeout)
    _world.pg_group_ranks[group] = {member: place for place, member in enumerate(ranks)}
    return connected(group)


def connected(group: Any) -> Any:
    """Wait until all members of a new gloo group are connected with each other, and return the group.

    A member returns from the making of the group when it is connected itself. If it then leaves, for example because
    its process ends, members that still connect fail with "Connection closed by peer".
    """
    gloo = None if group == dist.GroupMember.NON_GROUP_MEMBER else _gloo_of(group)
    if gloo is not None:
        gloo.barrier().wait()
    return group


def drain_at_exit(group: Any) -> None:
    """Drain a group at exit, even if the user destroys it, or references keep it alive."""
    global _owner
    _owner = os.getpid()
    _known.add(group)


def destroy_groups() -> None:
    """Destroy all process groups of this process, without waiting for the other ranks.

    A group that still has operations under way lives until the process exits.
    """
    groups = list(_world.pg_map)
    _known.update(groups)
    _unfinished.extend(group for group in groups if not drain(group))
    dist.destroy_process_group()
    _forget(groups)


def drain(group: Any) -> bool:
    """Wait until no worker thread of a gloo group holds an operation that has ended.

    This needs no other rank: operations on empty tensors pass through a worker thread but communicate nothing. A
    callback holds each thread in such an operation until all threads have arrived, so each has dropped what it held
    before. Then the empty tensors are waited for.

    A callback that is added when its operation has ended runs in this thread instead, so each try takes twice as long
    as the one before. Their number is the same on all ranks: each takes one of the tags by which collectives find each
    other, should a model that outlives the run communicate once more.

    Args:
        group: a process group of torch; one without gloo has nothing to drain.

    Returns:
        ``False`` if threads are still busy with operations that have not ended.
    """
    gloo = _gloo_of(group)
    if gloo is None:
        return True
    threads = _HeldThreads(gloo.options._threads)
    passing = []
    try:
        for number in range(_TRIES + threads.size):
            tensor = torch.empty(0, device="cpu")
            passing.append(weakref.ref(tensor))
            count = 1 if threads.all_are_held else 16 << min(number, _TRIES)
            gloo.allreduce_coalesced([tensor] * count).get_future().add_done_callback(threads.hold)
            del tensor
            if not threads.wait_for_calls(number + 1):
                return False
    finally:
        threads.release()
    deadline = time.monotonic() + _PATIENCE
    while any(tensor() is not None for tensor in passing):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.0001)  # without the GIL
    return threads.all_are_held


class _HeldThreads:
    """Holds worker threads in a callback until all of them have arrived there."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.all_are_held = False
        self._caller = threading.get_ident()
        self._held: set[int] = set()
        self._calls = 0
        self._is_over = False
        self._changed = threading.Condition()

    def hold(self, _: object) -> None:
        """Stay until all threads are held, if this is a worker thread."""
        with self._changed:
            self._calls += 1
            if threading.get_ident() != self._caller:
                self._held.add(threading.get_ident())
                if len(self._held) == self.size:
                    self.all_are_held = self._is_over = True
            self._changed.notify_all()
            if threading.get_ident() != self._caller:
                self._changed.wait_for(lambda: self._is_over)

    def wait_for_calls(self, count: int) -> bool:
        """Wait a moment for so many callbacks, and return whether they came."""
        with self._changed:
            return self._changed.wait_for(lambda: self._calls >= count, _PATIENCE)

    def release(self) -> None:
        """Release all waiting threads, now and in the future."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


def _gloo_of(group: Any) -> Any:
    """Return what moves the CPU tensors of a group if that is gloo, else ``None``."""
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # the group is for other devices
        return None
    backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
    return backend if isinstance(backend, getattr(dist, "ProcessGroupGloo", ())) else None


def _forget(groups: list[Any]) -> None:
    """Replace groups that have ended in the functions of ``torch.distributed.nn``.

    The module is imported with the first model in ``DistributedDataParallel``. The default group of that moment then
    is the default argument of its functions, which keeps it alive, and in use, until the process exits.
    """
    module = sys.modules.get("torch.distributed.nn.functional")
    for function in [] if module is None else vars(module).values():
        defaults = getattr(function, "__defaults__", None) or ()
        kept = tuple(None if any(default is group for group in groups) else default for default in defaults)
        if kept != defaults:
            function.__defaults__ = kept


@atexit.register
def _drain_at_exit() -> None:
    if _owner == os.getpid():
        all(drain(group) for group in {*_world.pg_map, *_known, *_unfinished})  # up to the first that is busy


class Send:
    """A send over gloo, which reports its completion only to a thread that waits for it.

    Args:
        work: the operation of torch.
        waiter: of the sends to the same rank.
    """

    def __init__(self, work: Any, waiter: SendWaiter) -> None:
        self._work = work
        self._waiter = waiter
        self._result: Future[None] | None = None

    def wait(self) -> None:
        """Wait until the message has left."""
        if self._result is None:
            self._result = Future()
            self.complete()
        self._result.result()

    def is_completed(self) -> bool:
        """Return whether the message has left; from the first call on, a thread waits for it."""
        if self._result is None:
            self._result = Future()
            self._waiter.add(self)
        return self._result.done()

    def complete(self) -> None:
        """Wait for gloo, which is possible once, and set the result for others who wait."""
        assert self._result is not None, "a thread waits"
        try:
            self._work.wait()
        except Exception as error:
            self._result.set_exception(error)
        else:
            self._result.set_result(None)


class SendWaiter:
    """Waits in a thread for the sends to one rank, in their order, as long as there are any."""

    def __init__(self) -> None:
        self._sends: deque[Send] = deque()
        self._lock = threading.Lock()
        self._runs = False

    def add(self, send: Send) -> None:
        """Wait for one more send."""
        with self._lock:
            self._sends.append(send)
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name="camshaft-sends", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._sends:
                    self._runs = False
                    return
                send = self._sends.popleft()
            send.complete()
            del send  # it must not live until the next one comes
