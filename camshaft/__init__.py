"""camshaft: an event-driven training engine for PyTorch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from camshaft import base, distributed, engine, exceptions, utils
from camshaft.version import __version__

if TYPE_CHECKING:
    from camshaft import handlers

__all__ = ["__version__", "base", "distributed", "engine", "exceptions", "handlers", "utils"]


def __getattr__(name: str) -> Any:
    """Import the handlers when they are first asked for: they are many modules."""
    if name == "handlers":
        return import_module("camshaft.handlers")
    raise AttributeError(f"module 'camshaft' has no attribute {name!r}")
