"""Beginning a process group of torch, or taking over one that exists."""

from __future__ import annotations

import inspect
import logging
import socket
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from camshaft.distributed.backend import accelerator
from camshaft.distributed.backends.native.backend import NativeBackend
from camshaft.distributed.backends.native.grouping import end_groups
from camshaft.distributed.backends.native.meeting import Attendance
from camshaft.distributed.backends.native.network import find_interface, gloo_on
from camshaft.distributed.backends.native.store import store_of
from camshaft.distributed.topology import Launch, Topology
from camshaft.errors import annotate

logger = logging.getLogger("camshaft.distributed.utils")
_PASSED_ON = frozenset(inspect.signature(dist.init_process_group).parameters) - {"backend", "store", "group_name"}


def create(name: str, launch: Launch | None, local_rank: int | None = None, **options: Any) -> NativeBackend:
    """Begin the default process group; all ranks call this.

    Args:
        name: ``"gloo"``, ``"nccl"``, or what torch knows besides.
        launch: how this process was started, ``None`` if it was started alone.
        local_rank: this process's number on its node, where no launcher tells.
        options: ``init_method``, ``rank``, ``world_size``, ``timeout``, ``device`` (an override), and what else
            ``torch.distributed.init_process_group`` takes.

    Raises:
        TypeError: an option is not known.
        ValueError: rank and world size are missing, or given besides Slurm's.
        RuntimeError: the device of the backend is missing, a group exists, or the environment contradicts itself.
    """
    check_options(name, options)
    if dist.is_initialized():
        raise RuntimeError("a default process group exists already: it is used as it is, without initialize")
    device = options.pop("device", None)
    place = _place(launch, options.pop("rank", None), options.pop("world_size", None), options.get("init_method"))
    interface, attendance = _begin(name, launch, place, options)
    try:
        topology = _standing(launch)
        chosen = device_of(topology.local_rank) if device is None else torch.device(device)
        backend = NativeBackend(topology, chosen, interface, options.get("timeout"), attendance)
        if (here := accelerator()) is not None and chosen.type == here.type:
            torch.accelerator.set_device_index(chosen)
        _meet_on_devices(backend)
    except BaseException as error:
        attendance.leave(error)
        end_groups()
        raise
    return backend


def check_options(name: str, options: dict[str, Any]) -> None:
    """Refuse arguments that nothing would read, and a backend whose devices are missing.

    Raises:
        TypeError: an option is not known.
        RuntimeError: there is no device for the backend.
    """
    known = {option for option in _PASSED_ON if not option.startswith("_")} | {"device"}
    if unknown := sorted(set(options) - known):
        raise TypeError(f"{unknown} are not known for backend {name!r}, but {sorted(known)} are")
    kinds = dist.Backend.backend_capability.get(name, ["cpu"])
    here = accelerator()
    if "cpu" not in kinds and (here is None or here.type not in kinds):
        needed = " or ".join(kinds).replace("cuda", "CUDA")
        raise RuntimeError(f"backend {name!r} needs a {needed} device, and there is none; 'gloo' works on the CPU")


def adopt(infer: Callable[[int, int], tuple[Topology, tuple[str, ...]]]) -> NativeBackend | None:
    """Take over the default process group if there is one, without any communication."""
    if dist.distributed_c10d.GroupMember.WORLD is None or dist.get_backend() == "xla":
        return None  # the runtime of XLA knows more than torch's group over it
    topology, assumed = infer(dist.get_rank(), dist.get_world_size())
    if "local_rank" in assumed:
        warnings.warn(
            f"the local rank of rank {topology.rank} is unknown; assuming {topology.local_rank}, as on a single node; "
            "start with torchrun, or call set_local_rank first",
            stacklevel=6,
        )
    bound: torch.device | None = getattr(dist.group.WORLD, "bound_device_id", None)
    return NativeBackend(topology, bound or device_of(topology.local_rank), assumed=assumed)


def device_of(local_rank: int) -> torch.device:
    """Choose the device of a process: one of the accelerators that it sees, if the process group works there.

    A process may see all accelerators of its node, or only its own (``srun --gpus-per-task=1``, Kubernetes), and
    nothing tells which. So the local rank is taken modulo the number of those that it sees.
    """
    kind = accelerator()
    if kind is None or f"{kind.type}:" not in dist.get_backend_config():
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    return torch.device(kind.type, local_rank % count) if count else torch.device("cpu")


def _meet_on_devices(backend: NativeBackend) -> None:
    """Wait for all ranks on their devices; where that fails, note whether processes of a node may share one."""
    try:
        backend.barrier(None)
    except RuntimeError as error:
        size = backend.topology.local_world_size
        if backend.device.type != "cpu" and (count := torch.accelerator.device_count()) < size:
            annotate(
                error,
                f"rank {backend.topology.rank} uses {backend.device}, one of {count} that it sees, and {size} "
                f"processes run on its node: with backend {backend.name!r} each needs a device of its own",
            )
        raise


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


def _standing(launch: Launch | None) -> Topology:
    """Find the topology of a group that has just begun, exchanging host names where the environment is incomplete.

    They meet in the store: a collective would need the device, which is chosen by the answer. Every rank names its host
    there, as a launcher may tell some ranks more than others (horovodrun).
    """
    store = dist.distributed_c10d._get_default_store()
    store.set(f"camshaft/host/{dist.get_rank()}", (launch and launch.host) or socket.gethostname())
    if launch is not None and not launch.assumed:
        return launch.topology
    hosts = [store.get(f"camshaft/host/{rank}").decode() for rank in range(dist.get_world_size())]
    return Topology.from_hosts(dist.get_rank(), hosts)
