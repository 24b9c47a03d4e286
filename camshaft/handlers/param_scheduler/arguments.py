"""Checks of the arguments of schedulers. What passes is a plain number, which can be saved and loaded safely."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

from camshaft.types import is_integer


def real(name: str, value: Any) -> float:
    """Check that an argument is a number.

    >>> real("start_value", 1)
    1.0
    """
    if not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return float(value)


def whole(name: str, value: Any, least: int) -> int:
    """Check that an argument is an integer that is large enough; ``4.0`` is one too.

    >>> whole("cycle_size", 10 / 2, least=2)
    5
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not is_integer(value):
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return int(value)


def check_sequence(name: str, value: Any) -> None:
    """Check that an argument is a list or a tuple, or something like them."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TypeError(f"{name} must be a list or a tuple, got {value!r} of type {type(value).__name__}")
