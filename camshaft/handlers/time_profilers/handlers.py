"""The time that each single handler takes."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from camshaft.engine.engine import Engine
from camshaft.engine.events import Events, FailureEvents
from camshaft.engine.registration import Invocation, Registration
from camshaft.handlers.time_profilers.flow import Flow, Hooks
from camshaft.handlers.time_profilers.tables import Statistics, name_of, write_table

Row = list[Any]
_TITLES = ("Handler", "Event Name", "Total(s)", "Min(s)/IDX", "Max(s)/IDX", "Mean(s)", "Std(s)")


@dataclass
class Calls:
    """How long the calls of a registered handler took, without what it fired itself."""

    handler: str
    event: str
    seconds: array[float] = field(default_factory=lambda: array("d"))


class HandlersTimeProfiler:
    """Measures how long each single handler takes, at the engine's events and at those that users fire.

    Every call is measured, of handlers that come and go in the run too, whatever the run's length and however it
    ends; a call that a filter refused is none. The time of handlers of an event that another handler or the process
    function fires is theirs alone. Each run is measured anew. It waits for no device, as :class:`BasicTimeProfiler`.

    Attributes:
        EVENT_FILTER_THESHOLD_TIME: seconds; shorter calls of handlers of an event with a filter are left out. Set it
            to 0 on a profiler, or for all of them, to have every call.

    >>> from camshaft.engine import Events
    >>> trainer = Engine(lambda engine, batch: batch)
    >>> @trainer.on(Events.ITERATION_COMPLETED(every=2))
    ... def show() -> None: ...
    >>> profiler = HandlersTimeProfiler()
    >>> profiler.EVENT_FILTER_THESHOLD_TIME = 0.0
    >>> profiler.attach(trainer)
    >>> state = trainer.run(range(10))
    >>> [row[:2] for row in profiler.get_results()]
    [['show', 'ITERATION_COMPLETED'], ['Total', ''], ['Processing', 'None'], ['Dataflow', 'None']]
    """

    EVENT_FILTER_THESHOLD_TIME: float = 0.0001

    def __init__(self) -> None:
        self._calls: dict[int, Calls] = {}
        self._flow = Flow(self._start)

    def attach(self, engine: Engine[Any, Any]) -> None:
        """Measure the runs of an engine. To do so twice is to do so once.

        Raises:
            TypeError: it is no engine.
            ValueError: this measures another engine already.
        """
        if self._flow.attach(engine):
            engine._dispatcher.wrap(self._timed)

    def detach(self) -> None:
        """Leave the engine; the results stay."""
        engine = self._flow.detach()
        if engine is not None:
            engine._dispatcher.unwrap(self._timed)

    @property
    def processing_times(self) -> list[float]:
        """Seconds of each call of the process function."""
        return list(self._flow.processes.seconds)

    @property
    def dataflow_times(self) -> list[float]:
        """Seconds that each batch took to come."""
        return list(self._flow.fetches.seconds)

    @property
    def event_handlers_times(self) -> dict[Any, dict[str, list[float]]]:
        """Seconds of each call, by event and by the name of the handler; several of one name share a list."""
        times: dict[Any, dict[str, list[float]]] = {event: {} for event in Events}
        for one in self._calls.values():
            times.setdefault(one.event, {}).setdefault(one.handler, []).extend(one.seconds)
        return times

    def get_results(self) -> list[Row]:
        """Give statistics in seconds, rounded to 5 digits; also in the middle of a run.

        Returns:
            For each handler ``[name, event name, total, (min, index), (max, index), mean, std]``, where an index is
            the number of the call, from 0; then the same for ``Total``, which has the total only, ``Processing`` and
            ``Dataflow``.
        """
        calls = self._calls.values()
        total = sum(sum(one.seconds) for one in calls)
        return [
            *(_row(one.handler, one.event, one.seconds) for one in calls),
            ["Total", "", round(total, 5), "", "", "", ""],
            _row("Processing", "None", self._flow.processes.seconds),
            _row("Dataflow", "None", self._flow.fetches.seconds),
        ]

    def write_results(self, output_path: str | os.PathLike[str]) -> None:
        """Write a CSV file: a row per sample, a column per handler; where one has fewer samples there are zeros."""
        columns = {
            "processing_stats": self._flow.processes.seconds,
            "dataflow_stats": self._flow.fetches.seconds,
        }
        calls = list(self._calls.values())
        names = [f"{one.handler} ({one.event})" for one in calls]
        seconds = [*columns.values(), *(one.seconds for one in calls)]
        size = max(map(len, seconds))
        padded = [[*column, *[0.0] * (size - len(column))] for column in seconds]
        write_table(output_path, ["#", *columns, *names], [range(1, size + 1), *padded])

    @staticmethod
    def print_results(results: Sequence[Sequence[Any]]) -> str:
        """Print what :meth:`get_results` gave as a table, and give that text."""
        table = [_TITLES, *(tuple(map(_cell, row)) for row in results)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        rule = tuple("-" * width for width in widths)
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (rule, table[0], rule, *table[1:], rule)]
        text = "\n".join(lines)
        print(text)  # noqa: T201  # what it is for
        return text

    def _start(self, engine: Engine[Any, Any]) -> None:
        """Begin a run with what is registered now, in the order of events and calls."""
        calls, self._calls = self._calls, {}
        for plan in engine._dispatcher.plans.values():
            for serial in (one.serial for one in plan.registrations if one.serial in calls):
                self._calls[serial] = calls[serial]
                del calls[serial].seconds[:]

    def _timed(self, event: Any, registration: Registration, call: Invocation) -> Invocation:
        """Put the clock around the calls of a handler; those that measure are none."""
        handler = registration.handler
        if isinstance(getattr(handler, "__self__", None), Hooks) or isinstance(event, FailureEvents):
            return call
        calls = self._calls.setdefault(registration.serial, Calls(name_of(handler), getattr(event, "name", event)))
        flow, seconds = self._flow, calls.seconds
        is_filtered = registration.is_filtered

        def timed(engine: Engine[Any, Any]) -> Any:
            outer, flow.nested = flow.nested, 0.0
            began = perf_counter()
            try:
                return call(engine)
            finally:
                took = perf_counter() - began
                if not is_filtered or took >= self.EVENT_FILTER_THESHOLD_TIME:
                    seconds.append(took - flow.nested)
                flow.nested = outer + took

        return timed


def _row(name: str, event: str, seconds: Iterable[float]) -> Row:
    found = Statistics.of(list(seconds))
    if found is None:
        return [name, event, "not triggered", *["None"] * 4]
    (low, low_index), (high, high_index) = found.smallest, found.largest
    mean, std = round(found.mean, 5), round(found.std, 5)
    return [name, event, round(found.total, 5), (round(low, 5), low_index), (round(high, 5), high_index), mean, std]


def _cell(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, tuple) else str(value)
