"""Small things that several handlers are given by their users."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from camshaft.engine.engine import Engine
from camshaft.engine.events import translated
from camshaft.handlers.checks import check_engine


def global_step_from_engine(
    engine: Engine[Any, Any], custom_event_name: Any = None, fallback_attr: str = "epoch"
) -> Callable[[Any, Any], int]:
    """Make a function for the ``global_step_transform`` of handlers on another engine, such as an evaluator.

    Args:
        engine: whose progress counts, usually the trainer.
        custom_event_name: the event whose count is the step; by default the one that the handler reacts to.
        fallback_attr: the attribute of ``engine.state`` that is the step where nothing counts that event.

    Returns:
        A function of an engine, which does not matter, and an event.

    >>> from camshaft.engine import Events
    >>> trainer = Engine(lambda engine, batch: None)
    >>> step = global_step_from_engine(trainer)
    >>> state = trainer.run(range(10), max_epochs=2)
    >>> step(None, Events.COMPLETED), step(None, Events.ITERATION_COMPLETED), step(None, Events.TERMINATE)
    (2, 20, 2)
    """

    check_engine("engine", engine)
    return _StepOf(engine, custom_event_name, fallback_attr)


@dataclass(frozen=True)
class _StepOf:
    engine: Engine[Any, Any]
    event: Any
    fallback_attr: str

    def __call__(self, _: Any, event_name: Any) -> int:
        state = self.engine.state
        event = translated(event_name if self.event is None else self.event)
        attribute = state.event_to_attr.get(event, self.fallback_attr)
        count: int = getattr(state, attribute)
        return count
