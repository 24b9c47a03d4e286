"""Base classes of the schedulers: counting calls, writing values, history, state, and simulation."""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from camshaft.base import Serializable
from camshaft.engine.engine import Engine
from camshaft.engine.events import EventLike, Events, RemovableEventHandle
from camshaft.handlers.utils import check_engine, check_entries, check_text, integer, load_optional, resumes_epoch

_EPOCH_STARTED = Events.EPOCH_STARTED  # looking up a member of an enumeration on each call is slow


class BaseParamScheduler(Serializable, ABC):
    """Base class of handlers that set a parameter each time they are called.

    The attributes named in ``_state_dict_all_req_keys`` are the state; subclasses extend the tuple.

    Args:
        param_name: name of the parameter.
        save_history: whether to keep the values in ``engine.state.param_history[param_name]``.

    Raises:
        TypeError: ``param_name`` is not a string.

    Attributes:
        event_index: number of calls so far, which is the index of the next value.
    """

    _state_dict_all_req_keys: ClassVar[tuple[str, ...]] = ("event_index", "param_name")

    def __init__(self, param_name: str, save_history: bool = False) -> None:
        check_text("param_name", param_name)
        self.param_name = param_name
        self.event_index = 0
        self.save_history = save_history

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
        return OrderedDict((name, copy.deepcopy(_state_of(getattr(self, name)), memo)) for name in keys)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state.

        Args:
            state_dict: what :meth:`state_dict` returned, here or in PyTorch-Ignite.

        Raises:
            TypeError: it is not a mapping.
            ValueError: a key is missing, or a value does not fit; the scheduler is unchanged.
        """
        if isinstance(state_dict, Mapping) and "save_history" in state_dict:  # a key of PyTorch-Ignite only
            try:
                state_dict = self._from_ignite(state_dict)
            except (AttributeError, LookupError, TypeError) as error:
                raise ValueError(f"state_dict must be that of a {type(self).__name__}, got {state_dict}") from error
        super().load_state_dict(state_dict)
        before = self.state_dict()
        try:
            self._restore(state_dict)
        except Exception as error:
            self._restore(before)
            raise ValueError(
                f"state_dict must be that of a {type(self).__name__} with the same arguments: {error!r}"
            ) from error

    def _from_ignite(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Convert the state of PyTorch-Ignite's scheduler of this name, so that the next call continues its values.

        Raises:
            ValueError: this scheduler cannot continue them.
        """
        return state_dict

    def _restore(self, state_dict: Mapping[str, Any]) -> None:
        memo = _memo(self)
        for name in self._state_dict_all_req_keys:
            value, saved = getattr(self, name), copy.deepcopy(state_dict[name], memo)
            if hasattr(value, "load_state_dict"):
                value.load_state_dict(saved)
            elif isinstance(value, list) and value and hasattr(value[0], "load_state_dict"):
                for one, state in zip(value, saved, strict=True):
                    one.load_state_dict(state)
            else:
                setattr(self, name, saved)

    def _record(self, engine: Engine[Any, Any], name: str, entry: Any) -> None:
        """Append an entry to the history."""
        state = engine.state
        if getattr(state, "param_history", None) is None:
            state.param_history = {}
        state.param_history.setdefault(name, []).append(entry)


def _state_of(value: Any) -> Any:
    if isinstance(value, list):
        return [_state_of(one) for one in value]
    return value.state_dict() if hasattr(value, "state_dict") else value


def _memo(scheduler: BaseParamScheduler) -> dict[int, Any]:
    """Return a memo with which ``deepcopy`` keeps the optimizer: users' own schedulers may have it in their state."""
    optimizer = getattr(scheduler, "optimizer", None)
    return {id(optimizer): optimizer}


class SteppedScheduler(BaseParamScheduler):
    """Base class of schedulers whose first call has index 0: apply the value of ``event_index``, then increment it."""

    def attach(self, engine: Engine[Any, Any], event: EventLike = Events.ITERATION_STARTED) -> RemovableEventHandle:
        """Call the scheduler whenever an event fires.

        Returns:
            A handle that detaches the scheduler.
        """
        check_engine("engine", engine)
        return engine.add_event_handler(event, self)

    def __call__(self, engine: Engine[Any, Any] | None, name: str | None = None) -> None:
        """Apply the value of ``event_index``, and increment it.

        Args:
            engine: the engine whose state keeps the history.
            name: key in the history, ``param_name`` by default.

        Raises:
            ValueError: the value is not valid; nothing is written.
        """
        if engine is not None and engine.last_event_name is _EPOCH_STARTED and self._is_done_with_epoch(engine):
            return
        self._apply(engine)
        if self.save_history and engine is not None:
            self._record(engine, name or self.param_name, self._written())
        self.event_index += 1

    def _is_done_with_epoch(self, engine: Engine[Any, Any]) -> bool:
        return self.event_index > 0 and resumes_epoch(engine)

    @abstractmethod
    def _apply(self, engine: Engine[Any, Any] | None) -> None:
        """Compute the value of ``event_index``, and write it."""

    @abstractmethod
    def _written(self) -> Any:
        """Return the values in effect as plain numbers."""


class ParamScheduler(SteppedScheduler):
    """Base class of schedulers of an optimizer's parameter, such as the learning rate.

    Attached to ``ITERATION_STARTED``, iteration ``k`` uses the value of index ``k - 1``. Each call overwrites what is
    in the optimizer; tensors are written in place. Subclasses define :meth:`get_param`.

    Attached to ``EPOCH_STARTED``, a scheduler does nothing when a resumed run continues an epoch.

    Args:
        optimizer: an optimizer, or any object whose ``param_groups`` is a list of dicts.
        param_name: key of the parameter groups.
        save_history: whether to keep the values, a list with one per group, in
            ``engine.state.param_history[param_name]``.
        param_group_index: index of the only group to schedule; all by default.

    Raises:
        TypeError: ``optimizer`` has no ``param_groups``, or the index is not an integer.
        ValueError: the index is out of range, or a group to schedule lacks the key.

    >>> import torch
    >>> from camshaft.engine import Engine, Events
    >>> class Halving(ParamScheduler):
    ...     def get_param(self) -> float:
    ...         return 0.5**self.event_index
    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> trainer = Engine(lambda engine, batch: optimizer.param_groups[0]["lr"])
    >>> handle = Halving(optimizer, "lr").attach(trainer)
    >>> handle = trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: print(trainer.state.output))
    >>> state = trainer.run([0, 0, 0])
    1.0
    0.5
    0.25
    """

    def __init__(
        self, optimizer: Any, param_name: str, save_history: bool = False, param_group_index: int | None = None
    ) -> None:
        super().__init__(param_name, save_history)
        groups = getattr(optimizer, "param_groups", None)
        if not isinstance(groups, Sequence) or isinstance(groups, str):
            raise TypeError(
                "optimizer must be an optimizer of torch, or an object with a list param_groups, got "
                f"{optimizer!r} of type {type(optimizer).__name__}"
            )
        if param_group_index is not None:
            index, count = integer("param_group_index", param_group_index, least=-len(groups)), len(groups)
            if index >= count:
                raise ValueError(f"param_group_index must be below {count}, the number of groups, got {index}")
        self.optimizer = optimizer
        self.param_group_index = param_group_index
        self._check_entries()

    @property
    def optimizer_param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups that are scheduled."""
        groups = self.optimizer.param_groups  # an optimizer replaces them when it loads a state
        index = self.param_group_index
        return cast("list[dict[str, Any]]", groups if index is None else [groups[index]])

    def _check_entries(self) -> None:
        """Check that the parameter exists: writing it would add it, without any effect."""
        check_entries(self.param_name, self.optimizer_param_groups)

    def _apply(self, engine: Engine[Any, Any] | None) -> None:
        self._write(self.get_param())

    def _write(self, value: Any) -> None:
        """Write one value into all groups, or one value of a list into each."""
        groups = self.optimizer.param_groups if self.param_group_index is None else self.optimizer_param_groups
        name = self.param_name
        if not isinstance(value, list):
            for group in groups:
                write(group, name, value)
            return
        if len(value) != len(groups):
            raise ValueError(
                f"get_param of {type(self).__name__} must return one value for each of {len(groups)} parameter "
                f"groups, got {len(value)}: {value}"
            )
        for group, one in zip(groups, value, strict=True):
            write(group, name, one)

    def _written(self) -> list[Any]:
        return [plain(group[self.param_name]) for group in self.optimizer_param_groups]

    def _columns(self) -> list[Any]:
        """Return what a row of simulated values holds: one value, or one per group where they differ."""
        written = self._written()
        return written if isinstance(self.get_param(), list) else written[:1]

    @classmethod
    def simulate_values(cls, num_events: int, **scheduler_kwargs: Any) -> list[list[Any]]:
        """Return the values that a run would apply, as a list of ``[index, value]``.

        Args:
            num_events: number of values.
            scheduler_kwargs: arguments of the scheduler. ``optimizer``, ``param_group_index`` and ``save_history``
                are ignored.

        >>> from camshaft.handlers import LinearCyclicalScheduler
        >>> LinearCyclicalScheduler.simulate_values(
        ...     num_events=4, param_name="lr", start_value=0.0, end_value=1.0, cycle_size=4
        ... )
        [[0, 0.0], [1, 0.5], [2, 1.0], [3, 0.5]]
        """
        ignored = ("optimizer", "param_group_index", "save_history")
        given = {key: value for key, value in scheduler_kwargs.items() if key not in ignored}
        scheduler = cls(optimizer=spare_optimizer(scheduler_kwargs.get("param_name", "lr")), **given)
        return rows_of(scheduler, num_events, scheduler._columns)


def write(group: dict[str, Any], name: str, value: Any) -> None:
    """Set an entry of a parameter group. A tensor is written in place, since compiled steps refer to it."""
    current = group.get(name)
    if type(current) is float or not isinstance(current, Tensor):  # the second test takes several times as long
        group[name] = value
    elif isinstance(value, Tensor):
        current.copy_(value)
    else:
        current.fill_(value)


def plain(value: Any) -> Any:
    """Return the number in a tensor, and any other value as it is."""
    return value.item() if isinstance(value, Tensor) else value


def as_list(value: Any) -> list[Any]:
    """Return a list as it is, and any other value in a list."""
    return value if isinstance(value, list) else [value]


# --- simulation ----------------------------------------------------------------------------------------------------


def spare_optimizer(param_name: str = "lr", value: float = 0.1) -> torch.optim.Optimizer:
    """Return an optimizer with one group that has this parameter."""
    return torch.optim.SGD([{"params": [torch.zeros(1, device="cpu")], param_name: value}], lr=0.1)


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


@contextmanager
def unchanged(schedulers: Sequence[Any]) -> Iterator[None]:
    """Restore schedulers and the parameter groups of their optimizers on exit."""
    states = [(scheduler, scheduler.save_history, scheduler.state_dict()) for scheduler in schedulers]
    optimizers = {id(one): one for scheduler in schedulers for one in as_list(scheduler.optimizer)}
    groups = [(group, dict(group)) for optimizer in optimizers.values() for group in optimizer.param_groups]
    tensors = [(one, one.clone()) for _, entries in groups for one in entries.values() if isinstance(one, Tensor)]
    try:
        yield
    finally:
        for scheduler, save_history, state in states:
            scheduler.load_state_dict(state)
            scheduler.save_history = save_history
        for group, entries in groups:
            group.clear()
            group.update(entries)
        for tensor, value in tensors:
            tensor.copy_(value)
