"""Give torch a backend named "mpi": its own if it was built with MPI, else ours over mpi4py."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d as c10d

from camshaft.distributed.backends.mpi.abort import JobGuard
from camshaft.distributed.backends.mpi.attendance import free_unused
from camshaft.distributed.backends.mpi.group import MPIGroup
from camshaft.distributed.backends.mpi.rendezvous import (
    check_launcher,
    connect,
    subgroup_communicator,
    world_communicator,
)

_registered = False
_made: Counter[tuple[int, ...]] = Counter()  # groups of these ranks since the default group was made


def register_mpi() -> None:
    """Let ``init_process_group("mpi")`` and ``new_group`` work with a torch that was built without MPI.

    MPI itself begins here, as it does whenever mpi4py is imported, and ends with the process. Does nothing if
    torch has a backend of that name already.

    Raises:
        ModuleNotFoundError: mpi4py or an MPI library is missing.
        RuntimeError: the processes were started by the launcher of another MPI library.
    """
    global _registered
    if _registered or dist.is_mpi_available():
        return
    check_launcher(os.environ, _start_mpi())
    if torch.__version__ >= "2.14":  # compared as versions, not as text
        dist.Backend.register_backend("mpi", _create_from_options, extended_api=True, devices=["cpu", "cuda"])
    else:
        _take_place_of_built_in()
    _registered = True


def initialize_mpi(timeout: timedelta | None = None) -> None:
    """Begin a default process group over MPI; all processes that mpirun started call this.

    From here to the end of the group, an error that nobody catches ends all processes of the job.

    Args:
        timeout: how long an operation may take; torch's default if ``None``.

    Raises:
        ModuleNotFoundError: mpi4py or an MPI library is missing.
        RuntimeError: there is a default process group already, or the processes were started by the launcher of
            another MPI library.
        DistBackendError: not all processes came in time.
    """
    if dist.is_initialized():
        raise RuntimeError("a default process group exists already: destroy it first")
    register_mpi()
    if not _registered:  # torch's own
        dist.init_process_group("mpi", timeout=timeout)
        return
    guard = JobGuard()
    dist.init_process_group("mpi", timeout=timeout)
    world = dist.group.WORLD
    assert isinstance(world, MPIGroup)
    # torch has no store for this backend; those who look for the default one shall find ours
    c10d._world.pg_map[world] = (dist.get_backend(world), world.store)
    world.attendance.when_left = guard.stop


def _start_mpi() -> int:
    """Import mpi4py, which begins MPI, and count the processes."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # mpi4py raises the latter when it finds no MPI library
        raise ModuleNotFoundError(
            "backend 'mpi' needs mpi4py and an MPI library: pip install 'camshaft[mpi]'"
        ) from error
    return MPI.COMM_WORLD.size


def create_group(ranks: Sequence[int], timeout: timedelta) -> MPIGroup:
    """Make a process group; its members alone call this, and of the default group all ranks.

    Args:
        ranks: global ranks, in the order of their rank in the group; none for the default group.
        timeout: how long an operation may take.
    """
    free_unused()
    return _create_subgroup(ranks, timeout) if ranks else _create_world(timeout)


def _create_world(timeout: timedelta) -> MPIGroup:
    _made.clear()
    store = connect(timeout)
    comm = world_communicator(PrefixStore("world", store), timeout)
    return MPIGroup(comm, store, timeout)


def _create_subgroup(ranks: Sequence[int], timeout: timedelta) -> MPIGroup:
    world = dist.group.WORLD
    if not isinstance(world, MPIGroup):
        raise RuntimeError(f"a group over MPI needs a default group over MPI, this one is of {dist.get_backend()!r}")
    _made[tuple(ranks)] += 1  # the same on all members
    store = PrefixStore(f"{list(ranks)}/{_made[tuple(ranks)]}", world.store)
    return MPIGroup(subgroup_communicator(world.comm, ranks, store, timeout), store, timeout)


def _create_from_options(options: Any, _: object) -> MPIGroup:
    return create_group(options.global_ranks_in_group, options.timeout)


def _take_place_of_built_in() -> None:
    """Stand in for the MPI group of torch, to which the name is wired before torch 2.14.

    Torch tells that one the ranks but no timeout, which is noted as it passes by.
    """
    make_group = c10d._new_process_group_helper
    noted = SimpleNamespace(timeout=c10d.default_pg_timeout)

    @functools.wraps(make_group)
    def make_group_and_note(*args: Any, **kwargs: Any) -> Any:
        noted.timeout = kwargs.get("timeout") or c10d.default_pg_timeout
        return make_group(*args, **kwargs)

    vars(c10d).update(
        _MPI_AVAILABLE=True,
        ProcessGroupMPI=SimpleNamespace(create=lambda ranks: create_group(ranks, noted.timeout)),
        _new_process_group_helper=make_group_and_note,
    )
