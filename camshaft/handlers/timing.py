"""A stopwatch that events start, pause and count for."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from camshaft.engine.engine import Engine
from camshaft.engine.events import EventLike, Events
from camshaft.handlers.utils import check_engine

__all__ = ["Timer"]


class Timer:
    """Measures how long something takes, in total or in the mean of its steps; by hand or by the events of an engine.

    It runs from the moment it is made.

    Args:
        average: whether :meth:`value` is the time per step.

    Attributes:
        total: seconds up to the last pause.
        step_count: steps counted.
        running: whether the clock runs now.

    >>> from camshaft.engine import Engine, Events
    >>> trainer = Engine(lambda engine, batch: None)
    >>> timer = Timer(average=True)
    >>> _ = timer.attach(
    ...     trainer, resume=Events.ITERATION_STARTED, pause=Events.ITERATION_COMPLETED,
    ...     step=Events.ITERATION_COMPLETED, start_paused=True,
    ... )
    >>> _ = trainer.run(range(10))
    >>> timer.step_count, timer.running, timer.value() < 1.0
    (10.0, False, True)
    """

    def __init__(self, average: bool = False) -> None:
        self._average = average
        self.reset()

    def attach(
        self,
        engine: Engine[Any, Any],
        start: EventLike = Events.STARTED,
        pause: EventLike = Events.COMPLETED,
        resume: EventLike | None = None,
        step: EventLike | None = None,
        *,
        start_paused: bool = False,
    ) -> Timer:
        """Let events of an engine work the clock.

        Args:
            engine: the engine.
            start: sets everything to zero, and starts the clock.
            pause: stops it.
            resume: lets it go on.
            step: counts a step.
            start_paused: let ``start`` stop the clock, which waits for ``resume`` then. Without it, the time from
                ``start`` to the first ``pause`` counts, also if ``resume`` is given.

        Returns:
            This timer.
        """
        check_engine("engine", engine)
        engine.add_event_handler(start, self._reset_paused if start_paused else self.reset)
        engine.add_event_handler(pause, self.pause)
        if resume is not None:
            engine.add_event_handler(resume, self.resume)
        if step is not None:
            engine.add_event_handler(step, self.step)
        return self

    def reset(self, *args: Any) -> Timer:
        """Set everything to zero, and start the clock."""
        self.total = 0.0
        self.step_count = 0.0
        self.running = True
        self._began = perf_counter()
        return self

    def pause(self, *args: Any) -> None:
        """Stop the clock, if it runs."""
        if self.running:
            self.total += perf_counter() - self._began
            self.running = False

    def resume(self, *args: Any) -> None:
        """Let the clock go on, if it stands."""
        if not self.running:
            self.running = True
            self._began = perf_counter()

    def value(self) -> float:
        """Give the seconds measured so far, in total or per step."""
        total = self.total + (perf_counter() - self._began if self.running else 0.0)
        return total / max(self.step_count, 1.0) if self._average else total

    def step(self, *args: Any) -> None:
        """Count a step."""
        self.step_count += 1.0

    def _reset_paused(self, *args: Any) -> None:
        self.reset().running = False
