"""Beginning a process group of torch, or taking over one that exists."""

from __future__ import annotations

import inspect
import logging
import os
import socket
import warnings
from typing import Any

import torch
import torch.distributed as dist

from camshaft.distributed.backends.native.backend import NativeBackend
from camshaft.distributed.backends.native.meeting import Attendance
from camshaft.distributed.backends.native.network import find_interface, gloo_on
from camshaft.distributed.backends.native.store import store_of
from camshaft.distributed.launchers import Launch, detect
from camshaft.distributed.topology import Topology

logger = logging.getLogger("camshaft.distributed.utils")
_PASSED_ON = frozenset(inspect.signature(dist.init_process_group).parameters) - {"backend", "store", "group_name"}


def create(name: str, local_rank: int | None = None, **options: Any) -> NativeBackend:
    """Begin the default process group; all ranks call this.

    Args:
        name: ``"gloo"``, ``"nccl"``, or what torch knows besides.
        local_rank: this process's number on its node, where no launcher tells.
        options: ``init_method``, ``rank``, ``world_size``, ``timeout``, ``device`` (an override), and what else
            ``torch.distributed.init_process_group`` takes.

    Raises:
        TypeError: an option is not known.
        ValueError: rank and world size are missing, or given besides Slurm's.
        RuntimeError: the device of the backend is missing, a group exists, or the environment contradicts itself.
    """
    check_options(name, options)
    return begin(name, detect(os.environ), local_rank, **options)


def check_options(name: str, options: dict[str, Any]) -> None:
    """Refuse arguments that nothing would read, and a backend whose devices are missing.

    Raises:
        TypeError: an option is not known.
        RuntimeError: there is no device for the backend.
    """
    known = {option for option in _PASSED_ON if not option.startswith("_")} | {"device"}
    if unknown := sorted(set(options) - known):
        raise TypeError(f"{unknown} are not known for backend {name!r}, but {sorted(known)} are")
    if name == "nccl" and not torch.cuda.is_available():
        raise RuntimeError("backend 'nccl' needs a CUDA device, and there is none; 'gloo' works on the CPU")


def begin(name: str, launch: Launch | None, local_rank: int | None, **options: Any) -> NativeBackend:
    """Begin the default process group with what is known of the start of this process; see :func:`create`."""
    if dist.is_initialized():
        raise RuntimeError("a default process group exists already: it is used as it is, without initialize")
    device = options.pop("device", None)
    place = _place(launch, options.pop("rank", None), options.pop("world_size", None), options.get("init_method"))
    if launch is not None and not launch.assumed and device is None:
        device = device_of(name, launch.topology)  # before anybody waits for this rank
    interface, attendance = _begin(name, launch, place, options)
    try:
        standing = _standing(launch, local_rank, device)
        backend = NativeBackend(*standing, interface, options.get("timeout"), attendance)
        if backend.device.type == "cuda":
            torch.cuda.set_device(backend.device)
        backend.barrier(None)
    except BaseException as error:
        attendance.leave(error)
        dist.destroy_process_group()
        raise
    return backend


def adopt(local_rank: int | None = None) -> NativeBackend | None:
    """Take over the default process group if there is one, without any communication."""
    if dist.distributed_c10d.GroupMember.WORLD is None or dist.get_backend() == "xla":
        return None  # the runtime of XLA knows more than torch's group over it
    rank, size = dist.get_rank(), dist.get_world_size()
    try:
        launch = detect(os.environ)
    except RuntimeError:  # contradictory or incomplete, but whoever made the group knew who this is
        launch = None
    if launch is not None and (launch.topology.rank, launch.topology.world_size) == (rank, size):
        topology = launch.topology
    else:
        topology = _guessed(rank, size, local_rank)
    return NativeBackend(topology, device_of(dist.get_backend(), topology))


def device_of(backend: str, topology: Topology) -> torch.device:
    """Choose the device of a process: its own GPU, where there is one for it, else the CPU.

    Raises:
        RuntimeError: nccl has not a GPU for each process of the node; all of them see it.
    """
    local_rank, local_size = topology.local_rank, topology.local_world_size
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank < count and (backend != "nccl" or local_size <= count):
        return torch.device("cuda", local_rank)
    if backend == "nccl":
        raise RuntimeError(f"backend 'nccl' needs a GPU for each process of a node, got {count} for {local_size}")
    return torch.device("cpu")


def _place(launch: Launch | None, rank: Any, size: Any, init_method: str | None) -> tuple[int, int]:
    if launch is not None and launch.launcher == "slurm" and (rank is not None or size is not None):
        raise ValueError(f"rank and world_size come from Slurm, got rank={rank!r} and world_size={size!r}")
    if launch is not None:
        return launch.topology.rank, launch.topology.world_size
    if (rank is None) != (size is None):
        raise ValueError(f"rank and world_size must be given together, got rank={rank!r} and world_size={size!r}")
    if rank is None and init_method is not None and not init_method.startswith("env://"):
        raise ValueError(f"rank and world_size must be given with init_method={init_method!r}, or by a launcher")
    rank, size = (0, 1) if rank is None else (rank, size)
    Topology(rank=rank, world_size=size, local_world_size=size, local_rank=rank)  # checks them
    return rank, size


def _begin(
    name: str, launch: Launch | None, place: tuple[int, int], options: dict[str, Any]
) -> tuple[str | None, Attendance]:
    """Make the process group; return the network interface that gloo needed to be told, and who attends the run."""
    method = options.pop("init_method", None)
    rank, size = place
    timeout = options.get("timeout") or dist.default_pg_timeout
    store = store_of(launch, method, rank, size, timeout)
    on_one_node = launch is not None and launch.topology.num_nodes == 1 and not launch.assumed
    interface = None if on_one_node else find_interface(store, rank, size)
    with gloo_on(interface):
        dist.init_process_group(name, store=store, rank=rank, world_size=size, **_set(options))
    return interface, Attendance(store, rank)


def _set(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value is not None}


def _standing(launch: Launch | None, local_rank: int | None, device: Any) -> tuple[Topology, torch.device]:
    """Find the topology of a group that has just begun, asking the others for what no variable tells."""
    if launch is not None and not launch.assumed:
        topology = launch.topology
    else:
        hosts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(hosts, (launch and launch.host) or socket.gethostname())
        topology = Topology.from_hosts(dist.get_rank(), hosts)
    chosen = device_of(dist.get_backend(), topology) if device is None else torch.device(device)
    return topology, chosen


def _guessed(rank: int, size: int, local_rank: int | None) -> Topology:
    if local_rank is None and "LOCAL_RANK" in os.environ:
        local_rank = int(os.environ["LOCAL_RANK"])
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or (size if local_rank in (None, rank) else 0)
    if local_rank is None and size > 1:
        warnings.warn(
            "nothing tells which process of its node this is: all are taken to be on one node; start with torchrun, or "
            "call set_local_rank first",
            stacklevel=4,
        )
    local_rank = rank if local_rank is None else local_rank
    if not local_size:  # ranks of a node are neighbours, the same number on each
        begin = rank - local_rank
        local_size = begin if begin else max(local_rank + 1, size)
    return Topology(
        rank=rank, world_size=size, local_rank=local_rank, local_world_size=min(local_size, size),
        node_rank=rank // local_size, num_nodes=-(-size // local_size),
    )  # fmt: skip
