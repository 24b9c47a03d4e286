"""Schedulers whose values follow a formula: cycles, and lines between milestones."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from numbers import Integral
from typing import Any, ClassVar

from camshaft.engine.engine import Engine
from camshaft.handlers.param_scheduler.base import ParamScheduler
from camshaft.handlers.utils import check_sequence, check_type, integer, number


class CyclicalScheduler(ParamScheduler):
    """Base class of schedulers that repeat a cycle. Subclasses define the values of a cycle in :meth:`get_param`.

    There, ``event_index`` counts the calls of the current cycle, and ``start_value``, ``end_value`` and
    ``cycle_size`` are those of the current cycle.

    Args:
        optimizer, param_name: see ``ParamScheduler``.
        start_value: value at the start of the first cycle.
        end_value: value at its end or in its middle, depending on the subclass.
        cycle_size: number of calls in the first cycle, at least 2.
        cycle_mult: factor by which the size changes from cycle to cycle; a cycle has at least one call.
        start_value_mult: factor by which the start value changes from cycle to cycle.
        end_value_mult: factor by which the end value changes from cycle to cycle.
        warmup_duration: number of calls after each cycle in which the value moves linearly to the next start value.
        save_history, param_group_index: see ``ParamScheduler``.

    Raises:
        TypeError: a value is not a number, or the size or the duration is not an integer.
        ValueError: ``cycle_size`` is below 2, or ``warmup_duration`` is negative.

    Attributes:
        cycle: index of the current cycle.
    """

    _state_dict_all_req_keys: ClassVar[tuple[str, ...]] = (
        *ParamScheduler._state_dict_all_req_keys,
        *("cycle", "start_value", "end_value", "cycle_size", "warmup_duration"),
        *("cycle_mult", "start_value_mult", "end_value_mult"),
    )

    def __init__(
        self,
        optimizer: Any,
        param_name: str,
        start_value: float,
        end_value: float,
        cycle_size: int,
        cycle_mult: float = 1.0,
        start_value_mult: float = 1.0,
        end_value_mult: float = 1.0,
        warmup_duration: int = 0,
        save_history: bool = False,
        param_group_index: int | None = None,
    ) -> None:
        super().__init__(optimizer, param_name, save_history, param_group_index)
        self.start_value = number("start_value", start_value)
        self.end_value = number("end_value", end_value)
        self.cycle_size = whole("cycle_size", cycle_size, least=2)
        self.cycle_mult = number("cycle_mult", cycle_mult)
        self.start_value_mult = number("start_value_mult", start_value_mult)
        self.end_value_mult = number("end_value_mult", end_value_mult)
        self.warmup_duration = whole("warmup_duration", warmup_duration, least=0)
        self.cycle = 0

    @property
    def total_cycle_size(self) -> int:
        """Number of calls in the current cycle and its warm-up."""
        return self.cycle_size + self.warmup_duration

    def _from_ignite(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"warmup_duration": self.warmup_duration, **state_dict}  # missing before version 0.4.13

    def _apply(self, engine: Engine[Any, Any] | None) -> None:
        warmed = self.event_index - self.cycle_size  # calls since the end of the cycle
        if warmed == 0:
            self.start_value *= self.start_value_mult
        if warmed == self.warmup_duration:
            self._start_cycle()
        elif warmed > 0:
            share = warmed / self.warmup_duration
            self._write(self.end_value + (self.start_value - self.end_value) * share)
            return
        self._write(self.get_param())

    def _start_cycle(self) -> None:
        self.event_index = 0
        self.cycle_size = max(1, int(self.cycle_size * self.cycle_mult))
        self.warmup_duration = max(0, int(self.warmup_duration * self.cycle_mult))
        self.cycle += 1
        self.end_value *= self.end_value_mult


class LinearCyclicalScheduler(CyclicalScheduler):
    """Move linearly from the start value to the end value and back in each cycle.

    Args:
        optimizer, param_name, start_value, end_value, cycle_size, cycle_mult, start_value_mult, end_value_mult,
            warmup_duration, save_history, param_group_index: see ``CyclicalScheduler``.
        monotonic: whether to move to the end value over the whole cycle, and then to the next start value at once, or
            in ``warmup_duration`` calls.

    Raises:
        TypeError: see ``CyclicalScheduler``.
        ValueError: see there; also if ``warmup_duration`` is given without ``monotonic=True``.

    >>> values = LinearCyclicalScheduler.simulate_values(
    ...     8, param_name="lr", start_value=1.0, end_value=0.0, cycle_size=4, warmup_duration=2, monotonic=True
    ... )
    >>> [value for index, value in values]
    [1.0, 0.75, 0.5, 0.25, 0.0, 0.5, 1.0, 0.75]
    """

    _state_dict_all_req_keys = (*CyclicalScheduler._state_dict_all_req_keys, "monotonic")

    def __init__(
        self,
        optimizer: Any,
        param_name: str,
        start_value: float,
        end_value: float,
        cycle_size: int,
        cycle_mult: float = 1.0,
        start_value_mult: float = 1.0,
        end_value_mult: float = 1.0,
        warmup_duration: int = 0,
        save_history: bool = False,
        param_group_index: int | None = None,
        *,
        monotonic: bool = False,
    ) -> None:
        cycle = (start_value, end_value, cycle_size, cycle_mult, start_value_mult, end_value_mult, warmup_duration)
        super().__init__(optimizer, param_name, *cycle, save_history, param_group_index)
        if self.warmup_duration and not monotonic:
            raise ValueError(f"warmup_duration must be 0 unless monotonic=True, got {warmup_duration}")
        self.monotonic = monotonic

    def _from_ignite(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"monotonic": self.monotonic, **super()._from_ignite(state_dict)}

    def get_param(self) -> float:
        """Return the value for ``event_index``."""
        progress = self.event_index / self.cycle_size
        left = 1 - progress if self.monotonic else abs(1 - 2 * progress)
        return self.end_value + (self.start_value - self.end_value) * left


class CosineAnnealingScheduler(CyclicalScheduler):
    """Move along half a cosine from the start value to the end value, and then to the next start value at once.

    Args:
        optimizer, param_name, start_value, end_value, cycle_size, cycle_mult, start_value_mult, end_value_mult,
            warmup_duration, save_history, param_group_index: see ``CyclicalScheduler``.

    >>> values = CosineAnnealingScheduler.simulate_values(
    ...     5, param_name="lr", start_value=0.0, end_value=1.0, cycle_size=4
    ... )
    >>> [round(value, 4) for index, value in values]
    [0.0, 0.1464, 0.5, 0.8536, 0.0]
    """

    def get_param(self) -> float:
        """Return the value for ``event_index``."""
        progress = self.event_index / self.cycle_size
        return self.start_value + (self.end_value - self.start_value) / 2 * (1 - math.cos(math.pi * progress))


class PiecewiseLinear(ParamScheduler):
    """Interpolate linearly between milestones; the value is constant before the first and after the last.

    Args:
        optimizer, param_name: see ``ParamScheduler``.
        milestones_values: tuples of an index and its value, sorted by index. Of two with the same index the second
            one holds from there on, which makes a jump.
        save_history, param_group_index: see ``ParamScheduler``.

    Raises:
        TypeError: ``milestones_values`` is not a sequence, a milestone is not an integer, or a value not a number.
        ValueError: ``milestones_values`` is empty, is not made of pairs, or is not sorted.

    >>> values = PiecewiseLinear.simulate_values(7, param_name="lr", milestones_values=[(1, 1.0), (3, 0.8), (5, 0.2)])
    >>> [value for index, value in values]
    [1.0, 1.0, 0.9, 0.8, 0.5, 0.2, 0.2]
    """

    _state_dict_all_req_keys = (*ParamScheduler._state_dict_all_req_keys, "milestones", "values")

    def __init__(
        self,
        optimizer: Any,
        param_name: str,
        milestones_values: Sequence[tuple[int, float]],
        save_history: bool = False,
        param_group_index: int | None = None,
    ) -> None:
        super().__init__(optimizer, param_name, save_history, param_group_index)
        self.milestones, self.values = split_milestones(milestones_values)

    def get_param(self) -> float:
        """Return the value for ``event_index``."""
        return interpolate(self.event_index, self.milestones, self.values)


def split_milestones(milestones_values: Any) -> tuple[list[int], list[float]]:
    """Check pairs of milestones and values, and return the milestones and the values.

    >>> split_milestones([(0, 1), (10, 0.5)])
    ([0, 10], [1.0, 0.5])
    """
    check_sequence("milestones_values", milestones_values)
    if not milestones_values:
        raise ValueError("milestones_values must hold at least one pair, got none")
    for pair in milestones_values:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(f"milestones_values must hold tuples (milestone, value), got {pair!r}")
        check_type("a milestone", pair[0], Integral, "an integer")
    milestones = [int(milestone) for milestone, _ in milestones_values]
    if any(earlier > later for earlier, later in pairwise(milestones)):
        raise ValueError(f"the milestones of milestones_values must be sorted, got {milestones}")
    return milestones, [number("a value of milestones_values", value) for _, value in milestones_values]


def interpolate(index: int, milestones: list[int], values: list[float]) -> float:
    """Return the value at an index.

    >>> [interpolate(index, [2, 4, 4], [1.0, 0.0, 5.0]) for index in range(1, 6)]
    [1.0, 1.0, 0.5, 5.0, 5.0]
    """
    behind = bisect_right(milestones, index)
    if behind == 0:
        return values[0]
    if behind == len(milestones):
        return values[-1]
    begin, end = milestones[behind - 1], milestones[behind]
    return values[behind - 1] + (values[behind] - values[behind - 1]) * (index - begin) / (end - begin)


def whole(name: str, value: Any, least: int) -> int:
    """Return an argument as an int, after checking that it is an integer of at least ``least``; 4.0 is accepted.

    >>> whole("cycle_size", 10 / 2, least=2)
    5
    """
    return integer(name, int(value) if isinstance(value, float) and value.is_integer() else value, least)
