"""Steps of another engine, and whether a run repeats one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from camshaft.engine.engine import Engine, check_engine
from camshaft.engine.events import Events, translated

__all__ = ["global_step_from_engine"]


def global_step_from_engine(
    engine: Engine[Any, Any], custom_event_name: Any = None, fallback_attr: str = "epoch"
) -> Callable[[Any, Any], int]:
    """Return a ``global_step_transform`` that reads the step from another engine.

    Args:
        engine: the engine whose counters are the steps, usually the trainer.
        custom_event_name: the event whose count is the step; by default the event that the handler is attached to.
        fallback_attr: the attribute of ``engine.state`` to use for events without a counter.

    Returns:
        A function of an engine, which it ignores, and an event.

    >>> from camshaft.engine import Events
    >>> trainer = Engine(lambda engine, batch: None)
    >>> step = global_step_from_engine(trainer)
    >>> state = trainer.run(range(10), max_epochs=2)
    >>> (
    ...     step(None, Events.COMPLETED),
    ...     step(None, Events.ITERATION_COMPLETED),
    ...     step(None, Events.TERMINATE),
    ... )
    (2, 20, 2)
    """
    check_engine("engine", engine)
    return StepOf(engine, custom_event_name, fallback_attr)


@dataclass(frozen=True)
class StepOf:
    """The steps of another engine, which loggers recognize in a handler."""

    engine: Engine[Any, Any]
    event: Any
    fallback_attr: str

    def __call__(self, _: Any, event_name: Any) -> int:
        """Return the count of the engine for an event."""
        state = self.engine.state
        event = translated(event_name if self.event is None else self.event)
        count: int = getattr(state, state.event_to_attr.get(event, self.fallback_attr))
        return count


def resumes_epoch(engine: Engine[Any, Any]) -> bool:
    """Return whether ``EPOCH_STARTED`` fires for an epoch that a resumed run continues, which is not a new epoch."""
    return engine.last_event_name is Events.EPOCH_STARTED and engine.iteration_in_epoch > 0


def repeats_iteration(engine: Engine[Any, Any]) -> bool:
    """Return whether a run resumed, from a loaded state or after an error, in the present iteration."""
    completed = engine.resumed_at
    return completed is not None and engine.state.iteration == completed + 1
