"""Stop training when its time is over."""

from __future__ import annotations

import logging
from numbers import Real
from time import monotonic
from typing import Any

from camshaft.engine.engine import Engine
from camshaft.handlers.stopping import StopTogether

__all__ = ["TimeLimit"]


class TimeLimit:
    """Ends a run when a time is over since this was made; on all ranks at the same iteration.

    Args:
        limit_sec: in seconds; by default 8 hours.

    Raises:
        TypeError: ``limit_sec`` is not a number.
        ValueError: it is not above 0.

    >>> from camshaft.engine import Events
    >>> trainer = Engine(lambda engine, batch: None)
    >>> handle = trainer.add_event_handler(Events.ITERATION_COMPLETED, TimeLimit(1e-9))
    >>> trainer.run(range(10)).iteration
    1
    """

    def __init__(self, limit_sec: float = 28800) -> None:
        given: Any = limit_sec  # for the type checker no float is Real
        if not isinstance(given, Real) or isinstance(given, bool):
            raise TypeError(f"limit_sec must be a number, got {limit_sec!r} of type {type(limit_sec).__name__}")
        if not limit_sec > 0:
            raise ValueError(f"limit_sec must be above 0, got {limit_sec!r}")
        self.limit_sec = limit_sec
        self.start_time = monotonic()
        self.logger = logging.getLogger(f"{__name__}.{type(self).__name__}")
        self._together = StopTogether()

    def __call__(self, engine: Engine[Any, Any]) -> None:
        """End the run if the time is over."""
        self._together.watch(engine)
        if monotonic() - self.start_time > self.limit_sec:
            self.logger.info("Reached the time limit: %s sec. Stop training", self.limit_sec)
            self._together.stop(engine)
