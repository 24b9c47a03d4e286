"""Checks of arguments that several handlers take."""

from __future__ import annotations

from typing import Any


def check_callable(name: str, value: Any) -> None:
    """Raise ``TypeError`` if something is given that cannot be called."""
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be callable, got {value!r}")
