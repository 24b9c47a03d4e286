"""Stopping a run on all ranks after the same iteration, when one of them requests it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from camshaft.distributed.agreement.stop import CommonStop, common_stop
from camshaft.distributed.ranks import get_world_size
from camshaft.engine.engine import Engine, check_engine
from camshaft.engine.events import Events, FailureEvents, Order, RemovableEventHandle
from camshaft.engine.loop import Phase
from camshaft.errors import line_of_caller

__all__ = ["stop_together"]


def stop_together(engine: Engine[Any, Any]) -> Callable[[], None]:
    """Return a function that ends the run of an engine on all ranks after the same iteration.

    Call this before the run, on every rank and on the same line. The returned function may then be called on any rank,
    by a step, a handler, a signal handler, or another thread. The run proceeds to the end of the iteration, or of the
    window of accumulated gradients, that the furthest rank is in, including ``EPOCH_COMPLETED`` if that is the last one
    of the epoch, and ends as after ``engine.terminate()``. Until then, an iteration only checks a flag, without
    communication.

    ``engine.terminate()`` on one rank alone would make the others wait for it in their next collective.

    Args:
        engine: the engine to stop.

    Raises:
        TypeError: ``engine`` is not an Engine.
        RuntimeError: raised by the returned function if the engine is not running.

    >>> from camshaft.engine import Events
    >>> trainer = Engine(lambda engine, batch: batch)
    >>> stop = stop_together(trainer)
    >>> @trainer.on(Events.ITERATION_STARTED(once=3))
    ... def look_at_the_disk() -> None:
    ...     stop()
    >>> trainer.run(range(10)).iteration
    3
    """
    stopping = StopTogether()
    stopping.surround(engine)

    def stop() -> None:
        if engine.phase in (Phase.IDLE, Phase.PAUSED):
            raise RuntimeError("stop was called while the engine is not running: call it in a step or a handler")
        stopping.request()

    return stop


class StopTogether:
    """Terminates the run of an engine on all ranks, which agree on the iteration without using the device.

    Every rank must create one on the same line of the user's code, for the same engine; missing ranks time out after
    10 s.

    Attributes:
        reason: why all ranks have ended the last run, or 0 if it ended otherwise.
        event: the event after which they did.
    """

    def __init__(self) -> None:
        self._name = os.path.basename(line_of_caller())
        self._is_attached = self._is_watching = False
        self._requested = 0
        self._common: CommonStop | None = None
        self._handles: list[RemovableEventHandle] = []
        self.reason = 0
        self.event: Any = None

    def attach(self, engine: Engine[Any, Any]) -> None:
        """Watch the runs of an engine that start from now on. In a single process, this costs nothing."""
        if not self._is_attached:
            check_engine("engine", engine)
            self._is_attached = True
            engine.add_event_handler(Events.STARTED, lambda engine: self._begin(engine, engine.state.iteration + 1))

    def watch(self, engine: Engine[Any, Any]) -> None:
        """Watch the current run of an engine too."""
        if not self._is_watching:
            self.attach(engine)
            self._begin(engine, engine.state.iteration)

    def stop(self, engine: Engine[Any, Any]) -> None:
        """Terminate the run; in a single process, after the current event."""
        self.watch(engine)
        if self._common is None:
            engine.terminate(on_all_ranks=True)
        else:
            self._common.want()

    def surround(self, engine: Engine[Any, Any]) -> None:
        """Watch all calls of ``run`` from now on, so that :meth:`request` works at any time."""
        check_engine("engine", engine)
        engine.surround(self._watching)

    def request(self, reason: int = 1) -> None:
        """Terminate the run after the current iteration; only sets a flag, also in signal handlers and threads."""
        self._requested = reason

    def settle(self) -> None:
        """Once the run has ended on this rank, set :attr:`reason`."""
        if self._common is not None:
            self.reason = self._common.settle()
            self._leave()

    @contextmanager
    def _watching(self, engine: Engine[Any, Any]) -> Iterator[None]:
        self._begin(engine, engine.state.iteration + 1, always=True)
        try:
            yield
        finally:
            self._leave()
            self._requested = 0

    def _begin(self, engine: Engine[Any, Any], step: int, always: bool = False) -> None:
        self._leave()
        self._is_watching, self.reason, self.event = True, 0, None
        if not always and get_world_size() == 1:
            return
        self._common = common_stop(self._name, step)
        leaving = Events.COMPLETED | Events.INTERRUPT | Events.TERMINATE
        self._handles = [
            engine.add_event_handler(Events.ITERATION_COMPLETED, self._after_iteration, order=Order.LAST),
            engine.add_event_handler(Events.EPOCH_COMPLETED, self._proceed_or_stop, order=Order.LAST),
            engine.add_event_handler(leaving, self.settle, order=Order.LAST),
            engine.add_event_handler(FailureEvents.ERROR_MET, self._leave),
        ]

    def _after_iteration(self, engine: Engine[Any, Any]) -> None:
        # After the last iteration of an epoch, handlers of EPOCH_COMPLETED may still stop the run.
        if engine.iteration_in_epoch != engine.state.epoch_length and not engine.in_step:
            self._proceed_or_stop(engine)

    def _proceed_or_stop(self, engine: Engine[Any, Any]) -> None:
        common = self._common
        if common is None:
            return
        if self._requested:
            common.want(self._requested)
        if not common.may_begin(engine.state.iteration + 1):
            self.event = engine.last_event_name
            engine.terminate(on_all_ranks=True)

    def _leave(self) -> None:
        for handle in self._handles:
            handle.remove()
        common, self._common, self._handles, self._is_watching = self._common, None, [], False
        if common is not None:
            common.leave()
