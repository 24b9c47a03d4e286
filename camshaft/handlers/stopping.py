"""Stopping a run on all ranks after the same iteration, when one of them requests it."""

from __future__ import annotations

import os
from typing import Any

from camshaft.distributed.coordination.stop import CommonStop, common_stop
from camshaft.engine.engine import Engine
from camshaft.engine.events import Events, FailureEvents, Order, RemovableEventHandle
from camshaft.errors import line_of_caller
from camshaft.handlers.utils import check_engine


class StopTogether:
    """Terminates the run of an engine on all ranks, which agree on the iteration without using the device.

    Every rank must create one on the same line of the user's code, for the same engine; missing ranks time out after
    10 s. In a single process it calls ``engine.terminate()``.
    """

    def __init__(self) -> None:
        self._name = os.path.basename(line_of_caller())
        self._is_attached = self._is_watching = False
        self._common: CommonStop | None = None
        self._handles: list[RemovableEventHandle] = []

    def attach(self, engine: Engine[Any, Any]) -> None:
        """Watch the runs of an engine that start from now on."""
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
        """Terminate the run."""
        self.watch(engine)
        if self._common is None:
            engine._terminate_together()
        else:
            self._common.want()

    def _begin(self, engine: Engine[Any, Any], step: int) -> None:
        self._leave()
        self._is_watching = True
        self._common = common_stop(self._name, step)
        if self._common is not None:
            leaving = Events.COMPLETED | Events.INTERRUPT | Events.TERMINATE
            self._handles = [
                engine.add_event_handler(Events.ITERATION_COMPLETED, self._after_iteration, order=Order.LAST),
                engine.add_event_handler(Events.EPOCH_COMPLETED, self._proceed_or_stop, order=Order.LAST),
                engine.add_event_handler(leaving, self._leave, order=Order.LAST),
                engine.add_event_handler(FailureEvents.ERROR_MET, self._leave),
            ]

    def _after_iteration(self, engine: Engine[Any, Any]) -> None:
        # After the last iteration of an epoch, handlers of EPOCH_COMPLETED may still stop the run.
        if engine.iteration_in_epoch != engine.state.epoch_length:
            self._proceed_or_stop(engine)

    def _proceed_or_stop(self, engine: Engine[Any, Any]) -> None:
        if self._common is not None and not self._common.may_begin(engine.state.iteration + 1):
            engine._terminate_together()

    def _leave(self) -> None:
        for handle in self._handles:
            handle.remove()
        stop, self._common, self._handles, self._is_watching = self._common, None, [], False
        if stop is not None:
            stop.leave()
