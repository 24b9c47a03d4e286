"""Making process groups of torch, also by their members alone."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_world: Any = c10d._world
_NOT_FOR_GROUPS = ("undefined", "fake")


def check_backend(backend: Any) -> None:
    """Refuse a backend that no group can be made of, before anybody waits for this rank.

    Args:
        backend: its name, or one for each kind of device, ``"cpu:gloo,cuda:nccl"``; ``None`` for that of all ranks.

    Raises:
        ValueError: torch does not have it.
    """
    if backend is None:
        return
    names = [part.rpartition(":")[2] for part in str(backend).split(",")]
    if not all(map(dist.is_backend_available, names)):
        known = [name for name in dist.Backend.backend_list if name not in _NOT_FOR_GROUPS]
        raise ValueError(f"backend must be one of {tuple(filter(dist.is_backend_available, known))}, got {backend!r}")


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
    return handle
