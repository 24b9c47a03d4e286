"""Stragglers: ranks that are slower than the others, which then have to wait for them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from statistics import median, median_low
from time import monotonic, perf_counter
from typing import Any

from camshaft import activity
from camshaft.activity import OwnClock
from camshaft.arguments import integer, number
from camshaft.distributed.failures import Watcher
from camshaft.distributed.job import current
from camshaft.engine.engine import Engine, check_engine
from camshaft.engine.events import Events, Order

__all__ = ["Stragglers"]

Found = dict[tuple[str, int], tuple[float, ...]]
"""By phase and rank, how many times the median a slow rank takes, its seconds per iteration, and the median."""

Times = Mapping[str, float]
"""Of a rank, in seconds per iteration: each phase that it measures, and ``iteration``; ``half`` is their number."""

_PHASES = {"loading": "data loading", "step": "the step"}
_PARTS = 5  # of half a window; their median counts, so that one disturbance does not
_LASTING = 30.0  # seconds to judge: on a machine with other work, one rank or another is slow for some seconds
_OFTEN = 0.8  # of the comparisons in that time
_LEAST = 0.05  # of the time of an iteration: what a rank must lose for a log message
_CHANGED = 1.5  # by what the factor of a straggler must change for another one
_AGAIN = 600.0  # seconds until it is repeated
_MOST = 8  # ranks in a message


class Stragglers:
    """Log which rank is slower than the others, in which phase of its work, and by which factor.

    Ranks that wait for each other all have iterations of the same length, however slow one of them is. Compared is
    therefore the own time of each rank, without the time inside collectives of :mod:`camshaft.distributed`:

    - *data loading*: seconds that it waits for the next batch;
    - *the step*: seconds in which the thread of the run uses a processor inside the process function. ``backward``
      reduces gradients out of sight, and waiting there takes no processor time. Neither does any other waiting, for a
      disk or in ``time.sleep``, so it does not count. Where the backend uses other devices than CPUs the step is not
      compared: threads that wait for a GPU are busy.

    Rank 0 logs a warning when a rank takes ``factor`` times as long as the median of the ranks (of an even number of
    ranks, the faster one in the middle), in both halves of a window, and loses 5% or more of the time of an iteration.
    If a window takes less than 30 s, that has to be so in 80% of the halves in 30 s: on machines with other work, even
    ranks differ for seconds. A half counts as the median of 5 parts of it. The warning is repeated if the factor
    changes by half, and after 10 minutes.

    Attach it on every rank. An iteration costs a few readings of clocks; nothing is exchanged by collectives, but by
    the thread that watches the job, once a second among the ranks of a node, and every 10 s among nodes. In a single
    process, nothing is measured.

    Args:
        factor: how many times the median a rank takes at least.
        window: number of iterations.

    Raises:
        TypeError: an argument is not a number.
        ValueError: ``factor`` is not above 1, or ``window`` is below 10.

    >>> trainer = Engine(lambda engine, batch: None)
    >>> Stragglers().attach(trainer)
    >>> state = trainer.run(range(10))
    """

    def __init__(self, factor: float = 1.3, window: int = 100) -> None:
        self._factor = number("factor", factor, above=1)
        self._part = -(-integer("window", window, least=2 * _PARTS) // (2 * _PARTS))  # iterations
        self.logger = logging.getLogger(f"{__name__}.{type(self).__name__}")
        self._is_attached = False
        self._compared: dict[int, float] = {}  # halves, by rank
        self._found: list[Found] = []  # by the comparisons that were not judged yet
        self._since = 0.0  # the first of them
        self._logged: dict[tuple[str, int], tuple[float, float]] = {}  # factor and time, by phase and rank

    def attach(self, engine: Engine[Any, Any]) -> None:
        """Measure the runs of an engine.

        Raises:
            TypeError: ``engine`` is not an Engine.
            RuntimeError: called a second time.
        """
        check_engine("engine", engine)
        if self._is_attached:
            raise RuntimeError("this Stragglers is already attached: create another one")
        self._is_attached = True
        engine.surround(self._measuring)

    @contextmanager
    def _measuring(self, engine: Engine[Any, Any]) -> Iterator[None]:
        backend = current()
        watcher = backend.job.find(Watcher)
        with ExitStack() as stack:
            if watcher is not None:
                name, clock, outer = backend.job.unique_name("stragglers"), OwnClock(), activity.own_clock
                times = _Times(engine, clock, self._part, measures_step=backend.device.type == "cpu")
                stack.enter_context(times)
                stack.callback(setattr, activity, "own_clock", outer)
                activity.own_clock = clock
                self._compared, self._found = {}, []

                def exchange(all_times: dict[int, Times]) -> Times | None:
                    if backend.topology.rank == 0:
                        self._compare(all_times)
                    return times.published

                stack.callback(watcher.unshare, name)
                watcher.share(name, exchange)
            yield

    def _compare(self, times: Mapping[int, Times]) -> None:
        """Log which ranks are slow again and again, on the watcher's thread."""
        halves = {rank: one["half"] for rank, one in times.items()}
        if len(times) < 2 or any(self._compared.get(rank) == half for rank, half in halves.items()):
            return  # a rank has measured nothing new
        self._compared |= halves
        now = monotonic()
        if not self._found:
            self._since = now
        self._found.append(slow(times, self._factor))
        if len(self._found) < 2 or now - self._since < _LASTING:
            return
        comparisons, self._found = self._found, []
        found: Found = {}
        for key in {key for one in comparisons for key in one}:
            figures = [one[key] for one in comparisons if key in one]
            if len(figures) >= _OFTEN * len(comparisons):
                found[key] = tuple(map(median, zip(*figures, strict=True)))
        worst_first = sorted(found, key=lambda key: found[key][0], reverse=True)
        confirmed = [key for key in worst_first if self._is_news(key, found[key][0], now)]
        self._logged.update({key: (found[key][0], now) for key in confirmed})
        lines = [_line(*key, *found[key]) for key in confirmed[:_MOST]]
        if len(confirmed) > _MOST:
            lines.append(f"and {len(confirmed) - _MOST} more")
        if lines:
            self.logger.warning("%s", "\n".join(lines))

    def _is_news(self, key: tuple[str, int], factor: float, now: float) -> bool:
        before, then = self._logged.get(key, (0.0, now))
        return now - then >= _AGAIN or factor > before * _CHANGED or factor < before / _CHANGED


def slow(times: Mapping[int, Times], factor: float) -> Found:
    """Return which ranks take ``factor`` times as long as the median, or longer, and lose much time by that.

    >>> own = {"iteration": 0.1, "step": 0.02}
    >>> slow({0: own, 1: own | {"step": 0.05}, 2: own, 3: own | {"step": 0.021}}, 1.3)
    {('step', 1): (2.5, 0.05, 0.02)}
    """
    found: Found = {}
    for phase in _PHASES:
        known = {rank: one[phase] for rank, one in times.items() if phase in one}
        usual = median_low(known.values()) if known else 0.0
        for rank, seconds in known.items():
            if seconds >= factor * usual and seconds - usual >= _LEAST * times[rank]["iteration"] > 0:
                found[phase, rank] = seconds / max(usual, 1e-9), seconds, usual
    return found


def _line(phase: str, rank: int, factor: float, seconds: float, usual: float) -> str:
    """Return what is logged of a rank.

    >>> _line("step", 1, 2.5, 0.05, 0.02)
    'rank 1 is slow in the step: 50.0 ms per iteration, 2.5 times the median of the ranks, 20.0 ms'
    """
    times = f"{factor:.1f}" if factor < 100 else "over 100"
    medians = f"{times} times the median of the ranks, {1000 * usual:.1f} ms"
    return f"rank {rank} is slow in {_PHASES[phase]}: {1000 * seconds:.1f} ms per iteration, {medians}"


class _Times:
    """The own times of this rank in a run, from entering to leaving a ``with`` block.

    Args:
        engine: what runs.
        clock: of the thread in which it runs.
        part: number of iterations to add up.
        measures_step: whether to measure the process function.

    Attributes:
        published: the times of the last half of a window, for other threads.
    """

    def __init__(self, engine: Engine[Any, Any], clock: OwnClock, part: int, measures_step: bool) -> None:
        self.published: Times | None = None
        self._engine, self._clock, self._part = engine, clock, part
        self._phases = ("iteration", "loading", *(["step"] if measures_step else []))
        self._parts: list[tuple[float, ...]] = []
        self._began = perf_counter()  # of the part
        self._loading = self._step = 0.0  # in the part
        self._num_iterations = self._num_halves = 0
        self._fetching = self._stepping = 0.0  # since when

    def __enter__(self) -> _Times:
        add = self._engine.add_event_handler
        self._handles = [
            add(Events.GET_BATCH_STARTED, self._fetch, order=Order.MEASURE_LAST),
            add(Events.GET_BATCH_COMPLETED, self._fetched, order=Order.MEASURE_FIRST),
            add(Events.ITERATION_STARTED, self._begin, order=Order.MEASURE_LAST),
            add(Events.ITERATION_COMPLETED, self._end, order=Order.MEASURE_FIRST),
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _fetch(self) -> None:
        self._fetching = self._clock.seconds()

    def _fetched(self) -> None:
        self._loading += self._clock.seconds() - self._fetching

    def _begin(self) -> None:
        self._stepping = self._clock.cpu_seconds()

    def _end(self) -> None:
        self._step += self._clock.cpu_seconds() - self._stepping
        self._num_iterations += 1
        if self._num_iterations % self._part == 0:
            self._end_part()

    def _end_part(self) -> None:
        now = perf_counter()
        self._parts.append((now - self._began, self._loading, self._step))
        self._began, self._loading, self._step = now, 0.0, 0.0
        if len(self._parts) == _PARTS:
            medians = [median(values) / self._part for values in zip(*self._parts, strict=True)]
            self._parts.clear()
            self._num_halves += 1
            self.published = dict(zip(self._phases, medians, strict=False)) | {"half": self._num_halves}
