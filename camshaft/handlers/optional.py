"""Libraries that only some handlers need, loaded when these are made."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def load_optional(module: str, *, extra: str, needed_by: str) -> Any:
    """Import a module that may not be installed.

    Args:
        module: its full name.
        extra: the extra of camshaft that installs it.
        needed_by: who asks.

    Raises:
        ModuleNotFoundError: it is not installed; the message says how to install it.

    >>> load_optional("json", extra="progress", needed_by="ProgressBar").dumps([])
    '[]'
    >>> load_optional("no_such_library", extra="progress", needed_by="ProgressBar")
    Traceback (most recent call last):
    ModuleNotFoundError: ProgressBar needs 'no_such_library': pip install 'camshaft[progress]'
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        message = f"{needed_by} needs {error.name!r}: pip install 'camshaft[{extra}]'"
        raise ModuleNotFoundError(message, name=error.name) from error
