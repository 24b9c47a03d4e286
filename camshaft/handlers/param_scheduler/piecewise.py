"""Values that go linearly from milestone to milestone."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from numbers import Integral
from typing import Any

from camshaft.handlers.param_scheduler.arguments import check_sequence, real
from camshaft.handlers.param_scheduler.param import ParamScheduler


class PiecewiseLinear(ParamScheduler):
    """Goes linearly from milestone to milestone, and is constant before the first and after the last.

    Args:
        optimizer: as in ``ParamScheduler``.
        param_name: likewise.
        milestones_values: tuples of an index and the value there, in the order of the indices. Two with the same
            index make a jump: from there on the second one holds.
        save_history: as in ``ParamScheduler``.
        param_group_index: likewise.

    Raises:
        TypeError: ``milestones_values`` is not a sequence, a milestone not an integer, or a value not a number.
        ValueError: it is empty, not made of pairs, or the milestones go back.

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
        """Compute the value for ``event_index``."""
        return value_at(self.event_index, self.milestones, self.values)


def split_milestones(milestones_values: Any) -> tuple[list[int], list[float]]:
    """Check pairs of milestones and values, and give them apart.

    >>> split_milestones([(0, 1), (10, 0.5)])
    ([0, 10], [1.0, 0.5])
    """
    check_sequence("milestones_values", milestones_values)
    if not milestones_values:
        raise ValueError("milestones_values must hold at least one pair, got none")
    for pair in milestones_values:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(f"milestones_values must hold tuples (milestone, value), got {pair!r}")
        if not isinstance(pair[0], Integral):
            raise TypeError(f"a milestone must be an integer, got {pair[0]!r} of type {type(pair[0]).__name__}")
    milestones = [int(milestone) for milestone, _ in milestones_values]
    if any(earlier > later for earlier, later in pairwise(milestones)):
        raise ValueError(f"the milestones of milestones_values must not go back, got {milestones}")
    return milestones, [real("a value of milestones_values", value) for _, value in milestones_values]


def value_at(index: int, milestones: list[int], values: list[float]) -> float:
    """Interpolate.

    >>> [value_at(index, [2, 4, 4], [1.0, 0.0, 5.0]) for index in range(1, 6)]
    [1.0, 1.0, 0.5, 5.0, 5.0]
    """
    behind = bisect_right(milestones, index)
    if behind == 0:
        return values[0]
    if behind == len(milestones):
        return values[-1]
    begin, end = milestones[behind - 1], milestones[behind]
    return values[behind - 1] + (values[behind] - values[behind - 1]) * (index - begin) / (end - begin)
