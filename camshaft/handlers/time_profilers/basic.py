"""The time that each part of a run takes: data, processing, and the handlers of each event together."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sized
from time import perf_counter
from typing import Any, ClassVar

import torch
from torch import Tensor

from camshaft.engine.engine import Engine
from camshaft.engine.events import Events
from camshaft.handlers.time_profilers.flow import FIRST, LAST, Flow, Hook, Hooks, Samples
from camshaft.handlers.time_profilers.tables import Statistics, name_of, write_table

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
_SHOWN = _MEASURED[:1] + _MEASURED[2:6] + _MEASURED[1:2]


class BasicTimeProfiler:
    """Measures how long a run takes to fetch batches, to process them, and to call the handlers of each event.

    It measures each run anew, whatever its length and however it ends. It waits for no device: work that a GPU still
    does when a function returns counts where the run waits for it.

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
        self.max_epochs: int | None = None
        self._flow = Flow(self._start)
        self._spans = [Span(event, self._flow.epochs) for event in _MEASURED]
        self._names: dict[int, tuple[Events, str]] = {}

    def attach(self, engine: Engine[Any, Any]) -> None:
        """Measure the runs of an engine. To do so twice is to do so once.

        Raises:
            TypeError: it is no engine.
            ValueError: this measures another engine already.
        """
        if self._flow.attach(engine):
            for span in self._spans:
                span.attach(engine)

    def detach(self) -> None:
        """Leave the engine; the results stay."""
        self._find_names(self._flow.detach())
        for span in self._spans:
            span.detach()

    @property
    def total_num_iters(self) -> int:
        """Iterations of the run so far whose processing began."""
        return len(self._flow.epochs)

    @property
    def processing_times(self) -> Tensor:
        """Seconds of each call of the process function."""
        return _tensor(self._flow.processes)

    @property
    def dataflow_times(self) -> Tensor:
        """Seconds that each batch took to come."""
        return _tensor(self._flow.fetches)

    @property
    def event_handlers_times(self) -> dict[Events, Tensor]:
        """Seconds that the handlers took at each firing, by event."""
        return {span.event: _tensor(span.samples) for span in self._spans}

    @property
    def event_handlers_names(self) -> dict[Events, list[str]]:
        """Qualified names of the handlers that there are or were in the run, by event."""
        self._find_names(self._flow.engine)
        return {event: [name for one, name in self._names.values() if one is event] for event in _MEASURED}

    def get_results(self) -> dict[str, dict[str, Any]]:
        """Give statistics, in seconds; also in the middle of a run.

        Returns:
            ``processing_stats`` and ``dataflow_stats`` have the ``total``, and if there are two samples or more
            ``min/index`` and ``max/index``, each a value and the number of the sample, ``mean`` and ``std``.
            ``event_handlers_stats`` has the same for each event by name, and ``total_time`` of all, a tensor.
            ``event_handlers_names`` has lists of names as ``<EVENT>_names``.
        """
        handlers: dict[str, Any] = {span.event.name: _statistics(span.samples) for span in self._spans}
        handlers["total_time"] = sum((times.sum() for times in self.event_handlers_times.values()), torch.tensor(0.0))
        return OrderedDict(
            processing_stats=_statistics(self._flow.processes),
            dataflow_stats=_statistics(self._flow.fetches),
            event_handlers_stats=handlers,
            event_handlers_names={f"{event.name}_names": names for event, names in self.event_handlers_names.items()},
        )

    def write_results(self, output_path: str | os.PathLike[str]) -> None:
        """Write a CSV file with one row per iteration.

        The columns are epoch, iteration, and seconds; those of events, which need not fire in each iteration, stand
        in the row where they fired, or that follows, so that each column adds up to the total.
        """
        flow, size = self._flow, self.total_num_iters
        columns = {"epoch": list(flow.epochs), "iteration": list(flow.iterations)}
        times = {
            "processing_stats": flow.processes,
            "dataflow_stats": flow.fetches,
            **{f"Event_{span.event.name}": span.samples for span in self._spans},
        }
        seconds = [samples.column(size) for samples in times.values()]
        write_table(output_path, [*columns, *times], [*columns.values(), *seconds])

    @staticmethod
    def print_results(results: Mapping[str, Mapping[str, Any]]) -> str:
        """Print what :meth:`get_results` gave, and give that text."""
        events, names = results["event_handlers_stats"], results["event_handlers_names"]
        parts = [
            ("Processing function", _line(results["processing_stats"])),
            ("Dataflow", _line(results["dataflow_stats"])),
            ("Event handlers", f"{float(events['total_time']):.5f}"),
            *(
                (f"- Events.{event.name}: {list(names[f'{event.name}_names'])}", _line(events[event.name]))
                for event in _SHOWN
            ),
        ]
        head = "Time profiling stats (in seconds):\ntotal  |  min/index  |  max/index  |  mean  |  std"
        text = "\n\n".join([head, *(f"{title}\n{line}" for title, line in parts)]) + "\n"
        print(text)  # noqa: T201  # what it is for
        return text

    def _start(self, engine: Engine[Any, Any]) -> None:
        self.max_epochs = engine.state.max_epochs
        self._names = {}
        self._find_names(engine)
        for span in self._spans:
            span.reset()

    def _find_names(self, engine: Engine[Any, Any] | None) -> None:
        """Take down the handlers that there are now, behind those that there were."""
        if engine is None:
            return
        for event in _MEASURED:
            for one in engine._dispatcher.plans[event].registrations:
                if not isinstance(getattr(one.handler, "__self__", None), Hooks):
                    self._names[one.serial] = event, name_of(one.handler)


class Span(Hooks):
    """The time from before all handlers of an event to after them."""

    def __init__(self, event: Events, rows: Sized) -> None:
        super().__init__()
        self.event = event
        self.samples = Samples()
        self._rows = rows
        self._shift = -1 if event in _AFTER_PROCESSING else 0
        self._began: float | None = None

    def reset(self) -> None:
        """Forget what was measured."""
        self.samples.clear()
        self._began = None

    def hooks(self) -> Iterable[Hook]:
        """Give events, hooks and orders."""
        yield self.event, self.begin, FIRST
        yield self.event, self.end, LAST

    def begin(self, engine: Engine[Any, Any]) -> None:
        """Begin a firing; one that was begun before has failed."""
        self._began = perf_counter()

    def end(self, engine: Engine[Any, Any]) -> None:
        """End a firing."""
        if self._began is not None:
            self.samples.seconds.append(perf_counter() - self._began)
            self.samples.rows.append(len(self._rows) + self._shift)
            self._began = None


def _tensor(samples: Samples) -> Tensor:
    return torch.tensor(samples.seconds.tolist(), dtype=torch.float64)


def _statistics(samples: Samples) -> dict[str, Any]:
    found = Statistics.of(samples.seconds.tolist())
    if found is None:
        return {"total": "not yet triggered"}
    if len(samples.seconds) == 1:
        return {"total": found.total}
    values = (found.total, found.smallest, found.largest, found.mean, found.std)
    return dict(zip(("total", "min/index", "max/index", "mean", "std"), values, strict=True))


def _line(statistics: Mapping[str, Any]) -> str:
    """Put statistics into a line.

    >>> _line({"total": 3.0, "min/index": (1.0, 0), "max/index": (2.0, 1), "mean": 1.5, "std": 0.5})
    '3.00000 | 1.00000/0 | 2.00000/1 | 1.50000 | 0.50000'
    """
    parts = []
    for value in statistics.values():
        value, *index = value if isinstance(value, tuple) else (value,)
        text = value if isinstance(value, str) else f"{value:.5f}"
        parts.append("/".join([text, *map(str, index)]))
    return " | ".join(parts)
