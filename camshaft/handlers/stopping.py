"""Ranks stop together: a run that one of them wants to end ends on all, after the same iteration."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from camshaft.distributed.ending import CommonEnd, common_end
from camshaft.distributed.guard import line_of_caller
from camshaft.engine.engine import Engine
from camshaft.engine.events import Events, FailureEvents, RemovableEventHandle
from camshaft.handlers.utils import check_engine

_PACKAGE = str(Path(__file__).resolve().parents[1])
_LAST = sys.maxsize  # of all handlers of an event
_LEAVING = Events.COMPLETED | Events.INTERRUPT | Events.TERMINATE


class StopTogether:
    """Ends the run of an engine on all ranks, by agreement off the device.

    Every rank makes one, on the same line of the user's, for the same engine; ranks that make none are waited for in
    vain, for seconds. In a single process it is ``engine.terminate()``.
    """

    def __init__(self) -> None:
        self._name = os.path.basename(line_of_caller(within=_PACKAGE))
        self._end: CommonEnd | None = None
        self._is_watching = False
        self._handles: list[RemovableEventHandle] = []
        self._has_engine = False

    def attach(self, engine: Engine[Any, Any]) -> None:
        """Watch the runs of an engine from now on; the one that is under way with :meth:`watch`."""
        if not self._has_engine:
            check_engine("engine", engine)
            self._has_engine = True
            engine.add_event_handler(Events.STARTED, self._start)

    def watch(self, engine: Engine[Any, Any]) -> None:
        """Watch the run of an engine that is under way, if that is not so yet."""
        if not self._is_watching:
            self.attach(engine)
            self._begin(engine, engine.state.iteration)

    def stop(self, engine: Engine[Any, Any]) -> None:
        """End the run."""
        self.watch(engine)
        if self._end is None:
            engine.terminate()
        else:
            self._end.want()

    def _start(self, engine: Engine[Any, Any]) -> None:
        self._begin(engine, engine.state.iteration + 1)

    def _begin(self, engine: Engine[Any, Any], step: int) -> None:
        self._leave()
        self._is_watching = True
        self._end = common_end(self._name, step)
        if self._end is not None:
            add = engine.add_event_handler
            self._handles = [
                add(Events.ITERATION_COMPLETED, self._after_iteration, order=_LAST),
                add(Events.EPOCH_COMPLETED, self._go_on, order=_LAST),
                add(_LEAVING, self._leave, order=_LAST),
                add(FailureEvents.ERROR_MET, self._leave),
            ]

    def _after_iteration(self, engine: Engine[Any, Any]) -> None:
        # After the last one of an epoch the handlers of EPOCH_COMPLETED may want to stop before the next begins.
        if engine.iteration_in_epoch != engine.state.epoch_length:
            self._go_on(engine)

    def _go_on(self, engine: Engine[Any, Any]) -> None:
        if self._end is not None and not self._end.may_begin(engine.state.iteration + 1):
            engine.terminate()

    def _leave(self) -> None:
        for handle in self._handles:
            handle.remove()
        end, self._end, self._handles, self._is_watching = self._end, None, [], False
        if end is not None:
            end.leave()
