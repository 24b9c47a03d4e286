"""Backends by name, imported when they are asked for."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch.distributed as dist

_MODULES = {"mpi": "mpi"}  # all others are torch's, and begin in the same way
_NOT_FOR_RUNS = ("undefined", "fake", "ucc")


def available_backends() -> tuple[str, ...]:
    """Give the names of the backends that can be initialized in this installation.

    >>> "gloo" in available_backends()
    True
    """
    return tuple(name for name in _names() if _is_available(name))


def module_of(name: str) -> ModuleType:
    """Import the module of a backend.

    Raises:
        ValueError: there is no such backend, or what it needs is not installed.
    """
    if name not in available_backends():
        raise ValueError(f"backend must be one of {available_backends()}, got {name!r}, {_reason(name)}")
    return import_module(f"camshaft.distributed.backends.{_MODULES.get(name, 'native_start')}")


def _names() -> tuple[str, ...]:
    """List the backends that torch knows, also those registered for other devices."""
    if not dist.is_available():
        return ()
    registered = getattr(dist.Backend, "backend_list", [])
    return tuple(dict.fromkeys(("nccl", "gloo", "mpi", *(name for name in registered if name not in _NOT_FOR_RUNS))))


def _is_available(name: str) -> bool:
    if name == "mpi":
        return dist.is_mpi_available() or find_spec("mpi4py") is not None
    return dist.is_backend_available(name)


def _reason(name: str) -> str:
    if name == "mpi":
        return "which needs pip install 'camshaft[mpi]'"
    return "which this torch was not built with" if name in _names() else "which nobody has registered"
