"""Backend horovod: beginning a run, or taking over one that exists."""

from __future__ import annotations

import os
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from camshaft.distributed.backends.horovod.backend import HorovodBackend
from camshaft.distributed.backends.horovod.library import library
from camshaft.distributed.topology import Launch, Topology

_DYNAMIC = "HOROVOD_DYNAMIC_PROCESS_SETS"
_OPTIONS = ("comm", "process_sets", "timeout")
_TIMEOUT = timedelta(minutes=30)  # torch's for gloo


def create(name: str, launch: Launch | None, local_rank: int | None = None, **options: Any) -> HorovodBackend:
    """Initialize Horovod; all processes that horovodrun, or mpirun for a Horovod with MPI, started call this.

    Args:
        name: ``"horovod"``.
        launch: how this process was started, ``None`` if it was started alone.
        local_rank: of no use, Horovod knows it.
        options: ``timeout``, a ``timedelta`` for each operation; ``comm`` and ``process_sets``, as
            ``horovod.torch.init`` takes them.

    Raises:
        ModuleNotFoundError: Horovod is missing, or was not built for the installed torch.
        TypeError: an option is not known, or ``timeout`` is no ``timedelta``.
        RuntimeError: Horovod is initialized already, or another launcher started the processes.
    """
    if unknown := sorted(set(options) - set(_OPTIONS)):
        raise TypeError(f"{unknown} are not known for backend {name!r}, but {list(_OPTIONS)} are")
    timeout = options.pop("timeout", None) or _TIMEOUT
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout must be a datetime.timedelta, got {timeout!r}")
    hvd = library()
    if hvd.is_initialized():
        raise RuntimeError("Horovod is initialized already: it is used as it is, without initialize")
    if HorovodBackend.has_ended and int(os.environ.get("HOROVOD_SIZE", 1)) > 1:
        raise RuntimeError(  # what they met at may keep the addresses of the first run, where nobody is any more
            "horovodrun lets its processes meet once, and that run was ended: initialize and finalize once, around all "
            "that needs it"
        )
    with _dynamic_process_sets():
        hvd.init(**{option: value for option, value in options.items() if value is not None})
    try:
        if options.get("comm") is None:
            _check_size(hvd, launch)
        topology = _topology(hvd, ask=True)
        device = _device(hvd, topology.local_rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return HorovodBackend(hvd, topology, device, timeout.total_seconds())
    except BaseException:
        hvd.shutdown()
        raise


def adopt(infer: object) -> HorovodBackend | None:
    """Take over what ``horovod.torch.init`` began, if it did, without any communication."""
    hvd: Any = sys.modules["horovod.torch"]
    if not hvd.is_initialized():
        return None
    topology = _topology(hvd, ask=False)
    return HorovodBackend(hvd, topology, _device(hvd, topology.local_rank), _TIMEOUT.total_seconds())


@contextmanager
def _dynamic_process_sets() -> Iterator[None]:
    """Let groups be made later; Horovod reads the variable while it is initialized."""
    before = os.environ.get(_DYNAMIC)
    os.environ[_DYNAMIC] = "1"
    try:
        yield
    finally:
        del os.environ[_DYNAMIC]
        if before is not None:
            os.environ[_DYNAMIC] = before


def _check_size(hvd: Any, launch: Launch | None) -> None:
    """Refuse many runs of one process each, which Horovod makes of the processes of another launcher."""
    if launch is not None and hvd.size() == 1 < launch.topology.world_size and "HOROVOD_SIZE" not in os.environ:
        raise RuntimeError(
            f"{launch.launcher} started {launch.topology.world_size} processes, of which Horovod knows nothing: start "
            "them with horovodrun, or let camshaft.distributed.spawn do it"
        )


def _topology(hvd: Any, *, ask: bool) -> Topology:
    """Find where this process stands; where nodes hold different numbers of processes, the others must be asked."""
    # Horovod's "cross" numbers count the nodes that have this local rank.
    topology = Topology(
        rank=hvd.rank(),
        world_size=hvd.size(),
        local_rank=hvd.local_rank(),
        local_world_size=hvd.local_size(),
        node_rank=hvd.cross_rank(),
        num_nodes=hvd.cross_size(),
    )
    if hvd.mpi_ops.is_homogeneous():
        return topology
    if not ask:
        warnings.warn(
            "the nodes hold different numbers of processes, and Horovod counts only those nodes that have this local "
            "rank; camshaft.distributed.initialize('horovod') asks for the others",
            stacklevel=2,
        )
        return topology
    host = os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
    return Topology.from_hosts(hvd.rank(), hvd.allgather_object(host, name="camshaft.hosts"))


def _device(hvd: Any, local_rank: int) -> torch.device:
    """Choose the device of a process: its own GPU, where Horovod can use it and each process of the node has one."""
    if not torch.cuda.is_available() or torch.cuda.device_count() < hvd.local_size():
        return torch.device("cpu")
    if not hvd.cuda_built() and not hvd.rocm_built():
        warnings.warn("Horovod was built without GPUs; they are not used: see docs/reference/backends.md", stacklevel=2)
        return torch.device("cpu")
    return torch.device("cuda", local_rank)
