"""Traces of torch's profiler for some iterations of a run."""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from torch.profiler import profile, schedule

from camshaft.arguments import check_callable, check_keywords, integer
from camshaft.distributed import get_rank
from camshaft.engine.engine import Engine, check_engine
from camshaft.engine.events import Events, FailureEvents, Order, RemovableEventHandle, joined

__all__ = ["TorchProfiler"]

logger = logging.getLogger(__name__)


class TorchProfiler:
    """Profile some iterations of a run with ``torch.profiler``, and write a trace on each rank.

    An iteration extends from the end of the previous iteration to its own end, including its handlers and the fetch of
    its batch. The cycle of ``wait``, ``warmup`` and ``active`` iterations starts with the run. A run that ends early,
    fails or pauses during a cycle leaves a trace of what was recorded; the next cycle starts after that.

    The traces are files ``rank<rank>.<time>.pt.trace.json``. TensorBoard's profiler plugin shows them if they are in
    its log directory, and so do Perfetto (https://ui.perfetto.dev) and Chrome (``chrome://tracing``). A trace that
    cannot be written causes a warning.

    Args:
        directory: directory for the traces; created if missing.
        wait: number of iterations to skip at the start of a cycle.
        warmup: number of iterations to profile without recording, since the first ones are slow.
        active: number of iterations to record.
        repeat: number of cycles in a run; 0 for no limit.
        skip_first: number of iterations to skip before the first cycle.
        ranks: ranks to profile; all by default.
        compress: whether to write ``.json.gz``.
        on_trace_ready: called with torch's profiler after each trace, for example to print
            ``profiler.key_averages().table()``.
        options: arguments of ``torch.profiler.profile``: ``activities``, ``record_shapes``, ``profile_memory``,
            ``with_stack``, ``with_flops`` and others.

    Raises:
        TypeError: ``on_trace_ready`` is not callable, or an option is unknown to torch.
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
        counts = {"wait": wait, "warmup": warmup, "active": active, "repeat": repeat, "skip_first": skip_first}
        for name, count in counts.items():
            integer(name, count, least=1 if name == "active" else 0)
        check_callable("on_trace_ready", on_trace_ready)
        check_keywords(TorchProfiler, options, profile, "schedule")
        self.directory = Path(directory)
        self.traces: list[Path] = []
        # A profile is open for a cycle only: outside of cycles an iteration costs next to nothing.
        self._options = {"schedule": schedule(wait=0, warmup=warmup, active=active, repeat=1), **options}
        self._wait, self._repeat, self._skip_first = wait, repeat or math.inf, skip_first
        self._ranks = ranks
        self._suffix = ".pt.trace.json.gz" if compress else ".pt.trace.json"
        self._on_trace_ready = on_trace_ready
        self._profile: profile | None = None
        self._opened_at = 0  # the iteration in which it was opened
        self._cycles = 0  # cycles of this run that have left a trace
        self._skip = math.inf  # iterations to skip before the next cycle

    def attach(self, engine: Engine[Any, Any]) -> RemovableEventHandle:
        """Profile the runs of an engine.

        Returns:
            A handle that detaches the profiler.
        """
        check_engine("engine", engine)
        leaving = Events.TERMINATE | Events.COMPLETED | Events.INTERRUPT
        handles = [
            engine.add_event_handler(Events.STARTED, self._start, order=Order.MEASURE_FIRST),
            engine.add_event_handler(Events.ITERATION_COMPLETED, self._step, order=Order.MEASURE_LAST),
            engine.add_event_handler(leaving, self._leave, order=Order.MEASURE_FIRST),
            engine.add_event_handler(FailureEvents.ERROR_MET, self._leave),
        ]
        return joined(handles, Events.ITERATION_COMPLETED, self._step, engine)

    def _start(self, engine: Engine[Any, Any]) -> None:
        self._close()
        self._cycles = 0
        is_profiled = self._ranks is None or get_rank() in self._ranks
        self._skip = self._skip_first + self._wait if is_profiled else math.inf
        self._open_if_due(engine)

    def _step(self, engine: Engine[Any, Any]) -> None:
        if self._profile is None:
            self._skip -= 1
        else:
            cycles = self._cycles
            self._profile.step()
            if self._cycles > cycles:
                self._close()
        self._open_if_due(engine)

    def _leave(self, engine: Engine[Any, Any]) -> None:
        """End the current cycle, and write what was recorded if an iteration has started since."""
        if self._profile is not None and engine.state.iteration == self._opened_at:
            self._profile.on_trace_ready = None
        self._close()

    def _open_if_due(self, engine: Engine[Any, Any]) -> None:
        if self._profile is None and self._skip <= 0:
            self._opened_at = engine.state.iteration
            self._profile = profile(on_trace_ready=self._write, **self._options)
            self._profile.__enter__()  # type: ignore[no-untyped-call]  # torch has no types for it

    def _close(self) -> None:
        running, self._profile = self._profile, None
        if running is not None:
            running.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch has no types for it
        self._skip = self._wait if self._cycles < self._repeat else math.inf

    def _write(self, running: profile) -> None:
        # not with tensorboard_trace_handler, which does not return the path; the names are the same
        self._cycles += 1
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"rank{get_rank()}.{time.time_ns()}{self._suffix}"
        try:
            running.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:  # torch raises the latter if the disk is full
            warnings.warn(f"TorchProfiler cannot write to {self.directory}, the trace is lost: {error}", stacklevel=2)
        else:
            self.traces.append(path)
            logger.info("Wrote a trace to %s", path)
        if self._on_trace_ready is not None:
            self._on_trace_ready(running)
