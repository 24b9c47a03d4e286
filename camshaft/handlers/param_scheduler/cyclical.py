"""Schedulers that go round: from one value to another, and again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from camshaft.engine.engine import Engine
from camshaft.handlers.param_scheduler.arguments import real, whole
from camshaft.handlers.param_scheduler.param import ParamScheduler


class CyclicalScheduler(ParamScheduler):
    """Repeats a cycle of values. A subclass defines its course in :meth:`get_param`.

    In there, ``event_index`` counts the calls of the present cycle, and ``start_value``, ``end_value`` and
    ``cycle_size`` are those of this cycle.

    Args:
        optimizer: as in ``ParamScheduler``.
        param_name: likewise.
        start_value: at the start of the first cycle.
        end_value: at its end, or in the middle, as the subclass has it.
        cycle_size: calls in the first cycle, at least 2.
        cycle_mult: how many times longer each cycle is than the one before; one call is the least.
        start_value_mult: by what the start value is multiplied after each cycle.
        end_value_mult: likewise for the end value.
        warmup_duration: calls in which, after each cycle, the value goes linearly to the start value of the next.
        save_history: as in ``ParamScheduler``.
        param_group_index: likewise.

    Raises:
        TypeError: a value is not a number, or the size or the duration not an integer.
        ValueError: ``cycle_size`` is below 2, or ``warmup_duration`` below 0.

    Attributes:
        cycle: the number of the present cycle, from 0.
    """

    _state_dict_all_req_keys: ClassVar[tuple[str, ...]] = (
        *ParamScheduler._state_dict_all_req_keys,
        "cycle",
        "start_value",
        "end_value",
        "cycle_size",
        "warmup_duration",
        "cycle_mult",
        "start_value_mult",
        "end_value_mult",
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
        self.start_value = real("start_value", start_value)
        self.end_value = real("end_value", end_value)
        self.cycle_size = whole("cycle_size", cycle_size, least=2)
        self.cycle_mult = real("cycle_mult", cycle_mult)
        self.start_value_mult = real("start_value_mult", start_value_mult)
        self.end_value_mult = real("end_value_mult", end_value_mult)
        self.warmup_duration = whole("warmup_duration", warmup_duration, least=0)
        self.cycle = 0

    @property
    def total_cycle_size(self) -> int:
        """The number of calls in the present cycle and its warm-up."""
        return self.cycle_size + self.warmup_duration

    def _from_ignite(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"warmup_duration": self.warmup_duration, **state_dict}  # which versions before 0.4.13 lack

    def _apply(self, engine: Engine[Any, Any] | None) -> None:
        if self.event_index >= self.cycle_size:
            self._move_on()
        warming_up = self.event_index > self.cycle_size
        self._write(self._warmup_value() if warming_up else self.get_param())

    def _move_on(self) -> None:
        """Take over what holds after the cycle, and after its warm-up."""
        if self.event_index == self.cycle_size:
            self.start_value *= self.start_value_mult
        if self.event_index == self.total_cycle_size:
            self.event_index = 0
            self.cycle_size = max(1, int(self.cycle_size * self.cycle_mult))
            self.warmup_duration = max(0, int(self.warmup_duration * self.cycle_mult))
            self.cycle += 1
            self.end_value *= self.end_value_mult

    def _warmup_value(self) -> float:
        progress = (self.event_index - self.cycle_size) / self.warmup_duration
        return self.end_value + (self.start_value - self.end_value) * progress


class LinearCyclicalScheduler(CyclicalScheduler):
    """Goes linearly from the start value to the end value and back, in each cycle.

    Args:
        optimizer, param_name, start_value, end_value, cycle_size, cycle_mult, start_value_mult, end_value_mult,
            warmup_duration, save_history, param_group_index: as in ``CyclicalScheduler``.
        monotonic: go to the end value over the whole cycle, and then jump to the next start value, or go there in
            ``warmup_duration`` calls.

    Raises:
        TypeError: as ``CyclicalScheduler``.
        ValueError: likewise, and for a warm-up without ``monotonic=True``: the value is at the start value then.

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
        super().__init__(
            optimizer,
            param_name,
            start_value,
            end_value,
            cycle_size,
            cycle_mult,
            start_value_mult,
            end_value_mult,
            warmup_duration,
            save_history,
            param_group_index,
        )
        if self.warmup_duration and not monotonic:
            raise ValueError(f"warmup_duration must be 0 unless monotonic=True, got {warmup_duration}")
        self.monotonic = monotonic

    def _from_ignite(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"monotonic": self.monotonic, **super()._from_ignite(state_dict)}

    def get_param(self) -> float:
        """Compute the value for ``event_index``."""
        progress = self.event_index / self.cycle_size
        left = 1 - progress if self.monotonic else abs(1 - 2 * progress)
        return self.end_value + (self.start_value - self.end_value) * left


class CosineAnnealingScheduler(CyclicalScheduler):
    """Goes along half a cosine from the start value to the end value, and then jumps to the next start value.

    Args:
        optimizer, param_name, start_value, end_value, cycle_size, cycle_mult, start_value_mult, end_value_mult,
            warmup_duration, save_history, param_group_index: as in ``CyclicalScheduler``.

    >>> values = CosineAnnealingScheduler.simulate_values(
    ...     5, param_name="lr", start_value=0.0, end_value=1.0, cycle_size=4
    ... )
    >>> [round(value, 4) for index, value in values]
    [0.0, 0.1464, 0.5, 0.8536, 0.0]
    """

    def get_param(self) -> float:
        """Compute the value for ``event_index``."""
        progress = self.event_index / self.cycle_size
        return self.start_value + (self.end_value - self.start_value) / 2 * (1 - math.cos(math.pi * progress))
