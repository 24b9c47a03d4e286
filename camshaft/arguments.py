"""Checks of arguments, and words for what was passed."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from numbers import Integral, Real
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from torch import Tensor

from camshaft.dtensors import full_value
from camshaft.interop import ignite_class

_LONGEST = 80  # characters of a value in a message


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

    >>> import torch
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


def check_keywords(kind: type[Any], keywords: Iterable[str], function: Callable[..., Any], *given: str) -> None:
    """Raise ``TypeError`` unless a function takes the keyword arguments that a constructor passes on to it.

    Args:
        kind: the class that is constructed.
        keywords: the names of these arguments.
        function: the function.
        given: its parameters that are not for keywords of the user. If it has ``**kwargs``, any keyword is accepted,
            unless they are among these.
    """
    if not keywords:
        return  # signatures take a while
    own, passed = (inspect.signature(one).parameters.values() for one in (kind, function))
    if all(one.kind is not one.VAR_KEYWORD or one.name in given for one in passed):
        known = [one.name for one in (*own, *passed) if one.kind is not one.VAR_KEYWORD and one.name not in given]
        check_known(keywords, known, kind.__name__)


def check_known(options: Iterable[str], known: Collection[str], where: str) -> None:
    """Reject unknown options.

    >>> check_known(["siz"], ["size", "weight"], "auto_model")
    Traceback (most recent call last):
    TypeError: auto_model got unknown options ['siz']; did you mean ['size']?
    >>> check_known(["colour"], ["size", "weight"], "auto_model")
    Traceback (most recent call last):
    TypeError: auto_model got unknown options ['colour']; it accepts ['size', 'weight']

    Raises:
        TypeError: an option is unknown.
    """
    if unknown := sorted(set(options) - set(known)):
        meant = [close for one in unknown for close in get_close_matches(one, known, n=1, cutoff=0.8)]
        is_clear = len(meant) == len(unknown)
        hint = f"did you mean {meant}?" if is_clear else f"it accepts {sorted(known) or 'none'}"
        raise TypeError(f"{where} got unknown options {unknown}; {hint}")


def check_callable(name: str, value: Any, arguments: str | None = None) -> None:
    """Raise an error unless ``value`` is ``None`` or callable, with arguments if they are given as in "(engine)"."""
    if value is not None and arguments is not None:
        check_takes(name, value, arguments)
    elif value is not None and not callable(value):
        raise TypeError(f"{name} must be callable, got {described(value)}")


def check_text(name: str, value: Any, optional: bool = False) -> None:
    """Raise ``TypeError`` unless ``value`` is a string, or ``None`` where that is allowed."""
    if not (isinstance(value, str) or (optional and value is None)):
        raise TypeError(f"{name} must be a str, got {described(value)}")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise ``ValueError`` unless ``value`` is one of the strings.

    >>> check_choice("mode", "best", ("max", "min"))
    Traceback (most recent call last):
    ValueError: mode must be 'max' or 'min', got 'best'
    """
    if value not in choices:
        *others, last = map(repr, choices)
        raise ValueError(f"{name} must be {', '.join(others)} or {last}, got {value!r}")


def check_sequence(name: str, value: Any) -> None:
    """Raise ``TypeError`` if an argument is not a list, a tuple, or another sequence; a string is not accepted."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TypeError(f"{name} must be a list or a tuple, got {described(value)}")


def number(
    name: str,
    value: Any,
    *,
    least: float = -math.inf,
    most: float = math.inf,
    above: float = -math.inf,
    below: float = math.inf,
) -> float:
    """Return an argument as a float, after checking that it is a finite number within bounds.

    >>> number("start_value", 1)
    1.0
    >>> number("smooth_f", 1, least=0, below=1)
    Traceback (most recent call last):
    ValueError: smooth_f must be at least 0 and below 1, got 1
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {described(value)}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    _check_bounds(name, value, least, most, above, below)
    return float(value)


def integer(name: str, value: Any, least: int, below: float = math.inf) -> int:
    """Return an argument as an int, after checking that it is an integer within bounds.

    >>> integer("warmup", 0, least=1)
    Traceback (most recent call last):
    ValueError: warmup must be at least 1, got 0
    """
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {described(value)}")
    _check_bounds(name, value, least, math.inf, -math.inf, below)
    return int(value)


def _check_bounds(name: str, value: Any, least: float, most: float, above: float, below: float) -> None:
    if not (least <= value <= most and above < value < below):
        bounds = {"at least": least, "at most": most, "above": above, "below": below}
        allowed = " and ".join(f"{word} {bound}" for word, bound in bounds.items() if math.isfinite(bound))
        raise ValueError(f"{name} must be {allowed}, got {value!r}")


def scalar(name: str, value: Any) -> Tensor | float:
    """Return a number as a float, or the element of a tensor, detached, as a 0-d tensor on its device.

    For a DTensor, this is the element of the full tensor, and all ranks must call this.

    >>> import torch
    >>> scalar("output_transform", torch.tensor([0.5])), scalar("output_transform", 2)
    (tensor(0.5000), 2.0)
    """
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"{name} must return a number, or a tensor with one element, got one of shape {tuple(value.shape)}"
            )
        element: Tensor = full_value(value.detach()).reshape(())
        return element
    if type(value) is float:  # saves the look-up of an abstract class
        return value
    if not isinstance(value, Real):
        raise TypeError(f"{name} must return a number, or a tensor with one element, got {described(value)}")
    return float(value)


def load_optional(module: str, *, extra: str, needed_by: str) -> Any:
    """Import a module that may not be installed.

    Args:
        module: the full name of the module.
        extra: the extra of camshaft that installs it.
        needed_by: the name of the class or function that needs it.

    Raises:
        ModuleNotFoundError: the module is not installed; the message says how to install it.

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


def identity(output: Any) -> Any:
    """Return the argument; the default of ``output_transform``."""
    return output
