"""The passes over the data of a run: beginning them, and telling samplers which one it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat
from typing import TYPE_CHECKING, Any

from camshaft.engine.data import announce_epoch, length_of
from camshaft.engine.event import Events
from camshaft.engine.plan import Plan
from camshaft.engine.position import Position, exact_batches, goes_back, position_of

if TYPE_CHECKING:
    from camshaft.engine.engine import Engine


_SILENT = Plan(None, None)


class Feed:
    """The live pass over ``state.dataloader``; a pass may be shorter or longer than an epoch.

    Args:
        engine: the engine that consumes the data.

    Attributes:
        iterator: the live iterator, ``None`` when the next epoch is to begin a pass.
        begun: whether the first pass has begun.
        fetching: the plan of ``GET_BATCH_STARTED``, or a silent one without data.
        fetched: the plan of ``GET_BATCH_COMPLETED``, likewise.
        cut_after: iterations of the last epoch, if it was cut short and so began a new pass; else ``None``.
        held_at: iterations done where a saved state goes back to, or ``None`` to go on where the run is.
    """

    def __init__(self, engine: Engine[Any, Any]) -> None:
        self.engine = engine
        self.iterator: Iterator[Any] | None = None
        self.cut_after: int | None = None
        self.held_at: int | None = None
        self.begun = False
        self.fetching = self.fetched = _SILENT
        self._announced: Any = None
        self._number = -1
        self._first_iteration = 0
        self._length: int | None = None
        self._shares: Callable[[int], float] | None = None

    def open(self) -> int:
        """Begin a pass; give how many batches of it are left out, as a run had them before."""
        engine = self.engine
        if engine.state.dataloader is None:
            self.iterator = repeat(None)
            self.fetching = self.fetched = _SILENT
            return 0
        self.announce()
        skipped = 0
        if self.begun:
            self.iterator = engine._open_data(self.cut_after)
        else:
            self.iterator, skipped = engine._open_data_at_position()
        self.begun, self.cut_after = True, None
        self._opened()
        if engine._goes_on_at is not None:
            self._number = max(self._number, engine._goes_on_at.get("epoch", 0))
            engine._goes_on_at = None
        self._first_iteration = engine.state.iteration - skipped
        self._length = length_of(engine.state.dataloader)
        return skipped

    def cut(self, done: int) -> None:
        """Give up the pass; the next epoch begins another one."""
        if self.iterator is not None:
            self.iterator, self.cut_after, self.held_at = None, done, None

    def replace(self, data: Any) -> None:
        """Go on with other data, now if a pass is live."""
        state = self.engine.state
        previous, state.dataloader = state.dataloader, data
        if self.iterator is not None:
            self.announce()
            try:
                self.iterator = self.engine._open_data(None)
            except BaseException:
                state.dataloader = previous
                raise
            self._opened()
            self._first_iteration, self._length = state.iteration, length_of(data)

    def recount(self, shift: int) -> None:
        """Keep the place in the pass although the count of iterations is another now."""
        self._first_iteration += shift

    def announce_if_over(self) -> None:
        """Tell the samplers the number of the next pass, if it is known that the next fetch begins one.

        This comes before ``EPOCH_STARTED``, so that a handler may call ``set_epoch`` with a number of its own.
        """
        consumed = self.engine.state.iteration - self._first_iteration
        if self.iterator is None or (self._length is not None and consumed >= self._length):
            self.announce()

    def announce(self) -> None:
        """Tell the samplers the number of the next pass, once."""
        data = self.engine.state.dataloader
        if self._announced is not data:
            announce_epoch(data, self._next_number())
            self._announced = data

    def position(self) -> Position | None:
        """Tell where the run stands in its data."""
        engine = self.engine
        if engine.state.dataloader is None or not self.begun:
            return engine._goes_on_at
        batches = engine.state.iteration - self._first_iteration
        redo = 0 if self.held_at is None else max(0, engine.state.iteration - self.held_at)
        able = redo <= batches and goes_back(engine.state.dataloader)
        batches -= redo if able else 0
        over = self.iterator is None or (self._length is not None and batches >= self._length)
        position = position_of(engine.state.dataloader, batches, over=over)
        return {**(position or {"batches": 0}), "redo" if able else "lost": redo} if redo else position

    def share(self) -> float:
        """Give the size of this rank's batch over the mean size of those of all ranks."""
        if self._shares is None:
            return 1.0
        return self._shares(self.engine.state.iteration - self._first_iteration - 1)

    def _opened(self) -> None:
        sampler = exact_batches(self.engine.state.dataloader)
        self._shares = sampler.share if sampler is not None and sampler.num_replicas > 1 else None
        plans = self.engine._dispatcher.plans
        self.fetching, self.fetched = plans[Events.GET_BATCH_STARTED], plans[Events.GET_BATCH_COMPLETED]
        self._number, self._announced = self._next_number(), None

    def _next_number(self) -> int:
        """Number the next pass: from the counters, so that a resumed run agrees, and never a number twice."""
        state = self.engine.state
        length = length_of(state.dataloader)
        by_epoch = not length or length == state.epoch_length
        number = state.epoch - 1 if by_epoch else state.iteration // (length or 1)
        return max(number, self._number + 1)
