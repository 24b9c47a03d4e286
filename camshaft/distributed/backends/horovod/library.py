"""Horovod for torch, and what comes with it, imported when it is needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def library() -> Any:
    """Import ``horovod.torch``.

    Raises:
        ModuleNotFoundError: it is missing, or was not built for the installed torch.
    """
    try:
        return import_module("horovod.torch")
    except ImportError as error:
        raise ModuleNotFoundError(
            f"backend 'horovod' needs Horovod, built for the installed torch: see docs/reference/backends.md ({error})"
        ) from error


def launcher() -> Any:
    """Give ``horovod.run``."""
    return import_module("horovod").run


def pickler() -> Any:
    """Give what Horovod pickles with, functions of the main module too."""
    return import_module("cloudpickle")


def rendezvous() -> Any:
    """Give the module that holds what the processes meet at."""
    return import_module("horovod.runner.gloo_run")
