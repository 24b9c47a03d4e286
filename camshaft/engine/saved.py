"""What a state dict of an engine must hold, and what it means for the counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from camshaft.engine.filters import is_integer
from camshaft.engine.resume import positive


@dataclass(frozen=True)
class Progress:
    """Counts of completed work, and the target."""

    iteration: int
    epoch: int
    epoch_length: int | None
    max_epochs: int | None
    max_iters: int | None


def progress_of(state_dict: Mapping[str, Any]) -> Progress:
    """Read the counters of a state dict.

    Args:
        state_dict: with ``epoch_length``, one of ``iteration`` and ``epoch``, one of ``max_epochs`` and
            ``max_iters``.

    Raises:
        TypeError: a number is not an integer.
        ValueError: a number is out of range, or a count of epochs comes without their length.

    >>> progress_of({"epoch": 3, "epoch_length": 10, "max_epochs": 5}).iteration
    30
    """
    length = _length(state_dict)
    max_epochs, max_iters = (positive(name, state_dict.get(name)) for name in ("max_epochs", "max_iters"))
    if "iteration" in state_dict:
        iteration = _count("iteration", state_dict["iteration"])
        epoch = iteration // length if length else 0  # an unfinished first pass over data of unknown length
    else:
        epoch = _count("epoch", state_dict["epoch"])
        if epoch and not length:
            raise ValueError(f"epoch_length must be a positive integer when epoch is {epoch}, got None")
        iteration = epoch * (length or 0)
    for name, target, reached in (("max_epochs", max_epochs, epoch), ("max_iters", max_iters, iteration)):
        if target is not None and target < reached:
            raise ValueError(f"{name} must not be below the progress of the state dict, {reached}, got {target}")
    return Progress(iteration, epoch, length, max_epochs, max_iters)


def _length(state_dict: Mapping[str, Any]) -> int | None:
    length = state_dict["epoch_length"]
    started = state_dict.get("iteration", state_dict.get("epoch"))
    return None if not length and not started else positive("epoch_length", length)


def _count(name: str, value: Any) -> int:
    if not is_integer(value):
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}")
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value}")
    return int(value)
