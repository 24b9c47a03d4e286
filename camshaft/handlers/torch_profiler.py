"""Traces of torch's profiler, for some iterations of a run."""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerAction, profile

from camshaft.distributed import get_rank
from camshaft.engine.engine import Engine
from camshaft.engine.events import Events, FailureEvents, RemovableEventHandle
from camshaft.handlers.utils import check_callable, check_engine, joined

__all__ = ["TorchProfiler"]

_FIRST, _LAST = -(2**40), 2**40  # of the handlers of an event, but within those of the profilers of handlers

logger = logging.getLogger(__name__)


class TorchProfiler:
    """Profiles some iterations of a run with ``torch.profiler``, and writes a trace of each rank.

    An iteration is one from the end of the iteration before to its own end, with its handlers and with the fetch of its
    batch. The cycle of ``wait``, ``warmup`` and ``active`` iterations begins with the run. A run that ends early, fails
    or pauses in the middle of a cycle leaves a trace of what was recorded; the next cycle begins after that.

    The traces are files ``rank<rank>.<time>.pt.trace.json``: TensorBoard's profiler plugin shows them if its log
    directory is theirs or above it, and so do Perfetto (https://ui.perfetto.dev) and Chrome (``chrome://tracing``).

    Args:
        directory: where the traces go; made if it is not there.
        wait: iterations to leave out at the beginning of a cycle.
        warmup: iterations to profile without recording them: the first ones are slow.
        active: iterations to record.
        repeat: cycles in a run, 0 for as many as fit in it.
        skip_first: iterations to leave out before the first cycle.
        ranks: which ranks are profiled, all if ``None``.
        compress: write ``.json.gz``.
        on_trace_ready: called with torch's profiler after each trace; for ``profiler.key_averages().table()``, say.
        options: for ``torch.profiler.profile``: ``activities``, ``record_shapes``, ``profile_memory``, ``with_stack``,
            ``with_flops`` and more.

    Raises:
        TypeError: ``on_trace_ready`` is not callable, or an option is none of torch's.
        ValueError: a number of iterations is negative, or ``active`` is 0.

    Attributes:
        traces: paths of the traces that this rank has written.

    >>> import tempfile
    >>> import torch
    >>> trainer = Engine(lambda engine, batch: torch.ones(2, 2) @ torch.ones(2, 2))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     profiler = TorchProfiler(directory, wait=1, warmup=1, active=2)
    ...     handle = profiler.attach(trainer)
    ...     state = trainer.run(range(10))
    ...     [path.name.startswith("rank0.") for path in profiler.traces]
    [True]
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        wait: int = 1,
        warmup: int = 1,
        active: int = 3,
        repeat: int = 1,
        skip_first: int = 0,
        ranks: Collection[int] | None = None,
        compress: bool = False,
        on_trace_ready: Callable[[profile], object] | None = None,
        **options: Any,
    ) -> None:
        _check_cycle(wait=wait, warmup=warmup, active=active, repeat=repeat, skip_first=skip_first)
        check_callable("on_trace_ready", on_trace_ready)
        inspect.signature(profile).bind(schedule=None, **options)
        self.directory = Path(directory)
        self.traces: list[Path] = []
        self._wait, self._warmup, self._active = wait, warmup, active
        self._repeat, self._skip_first = repeat, skip_first
        self._ranks = ranks
        self._suffix = ".pt.trace.json.gz" if compress else ".pt.trace.json"
        self._on_trace_ready = on_trace_ready
        self._options = options
        self._profile: profile | None = None
        self._opened_at = 0  # this iteration
        self._cycles = 0  # of this run that have left a trace
        self._skip = math.inf  # iterations to leave out before the next cycle

    def attach(self, engine: Engine[Any, Any]) -> RemovableEventHandle:
        """Profile the runs of an engine; gives a handle that ends that."""
        check_engine("engine", engine)
        leaving = Events.TERMINATE | Events.COMPLETED | Events.INTERRUPT
        handles = [
            engine.add_event_handler(Events.STARTED, self._start, order=_FIRST),
            engine.add_event_handler(Events.ITERATION_COMPLETED, self._step, order=_LAST),
            engine.add_event_handler(leaving, self._leave, order=_FIRST),
            engine.add_event_handler(FailureEvents.ERROR_MET, self._leave),
        ]
        return joined(handles, Events.ITERATION_COMPLETED, self._step, engine)

    def _start(self, engine: Engine[Any, Any]) -> None:
        self._close()
        self._cycles = 0
        self._skip = math.inf
        if self._ranks is None or get_rank() in self._ranks:
            self._skip = self._skip_first + self._wait
            self._open_if_due(engine)

    def _step(self, engine: Engine[Any, Any]) -> None:
        """End an iteration."""
        if self._profile is None:
            self._skip -= 1
        else:
            cycles = self._cycles
            self._profile.step()
            if self._cycles > cycles:
                self._close()
        self._open_if_due(engine)

    def _leave(self, engine: Engine[Any, Any]) -> None:
        """End the cycle that is under way, and write what was recorded, if an iteration has begun since."""
        if self._profile is not None and engine.state.iteration == self._opened_at:
            self._profile.on_trace_ready = None
        self._close()

    def _open_if_due(self, engine: Engine[Any, Any]) -> None:
        if self._profile is None and self._skip <= 0:
            self._opened_at = engine.state.iteration
            self._profile = profile(schedule=self._action, on_trace_ready=self._write, **self._options)
            self._profile.__enter__()  # type: ignore[no-untyped-call]  # torch does not say

    def _close(self) -> None:
        running, self._profile = self._profile, None
        if running is not None:
            running.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch does not say
        self._skip = self._wait if self._cycles < (self._repeat or math.inf) else math.inf

    def _action(self, step: int) -> ProfilerAction:
        """Tell torch what to do in each iteration of a cycle, from the one after ``wait``."""
        left = self._warmup + self._active - step
        if left <= 0:
            return ProfilerAction.NONE
        if left > self._active:
            return ProfilerAction.WARMUP
        return ProfilerAction.RECORD if left > 1 else ProfilerAction.RECORD_AND_SAVE

    def _write(self, running: profile) -> None:
        self._cycles += 1
        self.directory.mkdir(parents=True, exist_ok=True)
        # in nanoseconds: TensorBoard takes the digits for the number of the trace
        path = self.directory / f"rank{get_rank()}.{time.time_ns()}{self._suffix}"
        running.export_chrome_trace(str(path))
        self.traces.append(path)
        logger.info("Wrote a trace to %s", path)
        if self._on_trace_ready is not None:
            self._on_trace_ready(running)


def _check_cycle(*, active: int, **counts: int) -> None:
    for name, count, least in (("active", active, 1), *((name, count, 0) for name, count in counts.items())):
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"{name} must be an int, got {count!r}")
        if count < least:
            raise ValueError(f"{name} must be at least {least}, got {count}")
