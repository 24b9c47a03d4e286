"""Checks of arguments that several handlers take."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from camshaft.engine.engine import Engine
from camshaft.engine.state import State
from camshaft.errors import described


def check_callable(name: str, value: Any) -> None:
    """Raise ``TypeError`` if something is given that cannot be called."""
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be callable, got {value!r}")


def check_engine(name: str, value: Any) -> None:
    """Raise ``TypeError`` if something is not an engine of this library."""
    if not isinstance(value, Engine):
        raise TypeError(f"{name} must be an Engine, got {described(value)}")


def check_text(name: str, value: Any, optional: bool = False) -> None:
    """Raise ``TypeError`` if something is not a text, nor ``None`` where that is allowed."""
    if not (isinstance(value, str) or (optional and value is None)):
        raise TypeError(f"{name} must be a str, got {value!r} of type {type(value).__name__}")


def check_is_no_counter(argument: str, name: str, state: State[Any, Any]) -> None:
    """Raise ``ValueError`` if an attribute of a state is one that the engine counts by.

    >>> check_is_no_counter("param_name", "epoch", State())
    Traceback (most recent call last):
    ValueError: param_name must not be 'epoch', by which the engine counts; choose another name
    """
    if name in state.event_to_attr.values():
        raise ValueError(f"{argument} must not be {name!r}, by which the engine counts; choose another name")


def check_entries(param_name: str, groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise ``ValueError`` if one of some parameter groups has no such parameter.

    >>> check_entries("rl", [{"params": [], "lr": 0.1}])
    Traceback (most recent call last):
    ValueError: param_name must be a parameter that all groups have, got 'rl'; one has ['lr']; one of ...
    """
    for group in groups:
        known = [name for name in group if name != "params"]
        if param_name not in known:
            raise ValueError(
                f"param_name must be a parameter that all groups have, got {param_name!r}; one has {known}; one of "
                "your own must be in the groups before it is used here"
            )


def check_sequence(name: str, value: Any) -> None:
    """Raise ``TypeError`` if an argument is not a list, a tuple, or another sequence; a string is not accepted."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TypeError(f"{name} must be a list or a tuple, got {described(value)}")


def number(name: str, value: Any) -> float:
    """Return an argument as a float, after checking that it is a finite number.

    >>> number("start_value", 1)
    1.0
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {described(value)}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return float(value)


def integer(name: str, value: Any, least: int) -> int:
    """Return an argument as an int, after checking that it is an integer of at least ``least``.

    >>> integer("warmup", 0, least=1)
    Traceback (most recent call last):
    ValueError: warmup must be at least 1, got 0
    """
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {described(value)}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return int(value)
