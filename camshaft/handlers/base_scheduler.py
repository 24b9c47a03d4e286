"""What schedulers have in common: counting calls, history, state, and simulation."""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from numbers import Integral
from types import FunctionType, MethodType
from typing import Any, ClassVar

from camshaft.arguments import check_sequence, check_text, check_type, integer, load_optional, number
from camshaft.base import Serializable
from camshaft.engine.engine import Engine, check_engine
from camshaft.engine.events import EventLike, Events, OptimizerEvents, RemovableEventHandle, events_in, joined
from camshaft.engine.loop import Phase
from camshaft.handlers.steps import repeats_iteration, resumes_epoch

# looking up a member of an enumeration on each call is slow
_EPOCH_STARTED = Events.EPOCH_STARTED
_ITERATION_STARTED, _ITERATION_COMPLETED = Events.ITERATION_STARTED, Events.ITERATION_COMPLETED
_STEP_COMPLETED = OptimizerEvents.STEP_COMPLETED


class BaseParamScheduler(Serializable, ABC):
    """Base class of handlers that set a parameter each time they are called.

    The attributes named in ``_state_dict_all_req_keys`` are the state; subclasses extend the tuple. If one is a
    callable object, its attributes are saved; functions are not saved.

    Args:
        param_name: name of the parameter.
        save_history: whether to keep the values in ``engine.state.param_history[param_name]``.

    Raises:
        TypeError: ``param_name`` is not a string.

    Attributes:
        event_index: number of calls so far, which is the index of the next value.
    """

    _state_dict_all_req_keys: ClassVar[tuple[str, ...]] = ("event_index", "param_name")
    _instead_of_ignite: str | None = None  # what to do if PyTorch-Ignite's state of this name has another meaning

    def __init__(self, param_name: str, save_history: bool = False) -> None:
        check_text("param_name", param_name)
        self.param_name = param_name
        self.event_index = 0
        self.save_history = save_history
        self._last_iteration: int | None = None  # in which it was called
        self._last_epoch: int | None = None  # at whose start it was called

    @abstractmethod
    def get_param(self) -> Any:
        """Return the value for ``event_index`` without changing anything."""

    @classmethod
    @abstractmethod
    def simulate_values(cls, num_events: int, **scheduler_kwargs: Any) -> list[list[Any]]:
        """Return the first values as a list of ``[index, value]``.

        Args:
            num_events: number of values.
            scheduler_kwargs: arguments of the scheduler.
        """

    @classmethod
    def plot_values(cls, num_events: int, **scheduler_kwargs: Any) -> Any:
        """Plot the first values with matplotlib.

        Args:
            num_events: number of values.
            scheduler_kwargs: arguments of ``simulate_values``.

        Returns:
            The lines that ``matplotlib.pyplot.plot`` returns.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        pyplot = load_optional("matplotlib.pyplot", extra="plot", needed_by=f"{cls.__name__}.plot_values")
        rows = cls.simulate_values(num_events, **scheduler_kwargs)
        label = scheduler_kwargs.get("param_name", "learning rate")
        lines = pyplot.plot([row[0] for row in rows], [row[1:] for row in rows], label=label)
        pyplot.legend()
        pyplot.grid(which="both")
        return lines

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return a copy of the attributes that the next values depend on."""
        memo = _memo(self)
        keys = self._state_dict_all_req_keys
        state = OrderedDict((name, copy.deepcopy(_state_of(getattr(self, name)), memo)) for name in keys)
        state.update(last_iteration=self._last_iteration, last_epoch=self._last_epoch)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state.

        Args:
            state_dict: what :meth:`state_dict` returned.

        Raises:
            TypeError: it is not a mapping.
            ValueError: a key is missing, or a value does not fit; the scheduler is unchanged.
        """
        super().load_state_dict(state_dict)
        if "save_history" in state_dict and self._instead_of_ignite:  # a key of PyTorch-Ignite only
            raise ValueError(
                f"state_dict must be that of a {type(self).__name__} of camshaft, got that of PyTorch-Ignite, which "
                f"counts calls differently: {self._instead_of_ignite}"
            )
        before = self.state_dict()
        try:
            self._restore(state_dict)
        except Exception as error:
            self._restore(before)
            raise ValueError(
                f"state_dict must be that of a {type(self).__name__} with the same arguments: {error!r}"
            ) from error

    def _restore(self, state_dict: Mapping[str, Any]) -> None:
        memo = _memo(self)
        self._last_iteration = state_dict.get("last_iteration")  # which older states lack
        self._last_epoch = state_dict.get("last_epoch")  # likewise
        for name in self._state_dict_all_req_keys:
            value, saved = getattr(self, name), copy.deepcopy(state_dict[name], memo)
            if hasattr(value, "load_state_dict"):
                value.load_state_dict(saved)
            elif isinstance(value, list) and value and hasattr(value[0], "load_state_dict"):
                for one, state in zip(value, saved, strict=True):
                    one.load_state_dict(state)
            elif not callable(value):
                setattr(self, name, saved)
            elif saved is not None and (attributes := _attributes_of(value)) is not None:
                attributes.update(saved)

    def _was_counted(self, engine: Engine[Any, Any]) -> bool:
        """Return whether a resumed run continues or repeats the epoch or the iteration of the last call."""
        event, state = engine.last_event_name, engine.state
        if event is _EPOCH_STARTED:
            if resumes_epoch(engine):
                return self.event_index > 0
            return self._last_epoch == state.epoch and engine.resumed_at == state.iteration
        is_iteration = event is _ITERATION_STARTED or event is _ITERATION_COMPLETED
        return is_iteration and self._last_iteration == state.iteration and repeats_iteration(engine)

    def _remember_call(self, engine: Engine[Any, Any]) -> None:
        """Remember the iteration of a call, and the epoch if it starts."""
        if self._last_iteration is None:  # a check in each call would take as long as all of this
            check_engine("engine", engine)
        self._last_iteration = engine.state.iteration
        if engine.last_event_name is _EPOCH_STARTED:
            self._last_epoch = engine.state.epoch

    def _record(self, engine: Engine[Any, Any], name: str, entry: Any) -> None:
        """Append an entry to the history."""
        state = engine.state
        if getattr(state, "param_history", None) is None:
            state.param_history = {}
        state.param_history.setdefault(name, []).append(entry)


def _state_of(value: Any) -> Any:
    if isinstance(value, list):
        return [_state_of(one) for one in value]
    if hasattr(value, "state_dict"):
        return value.state_dict()
    return _attributes_of(value) if callable(value) else value


def _attributes_of(function: Any) -> dict[str, Any] | None:
    """Return the attributes of a callable object; functions could not be loaded safely."""
    attributes = getattr(function, "__dict__", None)
    if isinstance(function, (FunctionType, MethodType)) or not isinstance(attributes, dict):
        return None
    return None if "__wrapped__" in attributes else attributes


def _memo(scheduler: BaseParamScheduler) -> dict[int, Any]:
    """Return a memo with which ``deepcopy`` keeps the optimizer: users' own schedulers may have it in their state."""
    optimizer = getattr(scheduler, "optimizer", None)
    return {id(optimizer): optimizer}


class Attachable(ABC):
    """Sets the value of a step before it, also if it is attached to the event after steps."""

    event_index: int

    def attach(self, engine: Engine[Any, Any], event: EventLike = Events.ITERATION_STARTED) -> RemovableEventHandle:
        """Call the scheduler whenever an event fires.

        On ``OptimizerEvents.STEP_COMPLETED``, a call sets the value of the next step; that of the first step is set
        when the run starts, or now if it has started.

        Returns:
            A handle that detaches the scheduler.
        """
        check_engine("engine", engine)
        handles = [engine.add_event_handler(event, self)]
        if _STEP_COMPLETED in events_in(event):
            handles.append(engine.add_event_handler(Events.STARTED, self._set_first))
            if engine.phase is Phase.RUNNING:
                self._set_first(engine)
        return joined(handles, event, self, engine)

    def _set_first(self, engine: Engine[Any, Any]) -> None:
        if self.event_index == 0 and engine.has_event_handler(self, _STEP_COMPLETED):
            self(engine)

    def _check_first(self, engine: Engine[Any, Any]) -> None:
        """Go on to the second value if the first step is over without a call, but had the first value.

        Combinations of schedulers do this for those in them, which are not registered.

        Raises:
            ValueError: the step had another value.
        """
        event = engine.last_event_name
        if self.event_index or event is not _STEP_COMPLETED or not engine.has_event_handler(self, _STEP_COMPLETED):
            return
        before = self._written()
        self(None)
        if self._written() != before:
            raise ValueError(
                f"the first step of the optimizer had {before} instead of the schedule's {self._written()}: pass the "
                f"event to attach() of {type(self).__name__}, not to add_event_handler()"
            )

    @abstractmethod
    def __call__(self, engine: Engine[Any, Any] | None, name: str | None = None) -> None:
        """Apply the next value."""

    @abstractmethod
    def _written(self) -> Any:
        """Return the values in effect as plain numbers."""


class SteppedScheduler(Attachable, BaseParamScheduler):
    """Base class of schedulers whose first call has index 0: apply the value of ``event_index``, then increment it."""

    def __call__(self, engine: Engine[Any, Any] | None, name: str | None = None) -> None:
        """Apply the value of ``event_index``, and increment it.

        Args:
            engine: the engine whose state keeps the history.
            name: key in the history, ``param_name`` by default.

        Raises:
            ValueError: the value is not valid; nothing is written.
        """
        if engine is not None:
            if self._was_counted(engine):
                return
            self._check_first(engine)
        self._apply(engine)
        if engine is not None:
            self._remember_call(engine)
            if self.save_history:
                self._record(engine, name or self.param_name, self._written())
        self.event_index += 1

    @abstractmethod
    def _apply(self, engine: Engine[Any, Any] | None) -> None:
        """Compute the value of ``event_index``, and write it."""


def rows_of(scheduler: Callable[[None], object], num_events: int, columns: Callable[[], list[Any]]) -> list[list[Any]]:
    """Call a scheduler repeatedly; return the index of each call and the ``columns`` after it."""
    rows = []
    with no_step_warnings():
        for index in range(num_events):
            scheduler(None)
            rows.append([index, *columns()])
    return rows


@contextmanager
def no_step_warnings() -> Iterator[None]:
    """Suppress torch's warning that the optimizer should step first.

    The optimizer of a run has stepped by then, or skipped the step on purpose, to accumulate gradients or because
    they overflowed.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of|Seems like", UserWarning)
        yield


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


def check_entries(param_name: str, groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise ``ValueError`` unless all parameter groups have the parameter.

    >>> check_entries("rl", [{"params": [], "lr": 0.1}])
    Traceback (most recent call last):
    ValueError: param_name must be a parameter of all groups of the optimizer, got 'rl': there are ['lr']
    """
    for group in groups:
        known = [name for name in group if name != "params"]
        if param_name not in known:
            raise ValueError(
                f"param_name must be a parameter of all groups of the optimizer, got {param_name!r}: there are {known}"
            )
