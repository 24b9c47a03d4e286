"""Exceptions of this package, notes on exceptions, and descriptions of values in error messages."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

from camshaft.ignite import ignite_class


class NotComputableError(RuntimeError):
    """A value cannot be computed yet, for example a mean over no samples.

    >>> raise NotComputableError("accuracy needs at least one sample")
    Traceback (most recent call last):
    camshaft.errors.NotComputableError: accuracy needs at least one sample
    """


class RankDivergenceError(RuntimeError):
    """Ranks do different things where all must do the same, such as a collective that some ranks cannot reach."""


class DamagedCheckpointError(RuntimeError):
    """A checkpoint is not what was saved: it is truncated, changed or missing."""


def annotate(error: BaseException, text: str) -> None:
    """Add a note to ``error``; Python prints it below the message (3.10 only keeps it in ``__notes__``).

    >>> error = ValueError("broken")
    >>> annotate(error, "in handler 'save' at epoch 3")
    >>> error.__notes__
    ["in handler 'save' at epoch 3"]
    """
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:
        # What add_note does since Python 3.11.
        error.__dict__.setdefault("__notes__", []).append(text)


def described(value: Any) -> str:
    """Describe ``value`` and its type for an error message; for objects of PyTorch-Ignite, add what to import instead.

    >>> described(3)
    '3 of type int'
    """
    text = f"{value!r} of type {type(value).__name__}"
    foreign = ignite_class(value)
    if foreign is None:
        return text
    package = foreign.__module__.partition(".")[2].partition(".")[0]
    instead = f": use the one from camshaft.{package}" if package in ("distributed", "engine", "handlers") else ""
    return f"{text}; {foreign.__name__} comes from PyTorch-Ignite{instead}"


def check_is_no_class(name: str, value: Any) -> None:
    """Raise ``TypeError`` if ``value`` is a class where an object is needed.

    >>> check_is_no_class("metrics['mean']", float)
    Traceback (most recent call last):
    TypeError: metrics['mean'] must be an object, got the class <class 'float'>: pass float(...) instead
    """
    if isinstance(value, type):
        raise TypeError(f"{name} must be an object, got the class {value!r}: pass {value.__name__}(...) instead")


def line_of_caller(folder: str = "") -> str:
    """Return the line that called into a folder of this package, as ``"train.py:12 in main"`` with its full path."""
    inner = (os.path.join(os.path.dirname(__file__), folder, ""), contextlib.__file__)
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inner):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
