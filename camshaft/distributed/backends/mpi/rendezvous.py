"""How the processes that mpirun started find each other: a store that all reach, and communicators."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from camshaft.distributed.backends.mpi.work import wait_for

if TYPE_CHECKING:
    from mpi4py import MPI

_ROOM = 1024  # bytes for the address of the store
# what the launchers of Open MPI and of MPICH and Intel MPI say, and srun if it started us itself
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


def check_launcher(environ: Mapping[str, str], world_size: int) -> None:
    """Refuse to run as so many worlds of one process, as when mpirun is of another MPI library than mpi4py.

    Raises:
        RuntimeError: the launcher started several processes, MPI sees one.

    >>> check_launcher({"PMI_SIZE": "2"}, world_size=2)
    """
    name = next((name for name in _SIZES if name in environ), None)
    if world_size == 1 and name is not None and environ[name] != "1":
        raise RuntimeError(
            f"MPI sees 1 process, but the launcher started {environ[name]} ({name}): start with the mpirun of the "
            "MPI library that mpi4py uses (python -m mpi4py --mpi-library), or under Slurm with srun --mpi=pmi2 "
            "(MPICH) or --mpi=pmix (Open MPI)"
        )


def connect(timeout: timedelta) -> TCPStore:
    """Make a store on rank 0 and connect all ranks to it; MPI tells them where it is.

    Every process calls this. ``MASTER_ADDR`` names the host of rank 0 where its own name does not reach it.

    Raises:
        DistBackendError: rank 0 did not come within ``timeout``.
        DistNetworkError: the host of rank 0 cannot be reached.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if world.rank == 0:
        store = TCPStore("localhost", 0, world.size, True, timeout, wait_for_workers=False)
        _tell({"host": MPI.Get_processor_name(), "port": store.port}, timeout)
        return store
    address = _tell(None, timeout)
    is_near = address["host"] == MPI.Get_processor_name()
    host = os.environ.get("MASTER_ADDR") or ("localhost" if is_near else str(address["host"]))
    return TCPStore(host, int(address["port"]), world.size, False, timeout, wait_for_workers=False)


def _tell(address: dict[str, str | int] | None, timeout: timedelta) -> dict[str, str | int]:
    """Give every rank the address that rank 0 has."""
    from mpi4py import MPI

    buffer = bytearray(json.dumps(address).encode().ljust(_ROOM))
    began = MPI.COMM_WORLD.Ibcast([buffer, MPI.BYTE], 0)

    def watch(waited: float) -> None:
        if waited > timeout.total_seconds():
            limit = timeout.total_seconds()
            raise dist.DistBackendError(f"not all ranks came to make a group over MPI within {limit:g} s")

    wait_for(began, None, watch)
    told: dict[str, str | int] = json.loads(bytes(buffer))
    return told


def world_communicator(store: Store, timeout: timedelta) -> MPI.Intracomm:
    """Give all ranks a communicator of their own; every rank calls this.

    Raises:
        DistBackendError: not all came within ``timeout``.
    """
    from mpi4py import MPI

    _meet(store, MPI.COMM_WORLD.size, timeout)
    return MPI.COMM_WORLD.Dup()


def subgroup_communicator(
    parent: MPI.Intracomm, ranks: Sequence[int], store: Store, timeout: timedelta
) -> MPI.Intracomm:
    """Give some ranks a communicator of their own; they alone call this, with a store of their own.

    Raises:
        DistBackendError: not all came within ``timeout``.
    """
    _meet(store, len(ranks), timeout)
    everybody = parent.Get_group()
    members = everybody.Incl(list(ranks))
    try:
        return parent.Create_group(members)
    finally:
        members.Free()
        everybody.Free()


def _meet(store: Store, size: int, timeout: timedelta) -> None:
    """Wait until all are here, asleep: MPI would take a whole core for it, and know no timeout."""
    if store.add("present", 1) == size:
        store.set("complete", "yes")
    try:
        store.wait(["complete"], timeout)
    except RuntimeError as error:
        present = store.add("present", 0)
        raise dist.DistBackendError(
            f"{present} of {size} ranks came to make a group over MPI within {timeout.total_seconds():g} s"
        ) from error
