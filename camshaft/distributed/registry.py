"""Backends by name; the module of each is imported when it is asked for.

Such a module or package has ``create(name, local_rank, **options)``, which begins a run, ``adopt(local_rank)``, which
takes over one that exists without any communication, or gives ``None``, and ``spawn(name, function, args, kwargs,
**options)``, which starts the processes of a run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch.distributed as dist

from camshaft.distributed.backend import Backend
from camshaft.distributed.topology import Topology

has_native_dist_support = dist.is_available()
has_xla_support = find_spec("torch_xla") is not None
has_hvd_support = find_spec("horovod") is not None

_MODULES = {"mpi": "mpi", "xla-tpu": "xla", "horovod": "horovod"}  # all others are torch's, and begin in the same way
NEEDS = {
    "mpi": "pip install 'camshaft[mpi]'",
    "xla-tpu": "pip install 'camshaft[xla]'",
    "horovod": "Horovod built for the installed torch: see docs/reference/backends.md",
}
_NOT_FOR_RUNS = ("undefined", "fake", "ucc", "xla")  # the last is begun by the name of "xla-tpu"
_ADOPTERS = {"torch.distributed": "native", "torch_xla": "xla", "horovod.torch": "horovod"}
_loaded: dict[str, Any] = {}
_imported = sys.modules
_torch_world = dist.distributed_c10d._world  # whose default_pg is dist.group.WORLD, found in half the time


def available_backends() -> tuple[str, ...]:
    """Give the names of the backends that can be initialized in this installation.

    >>> "gloo" in available_backends()
    True
    """
    return tuple(name for name in known_backends() if _is_available(name))


def module_of(name: str) -> ModuleType:
    """Import the module of a backend.

    Raises:
        ValueError: there is no such backend, or what it needs is not installed.
    """
    if name not in available_backends():
        raise ValueError(f"backend must be one of {available_backends()}, got {name!r}, which {_lack(name)}")
    return _import(_MODULES.get(name, "native"))


def nothing_has_begun() -> bool:
    """Say quickly whether there can be no run to take over: each query asks this in a single process."""
    return _torch_world.default_pg is None and "torch_xla" not in _imported and "horovod.torch" not in _imported


def adopted(infer: Callable[[int, int], tuple[Topology, tuple[str, ...]]]) -> Backend | None:
    """Take over a run that somebody else began, if there is one; whoever began it has imported its library.

    This is asked with every query as long as there is none, so it looks nothing up twice.
    """
    for library in _ADOPTERS:
        if library in sys.modules:
            module = _loaded.get(library) or _loaded.setdefault(library, _import(_ADOPTERS[library]))
            backend: Backend | None = module.adopt(infer)
            if backend is not None:
                return backend
    return None


def backend_classes() -> list[type[Backend]]:
    """Give the class of each kind of backend that is installed, in the order in which runs are looked for."""
    classes = {
        ("serial", "SerialBackend"): True,
        ("native.backend", "NativeBackend"): has_native_dist_support,
        ("xla", "XlaBackend"): has_xla_support,
        ("horovod", "HorovodBackend"): has_hvd_support,
    }
    return [getattr(_import(module), name) for (module, name), installed in classes.items() if installed]


def known_backends() -> tuple[str, ...]:
    """List the backends that torch knows, also those registered for other devices, and the others."""
    registered = getattr(dist.Backend, "backend_list", []) if has_native_dist_support else []
    native = ("nccl", "gloo", "mpi", *(name for name in registered if name not in _NOT_FOR_RUNS))
    return (*dict.fromkeys(native), "xla-tpu", "horovod")


def lack_of(name: str) -> str | None:
    """Tell what a backend needs that is not installed, or ``None``: ``"needs pip install 'camshaft[mpi]'"``."""
    return None if _is_available(name) else _lack(name)


def _import(module: str) -> ModuleType:
    return import_module(f"camshaft.distributed.backends.{module}")


def _is_available(name: str) -> bool:
    if name == "xla-tpu":
        return has_xla_support
    if name == "horovod":
        return has_hvd_support
    if name == "mpi":
        return has_native_dist_support and (dist.is_mpi_available() or find_spec("mpi4py") is not None)
    return has_native_dist_support and dist.is_backend_available(name)


def _lack(name: str) -> str:
    if needs := NEEDS.get(str(name)):
        return f"needs {needs}"
    return "is not in this torch" if name in known_backends() else "nobody has registered"
