"""Time profilers: how long a run fetches data, processes it, and calls handlers."""

from __future__ import annotations

import csv
import os
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import Any, ClassVar

import torch
from torch import Tensor

from camshaft.engine.dispatch import Invocation, Registration
from camshaft.engine.engine import Engine
from camshaft.engine.events import Events, FailureEvents, Order, RemovableEventHandle
from camshaft.handlers.utils import check_engine

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
    """Durations in seconds, each with its row: the index of the iteration in the run. Rows hardly take memory."""

    __slots__ = ("_jumps", "_next_row", "seconds")

    def __init__(self) -> None:
        self.seconds = array("d")
        self._jumps: dict[int, int] = {}  # rows by index, where they do not follow the row before
        self._next_row = -1

    def append(self, seconds: float, row: int) -> None:
        if row != self._next_row:
            self._jumps[len(self.seconds)] = row
        self._next_row = row + 1
        self.seconds.append(seconds)

    def column(self, size: int) -> list[float]:
        """Return the seconds in each of ``size`` rows; those outside count in the first or last row."""
        column, row = [0.0] * size, -1
        for index, seconds in enumerate(self.seconds if size else ()):
            row = self._jumps.get(index, row + 1)
            column[max(0, min(row, size - 1))] += seconds
        return column


class _Profiler:
    """Measures how long each batch takes to be fetched and processed.

    Two intervals in between are not measured: handlers of ``DATALOADER_STOP_ITERATION``, and pauses of a run, whose
    end fires no event, so that the interrupted sample is dropped.
    """

    def __init__(self) -> None:
        self._engine: Callable[[], Engine[Any, Any] | None] = _no_engine
        self._handles: list[RemovableEventHandle] = []
        self._reset()

    def _reset(self) -> None:
        self._fetches, self._processes = _Samples(), _Samples()
        self._num_rows = 0
        self._jumps: list[tuple[int, int, int]] = []  # row, epoch and iteration where they do not follow the row before
        self._epoch = self._iteration = -1
        self._started: float | None = None
        self._nested = 0.0  # seconds since then that are not measured here
        self._paused = 0.0, 0.0

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

    def detach(self) -> None:
        """Stop measuring; the results are kept."""
        for handle in self._handles:
            handle.remove()
        self._engine, self._handles = _no_engine, []

    def _hooks(self) -> Iterator[Hook]:
        first, last = Order.TIME_FIRST - 1, Order.TIME_LAST + 1  # outside of the hooks that measure handlers
        yield Events.STARTED, self._start, first
        yield Events.GET_BATCH_STARTED, self._fetch, last
        yield Events.DATALOADER_STOP_ITERATION, self._pause, first
        yield Events.DATALOADER_STOP_ITERATION, self._resume, last
        yield Events.GET_BATCH_COMPLETED, self._fetched, first
        yield Events.ITERATION_STARTED, self._process, last
        yield Events.ITERATION_COMPLETED, self._processed, first
        yield Events.INTERRUPT, self._drop, last

    def _start(self, engine: Engine[Any, Any]) -> None:
        self._reset()

    def _fetch(self, engine: Engine[Any, Any]) -> None:
        self._nested = 0.0
        self._started = perf_counter()

    def _fetched(self, engine: Engine[Any, Any]) -> None:
        if self._started is not None:
            self._fetches.append(perf_counter() - self._started - self._nested, self._num_rows)
            self._started = None

    def _process(self, engine: Engine[Any, Any]) -> None:
        epoch, iteration = engine.state.epoch, engine.state.iteration
        if iteration != self._iteration + 1 or epoch != self._epoch:
            self._jumps.append((self._num_rows, epoch, iteration))
        self._epoch, self._iteration = epoch, iteration
        self._num_rows += 1
        self._nested = 0.0
        self._started = perf_counter()

    def _processed(self, engine: Engine[Any, Any]) -> None:
        if self._started is not None:
            self._processes.append(perf_counter() - self._started - self._nested, self._num_rows - 1)
            self._started = None

    def _pause(self, engine: Engine[Any, Any]) -> None:
        self._paused = perf_counter(), self._nested

    def _resume(self, engine: Engine[Any, Any]) -> None:
        if self._started is not None:
            paused_at, self._nested = self._paused
            self._started += perf_counter() - paused_at

    def _drop(self, engine: Engine[Any, Any]) -> None:
        self._started = None


def _no_engine() -> None:
    return None


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

    def _reset(self) -> None:
        super()._reset()
        self._events = {event: _Samples() for event in _MEASURED}
        self._names: dict[int, tuple[Events, str]] = {}

    def _start(self, engine: Engine[Any, Any]) -> None:
        super()._start(engine)
        self.max_epochs = engine.state.max_epochs
        self._find_names()

    def detach(self) -> None:
        """Stop measuring; the results are kept."""
        self._find_names()
        super().detach()

    def _hooks(self) -> Iterator[Hook]:
        yield from super()._hooks()
        for event in _MEASURED:
            yield from self._hooks_around(event)

    def _hooks_around(self, event: Events) -> Iterator[Hook]:
        shift = -1 if event in _AFTER_PROCESSING else 0
        started: float | None = None

        def start(engine: Engine[Any, Any]) -> None:
            nonlocal started
            started = perf_counter()

        def end(engine: Engine[Any, Any]) -> None:
            nonlocal started
            if started is not None:
                self._events[event].append(perf_counter() - started, self._num_rows + shift)
                started = None

        yield event, start, Order.TIME_FIRST
        yield event, end, Order.TIME_LAST

    def _find_names(self) -> None:
        """Note the current handlers, after those that were there before."""
        engine = self._engine()
        if engine is None:
            return
        for event in _MEASURED:
            for one in engine._dispatcher.plans[event].registrations:
                if not _is_hook(one):
                    self._names[one.serial] = event, _name_of(one.handler)

    @property
    def total_num_iters(self) -> int:
        """Number of iterations in the run whose processing has started."""
        return self._num_rows

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
        self._find_names()
        return {event: [name for one, name in self._names.values() if one is event] for event in _MEASURED}

    def get_results(self) -> dict[str, dict[str, Any]]:
        """Return statistics in seconds; can also be called during a run.

        Returns:
            ``processing_stats`` and ``dataflow_stats`` have the ``total``, and with two or more samples ``min/index``
            and ``max/index``, each a value and the index of the sample, ``mean`` and ``std``.
            ``event_handlers_stats`` has the same for each event by name, and the ``total_time`` of all, a tensor.
            ``event_handlers_names`` has lists of names as ``<EVENT>_names``.
        """
        handlers: dict[str, Any] = {event.name: _basic_statistics(samples) for event, samples in self._events.items()}
        handlers["total_time"] = sum((times.sum() for times in self.event_handlers_times.values()), torch.tensor(0.0))
        return OrderedDict(
            processing_stats=_basic_statistics(self._processes),
            dataflow_stats=_basic_statistics(self._fetches),
            event_handlers_stats=handlers,
            event_handlers_names={f"{event.name}_names": names for event, names in self.event_handlers_names.items()},
        )

    def write_results(self, output_path: str | os.PathLike[str]) -> None:
        """Write a CSV file with one row per iteration: epoch, iteration, and seconds.

        Events that do not fire in each iteration count in the row in which they fired, or in the next one, so that
        each column adds up to the total.
        """
        size = self._num_rows
        bounds = pairwise([*(row for row, _, _ in self._jumps), size])
        rows = [
            (epoch, iteration + index)
            for (_, epoch, iteration), (start, end) in zip(self._jumps, bounds, strict=True)
            for index in range(end - start)
        ]
        columns: dict[str, list[Any]] = {
            "epoch": [epoch for epoch, _ in rows],
            "iteration": [iteration for _, iteration in rows],
            "processing_stats": self._processes.column(size),
            "dataflow_stats": self._fetches.column(size),
            **{f"Event_{event.name}": samples.column(size) for event, samples in self._events.items()},
        }
        _write_table(output_path, columns, columns.values())

    @staticmethod
    def print_results(results: Mapping[str, Mapping[str, Any]]) -> str:
        """Print what :meth:`get_results` returned, and return the text."""
        events, names = results["event_handlers_stats"], results["event_handlers_names"]
        sections = [
            ("Processing function", _line(results["processing_stats"])),
            ("Dataflow", _line(results["dataflow_stats"])),
            ("Event handlers", f"{float(events['total_time']):.5f}"),
            *(
                (f"- Events.{event.name}: {list(names[f'{event.name}_names'])}", _line(events[event.name]))
                for event in _PRINTED
            ),
        ]
        head = "Time profiling stats (in seconds):\ntotal  |  min/index  |  max/index  |  mean  |  std"
        text = "\n\n".join([head, *(f"{title}\n{line}" for title, line in sections)]) + "\n"
        print(text)  # noqa: T201  # its purpose
        return text


@dataclass
class _Calls:
    """Durations of the calls of one registered handler, without the handlers of events that it fired itself."""

    handler: str
    event: str
    seconds: array[float] = field(default_factory=lambda: array("d"))


class HandlersTimeProfiler(_Profiler):
    """Measure how long each single handler takes, of the engine's events and of custom ones.

    Every call is measured, also of handlers that are attached or removed during the run, whatever the run's length and
    however it ends; a call that a filter rejected does not count. Handlers of an event that is fired inside a handler
    or the process function are measured separately from it. Each run is measured separately. The profiler never waits
    for a device, see :class:`BasicTimeProfiler`.

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
        self._calls: dict[int, _Calls] = {}

    def attach(self, engine: Engine[Any, Any]) -> None:
        """Measure the runs of an engine. Attaching again to the same engine has no effect.

        Raises:
            TypeError: ``engine`` is not an Engine.
            ValueError: the profiler is attached to another engine.
        """
        is_new = self._engine() is not engine
        super().attach(engine)
        if is_new:
            engine._dispatcher.wrap(self._timed)

    def detach(self) -> None:
        """Stop measuring; the results are kept."""
        engine = self._engine()
        super().detach()
        if engine is not None:
            engine._dispatcher.unwrap(self._timed)

    def _start(self, engine: Engine[Any, Any]) -> None:
        """Keep what is registered now, sorted by event and order of the calls."""
        super()._start(engine)
        calls, self._calls = self._calls, {}
        for plan in engine._dispatcher.plans.values():
            for serial in (one.serial for one in plan.registrations if one.serial in calls):
                self._calls[serial] = calls[serial]
                del calls[serial].seconds[:]

    def _timed(self, event: Any, registration: Registration, call: Invocation) -> Invocation:
        """Return the call of a handler with a clock around it."""
        if _is_hook(registration) or isinstance(event, FailureEvents):
            return call
        name, event_name = _name_of(registration.handler), getattr(event, "name", event)
        seconds = self._calls.setdefault(registration.serial, _Calls(name, event_name)).seconds
        is_filtered = registration.is_filtered

        def timed(engine: Engine[Any, Any]) -> Any:
            outer, self._nested = self._nested, 0.0
            started = perf_counter()
            try:
                return call(engine)
            finally:
                took = perf_counter() - started
                if not is_filtered or took >= self.EVENT_FILTER_THESHOLD_TIME:
                    seconds.append(took - self._nested)
                self._nested = outer + took

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
        calls = self._calls.values()
        total = sum(sum(one.seconds) for one in calls)
        return [
            *(_row(one.handler, one.event, one.seconds) for one in calls),
            ["Total", "", round(total, 5), "", "", "", ""],
            _row("Processing", "None", self._processes.seconds),
            _row("Dataflow", "None", self._fetches.seconds),
        ]

    def write_results(self, output_path: str | os.PathLike[str]) -> None:
        """Write a CSV file with a row per sample and a column per handler, padded with zeros."""
        calls = list(self._calls.values())
        names = ["#", "processing_stats", "dataflow_stats", *(f"{one.handler} ({one.event})" for one in calls)]
        seconds = [self._processes.seconds, self._fetches.seconds, *(one.seconds for one in calls)]
        size = max(map(len, seconds))
        padded = [[*column, *[0.0] * (size - len(column))] for column in seconds]
        _write_table(output_path, names, [range(1, size + 1), *padded])

    @staticmethod
    def print_results(results: Sequence[Sequence[Any]]) -> str:
        """Print what :meth:`get_results` returned as a table, and return the text."""
        titles = ("Handler", "Event Name", "Total(s)", "Min(s)/IDX", "Max(s)/IDX", "Mean(s)", "Std(s)")
        table = [titles, *(tuple(map(_cell, row)) for row in results)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        rule = tuple("-" * width for width in widths)
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (rule, titles, rule, *table[1:], rule)]
        text = "\n".join(lines)
        print(text)  # noqa: T201  # its purpose
        return text


def _is_hook(registration: Registration) -> bool:
    """Return whether a handler belongs to a time profiler."""
    return abs(registration.order) >= Order.TIME_LAST


def _name_of(handler: Any) -> str:
    """Return the qualified name of a handler, of its class, or of the function of a partial.

    >>> _name_of(partial(sorted, reverse=True)), _name_of([].append), _name_of(object())
    ('sorted', 'list.append', 'object')
    """
    while isinstance(handler, partial):
        handler = handler.func
    return getattr(handler, "__qualname__", None) or type(handler).__qualname__


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


def _basic_statistics(samples: _Samples) -> dict[str, Any]:
    found = _statistics(samples.seconds)
    if len(samples.seconds) > 1:
        return found
    return {"total": found.get("total", "not yet triggered")}


def _row(name: str, event: str, seconds: array[float]) -> list[Any]:
    if not seconds:
        return [name, event, "not triggered", *["None"] * 4]
    total, (low, low_index), (high, high_index), mean, std = _statistics(seconds).values()
    total, low, high, mean, std = (round(one, 5) for one in (total, low, high, mean, std))
    return [name, event, total, (low, low_index), (high, high_index), mean, std]


def _line(statistics: Mapping[str, Any]) -> str:
    """Return statistics as a line.

    >>> _line({"total": 3.0, "min/index": (1.0, 0), "max/index": (2.0, 1), "mean": 1.5, "std": 0.5})
    '3.00000 | 1.00000/0 | 2.00000/1 | 1.50000 | 0.50000'
    """
    pairs = (value if isinstance(value, tuple) else (value,) for value in statistics.values())
    return " | ".join(_cell(tuple(f"{one:.5f}" if isinstance(one, float) else one for one in pair)) for pair in pairs)


def _cell(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _write_table(path: str | os.PathLike[str], header: Iterable[str], columns: Iterable[Iterable[Any]]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(zip(*columns, strict=True))
