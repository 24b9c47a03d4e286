"""Exceptions, and the lines of the user's program that errors and warnings point to."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from types import FrameType

import torch

_LIBRARIES = tuple(os.path.join(os.path.dirname(file), "") for file in (__file__, torch.__file__))
_STANDARD_LIBRARY = ("<frozen ", os.path.join(os.path.dirname(threading.__file__), ""))


class NotComputableError(RuntimeError):
    """A value cannot be computed yet, for example a mean over no samples.

    >>> raise NotComputableError("accuracy needs at least one sample")
    Traceback (most recent call last):
    camshaft.errors.NotComputableError: accuracy needs at least one sample
    """


class RankDivergenceError(RuntimeError):
    """The ranks diverge: they call different collectives, or some cannot reach a collective that others wait in."""


class RankFailedError(RuntimeError):
    """Another rank has failed first, or has left the job, so this one cannot proceed.

    The cause of the error is the traceback of that rank, if it had one.
    """


class MismatchError(TypeError):
    """Ranks met in a collective with values that do not belong together; they may have called different ones."""


class RemoteTraceback(Exception):
    """The traceback of an error on another rank, as text."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


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


def line_of_caller(folder: str = "") -> str:
    """Return the line that called into a folder of this package, as ``"train.py:12 in main"`` with its full path."""
    inner = (os.path.join(os.path.dirname(__file__), folder, ""), contextlib.__file__)
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inner):
        frame = frame.f_back
    return line_of(frame)


def line_of(frame: FrameType) -> str:
    """Return where a frame is, as ``"train.py:12 in main"`` with its full path."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def level_of_caller() -> int:
    """Return the ``stacklevel`` with which the caller's warning points to the line that called into this package."""
    inner = os.path.join(os.path.dirname(__file__), "")
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inner):
        frame, level = frame.f_back, level + 1
    return level


def line_of_error(error: BaseException) -> str:
    """Return the innermost line of the user's that an error passed through, like :func:`line_of_caller`, or ``""``."""
    found, traceback = "", error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        file = code.co_filename
        is_standard = file.startswith(_STANDARD_LIBRARY) and "-packages" not in file
        if not is_standard and not file.startswith(_LIBRARIES):
            found = f"{file}:{traceback.tb_lineno} in {code.co_name}"
        traceback = traceback.tb_next
    return found
