"""How far a job had come when a run of it is taken up again, in the steps that its log counts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from camshaft.engine.engine import Engine
from camshaft.handlers.log_handlers import BaseHandler
from camshaft.handlers.values import Path


@dataclass(frozen=True)
class Attached:
    """A handler of a logger on an engine; keeps neither alive."""

    engine: weakref.ref[Engine[Any, Any]]
    handler: Callable[[], BaseHandler | None]
    event: Any

    @classmethod
    def of(cls, engine: Engine[Any, Any], handler: Any, event: Any) -> Attached:
        """Remember an attachment; functions that log on their own count their steps as they like."""
        known = weakref.ref(handler) if isinstance(handler, BaseHandler) else _nobody
        return cls(weakref.ref(engine), known, event)

    def step_on(self, running: Engine[Any, Any]) -> int | None:
        """Tell which step the handler would write now, if that has to do with the run of ``running``."""
        engine, handler = self.engine(), self.handler()
        if engine is None or handler is None:
            return None
        if engine is not running and not handler.has_own_steps:
            return None  # the count of an evaluator, which begins anew each time
        try:
            return handler.global_step(engine, self.event)
        except Exception:
            return None  # it may need what only exists when its event fires; that is told then

    def counts_by(self, running: Engine[Any, Any]) -> bool:
        """Say whether the steps may be those of an engine: they are not if they are known to be another one's."""
        followed = engine_followed(self.handler())
        return followed is None or followed is running


def engine_followed(handler: Any) -> Engine[Any, Any] | None:
    """Give the engine whose steps a handler writes, as ``global_step_from_engine`` tells, if it does so."""
    followed = getattr(getattr(handler, "global_step_transform", None), "engine", None)
    return followed if isinstance(followed, Engine) else None


class Reached:
    """For each name in a log, the last step that a run which is about to go on has behind it.

    Args:
        engine: whose run it is.
        attached: the handlers of the logger.

    >>> from camshaft.engine import Events
    >>> from camshaft.handlers.csv_logger import OutputHandler
    >>> trainer = Engine(lambda engine, batch: None)
    >>> trainer.state.epoch, trainer.state.iteration = 2, 20
    >>> by_iteration, by_epoch = OutputHandler("training", "all"), OutputHandler("training", ["accuracy"])
    >>> attached = [
    ...     Attached.of(trainer, by_iteration, Events.ITERATION_COMPLETED),
    ...     Attached.of(trainer, by_epoch, Events.EPOCH_COMPLETED),
    ... ]
    >>> reached = Reached(trainer, attached)
    >>> reached(("training", "loss")), reached(("training", "accuracy"))
    (20, 2)
    """

    def __init__(self, engine: Engine[Any, Any], attached: Iterable[Attached]) -> None:
        found = [(one, one.handler(), one.step_on(engine)) for one in attached]
        self._iteration = engine.state.iteration
        self.any = any(step for _, handler, step in found if handler is not None)
        self._found = [
            (handler, step if one.counts_by(engine) else None) for one, handler, step in found if handler is not None
        ]
        self.steps = tuple(step for _, step in self._found)
        self._known: dict[Path, int | None] = {}

    def __call__(self, path: Path) -> int | None:
        """Give the step of a name, or ``None`` if nobody knows; what users write by themselves counts iterations."""
        if path not in self._known:
            self._known[path] = self._find(path)
        return self._known[path]

    def is_beyond(self, path: Path, step: int) -> bool:
        """Say whether a point lies beyond the place where the run goes on."""
        last = self(path)
        return last is not None and step > last

    def is_last(self, path: Path, step: int) -> bool:
        """Say whether a point is the last one before the place where the run goes on."""
        return self(path) == step

    def _find(self, path: Path) -> int | None:
        claims = [(handler.claim(path), step) for handler, step in self._found]
        strongest = max((claim for claim, _ in claims), default=0)
        if strongest == 0:
            return self._iteration
        steps = [step for claim, step in claims if claim == strongest]
        known = [step for step in steps if step is not None]
        return max(known) if len(known) == len(steps) else None


def _nobody() -> None:
    return None
