"""Schedulers of attributes of an engine's state, such as the weight of a term of the loss.

Unlike the schedulers of an optimizer, these increment their counter first, so that their first call has index 1: equal
milestones take effect one event earlier here.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from camshaft.arguments import check_sequence, number
from camshaft.engine.engine import Engine, check_engine
from camshaft.engine.events import EventLike, Events, RemovableEventHandle
from camshaft.engine.state import check_is_no_counter
from camshaft.handlers.base_scheduler import BaseParamScheduler, interpolate, split_milestones, whole

__all__ = [
    "ExpStateScheduler",
    "LambdaStateScheduler",
    "MultiStepStateScheduler",
    "PiecewiseLinearStateScheduler",
    "StateParamScheduler",
    "StepStateScheduler",
]


class StateParamScheduler(BaseParamScheduler):
    """Base class of schedulers that set an attribute of an engine's state.

    Subclasses define :meth:`get_param` for ``event_index`` from 1. To have the attribute itself restored on resume,
    before the first call, add its name to ``engine.state_dict_user_keys``.

    >>> from camshaft.engine import Engine
    >>> from camshaft.handlers import ExpStateScheduler
    >>> trainer = Engine(lambda engine, batch: print(engine.state.noise))
    >>> trainer.state.noise = 1.0
    >>> handle = ExpStateScheduler(initial_value=1.0, gamma=0.5, param_name="noise").attach(trainer)
    >>> state = trainer.run([0, 0, 0])
    1.0
    0.5
    0.25

    Args:
        param_name: name of the attribute.
        save_history: whether to keep the values in ``engine.state.param_history[param_name]``.
        create_new: whether to create the attribute.

    Raises:
        TypeError: ``param_name`` is not a string.
    """

    def __init__(self, param_name: str, save_history: bool = False, create_new: bool = False) -> None:
        super().__init__(param_name, save_history)
        self.create_new = create_new

    def attach(self, engine: Engine[Any, Any], event: EventLike = Events.ITERATION_COMPLETED) -> RemovableEventHandle:
        """Call the scheduler whenever an event fires. A missing attribute is set to ``None`` until then.

        Returns:
            A handle that detaches the scheduler.

        Raises:
            ValueError: the attribute exists although ``create_new`` is true, or is a counter of the engine.
        """
        check_engine("engine", engine)
        state, name = engine.state, self.param_name
        check_is_no_counter("param_name", name, state)
        exists = hasattr(state, name)
        if exists and self.create_new:
            raise ValueError(f"the state already has an attribute {name!r}: choose another name, or create_new=False")
        handle = engine.add_event_handler(event, self)
        if not exists:
            if not self.create_new:
                text = f"the state has no attribute {name!r} and gets it; pass create_new=True if this is intended"
                warnings.warn(text, stacklevel=2)
            setattr(state, name, None)
        return handle

    def __call__(self, engine: Engine[Any, Any]) -> None:
        """Increment ``event_index``, and set the attribute to its value.

        Args:
            engine: the engine whose state is set, and keeps the history.
        """
        if is_new := not self._was_counted(engine):
            self.event_index += 1
            self._remember_call(engine)
        value = self.get_param()
        setattr(engine.state, self.param_name, value)
        if is_new and self.save_history:
            self._record(engine, self.param_name, value)

    @classmethod
    def simulate_values(cls, num_events: int, **scheduler_kwargs: Any) -> list[list[Any]]:
        """Return the values that a run would set: for each call its index, from 0, and the value.

        Args:
            num_events: number of values.
            scheduler_kwargs: arguments of the scheduler.
        """
        scheduler = cls(**scheduler_kwargs)
        before, rows = scheduler.state_dict(), []
        try:
            for index in range(num_events):
                scheduler.event_index += 1
                rows.append([index, scheduler.get_param()])
            return rows
        finally:
            scheduler.load_state_dict(before)  # callables with state are not copied

    @abstractmethod
    def get_param(self) -> Any:
        """Return the value for ``event_index``."""


class LambdaStateScheduler(StateParamScheduler):
    """Compute the values with a function.

    Args:
        lambda_obj: called with the index, from 1. The attributes of a callable object are saved with the state; a
            function is not.
        param_name, save_history, create_new: see ``StateParamScheduler``.

    Raises:
        ValueError: ``lambda_obj`` is not callable.

    >>> LambdaStateScheduler.simulate_values(
    ...     3, lambda_obj=lambda index: 10 * index, param_name="level"
    ... )
    [[0, 10], [1, 20], [2, 30]]
    """

    _state_dict_all_req_keys = (*StateParamScheduler._state_dict_all_req_keys, "lambda_obj")

    def __init__(
        self, lambda_obj: Callable[[int], Any], param_name: str, save_history: bool = False, create_new: bool = False
    ) -> None:
        super().__init__(param_name, save_history, create_new)
        if not callable(lambda_obj):
            raise ValueError(f"lambda_obj must be callable, got {lambda_obj!r}")
        self.lambda_obj = lambda_obj

    def get_param(self) -> Any:
        """Return the value for ``event_index``."""
        return self.lambda_obj(self.event_index)


class PiecewiseLinearStateScheduler(StateParamScheduler):
    """Interpolate linearly between milestones; the value is constant before the first and after the last.

    Args:
        milestones_values: tuples of an index and its value, sorted by index. Of two with the same index the second
            one holds from there on, which makes a jump.
        param_name, save_history, create_new: see ``StateParamScheduler``.

    Raises:
        TypeError: ``milestones_values`` is not a sequence, a milestone is not an integer, or a value not a number.
        ValueError: ``milestones_values`` is empty, is not made of pairs, or is not sorted.

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
        """Return the value for ``event_index``."""
        return interpolate(self.event_index, self.milestones, self.values)


class ExpStateScheduler(StateParamScheduler):
    """Multiply by ``gamma`` in each call.

    Args:
        initial_value: the value before the first call.
        gamma: the factor.
        param_name, save_history, create_new: see ``StateParamScheduler``.

    >>> ExpStateScheduler.simulate_values(3, initial_value=8.0, gamma=0.5, param_name="noise")
    [[0, 4.0], [1, 2.0], [2, 1.0]]
    """

    _state_dict_all_req_keys: ClassVar[tuple[str, ...]] = (
        *StateParamScheduler._state_dict_all_req_keys,
        "initial_value",
        "gamma",
    )

    def __init__(
        self, initial_value: float, gamma: float, param_name: str, save_history: bool = False, create_new: bool = False
    ) -> None:
        super().__init__(param_name, save_history, create_new)
        self.initial_value = number("initial_value", initial_value)
        self.gamma = number("gamma", gamma)

    def get_param(self) -> float:
        """Return the value for ``event_index``."""
        return self.initial_value * self.gamma**self.event_index


class StepStateScheduler(ExpStateScheduler):
    """Multiply by ``gamma`` every ``step_size`` calls.

    Args:
        initial_value: the value before the first step.
        gamma: the factor.
        step_size: number of calls between steps, at least 1.
        param_name, save_history, create_new: see ``StateParamScheduler``.

    >>> StepStateScheduler.simulate_values(
    ...     4, initial_value=8.0, gamma=0.5, step_size=2, param_name="noise"
    ... )
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
        """Return the value for ``event_index``."""
        return float(self.initial_value * self.gamma ** (self.event_index // self.step_size))


class MultiStepStateScheduler(ExpStateScheduler):
    """Multiply by ``gamma`` at each milestone.

    Args:
        initial_value: the value before the first milestone.
        gamma: the factor.
        milestones: indices, in any order.
        param_name, save_history, create_new: see ``StateParamScheduler``.

    >>> MultiStepStateScheduler.simulate_values(
    ...     4, initial_value=8.0, gamma=0.5, milestones=[2, 4], param_name="noise"
    ... )
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
        """Return the value for ``event_index``."""
        return float(self.initial_value * self.gamma ** bisect_right(self.milestones, self.event_index))
