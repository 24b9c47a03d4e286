"""Backends by name; the module of each is imported when it is first used.

Such a module has ``create(name, launch, local_rank, **options)``, which joins a job, ``OPTIONS``, the names of these
options, and, unless it is for MPI, ``adopt(infer)``, which returns the backend of a job that the user has joined,
without communication, or ``None``. The module of torch's backends also has ``check_options(name, options)``, which is
called before processes are started.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from camshaft.distributed.backends.contract import Backend, accelerator
from camshaft.distributed.topology import Launch, Topology
from camshaft.text import counted

has_native_dist_support = dist.is_available()
has_xla_support = find_spec("torch_xla") is not None
has_hvd_support = find_spec("horovod") is not None

_MODULES = {"mpi": "mpi", "xla-tpu": "xla", "horovod": "horovod"}  # all others are torch's
NEEDS = {
    "mpi": "pip install 'camshaft[mpi]'",
    "xla-tpu": "pip install 'camshaft[xla]'",
    "horovod": "Horovod built for the installed torch: see docs/reference/backends.md",
}
_NOT_FOR_RUNS = ("undefined", "fake", "ucc", "xla")  # the last is "xla-tpu" here
_PACKAGE = "camshaft.distributed.backends"
_ADOPTERS = {"torch.distributed": "torch_distributed", "torch_xla": "xla", "horovod.torch": "horovod"}
_loaded: dict[str, Any] = {}
_imported = sys.modules
_torch_world = dist.distributed_c10d._world  # its default_pg is dist.group.WORLD, in half the time


def available_backends() -> tuple[str, ...]:
    """Return the names of the backends that can be initialized in this installation.

    >>> "gloo" in available_backends()
    True
    """
    return tuple(name for name in known_backends() if lack_of(name) is None)


def module_of(name: str) -> ModuleType:
    """Return the module of a backend.

    Raises:
        ValueError: the backend does not exist, or what it needs is not installed.
    """
    if lack := lack_of(name):
        raise ValueError(f"backend must be one of {available_backends()}, got {name!r}, which {lack}")
    return import_module(f"{_PACKAGE}.{_MODULES.get(name, 'torch_distributed')}")


def nothing_to_adopt() -> bool:
    """Return True if there is certainly no job to adopt; fast, as each query asks this in a single process."""
    return _torch_world.default_pg is None and "torch_xla" not in _imported and "horovod.torch" not in _imported


def joined() -> tuple[Any, ...]:
    """Return what identifies the jobs that this process, or the one that forked it, has joined.

    >>> joined()
    (None, False, False)
    """
    horovod: Any = _imported.get("horovod.torch")
    xla: Any = getattr(_imported.get("torch_xla"), "_XLAC", None)  # None while it is being imported
    return (
        _torch_world.default_pg,
        hasattr(horovod, "is_initialized") and horovod.is_initialized(),
        hasattr(xla, "_xla_runtime_is_initialized") and xla._xla_runtime_is_initialized(),
    )


def adopt(infer: Callable[[int, int], tuple[Topology, tuple[str, ...]]]) -> Backend | None:
    """Return the backend of a job that the user has joined, if there is one: its library has been imported.

    Each query asks this as long as there is none, so nothing is looked up twice.

    Args:
        infer: returns the topology for a rank and a world size, and the names of the numbers that are assumed.
    """
    for library in _ADOPTERS:
        if library in sys.modules:
            if library not in _loaded:
                _loaded[library] = import_module(f"{_PACKAGE}.{_ADOPTERS[library]}")
            backend: Backend | None = _loaded[library].adopt(infer)
            if backend is not None:
                return backend
    return None


def known_backends() -> tuple[str, ...]:
    """Return all backends, installed or not: torch's, also those registered for other devices, and the others."""
    native = ("nccl", "gloo", "mpi", *(name for name in dist.Backend.backend_list if name not in _NOT_FOR_RUNS))
    return (*dict.fromkeys(native), "xla-tpu", "horovod")


def lack_of(name: str) -> str | None:
    """Return what a backend lacks, ``"needs pip install 'camshaft[mpi]'"``, or ``None`` if it is available."""
    if name not in known_backends():
        return "does not exist"
    if name in NEEDS:
        has_mpi = dist.is_mpi_available() or find_spec("mpi4py") is not None
        has_it = {"mpi": has_mpi, "xla-tpu": has_xla_support, "horovod": has_hvd_support}[name]
        return None if has_it else f"needs {NEEDS[name]}"
    return None if dist.is_backend_available(name) else "is not supported by the installed torch"


def choose(
    environ: Mapping[str, str], launch: Launch | None, nproc_per_node: int | None, available: Sequence[str]
) -> tuple[str | None, str]:
    """Choose a backend.

    Args:
        environ: the environment variables.
        launch: how this process was started, ``None`` without a launcher.
        nproc_per_node: the number of processes about to be started, ``None`` if none are.
        available: the backends that can be initialized.

    Returns:
        Its name, ``None`` for a single process, and the reason.

    >>> choose({}, None, None, ["gloo"])
    (None, 'no launcher started this process, and nproc_per_node is not given')
    """
    if "xla-tpu" in available and "PJRT_DEVICE" in environ:
        return "xla-tpu", f"PJRT_DEVICE={environ['PJRT_DEVICE']} is set, and torch_xla is installed"
    if nproc_per_node is None and launch is None:
        return None, "no launcher started this process, and nproc_per_node is not given"
    if nproc_per_node is None and launch is not None:
        if launch.launcher == "horovodrun" and "horovod" in available:
            return "horovod", "horovodrun started this process"
        if launch.mpi and "mpi" in available:
            return "mpi", f"{launch.launcher} started this process, for MPI"
    here = accelerator()
    if here is None:
        return "gloo", "there is no accelerator"
    try:
        name = dist.get_default_backend_for_device(here.type)
    except ValueError:
        return "gloo", f"torch has no backend for {here.type}"
    if name not in available:
        return "gloo", f"{name!r} is not available for {here.type}"
    count = torch.accelerator.device_count()
    local_size = nproc_per_node or (launch.topology.local_world_size if launch else 1)
    devices = f"there {'is' if count == 1 else 'are'} {counted(count, f'{here.type} device')}"
    why = f"{devices} for {counted(local_size, 'process')}"
    return "gloo" if count < local_size else name, why
