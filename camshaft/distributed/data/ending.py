"""Loaders that end on all ranks at the same step, however uneven their data is."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from camshaft.distributed.context import current
from camshaft.distributed.data.counting import Said, counting
from camshaft.distributed.data.lookahead import LookingAhead, WithState
from camshaft.types import Stateful

WINDOW = 8


def ending_together(loader: Iterable[Any], window: int = WINDOW) -> EndingTogether:
    """Let a loader end on all ranks at the step at which the first of them has no more batches.

    The ranks look ahead, and agree once for each window of batches how many of it all of them have: in the store of
    the run, or, on backends without one, by a collective. If a rank fails to load a batch, all raise at that step.

    Args:
        loader: gives batches, best in host memory. All ranks read in the same order what ends together.
        window: how many batches are looked ahead, and kept in memory; the same on all ranks.

    Returns:
        An iterable without length, with all else that the loader has. Its ``state_dict``, if there is one, knows
        nothing of the batches that were looked ahead.

    Raises:
        ValueError: ``window`` is no positive integer.

    >>> list(ending_together([1, 2, 3]))
    [1, 2, 3]
    """
    if not isinstance(window, int) or window < 1:
        raise ValueError(f"window must be a positive integer, got {window!r}")
    kind = StatefulEndingTogether if isinstance(loader, Stateful) else EndingTogether
    return kind(loader, window)


class EndingTogether(LookingAhead):
    """A loader that ends on all ranks together; see :func:`ending_together`."""

    def __init__(self, loader: Iterable[Any], window: int) -> None:
        super().__init__(loader)
        self._window = window

    def __iter__(self) -> Iterator[Any]:
        self._reached = None
        backend = current()
        if backend.topology.world_size == 1:
            yield from self._loader
            return
        others = counting(backend, self._window)
        ahead = Ahead(self._read(), self._window)
        given = 0
        try:
            count = self._window
            others.say(ahead.filled())
            while count == self._window:
                rows = others.hear()
                count = min(row.count for row in rows)
                if count < self._window:
                    others.leave()
                for left in reversed(range(count)):
                    batch, self._reached = ahead.take()
                    if count == self._window:
                        mine = ahead.filled()
                        if left == 0:  # said a step before it is asked for, so that nobody waits
                            others.say(mine)
                    yield batch
                given += count
        finally:
            others.leave()
        others.see_off()
        ahead.check(rows, count, backend.topology.rank, given + 1)
        self._reached = None if ahead.is_over else {}


class StatefulEndingTogether(WithState, EndingTogether):
    """The same, of a loader that has a state."""


class EvenLoader(DataLoader[Any]):
    """A ``DataLoader`` that ends on all ranks together; see :func:`ending_together`.

    Its length is not known: it is that of the rank with the fewest batches.

    Args:
        args, kwargs: for ``torch.utils.data.DataLoader``.

    Attributes:
        plain: the same loader, which ends where its own data do.
        is_skipped_forward: as of :class:`PlainLoader`.
    """

    is_skipped_forward = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.plain: DataLoader[Any] = copy.copy(self)
        self.plain.__class__ = DataLoader

    def __iter__(self) -> Any:
        return iter(ending_together(self.plain))

    def __len__(self) -> int:
        raise TypeError("the length of a loader that ends on all ranks together is not known before")


class Ahead:
    """Batches that were looked ahead.

    Args:
        batches: each with the state behind it.
        window: how many to keep.
    """

    def __init__(self, batches: Iterator[tuple[Any, Any]], window: int) -> None:
        self.is_over = False
        self._batches = batches
        self._window = window
        self._kept: deque[tuple[Any, Any]] = deque()
        self._error: Exception | None = None

    def filled(self) -> Said:
        """Look ahead as far as there is anything, and say how far."""
        while len(self._kept) < self._window and not self.is_over and self._error is None:
            try:
                self._kept.append(next(self._batches))
            except StopIteration:
                self.is_over = True
            except Exception as error:
                self._error = error
        reason = None if self._error is None else f"{type(self._error).__name__}: {self._error}"
        return Said(len(self._kept), reason)

    def take(self) -> tuple[Any, Any]:
        """Give the next one."""
        return self._kept.popleft()

    def check(self, rows: list[Said], count: int, rank: int, number: int) -> None:
        """Raise if the pass ends with an error, wherever that is; one behind the end is nobody's."""
        failed = {other: row.error for other, row in enumerate(rows) if row.error is not None and row.count == count}
        if rank in failed and self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # it knows this object: together they would outlast the loader's workers
        for other, reason in failed.items():
            raise RuntimeError(f"rank {other} failed to load batch {number}: {reason}")
