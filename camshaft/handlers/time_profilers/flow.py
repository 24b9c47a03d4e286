"""What takes the time between events: fetching batches and processing them."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator
from time import perf_counter
from typing import Any

from camshaft.engine.engine import Engine
from camshaft.engine.events import Events, RemovableEventHandle
from camshaft.handlers.utils import check_engine

FIRST, LAST = -(2**100), 2**100
"""Orders of measuring hooks: before and after all handlers of an event, also those at ``sys.maxsize``."""

Hook = tuple[Any, Callable[..., object], int]


class Counts:
    """Integers of which most exceed the one before by ``step``: only the others take memory.

    >>> counts = Counts(step=1)
    >>> for one in (4, 5, 6, 9, 10):
    ...     counts.append(one)
    >>> list(counts), len(counts), len(counts._starts)
    ([4, 5, 6, 9, 10], 5, 2)
    """

    __slots__ = ("_expected", "_firsts", "_size", "_starts", "_step")

    def __init__(self, step: int) -> None:
        self._step = step
        self._starts, self._firsts = array("q"), array("q")
        self.clear()

    def clear(self) -> None:
        """Forget them."""
        del self._starts[:], self._firsts[:]
        self._size = 0
        self._expected: int | None = None

    def append(self, value: int) -> None:
        """Add one."""
        if value != self._expected:
            self._starts.append(self._size)
            self._firsts.append(value)
        self._size += 1
        self._expected = value + self._step

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        ends = [*self._starts[1:], self._size]
        for start, end, first in zip(self._starts, ends, self._firsts, strict=True) if self._size else ():
            for index in range(end - start):
                yield first + index * self._step


class Samples:
    """Seconds that something took, each with the row (the iteration of the run) that it belongs to."""

    __slots__ = ("rows", "seconds")

    def __init__(self) -> None:
        self.seconds = array("d")
        self.rows = Counts(step=1)

    def clear(self) -> None:
        """Forget them."""
        del self.seconds[:]
        self.rows.clear()

    def column(self, size: int) -> list[float]:
        """Give the seconds of each of so many rows; what was measured around the first and last is theirs too."""
        column = [0.0] * size
        for seconds, row in zip(self.seconds, self.rows, strict=True) if size else ():
            column[max(0, min(row, size - 1))] += seconds
        return column


class Hooks:
    """Whose methods measure an engine: hooks on events of it, which no profiler takes for handlers."""

    def __init__(self) -> None:
        self._reference: Callable[[], Engine[Any, Any] | None] = _nothing
        self._handles: list[RemovableEventHandle] = []

    @property
    def engine(self) -> Engine[Any, Any] | None:
        """The engine that these measure, if it is still there."""
        return self._reference()

    def attach(self, engine: Any) -> bool:
        """Hook on to an engine; say whether that was new.

        Raises:
            TypeError: it is no engine.
            ValueError: these measure another engine.
        """
        check_engine("engine", engine)
        attached = self.engine
        if attached is engine:
            return False
        if attached is not None:
            raise ValueError(f"engine must be the one that is measured already, got {engine!r}: use another profiler")
        self._reference = weakref.ref(engine)
        self._handles = [engine.add_event_handler(event, hook, order=order) for event, hook, order in self.hooks()]
        return True

    def detach(self) -> Engine[Any, Any] | None:
        """Take the hooks off; give the engine on which they were."""
        engine = self.engine
        for handle in self._handles:
            handle.remove()
        self._reference, self._handles = _nothing, []
        return engine

    def hooks(self) -> Iterable[Hook]:
        """Give events, hooks and orders."""
        raise NotImplementedError


def _nothing() -> None:
    return None


class Flow(Hooks):
    """Measures how long it takes to fetch each batch, and to process it.

    What is in between does not count: handlers of ``DATALOADER_STOP_ITERATION``, and pauses, of which nobody knows
    when they end; so the sample is left out in which a run was interrupted.

    Args:
        started: called when a run begins, before all its handlers.

    Attributes:
        fetches: of each batch; those that gave none are left out.
        processes: of each call of the process function that returned.
        epochs: the epoch of each iteration of the run whose processing began.
        iterations: its number.
        nested: seconds within the span being measured that are not to be counted; for who measures them.
    """

    def __init__(self, started: Callable[[Engine[Any, Any]], object]) -> None:
        super().__init__()
        self._started = started
        self.fetches, self.processes = Samples(), Samples()
        self.epochs, self.iterations = Counts(step=0), Counts(step=1)
        self.nested = self._nested_before = 0.0
        self._began: float | None = None
        self._stopped = 0.0

    def hooks(self) -> Iterable[Hook]:
        """Give events, hooks and orders; these come before and after the hooks around handlers."""
        yield Events.STARTED, self.start, FIRST - 1
        yield Events.GET_BATCH_STARTED, self.fetching, LAST + 1
        yield Events.DATALOADER_STOP_ITERATION, self.stop, FIRST - 1
        yield Events.DATALOADER_STOP_ITERATION, self.go_on, LAST + 1
        yield Events.GET_BATCH_COMPLETED, self.fetched, FIRST - 1
        yield Events.ITERATION_STARTED, self.processing, LAST + 1
        yield Events.ITERATION_COMPLETED, self.processed, FIRST - 1
        yield Events.INTERRUPT, self.drop, LAST + 1

    def start(self, engine: Engine[Any, Any]) -> None:
        """Begin a run: forget the one before."""
        self.fetches.clear()
        self.processes.clear()
        self.epochs.clear()
        self.iterations.clear()
        self._began = None
        self._started(engine)

    def fetching(self, engine: Engine[Any, Any]) -> None:
        """Begin to fetch a batch: what was begun before is not going to end."""
        self.nested = 0.0
        self._began = perf_counter()

    def processing(self, engine: Engine[Any, Any]) -> None:
        """Begin to process a batch."""
        state = engine.state
        self.epochs.append(state.epoch)
        self.iterations.append(state.iteration)
        self.nested = 0.0
        self._began = perf_counter()

    def stop(self, engine: Engine[Any, Any]) -> None:
        """Stop the clock of a fetch."""
        self._stopped, self._nested_before = perf_counter(), self.nested

    def go_on(self, engine: Engine[Any, Any]) -> None:
        """Let the clock of a fetch go on."""
        if self._began is not None:
            self._began += perf_counter() - self._stopped
            self.nested = self._nested_before

    def fetched(self, engine: Engine[Any, Any]) -> None:
        """End the fetch of a batch."""
        if self._began is not None:
            self.fetches.seconds.append(perf_counter() - self._began - self.nested)
            self.fetches.rows.append(len(self.epochs))
            self._began = None

    def processed(self, engine: Engine[Any, Any]) -> None:
        """End the processing of a batch."""
        if self._began is not None:
            self.processes.seconds.append(perf_counter() - self._began - self.nested)
            self.processes.rows.append(len(self.epochs) - 1)
            self._began = None

    def drop(self, engine: Engine[Any, Any]) -> None:
        """Give up a span in which the run pauses."""
        self._began = None
