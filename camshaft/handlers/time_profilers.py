"""Time profilers: how long a run fetches data, processes it, and calls handlers."""

from __future__ import annotations

import csv
import os
import sys
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from time import perf_counter
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from camshaft.engine.dispatch import Invocation, Registration, name_of
from camshaft.engine.engine import Engine, check_engine
from camshaft.engine.events import Events, FailureEvents, Order, RemovableEventHandle
from camshaft.text import Look, aligned

__all__ = ["BasicTimeProfiler", "HandlersTimeProfiler"]

Hook = tuple[Events, Callable[[Engine[Any, Any]], object], int]

_MEASURED = (
    Events.STARTED,
    Events.COMPLETED,
    Events.EPOCH_STARTED,
    Events.EPOCH_COMPLETED,
    Events.ITERATION_STARTED,
    Events.ITERATION_COMPLETED,
    Events.GET_BATCH_STARTED,
    Events.GET_BATCH_COMPLETED,
)
_AFTER_PROCESSING = (Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED, Events.COMPLETED)
_PRINTED = _MEASURED[:1] + _MEASURED[2:6] + _MEASURED[1:2]


class _Samples:
    """Durations in seconds, each with its row: its iteration in the run."""

    __slots__ = ("rows", "seconds")

    def __init__(self) -> None:
        self.seconds, self.rows = array("d"), array("q")

    def clear(self) -> None:
        del self.seconds[:], self.rows[:]

    def column(self, size: int) -> list[float]:
        """Return the seconds in each of ``size`` rows; those outside count in the first or last row."""
        column = [0.0] * size
        if column:
            for seconds, row in zip(self.seconds, self.rows, strict=True):
                column[max(0, min(row, size - 1))] += seconds
        return column


class _Calls(NamedTuple):
    """Durations of the calls of one registered handler, without the handlers of events that it fired itself."""

    handler: str
    event: str
    seconds: array[float]


class _Profiler:
    """Measures how long each batch takes to be fetched and processed, and keeps track of the handlers of the run.

    The end of a pause fires no event, so the sample during which a run was paused is dropped.
    """

    def __init__(self) -> None:
        self._engine: Callable[[], Engine[Any, Any] | None] = lambda: None
        self._handles: list[RemovableEventHandle] = []
        self._calls: dict[int, _Calls] = {}
        self._fetches, self._processes = _Samples(), _Samples()
        self._epochs, self._iterations = array("q"), array("q")  # by row
        self._started: float | None = None
        self._outside = 0.0  # seconds since then of handlers of the engine's events

    def attach(self, engine: Engine[Any, Any]) -> None:
        """Measure the runs of an engine. Attaching again to the same engine has no effect.

        Raises:
            TypeError: ``engine`` is not an Engine.
            ValueError: the profiler is attached to another engine.
        """
        check_engine("engine", engine)
        attached = self._engine()
        if attached is engine:
            return
        if attached is not None:
            raise ValueError(f"engine must be the one that is already measured, got {engine!r}: use another profiler")
        self._engine = weakref.ref(engine)
        self._handles = [engine.add_event_handler(event, hook, order=order) for event, hook, order in self._hooks()]
        engine.wrap(self._timed)

    def detach(self) -> None:
        """Stop measuring; the results are kept."""
        for handle in self._handles:
            handle.remove()
        engine = self._engine()
        if engine is not None:
            engine.unwrap(self._timed)
        self._engine, self._handles = lambda: None, []

    def _hooks(self) -> Iterator[Hook]:
        first, last = Order.TIME_FIRST - 1, Order.TIME_LAST + 1  # outside of the hooks that measure handlers
        yield Events.STARTED, self._start, first
        yield Events.GET_BATCH_STARTED, self._begin, last
        yield Events.GET_BATCH_COMPLETED, partial(self._end, self._fetches, 0), first
        yield Events.ITERATION_STARTED, self._begin_row, last
        yield Events.ITERATION_COMPLETED, partial(self._end, self._processes, -1), first
        yield Events.INTERRUPT, self._drop, last

    def _timed(self, event: Any, registration: Registration, call: Invocation) -> Invocation:
        """Note a handler, and return its call."""
        is_hook = abs(registration.order) >= Order.TIME_LAST  # of a time profiler
        if not is_hook and not isinstance(event, FailureEvents):
            calls = _Calls(name_of(registration.handler), getattr(event, "name", event), array("d"))
            self._calls.setdefault(registration.serial, calls)
        return call

    def _start(self, engine: Engine[Any, Any]) -> None:
        """Forget the previous run. Keep the handlers that are registered now, by event and in the order of calls."""
        self._fetches.clear()
        self._processes.clear()
        del self._epochs[:], self._iterations[:]
        self._started = None
        calls, self._calls = self._calls, {}
        for serial in (one.serial for one in engine.registrations() if one.serial in calls):
            self._calls[serial] = calls[serial]
            del calls[serial].seconds[:]

    def _begin(self, engine: Engine[Any, Any]) -> None:
        self._outside = 0.0
        self._started = perf_counter()

    def _begin_row(self, engine: Engine[Any, Any]) -> None:
        self._epochs.append(engine.state.epoch)
        self._iterations.append(engine.state.iteration)
        self._begin(engine)

    def _end(self, samples: _Samples, shift: int, engine: Engine[Any, Any]) -> None:
        """Keep what began last as a sample of the next row, or of one before it."""
        if self._started is not None:
            samples.seconds.append(perf_counter() - self._started - self._outside)
            samples.rows.append(len(self._epochs) + shift)
            self._started = None

    def _drop(self, engine: Engine[Any, Any]) -> None:
        self._started = None


class BasicTimeProfiler(_Profiler):
    """Measure how long a run takes to fetch batches, to process them, and to call the handlers of each event.

    Each run is measured separately, whatever its length and however it ends. The profiler never waits for a device:
    work that a GPU still does when a function returns counts where the run waits for it.

    Attributes:
        max_epochs: target of the run, ``None`` if that is a number of iterations.
        events_to_ignore: events whose handlers are not measured.

    >>> trainer = Engine(lambda engine, batch: batch)
    >>> profiler = BasicTimeProfiler()
    >>> profiler.attach(trainer)
    >>> state = trainer.run(range(3), max_epochs=2)
    >>> results = profiler.get_results()
    >>> list(results), list(results["processing_stats"])  # doctest: +NORMALIZE_WHITESPACE
    (['processing_stats', 'dataflow_stats', 'event_handlers_stats', 'event_handlers_names'],
     ['total', 'min/index', 'max/index', 'mean', 'std'])
    """

    events_to_ignore: ClassVar[list[Events]] = [event for event in Events if event not in _MEASURED]

    def __init__(self) -> None:
        super().__init__()
        self.max_epochs: int | None = None
        self._events = {event: _Samples() for event in _MEASURED}

    def _start(self, engine: Engine[Any, Any]) -> None:
        super()._start(engine)
        for samples in self._events.values():
            samples.clear()
        self.max_epochs = engine.state.max_epochs

    def _hooks(self) -> Iterator[Hook]:
        yield from super()._hooks()
        for event in _MEASURED:
            yield from self._hooks_around(event)

    def _hooks_around(self, event: Events) -> Iterator[Hook]:
        shift = -1 if event in _AFTER_PROCESSING else 0
        add_seconds, add_row = self._events[event].seconds.append, self._events[event].rows.append
        started: float | None = None

        def start(engine: Engine[Any, Any]) -> None:
            nonlocal started
            started = perf_counter()

        def end(engine: Engine[Any, Any]) -> None:
            if started is not None:
                add_seconds(perf_counter() - started)
                add_row(len(self._epochs) + shift)

        yield event, start, Order.TIME_FIRST
        yield event, end, Order.TIME_LAST

    @property
    def total_num_iters(self) -> int:
        """Number of iterations in the run whose processing has started."""
        return len(self._epochs)

    @property
    def processing_times(self) -> Tensor:
        """Seconds of each call of the process function."""
        return _tensor(self._processes.seconds)

    @property
    def dataflow_times(self) -> Tensor:
        """Seconds that each batch took to be fetched."""
        return _tensor(self._fetches.seconds)

    @property
    def event_handlers_times(self) -> dict[Events, Tensor]:
        """Seconds that the handlers took each time an event fired, by event."""
        return {event: _tensor(samples.seconds) for event, samples in self._events.items()}

    @property
    def event_handlers_names(self) -> dict[Events, list[str]]:
        """Qualified names of the handlers that were attached during the run, by event."""
        calls = self._calls.values()
        return {event: [one.handler for one in calls if one.event == event.name] for event in _MEASURED}

    def get_results(self) -> dict[str, dict[str, Any]]:
        """Return statistics in seconds; can also be called during a run.

        Returns:
            ``processing_stats`` and ``dataflow_stats`` have the ``total``, and with two or more samples ``min/index``
            and ``max/index``, each a value and the index of the sample, ``mean`` and ``std``.
            ``event_handlers_stats`` has the same for each event by name, and the ``total_time`` of all, a tensor.
            ``event_handlers_names`` has lists of names as ``<EVENT>_names``.
        """

        def statistics(samples: _Samples) -> dict[str, Any]:
            found = _statistics(samples.seconds)
            return found if len(samples.seconds) > 1 else {"total": found.get("total", "not yet triggered")}

        handlers: dict[str, Any] = {event.name: statistics(samples) for event, samples in self._events.items()}
        handlers["total_time"] = sum((times.sum() for times in self.event_handlers_times.values()), torch.tensor(0.0))
        return OrderedDict(
            processing_stats=statistics(self._processes),
            dataflow_stats=statistics(self._fetches),
            event_handlers_stats=handlers,
            event_handlers_names={f"{event.name}_names": names for event, names in self.event_handlers_names.items()},
        )

    def write_results(self, output_path: str | os.PathLike[str]) -> None:
        """Write a CSV file with one row per iteration: epoch, iteration, and seconds.

        Events that do not fire in each iteration count in the row in which they fired, or in the next one, so that
        each column adds up to the total.
        """
        size = self.total_num_iters
        columns: dict[str, Iterable[Any]] = {
            "epoch": self._epochs,
            "iteration": self._iterations,
            "processing_stats": self._processes.column(size),
            "dataflow_stats": self._fetches.column(size),
            **{f"Event_{event.name}": samples.column(size) for event, samples in self._events.items()},
        }
        _write_table(output_path, columns, columns.values())

    @staticmethod
    def print_results(results: Mapping[str, Mapping[str, Any]]) -> str:
        """Print what :meth:`get_results` returned, and return the text."""

        def line(statistics: Mapping[str, Any]) -> str:
            return " | ".join(_cell(value, ".5f") for value in statistics.values())

        events, names = results["event_handlers_stats"], results["event_handlers_names"]
        sections = [
            ("Processing function", line(results["processing_stats"])),
            ("Dataflow", line(results["dataflow_stats"])),
            ("Event handlers", f"{float(events['total_time']):.5f}"),
            *(
                (f"- Events.{event.name}: {list(names[f'{event.name}_names'])}", line(events[event.name]))
                for event in _PRINTED
            ),
        ]
        head = "Time profiling stats (in seconds):\ntotal  |  min/index  |  max/index  |  mean  |  std"
        text = "\n\n".join([head, *(f"{title}\n{line}" for title, line in sections)]) + "\n"
        print(text)  # noqa: T201  # its purpose
        return text


class HandlersTimeProfiler(_Profiler):
    """Measure how long each single handler takes, of the engine's events and of custom ones.

    Every call is measured, also of handlers that are attached or removed during the run, whatever the run's length and
    however it ends; a call that a filter rejected does not count. Handlers of an event that is fired inside a handler
    are measured separately from it; those of an event that the process function fires are also part of its time. Each
    run is measured separately. The profiler never waits for a device, see :class:`BasicTimeProfiler`.

    Attributes:
        EVENT_FILTER_THESHOLD_TIME: seconds; shorter calls of handlers of an event with a filter are ignored. Set it to
            0, on a profiler or on the class, to measure every call.

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
        super().__init__()
        self._nested = 0.0  # seconds of the handlers that the present one has fired

    def _timed(self, event: Any, registration: Registration, call: Invocation) -> Invocation:
        """Return the call of a handler with a clock around it."""
        super()._timed(event, registration, call)
        if registration.serial not in self._calls:
            return call
        seconds, is_filtered = self._calls[registration.serial].seconds, registration.is_filtered
        is_of_engine = isinstance(event, Events)  # otherwise the process function or a handler fires it

        def timed(engine: Engine[Any, Any]) -> Any:
            outside = self._outside
            outer, self._nested = self._nested, 0.0
            started = perf_counter()
            try:
                return call(engine)
            finally:
                took = perf_counter() - started
                if not is_filtered or took >= self.EVENT_FILTER_THESHOLD_TIME:
                    seconds.append(took - self._nested)
                self._nested = outer + took
                if is_of_engine:
                    self._outside = outside + took

        return timed

    @property
    def processing_times(self) -> list[float]:
        """Seconds of each call of the process function."""
        return list(self._processes.seconds)

    @property
    def dataflow_times(self) -> list[float]:
        """Seconds that each batch took to be fetched."""
        return list(self._fetches.seconds)

    @property
    def event_handlers_times(self) -> dict[Any, dict[str, list[float]]]:
        """Seconds of each call, by event and by name of the handler; handlers with the same name share a list."""
        times: dict[Any, dict[str, list[float]]] = {event: {} for event in Events}
        for one in self._calls.values():
            times.setdefault(one.event, {}).setdefault(one.handler, []).extend(one.seconds)
        return times

    def get_results(self) -> list[list[Any]]:
        """Return statistics in seconds, rounded to 5 digits; can also be called during a run.

        Returns:
            For each handler ``[name, event name, total, (min, index), (max, index), mean, std]``, where the index is
            that of the call, from 0; then the same for ``Total``, which has only the total, ``Processing`` and
            ``Dataflow``.
        """

        def row(name: str, event: str, seconds: array[float]) -> list[Any]:
            if not seconds:
                return [name, event, "not triggered", *["None"] * 4]
            total, (low, low_index), (high, high_index), mean, std = _statistics(seconds).values()
            total, low, high, mean, std = (round(one, 5) for one in (total, low, high, mean, std))
            return [name, event, total, (low, low_index), (high, high_index), mean, std]

        calls = self._calls.values()
        total = sum(sum(one.seconds) for one in calls)
        return [
            *(row(*one) for one in calls),
            ["Total", "", round(total, 5), "", "", "", ""],
            row("Processing", "None", self._processes.seconds),
            row("Dataflow", "None", self._fetches.seconds),
        ]

    def write_results(self, output_path: str | os.PathLike[str]) -> None:
        """Write a CSV file with a row per sample and a column per handler, padded with zeros."""
        calls = self._calls.values()
        names = ["#", "processing_stats", "dataflow_stats", *(f"{one.handler} ({one.event})" for one in calls)]
        seconds = [self._processes.seconds, self._fetches.seconds, *(one.seconds for one in calls)]
        _write_table(output_path, names, [range(1, max(map(len, seconds)) + 1), *seconds])

    @staticmethod
    def print_results(results: Sequence[Sequence[Any]]) -> str:
        """Print what :meth:`get_results` returned as a table, and return the text."""
        titles = ("Handler", "Event Name", "Total(s)", "Min(s)/IDX", "Max(s)/IDX", "Mean(s)", "Std(s)")
        rows = [titles, *(list(map(_cell, row)) for row in results)]
        print(aligned(rows, Look.of(sys.stdout)))  # noqa: T201  # its purpose
        return aligned(rows)


def _tensor(seconds: array[float]) -> Tensor:
    return torch.tensor(seconds.tolist(), dtype=torch.float64)


def _statistics(seconds: array[float]) -> dict[str, Any]:
    """Return statistics, which are empty without samples.

    >>> _statistics(array("d", [1.0, 3.0]))
    {'total': 4.0, 'min/index': (1.0, 0), 'max/index': (3.0, 1), 'mean': 2.0, 'std': 1.4142135623730951}
    """
    if not seconds:
        return {}
    values = _tensor(seconds)
    low, high = int(values.argmin()), int(values.argmax())
    return {
        "total": values.sum().item(),
        "min/index": (seconds[low], low),
        "max/index": (seconds[high], high),
        "mean": values.mean().item(),
        "std": values.std().item() if len(seconds) > 1 else 0.0,
    }


def _cell(value: Any, form: str = "") -> str:
    """Return a statistic as text.

    >>> _cell((1.5, 3), ".2f"), _cell(2.0), _cell("not triggered", ".2f")
    ('1.50/3', '2.0', 'not triggered')
    """
    if isinstance(value, tuple):
        return f"{value[0]:{form}}/{value[1]}"
    return format(value, form) if isinstance(value, float) else str(value)


def _write_table(path: str | os.PathLike[str], header: Iterable[str], columns: Iterable[Iterable[Any]]) -> None:
    """Write a CSV file; short columns are padded with zeros."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(zip_longest(*columns, fillvalue=0.0))
