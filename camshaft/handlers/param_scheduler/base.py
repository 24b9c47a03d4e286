"""What all schedulers have in common: a count of their calls, a history, a state, and a look at what they will do."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, ClassVar

from camshaft.base import Serializable
from camshaft.engine.engine import Engine
from camshaft.engine.event import EventLike, Events
from camshaft.engine.handle import RemovableEventHandle
from camshaft.handlers.utils import check_engine, load_optional

_EPOCH_STARTED = Events.EPOCH_STARTED  # looked up once: a member of an enumeration is found slowly


class BaseParamScheduler(Serializable, ABC):
    """Gives a parameter a value each time it is called.

    The attributes that ``_state_dict_all_req_keys`` names are its state; a subclass adds its own.

    Args:
        param_name: what is scheduled.
        save_history: keep the values in ``engine.state.param_history[param_name]``.

    Raises:
        TypeError: ``param_name`` is not a string.

    Attributes:
        event_index: calls so far, which is the index of the next value.
    """

    _state_dict_all_req_keys: ClassVar[tuple[str, ...]] = ("event_index", "param_name")

    def __init__(self, param_name: str, save_history: bool = False) -> None:
        if not isinstance(param_name, str):
            raise TypeError(f"param_name must be a string, got {param_name!r} of type {type(param_name).__name__}")
        self.param_name = param_name
        self.event_index = 0
        self._save_history = save_history

    @property
    def save_history(self) -> bool:
        """Whether the values are kept."""
        return self._save_history

    @save_history.setter
    def save_history(self, value: bool) -> None:
        self._save_history = value

    @abstractmethod
    def get_param(self) -> Any:
        """Compute the value for ``event_index``, and change nothing."""

    @classmethod
    @abstractmethod
    def simulate_values(cls, num_events: int, **scheduler_kwargs: Any) -> list[list[Any]]:
        """List the first values: ``[index, value]`` for each call.

        Args:
            num_events: how many.
            scheduler_kwargs: arguments of the scheduler.
        """

    @classmethod
    def plot_values(cls, num_events: int, **scheduler_kwargs: Any) -> Any:
        """Plot the first values with matplotlib.

        Args:
            num_events: how many.
            scheduler_kwargs: as for ``simulate_values``.

        Returns:
            The lines, as ``matplotlib.pyplot.plot`` gives them.

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
        """Give copies of what the next values depend on."""
        kept = getattr(self, "optimizer", None)  # part of the state of some schedulers that users wrote for torch
        return OrderedDict(
            (name, copy.deepcopy(_state_of(getattr(self, name)), {id(kept): kept}))
            for name in self._state_dict_all_req_keys
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state.

        Args:
            state_dict: what :meth:`state_dict` returned, here or in PyTorch-Ignite.

        Raises:
            TypeError: it is not a mapping.
            ValueError: an attribute is missing, or does not fit; the scheduler is unchanged.
        """
        if isinstance(state_dict, Mapping) and "save_history" in state_dict:  # which ours never holds
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
            raise ValueError(f"state_dict must be that of a {type(self).__name__} made alike: {error!r}") from error

    def _from_ignite(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Convert the state of PyTorch-Ignite's scheduler of this name, so that the next call continues its values.

        Raises:
            ValueError: this scheduler cannot continue them.
        """
        return state_dict

    def _restore(self, state_dict: Mapping[str, Any]) -> None:
        kept = getattr(self, "optimizer", None)
        for name in self._state_dict_all_req_keys:
            value, saved = getattr(self, name), copy.deepcopy(state_dict[name], {id(kept): kept})
            if hasattr(value, "load_state_dict"):
                value.load_state_dict(saved)
            else:
                setattr(self, name, saved)

    def _record(self, engine: Engine[Any, Any], name: str, entry: Any) -> None:
        """Add an entry to the history."""
        state = engine.state
        if getattr(state, "param_history", None) is None:
            state.param_history = {}
        state.param_history.setdefault(name, []).append(entry)


class SteppedScheduler(BaseParamScheduler):
    """Applies the value of ``event_index`` each time it is called, and moves on."""

    def attach(self, engine: Engine[Any, Any], event: EventLike = Events.ITERATION_STARTED) -> RemovableEventHandle:
        """Call the scheduler whenever an event fires.

        Returns:
            A handle that takes it off the engine.
        """
        check_engine("engine", engine)
        return engine.add_event_handler(event, self)

    def __call__(self, engine: Engine[Any, Any] | None, name: str | None = None) -> None:
        """Apply the value of ``event_index``, and move on.

        Args:
            engine: whose state keeps the history.
            name: the name in the history, instead of ``param_name``.

        Raises:
            ValueError: the value is not a possible one; what is scheduled is as before.
        """
        if engine is not None and engine.last_event_name is _EPOCH_STARTED and self._continues(engine):
            return
        self._apply(engine)
        if self._save_history and engine is not None:
            self._record(engine, name or self.param_name, self._written())
        self.event_index += 1

    def _continues(self, engine: Engine[Any, Any]) -> bool:
        return self.event_index > 0 and continues_epoch(engine)

    @abstractmethod
    def _apply(self, engine: Engine[Any, Any] | None) -> None:
        """Compute the value of ``event_index``, and write it where it belongs."""

    @abstractmethod
    def _written(self) -> Any:
        """Read what holds now, as plain numbers."""


def continues_epoch(engine: Engine[Any, Any]) -> bool:
    """Say whether an epoch starts in its middle, where a run goes on: for a schedule that is no new epoch."""
    return engine.last_event_name is Events.EPOCH_STARTED and engine.iteration_in_epoch > 0


def _state_of(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value
