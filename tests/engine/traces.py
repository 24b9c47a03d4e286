"""Traces: what a run did, as a string that reads like the documented order of events.

`S ES GS GC IS IC EC C` is one epoch of one iteration. With counters each event is followed by
`epoch/iteration`. A dot may be written anywhere to set things apart, as in `flat("S 0/0 · ES 1/0")`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from camshaft.engine import Engine, Events

SHORT = {
    Events.STARTED: "S",
    Events.EPOCH_STARTED: "ES",
    Events.GET_BATCH_STARTED: "GS",
    Events.DATALOADER_STOP_ITERATION: "STOP",
    Events.GET_BATCH_COMPLETED: "GC",
    Events.ITERATION_STARTED: "IS",
    Events.ITERATION_COMPLETED: "IC",
    Events.EPOCH_COMPLETED: "EC",
    Events.COMPLETED: "C",
    Events.TERMINATE: "T",
    Events.TERMINATE_SINGLE_EPOCH: "TSE",
    Events.INTERRUPT: "INT",
}
"""All built-in events but `EXCEPTION_RAISED`, whose handlers swallow exceptions."""

IT = "GS GC IS IC"  # an iteration
IT_AGAIN = "GS STOP GC IS IC"  # the first iteration of a second pass
IT_BARE = "IS IC"  # an iteration without data


class Trace:
    """Collects the events of an engine, the batches it worked on, and the counters.

    Attributes:
        words: one for each event.
        batches: `state.batch` at each `ITERATION_STARTED`.
        counters: whether to write `epoch/iteration` after each event; `TSE` is always followed by
            `:iter_counter`.
    """

    def __init__(self, engine: Engine[Any, Any], counters: bool = False) -> None:
        self.words: list[str] = []
        self.batches: list[Any] = []
        self.counters = counters
        for event, word in SHORT.items():
            engine.add_event_handler(event, self._note, word)

    def _note(self, engine: Engine[Any, Any], word: str, iter_counter: int | None = None) -> None:
        if word == "IS":
            self.batches.append(engine.state.batch)
        word = word if iter_counter is None else f"{word}:{iter_counter}"
        self.words.append(f"{word} {engine.state.epoch}/{engine.state.iteration}" if self.counters else word)

    def take(self) -> str:
        """Return what was collected so far, and begin anew."""
        text = " ".join(self.words)
        self.words.clear()
        return text


def echo(engine: Engine[Any, Any], batch: Any) -> Any:
    return batch


def traced(step: Callable[[Any, Any], Any] = echo, counters: bool = False) -> tuple[Engine[Any, Any], Trace]:
    """Make an engine whose events are written down before any other handler runs."""
    engine = Engine(step)
    return engine, Trace(engine, counters)


def flat(*texts: str) -> str:
    """Join texts to one line with single blanks, without the dots that set things apart."""
    return " ".join(" ".join(texts).replace("·", " ").split())


def at(engine: Engine[Any, Any], event: Any, action: Callable[[Any], Any], firing: int = 1) -> None:
    """Call `action(engine)` at the n-th firing of an event, and never again."""
    fired = iter(range(1, firing + 1))
    engine.add_event_handler(event, lambda engine: action(engine) if next(fired, 0) == firing else None)


def at_position(engine: Engine[Any, Any], position: int, action: Callable[[Any], Any]) -> None:
    """Call `action(engine)` at the event of this number in the whole run, counted from 0."""
    fired = iter(range(position + 1))
    for event in SHORT:
        engine.add_event_handler(event, lambda engine: action(engine) if next(fired, -1) == position else None)


def unsized(batches: Iterable[Any]) -> Iterator[Any]:
    """Return batches once, without a length."""
    return iter(list(batches))


class Sizeless:
    """Data that can be iterated over again and again, but has no length."""

    def __init__(self, *batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)
