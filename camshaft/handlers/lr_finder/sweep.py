"""The rates that a search goes through, and what it was asked for, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from torch.optim import Optimizer

from camshaft.handlers.param_scheduler.param import plain
from camshaft.types import is_integer

STEP_MODES = ("exp", "linear")


@dataclass(frozen=True)
class Sweep:
    """From which rates to which, one for each parameter group, in how many iterations; and when to stop before.

    Raises:
        TypeError: a number is none.
        ValueError: a number is out of range, or the mode is unknown.

    >>> Sweep([1.0], [100.0], None, "exp", 0.05, 5.0).rates(1, 3)
    [10.0]
    """

    start: list[float]
    end: list[float]
    num_iter: int | None
    step_mode: str
    smooth_f: float
    diverge_th: float

    def __post_init__(self) -> None:
        if self.num_iter is not None and not is_integer(self.num_iter):
            raise TypeError(
                f"num_iter must be an integer, got {self.num_iter!r} of type {type(self.num_iter).__name__}"
            )
        if self.num_iter is not None and self.num_iter < 1:
            raise ValueError(f"num_iter must be at least 1, got {self.num_iter}")
        if self.step_mode not in STEP_MODES:
            raise ValueError(f"step_mode must be one of {STEP_MODES}, got {self.step_mode!r}")
        if not 0 <= self.smooth_f < 1:
            raise ValueError(f"smooth_f must be from 0 to 1, 1 excluded, got {self.smooth_f}")
        if not self.diverge_th >= 1:
            raise ValueError(f"diverge_th must be at least 1, got {self.diverge_th}")
        for start, end in zip(self.start, self.end, strict=True):
            if not start < end:
                raise ValueError(f"start_lr must be below end_lr, got {start} and {end}")
            if self.step_mode == "exp" and start <= 0:
                raise ValueError(f"start_lr must be above 0 for step_mode='exp', got {start}")

    def rates(self, index: int, count: int) -> list[float]:
        """Give the rates of one iteration of ``count``: those of the first are the start, of the last the end."""
        part = index / max(1, count - 1)
        if self.step_mode == "linear":
            return [start + part * (end - start) for start, end in zip(self.start, self.end, strict=True)]
        return [start * (end / start) ** part for start, end in zip(self.start, self.end, strict=True)]


def present_rates(optimizer: Optimizer) -> list[float]:
    """Read the rates of an optimizer."""
    return [float(plain(group["lr"])) for group in optimizer.param_groups]


def rates_of(name: str, value: Any, optimizer: Optimizer) -> list[float]:
    """Give one rate for each parameter group, from a number or a list of them.

    Raises:
        TypeError: it is none of these.
        ValueError: the list has another length.
    """
    groups = optimizer.param_groups
    if isinstance(value, Real) and not isinstance(value, bool):
        return [float(value)] * len(groups)
    if not isinstance(value, list) or not all(isinstance(one, Real) for one in value):
        raise TypeError(f"{name} must be a number or a list of numbers, got {value!r} of type {type(value).__name__}")
    if len(value) != len(groups):
        raise ValueError(f"{name} must hold one rate for each of {len(groups)} parameter groups, got {value}")
    return [float(one) for one in value]


def checked_objects(to_save: Any) -> Mapping[str, Any]:
    """Check what is to be restored after a search.

    Raises:
        TypeError: it is not a mapping of objects with a state, or its optimizer is none.
        ValueError: it has no optimizer.
    """
    if not isinstance(to_save, Mapping):
        raise TypeError(f"to_save must be a mapping, got {to_save!r} of type {type(to_save).__name__}")
    for name, one in to_save.items():
        if not all(callable(getattr(one, method, None)) for method in ("state_dict", "load_state_dict")):
            raise TypeError(f"to_save[{name!r}] must have state_dict() and load_state_dict(), got {one!r}")
    if "optimizer" not in to_save:
        raise ValueError(f"to_save must hold 'optimizer', whose rate is searched for, got {list(to_save)}")
    optimizer = to_save["optimizer"]
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"to_save['optimizer'] must be a torch.optim.Optimizer, got {optimizer!r}")
    return to_save


def checked_number(name: str, value: Any) -> float:
    """Raise ``TypeError`` for what is not a number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    return float(value)
