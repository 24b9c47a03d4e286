"""Making process groups of torch, also by their members alone, and ending them so that the process can exit.

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
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_TURNS = 10  # tries to hold a worker thread in an operation
_PATIENCE = 1.0  # seconds for a worker thread to end an operation that has nothing to do

_world: Any = c10d._world
_known: weakref.WeakSet[Any] = weakref.WeakSet()  # groups that may outlive their end
_unfinished: list[Any] = []  # groups with operations that have not ended, for which their destruction would wait
_owner = 0  # the process whose groups these are; children that are forked have none of the threads


def can_make_among_members() -> bool:
    """Tell whether the members of a group can make it without the other ranks.

    They cannot where its communicator is a part of that of all ranks: nccl splits that if it is bound to a device, and
    so does torch's own MPI.
    """
    default: Any = _world.default_pg
    is_of_torch = type(default) is dist.ProcessGroup
    return default.bound_device_id is None and not (dist.get_backend() == "mpi" and is_of_torch)


def make_among_members(ranks: list[int], timeout: timedelta | None) -> Any:
    """Make a process group of some ranks, in the order of the ranks; these alone call this, once.

    ``torch.distributed.new_group(use_local_synchronization=True)`` names the group after the number of groups that a
    rank is in, and ranks that do not agree on it wait for each other in vain. Here the ranks name it.

    Args:
        ranks: global ranks; others get what torch gives to ranks that are in no group.
        timeout: how long an operation may take; torch's default if ``None``.
    """
    rank = dist.get_rank()
    if rank not in ranks:
        return dist.GroupMember.NON_GROUP_MEMBER
    name = "camshaft/" + "_".join(map(str, ranks))
    for known, other_name in _world.pg_names.items():
        if other_name == name:  # made when the default group was taken over before
            return known
    backend, store = _world.pg_map[_world.default_pg]
    timeout = timeout or c10d._get_default_timeout(dist.Backend(backend))
    make: Any = c10d._new_process_group_helper
    handle, _ = make(len(ranks), ranks.index(rank), ranks, dist.Backend(backend), store, name, timeout=timeout)
    _world.pg_group_ranks[handle] = {member: place for place, member in enumerate(ranks)}
    return connected(handle)


def connected(group: Any) -> Any:
    """Wait until all members of a new gloo group are connected with each other, and return the group.

    A member returns from the making of the group when it is connected itself. If it leaves the group then,
    for example because its process ends, others that still connect fail with "Connection closed by peer".

    Args:
        group: a process group of torch, or what torch gives to ranks that are not in it.
    """
    gloo = None if group == dist.GroupMember.NON_GROUP_MEMBER else _gloo_of(group)
    if gloo is not None:
        gloo.barrier().wait()
    return group


def register(group: Any) -> None:
    """Drain a group at exit, even if somebody else destroys it and something keeps it alive.

    Args:
        group: a process group of torch.
    """
    global _owner
    _owner = os.getpid()
    _known.add(group)


def end_groups() -> None:
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
    callback holds each thread in such an operation until all threads have come, so each has dropped what it held
    before. Then the drop of the empty tensors is awaited.

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
    meeting = _Meeting(gloo.options._threads)
    passing = []
    try:
        for turn in range(_TURNS + meeting.size):
            tensor = torch.empty(0, device="cpu")
            passing.append(weakref.ref(tensor))
            count = 1 if meeting.is_complete else 16 << min(turn, _TURNS)
            gloo.allreduce_coalesced([tensor] * count).get_future().add_done_callback(meeting.come)
            del tensor
            if not meeting.reaches(turn + 1):
                return False
    finally:
        meeting.end()
    deadline = time.monotonic() + _PATIENCE
    while any(tensor() is not None for tensor in passing):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.0001)  # without the GIL
    return meeting.is_complete


class _Meeting:
    """Holds worker threads until all have come.

    Args:
        size: their number.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.is_complete = False
        self._caller = threading.get_ident()
        self._here: set[int] = set()
        self._turns = 0
        self._is_over = False
        self._changed = threading.Condition()

    def come(self, _: object) -> None:
        """Stay until all are here, if this is a worker thread."""
        with self._changed:
            self._turns += 1
            if threading.get_ident() != self._caller:
                self._here.add(threading.get_ident())
                if len(self._here) == self.size:
                    self.is_complete = self._is_over = True
            self._changed.notify_all()
            if threading.get_ident() != self._caller:
                self._changed.wait_for(lambda: self._is_over)

    def reaches(self, turn: int) -> bool:
        """Wait, but not for long, until so many have come, and return whether they have."""
        with self._changed:
            return self._changed.wait_for(lambda: self._turns >= turn, _PATIENCE)

    def end(self) -> None:
        """Let all leave, and those who come later pass."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


def _gloo_of(group: Any) -> Any:
    """Return what moves the CPU tensors of a group if that is gloo."""
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # it is for other devices
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
