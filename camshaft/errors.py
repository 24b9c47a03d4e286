"""Exceptions, helpers for error messages, and checks of what comes from PyTorch-Ignite."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import threading
from collections.abc import Iterable, Mapping
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType
from typing import Any

import torch
import torch.distributed as dist

_LIBRARIES = tuple(os.path.join(os.path.dirname(file), "") for file in (__file__, torch.__file__))
_LONGEST = 80  # characters of a value in a message
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


def described(value: Any) -> str:
    """Describe ``value`` and its type for an error message; for objects of PyTorch-Ignite, add what to import instead.

    >>> described(3), described(None), described(int), described(lambda: 3)
    ('3 of type int', 'None', 'the class int', 'the function <lambda>')
    """
    kind: Any = type(value)
    if isinstance(value, type):
        text = f"the class {value.__name__}"
    elif isinstance(value, (BuiltinFunctionType, FunctionType, MethodType)):
        text = f"the function {value.__qualname__}"
    elif kind.__repr__ is object.__repr__:  # which shows an address
        text = f"an object of type {kind.__name__}"
    else:
        text = "None" if value is None else f"{shortened(value)} of type {kind.__name__}"
    foreign = ignite_class(value)
    if foreign is None:
        return text
    package = foreign.__module__.partition(".")[2].partition(".")[0]
    instead = f": use the one from camshaft.{package}" if package in ("distributed", "engine", "handlers") else ""
    return f"{text}; {foreign.__name__} comes from PyTorch-Ignite{instead}"


def shortened(value: Any) -> str:
    """Return the ``repr`` of a value on one line, without an address, cut to a length that fits into a message.

    >>> shortened(torch.zeros(2, 2)), shortened(object())
    ('tensor([[0., 0.], [0., 0.]])', '<object object>')
    """
    kind: Any = type(value)
    if kind.__repr__ is object.__repr__:
        return f"<{kind.__name__} object>"
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def check_type(name: str, value: Any, kind: type[Any] | tuple[type[Any], ...], expected: str) -> None:
    """Raise ``TypeError`` unless ``value`` is an instance of a class.

    >>> check_type("names", "lr", (list, tuple), "a list or a tuple")
    Traceback (most recent call last):
    TypeError: names must be a list or a tuple, got 'lr' of type str
    """
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {expected}, got {described(value)}")


def check_is_no_class(name: str, value: Any) -> None:
    """Raise ``TypeError`` if ``value`` is a class where an object is needed.

    >>> check_is_no_class("metrics['mean']", float)
    Traceback (most recent call last):
    TypeError: metrics['mean'] must be an object, got the class float: pass float(...) instead
    """
    if isinstance(value, type):
        raise TypeError(f"{name} must be an object, got {described(value)}: pass {value.__name__}(...) instead")


def check_takes(
    name: str, function: Any, arguments: str, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> None:
    """Raise an error unless a function can be called with arguments.

    Args:
        name: of the function, for the message.
        function: the function.
        arguments: what it must take; those that end in ``=...`` are passed by name.
        args: values for the arguments, if the text leaves open how many there are.
        kwargs: values of those passed by name, in this case.

    >>> check_takes("score_function", lambda: 0.5, "(engine)")
    Traceback (most recent call last):
    ValueError: score_function must take (engine), got the function <lambda>, which takes ()
    """
    if not callable(function):
        raise TypeError(f"{name} must be callable, got {described(function)}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have none
        return
    if kwargs is None:
        names = arguments.strip("()").split(", ")
        kwargs = {one.removesuffix("=..."): None for one in names if one.endswith("=...")}
        args = names[len(kwargs) :]
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        takes = without_annotations(signature)
        raise ValueError(f"{name} must take {arguments}, got {described(function)}, which takes {takes}") from error


def without_annotations(signature: inspect.Signature) -> inspect.Signature:
    """Return a signature as it is shown in messages."""
    parameters = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
    return signature.replace(parameters=parameters, return_annotation=signature.empty)


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


def ignite_class(value: Any) -> type | None:
    """Return the class of PyTorch-Ignite that ``value`` is, or is an instance of, or ``None``."""
    kind = value if isinstance(value, type) else type(value)
    return next((base for base in kind.__mro__ if base.__module__.partition(".")[0] == "ignite"), None)


def check_metric(metric: Any) -> None:
    """Reject metrics that collect samples, such as ``ROC_AUC``, in a job of several ranks.

    They gather the samples as if every rank had the same number. Where the numbers differ, gloo aborts the process, and
    MPI loses samples.
    """
    group = getattr(metric, "metrics", None)
    for one in (metric, *(group.values() if isinstance(group, dict) else ())):
        collects = any(isinstance(getattr(one, name, None), list) for name in ("_predictions", "_y_pred"))
        if collects and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            name = type(one).__name__
            raise RuntimeError(
                f"{name} of PyTorch-Ignite must not be attached in a job of {dist.get_world_size()} ranks: it gathers "
                "samples as if every rank had the same number, and fails or leaves some out where they differ; use "
                "camshaft.handlers.attach_metrics with a metric of torchmetrics, such as BinaryAUROC instead of ROC_AUC"
            )
