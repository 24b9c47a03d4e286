"""What this process is doing: the engines that run, and the runs that ended before their target.

The engine writes here, and the watcher of a distributed job reads, from its own thread. Neither knows the other.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from itertools import count
from threading import RLock, get_ident
from time import monotonic, perf_counter, thread_time
from typing import Any, NamedTuple

from camshaft.errors import annotate, line_of_caller

TOGETHER = "stopped on all ranks together"
_LONGEST = 200  # characters of the text of an error

logger = logging.getLogger(__name__)


class RunEnd(NamedTuple):
    """A run that left its loop before its target. The engine may still call handlers, such as those of ``COMPLETED``.

    Args:
        line: line of the call of ``run``, ``"FILE:LINE in f"``.
        number: how often this process had called ``run`` at that line, including this call.
        how: why, for example ``"terminate() at FILE:LINE in f"`` or ``"ValueError: text at FILE:LINE in f"``.
        epoch: epoch of the engine at that time.
        iteration: iteration of the engine at that time.
        time: ``time.monotonic()``.
    """

    line: str
    number: int
    how: str
    epoch: int
    iteration: int
    time: float


class OwnClock:
    """Measures the own time of the thread that creates it: all of it, except for that inside collectives."""

    def __init__(self) -> None:
        self._thread = get_ident()
        self._depth = 0  # of collectives inside of others
        self._seconds = self._cpu_seconds = 0.0  # inside collectives
        self._began = (0.0, 0.0)

    def seconds(self) -> float:
        """Return the seconds since some point in time."""
        return perf_counter() - self._seconds

    def cpu_seconds(self) -> float:
        """Return the seconds that the thread has used a processor."""
        return thread_time() - self._cpu_seconds

    def pause(self) -> None:
        """Stop, at the begin of a collective; on other threads, nothing happens."""
        if get_ident() == self._thread:
            if self._depth == 0:
                self._began = self.seconds(), self.cpu_seconds()
            self._depth += 1

    def resume(self) -> None:
        """Continue, at the end of a collective."""
        if get_ident() == self._thread and self._depth > 0:
            self._depth -= 1
            if self._depth == 0:
                self._seconds += self.seconds() - self._began[0]
                self._cpu_seconds += self.cpu_seconds() - self._began[1]


running: list[Any] = []
"""The engines that execute ``run``, of all threads; those of one thread from the outermost to the innermost."""

early_ends: deque[RunEnd] = deque(maxlen=8)
"""The last runs that left their loop early, oldest first."""

explainers: list[Callable[[BaseException], BaseException]] = []
"""Functions that get an error of a run before its handlers, and return it or an error to raise in its place."""

own_clock: OwnClock | None = None
"""The clock that collectives stop, while somebody measures the own time of a thread of this process."""

lock = RLock()
"""Held while :data:`running` changes."""

_numbers: dict[str, count[int]] = {}


def begin(engine: Any) -> Any:
    """Register an engine that executes ``run`` in this thread from now on; return the innermost one before, if any."""
    outer = next(reversed(in_thread()), None)
    line = line_of_caller()
    engine.run_line, engine.run_number = line, next(_numbers.setdefault(line, count(1)))
    engine.run_thread = get_ident()
    running.append(engine)
    return outer


def in_thread(thread: int | None = None) -> list[Any]:
    """Return the engines that run in a thread, by default this one, from the outermost to the innermost.

    Args:
        thread: identifier of the thread.
    """
    thread = get_ident() if thread is None else thread
    return [engine for engine in tuple(running) if engine.run_thread == thread]


def left_early(engine: Any, how: str) -> None:
    """Record that the run of an engine leaves its loop before its target."""
    state = engine.state
    early_ends.append(RunEnd(engine.run_line, engine.run_number, how, state.epoch, state.iteration, monotonic()))


def summary(error: BaseException) -> str:
    """Return the type and the text of an error in one line of limited length."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # a broken __str__ must not hide the error
        text = ""
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def explained(error: BaseException) -> BaseException:
    """Return what the explainers make of an error: the error itself, or the one to raise in its place.

    A replacement gets the notes of the error, and its traceback unless it has one. An explainer that fails, or does not
    return an exception, is ignored.
    """
    for explain in tuple(explainers):
        try:
            other = explain(error)
        except Exception:
            logger.exception("An explainer of errors failed: %r", explain)
            continue
        if other is error or not isinstance(other, BaseException):
            continue
        for note in getattr(error, "__notes__", ()):
            if note not in getattr(other, "__notes__", ()):
                annotate(other, note)
        error = other if other.__traceback__ is not None else other.with_traceback(error.__traceback__)
    return error
