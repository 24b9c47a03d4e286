"""The exceptions of our own, and notes on those of others."""

from __future__ import annotations

from typing import Any


class NotComputableError(RuntimeError):
    """Say that a value cannot be computed yet, for example a mean over no samples.

    >>> raise NotComputableError("accuracy needs at least one sample")
    Traceback (most recent call last):
    camshaft.errors.NotComputableError: accuracy needs at least one sample
    """


class RankDivergenceError(RuntimeError):
    """Say that ranks do different things where all must do the same: a collective that some cannot reach, say."""


class DamagedCheckpointError(RuntimeError):
    """Say that a checkpoint is not what was saved: it is cut off, or a part of it has changed, or it is gone."""


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


def ignite_class(value: Any) -> type | None:
    """Return the class of PyTorch-Ignite that ``value`` is, or is an instance of; ``None`` if there is none."""
    kind = value if isinstance(value, type) else type(value)
    return next((base for base in kind.__mro__ if base.__module__.partition(".")[0] == "ignite"), None)


def described(value: Any) -> str:
    """Return ``value`` and its type for an error message, and what to import instead if it is PyTorch-Ignite's.

    >>> described(3)
    '3 of type int'
    """
    text = f"{value!r} of type {type(value).__name__}"
    theirs = ignite_class(value)
    if theirs is None:
        return text
    package = theirs.__module__.partition(".")[2].partition(".")[0]
    instead = f": use the one from camshaft.{package}" if package in ("distributed", "engine", "handlers") else ""
    return f"{text}; {theirs.__name__} comes from PyTorch-Ignite{instead}"


def check_is_no_class(name: str, value: Any) -> None:
    """Raise ``TypeError`` if a class is given where an object is needed.

    >>> check_is_no_class("metrics['mean']", float)
    Traceback (most recent call last):
    TypeError: metrics['mean'] must be an object, got the class <class 'float'>: pass float(...) instead
    """
    if isinstance(value, type):
        raise TypeError(f"{name} must be an object, got the class {value!r}: pass {value.__name__}(...) instead")
