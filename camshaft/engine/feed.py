"""The passes over the data of a run: beginning them, and telling samplers which one it is."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import TYPE_CHECKING, Any

from camshaft.engine.data import announce_epoch, length_of

if TYPE_CHECKING:
    from camshaft.engine.engine import Engine


class Feed:
    """The live pass over ``state.dataloader``; a pass may be shorter or longer than an epoch.

    Args:
        engine: the engine that consumes the data.

    Attributes:
        iterator: the live iterator, ``None`` when the next epoch is to begin a pass.
        begun: whether the first pass has begun.
        cut_after: iterations of the last epoch, if it was cut short and so began a new pass; else ``None``.
    """

    def __init__(self, engine: Engine[Any, Any]) -> None:
        self.engine = engine
        self.iterator: Iterator[Any] | None = None
        self.cut_after: int | None = None
        self.begun = False
        self._announced: tuple[Any, int] | None = None
        self._first_iteration = 0
        self._length: int | None = None

    def open(self) -> None:
        """Begin a pass."""
        engine = self.engine
        if engine.state.dataloader is None:
            self.iterator = repeat(None)
            return
        self.announce()
        skipped = 0
        if self.begun:
            self.iterator = engine._open_data(self.cut_after)
        else:
            self.iterator, skipped = engine._open_data_at_position()
        self.begun, self.cut_after, self._announced = True, None, None
        self._first_iteration = engine.state.iteration - skipped
        self._length = length_of(engine.state.dataloader)

    def cut(self, done: int) -> None:
        """Give up the pass; the next epoch begins another one."""
        if self.iterator is not None:
            self.iterator, self.cut_after = None, done

    def replace(self, data: Any) -> None:
        """Go on with other data, now if a pass is live."""
        live = self.iterator is not None
        self.engine.state.dataloader = data
        if live:
            self.announce()
            self.iterator = iter(data)
            self._announced = None
            self._first_iteration, self._length = self.engine.state.iteration, length_of(data)

    def announce_if_over(self) -> None:
        """Tell the samplers the number of the next pass, if it is known that the next fetch begins one.

        This comes before ``EPOCH_STARTED``, so that a handler may call ``set_epoch`` with a number of its own.
        """
        consumed = self.engine.state.iteration - self._first_iteration
        if self.iterator is None or (self._length is not None and consumed >= self._length):
            self.announce()

    def announce(self) -> None:
        """Tell the samplers the number of the next pass, once."""
        state = self.engine.state
        length = length_of(state.dataloader)
        by_epoch = not length or length == state.epoch_length
        number = state.epoch - 1 if by_epoch else state.iteration // (length or 1)
        if self._announced is None or self._announced[0] is not state.dataloader or self._announced[1] != number:
            announce_epoch(state.dataloader, number)
            self._announced = (state.dataloader, number)
