"""Schedulers of an attribute of an engine's state, such as the weight of a part of the loss."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from typing import Any

from camshaft.engine.engine import Engine
from camshaft.engine.event import EventLike, Events
from camshaft.engine.handle import RemovableEventHandle
from camshaft.handlers.param_scheduler.base import _EPOCH_STARTED, BaseParamScheduler, continues_epoch
from camshaft.handlers.param_scheduler.simulation import rows_of
from camshaft.handlers.utils import check_engine, check_is_no_counter


class StateParamScheduler(BaseParamScheduler):
    """Sets an attribute of an engine's state each time it is called.

    A subclass defines :meth:`get_param`, for ``event_index`` from 1. For the attribute itself to be there after a
    resume, before the first call, name it in ``engine.state_dict_user_keys``.

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
        param_name: the attribute.
        save_history: keep the values in ``engine.state.param_history[param_name]``.
        create_new: whether the attribute is a new one.

    Raises:
        TypeError: ``param_name`` is not a string.
    """

    def __init__(self, param_name: str, save_history: bool = False, create_new: bool = False) -> None:
        super().__init__(param_name, save_history)
        self.create_new = create_new

    def attach(self, engine: Engine[Any, Any], event: EventLike = Events.ITERATION_COMPLETED) -> RemovableEventHandle:
        """Call the scheduler whenever an event fires; an attribute that is not there yet is ``None`` until then.

        Returns:
            A handle that takes the scheduler off the engine.

        Raises:
            ValueError: the attribute should be a new one, and is there; or the engine counts by it.
        """
        check_engine("engine", engine)
        state, name = engine.state, self.param_name
        check_is_no_counter("param_name", name, state)
        if hasattr(state, name):
            if self.create_new:
                raise ValueError(
                    f"the state has an attribute {name!r} already: choose another param_name, or create_new=False"
                )
            return engine.add_event_handler(event, self)
        handle = engine.add_event_handler(event, self)
        if not self.create_new:
            warnings.warn(
                f"the state has no attribute {name!r}, so it is made; if that is meant, give create_new=True",
                stacklevel=2,
            )
        setattr(state, name, None)
        return handle

    def __call__(self, engine: Engine[Any, Any]) -> None:
        """Count, and set the attribute to the value of ``event_index``.

        Args:
            engine: whose state is set, and keeps the history.
        """
        if engine.last_event_name is not _EPOCH_STARTED or not (self.event_index and continues_epoch(engine)):
            self.event_index += 1
        value = self.get_param()
        setattr(engine.state, self.param_name, value)
        if self._save_history:
            self._record(engine, self.param_name, value)

    @classmethod
    def simulate_values(cls, num_events: int, **scheduler_kwargs: Any) -> list[list[Any]]:
        """List the values that a run would set: for each call its number, from 0, and the value.

        Args:
            num_events: how many.
            scheduler_kwargs: arguments of the scheduler.
        """
        scheduler = cls(**{**scheduler_kwargs, "save_history": False})
        engine: Engine[Any, Any] = Engine(lambda engine, batch: None)
        before = scheduler.state_dict()
        try:
            return rows_of(
                lambda _: scheduler(engine), num_events, lambda: [getattr(engine.state, scheduler.param_name)]
            )
        finally:
            scheduler.load_state_dict(before)  # of functions with a state of their own, which are not copied

    @abstractmethod
    def get_param(self) -> Any:
        """Compute the value for ``event_index``."""
