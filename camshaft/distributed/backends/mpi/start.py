"""Backend mpi: beginning a run."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from camshaft.distributed.backends.mpi.register import initialize_mpi
from camshaft.distributed.backends.native.backend import NativeBackend
from camshaft.distributed.topology import Launch, Topology


def create(
    name: str,
    launch: Launch | None,
    local_rank: int | None = None,
    timeout: timedelta | None = None,
    device: Any = None,
) -> NativeBackend:
    """Begin a run over MPI; all processes that mpirun started call this.

    Args:
        name: ``"mpi"``.
        launch: of no use, as MPI knows the place.
        local_rank: of no use, MPI's processes tell each other their hosts.
        timeout: how long an operation may take; torch's default if ``None``.
        device: where tensors are moved from and to; the CPU if ``None``.

    Raises:
        ModuleNotFoundError: mpi4py or an MPI library is missing.
        RuntimeError: a default process group exists, or the processes were started by another MPI's launcher.
    """
    initialize_mpi(timeout)
    try:
        hosts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(hosts, socket.gethostname())
        topology = Topology.from_hosts(dist.get_rank(), hosts)
        return NativeBackend(topology, torch.device("cpu" if device is None else device))
    except BaseException:
        dist.destroy_process_group()
        raise
