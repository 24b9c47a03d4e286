"""Stop a run after a time limit."""

from __future__ import annotations

import logging
import math
from time import monotonic
from typing import Any

from camshaft.arguments import number
from camshaft.engine.engine import Engine
from camshaft.handlers.stopping import StopTogether

__all__ = ["TimeLimit"]


class TimeLimit:
    """Terminate a run after a time limit, counted from creating the handler, on all ranks after the same iteration.

    Args:
        limit_sec: seconds; 8 hours by default, ``math.inf`` for no limit.

    Raises:
        TypeError: ``limit_sec`` is not a number.
        ValueError: ``limit_sec`` is not above 0.

    >>> from camshaft.engine import Events
    >>> trainer = Engine(lambda engine, batch: None)
    >>> handle = trainer.add_event_handler(Events.ITERATION_COMPLETED, TimeLimit(1e-9))
    >>> trainer.run(range(10)).iteration
    1
    """

    def __init__(self, limit_sec: float = 28800) -> None:
        if limit_sec != math.inf:
            number("limit_sec", limit_sec, above=0)
        self.limit_sec = limit_sec
        self.start_time = monotonic()
        self.logger = logging.getLogger(f"{__name__}.{type(self).__name__}")
        self._together = StopTogether()

    def __call__(self, engine: Engine[Any, Any]) -> None:
        """Terminate the run if the time has passed."""
        self._together.watch(engine)
        if monotonic() - self.start_time > self.limit_sec:
            self.logger.info("Reached the time limit: %s sec. Stopping the run", self.limit_sec)
            self._together.stop(engine)
