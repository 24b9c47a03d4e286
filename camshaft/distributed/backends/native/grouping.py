"""Making process groups of torch, also by their members alone."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_world: Any = c10d._world


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
