"""Timer that the events of an engine control."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from camshaft.engine.engine import Engine, check_engine
from camshaft.engine.events import EventLike, Events

__all__ = ["Timer"]


class Timer:
    """Measure time, in total or per step; controlled by method calls or by the events of an engine.

    It starts when it is created.

    Args:
        average: whether :meth:`value` is the time per step.

    Attributes:
        total: seconds up to the last pause.
        step_count: number of steps.
        running: whether the timer is running.

    >>> from camshaft.engine import Engine, Events
    >>> trainer = Engine(lambda engine, batch: None)
    >>> timer = Timer(average=True)
    >>> _ = timer.attach(
    ...     trainer,
    ...     resume=Events.ITERATION_STARTED,
    ...     pause=Events.ITERATION_COMPLETED,
    ...     step=Events.ITERATION_COMPLETED,
    ...     start_paused=True,
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
        """Control the timer by the events of an engine.

        Args:
            engine: the engine.
            start: event that resets and starts the timer.
            pause: event that pauses it.
            resume: event that resumes it.
            step: event that counts a step.
            start_paused: whether ``start`` leaves the timer paused until ``resume``. By default the time from
                ``start`` to the first ``pause`` counts, also if ``resume`` is given.

        Returns:
            This timer.
        """
        check_engine("engine", engine)
        engine.add_event_handler(start, self._reset_paused if start_paused else self.reset)
        for event, handler in ((pause, self.pause), (resume, self.resume), (step, self.step)):
            if event is not None:
                engine.add_event_handler(event, handler)
        return self

    def reset(self, *args: Any) -> Timer:
        """Reset to zero, and start."""
        self.total = 0.0
        self.step_count = 0.0
        self.running = True
        self._began = perf_counter()
        return self

    def pause(self, *args: Any) -> None:
        """Pause if running."""
        if self.running:
            self.total += perf_counter() - self._began
            self.running = False

    def resume(self, *args: Any) -> None:
        """Resume if paused."""
        if not self.running:
            self.running = True
            self._began = perf_counter()

    def value(self) -> float:
        """Return the seconds so far, in total or per step."""
        total = self.total + (perf_counter() - self._began if self.running else 0.0)
        return total / max(self.step_count, 1.0) if self._average else total

    def step(self, *args: Any) -> None:
        """Count a step."""
        self.step_count += 1.0

    def _reset_paused(self, *args: Any) -> None:
        self.reset().running = False
