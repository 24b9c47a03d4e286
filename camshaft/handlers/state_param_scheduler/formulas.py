"""Values from a formula: linear between milestones, or multiplied again and again."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import ClassVar

from camshaft.handlers.param_scheduler.arguments import check_sequence, real, whole
from camshaft.handlers.param_scheduler.piecewise import split_milestones, value_at
from camshaft.handlers.state_param_scheduler.base import StateParamScheduler


class PiecewiseLinearStateScheduler(StateParamScheduler):
    """Goes linearly from milestone to milestone, and is constant before the first and after the last.

    Args:
        milestones_values: tuples of an index and the value there, in the order of the indices. Two with the same
            index make a jump: from there on the second one holds.
        param_name, save_history, create_new: as in ``StateParamScheduler``.

    Raises:
        TypeError: ``milestones_values`` is not a sequence, a milestone not an integer, or a value not a number.
        ValueError: it is empty, not made of pairs, or the milestones go back.

    >>> values = PiecewiseLinearStateScheduler.simulate_values(
    ...     5, milestones_values=[(1, 1.0), (3, 0.0)], param_name="share"
    ... )
    >>> [value for call, value in values]
    [1.0, 0.5, 0.0, 0.0, 0.0]
    """

    _state_dict_all_req_keys = (*StateParamScheduler._state_dict_all_req_keys, "milestones", "values")

    def __init__(
        self,
        milestones_values: Sequence[tuple[int, float]],
        param_name: str,
        save_history: bool = False,
        create_new: bool = False,
    ) -> None:
        super().__init__(param_name, save_history, create_new)
        self.milestones, self.values = split_milestones(milestones_values)

    def get_param(self) -> float:
        """Compute the value for ``event_index``."""
        return value_at(self.event_index, self.milestones, self.values)


class ExpStateScheduler(StateParamScheduler):
    """Multiplies by ``gamma`` in each call.

    Args:
        initial_value: the value before the first call.
        gamma: the factor.
        param_name, save_history, create_new: as in ``StateParamScheduler``.

    >>> ExpStateScheduler.simulate_values(3, initial_value=8.0, gamma=0.5, param_name="noise")
    [[0, 4.0], [1, 2.0], [2, 1.0]]
    """

    _state_dict_all_req_keys: ClassVar[tuple[str, ...]] = (
        *StateParamScheduler._state_dict_all_req_keys,
        "initial_value",
        "gamma",
    )

    def __init__(
        self,
        initial_value: float,
        gamma: float,
        param_name: str,
        save_history: bool = False,
        create_new: bool = False,
    ) -> None:
        super().__init__(param_name, save_history, create_new)
        self.initial_value = real("initial_value", initial_value)
        self.gamma = real("gamma", gamma)

    def get_param(self) -> float:
        """Compute the value for ``event_index``."""
        return float(self.initial_value * self.gamma**self.event_index)


class StepStateScheduler(ExpStateScheduler):
    """Multiplies by ``gamma`` every ``step_size`` calls.

    Args:
        initial_value: the value before the first step.
        gamma: the factor.
        step_size: calls from one step to the next, at least 1.
        param_name, save_history, create_new: as in ``StateParamScheduler``.

    >>> StepStateScheduler.simulate_values(4, initial_value=8.0, gamma=0.5, step_size=2, param_name="noise")
    [[0, 8.0], [1, 4.0], [2, 4.0], [3, 2.0]]
    """

    _state_dict_all_req_keys = (*ExpStateScheduler._state_dict_all_req_keys, "step_size")

    def __init__(
        self,
        initial_value: float,
        gamma: float,
        step_size: int,
        param_name: str,
        save_history: bool = False,
        create_new: bool = False,
    ) -> None:
        super().__init__(initial_value, gamma, param_name, save_history, create_new)
        self.step_size = whole("step_size", step_size, least=1)

    def get_param(self) -> float:
        """Compute the value for ``event_index``."""
        return float(self.initial_value * self.gamma ** (self.event_index // self.step_size))


class MultiStepStateScheduler(ExpStateScheduler):
    """Multiplies by ``gamma`` at each milestone.

    Args:
        initial_value: the value before the first milestone.
        gamma: the factor.
        milestones: indices, in any order.
        param_name, save_history, create_new: as in ``StateParamScheduler``.

    >>> MultiStepStateScheduler.simulate_values(4, initial_value=8.0, gamma=0.5, milestones=[2, 4], param_name="noise")
    [[0, 8.0], [1, 4.0], [2, 4.0], [3, 2.0]]
    """

    _state_dict_all_req_keys = (*ExpStateScheduler._state_dict_all_req_keys, "milestones")

    def __init__(
        self,
        initial_value: float,
        gamma: float,
        milestones: Sequence[int],
        param_name: str,
        save_history: bool = False,
        create_new: bool = False,
    ) -> None:
        super().__init__(initial_value, gamma, param_name, save_history, create_new)
        check_sequence("milestones", milestones)
        self.milestones = sorted(whole("a milestone", milestone, least=0) for milestone in milestones)

    def get_param(self) -> float:
        """Compute the value for ``event_index``."""
        return float(self.initial_value * self.gamma ** bisect_right(self.milestones, self.event_index))
