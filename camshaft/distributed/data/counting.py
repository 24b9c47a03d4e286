"""How many batches each rank has: told by all to all off the device, and never waited for in vain.

Nothing stays in the store: a window is deleted when all have spoken of the next one, and the rest by the last to leave.
"""

from __future__ import annotations

import json
import logging
import time
import weakref
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistNetworkError

from camshaft.distributed.backend import Backend
from camshaft.distributed.collectives import all_gather
from camshaft.distributed.guard import check_all_present
from camshaft.errors import RankDivergenceError

_PAUSE = 0.05  # seconds, at most, between questions to the store
_SILENCE = 10.0  # seconds after which a rank says for whom it waits
_FAREWELL = 10.0  # seconds for which rank 0, whose process mostly holds the store, stays until all have read it
_WHAT = "a pass over data that ends on all ranks together"
_logger = logging.getLogger(__name__)
_begun: weakref.WeakKeyDictionary[Backend, Counter[str]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Said:
    """What a rank says.

    Args:
        count: how many batches it has, of those that were asked for.
        error: what happened when it wanted one more.
    """

    count: int
    error: str | None = None


class Counting(Protocol):
    """Where the ranks say how many batches they have, once for each window of them."""

    def say(self, mine: Said) -> None:
        """Say how many this rank has, and do not wait."""

    def hear(self) -> list[Said]:
        """Wait for what all have said, in the order of the ranks.

        Raises:
            RankDivergenceError: one has left, or does not come.
        """

    def leave(self) -> None:
        """Say nothing more."""

    def see_off(self) -> None:
        """Let the others read what was said last, before this process ends perhaps."""


def counting(backend: Backend, full: int) -> Counting:
    """Begin to count batches with the other ranks, all of which do the same, in windows of so many."""
    store = backend.store()
    if store is None:
        return ByCollectives()
    passes = _begun.setdefault(backend, Counter())
    passes[""] += 1
    place = PrefixStore(f"camshaft/batches/{passes['']}", store)
    return InStore(place, backend.topology.rank, backend.topology.world_size, full)


class ByCollectives:
    """One collective for each window, where there is no store."""

    def __init__(self) -> None:
        self._mine = Said(0)

    def say(self, mine: Said) -> None:
        """Keep it until all are heard."""
        self._mine = mine

    def hear(self) -> list[Said]:
        """Gather what the ranks say."""
        return [Said(*said) for said in all_gather((self._mine.count, self._mine.error))]

    def leave(self) -> None:
        """Do nothing: nobody can be told."""

    def see_off(self) -> None:
        """Do nothing: nobody reads here."""


class InStore:
    """Keys in a store, none of which lasts.

    For each window the ranks count themselves, and those of them whose data ends in it; who does so last says to all
    how many those are. Only if there are any does anybody read what each rank has said. So a window costs each rank as
    much among a thousand ranks as among two.

    Args:
        store: that of this pass alone.
        rank: of this process.
        size: the number of ranks.
        full: how many batches a window has.
    """

    def __init__(self, store: Store, rank: int, size: int, full: int) -> None:
        self._store = store
        self._rank = rank
        self._ranks = range(size)
        self._full = full
        self._window = 0
        self._has_left = self._has_told = False

    def say(self, mine: Said) -> None:
        """Write it down."""
        self._store.set(f"said/{self._rank}", json.dumps([self._window + 1, mine.count, mine.error]))
        self._count_in(ends=mine.count < self._full)

    def hear(self) -> list[Said]:
        """Wait until all have counted themselves."""
        check_all_present(_WHAT, self._ranks, self._rank)
        try:
            self._wait_for(f"{self._window}/all")
            if not int(self._store.get(f"{self._window}/all")):
                return [Said(self._full)] * len(self._ranks)
            rows = [self._said(rank) for rank in self._ranks]
        except DistNetworkError as error:
            raise RankDivergenceError("the process that holds the store of this run has ended") from error
        gone = [rank for rank, (window, *_) in enumerate(rows) if window < self._window]
        if gone:
            raise RankDivergenceError(
                f"rank {self._rank} goes on with {_WHAT}, but ranks {gone} have failed or stopped before its end"
            )
        return [Said(count, error) for _, count, error in rows]

    def leave(self) -> None:
        """Tell those who might still wait; the last one deletes what is left."""
        if self._has_left:
            return
        self._has_left = True
        with suppress(RuntimeError):  # the process that holds the store has ended already
            self._count_in(ends=True)
            if self._store.add("left", 1) == len(self._ranks):
                for window in range(self._window - 1, self._window + 2):
                    self._forget(window)
                for key in (*(f"said/{rank}" for rank in self._ranks), "left"):
                    self._store.delete_key(key)

    def see_off(self) -> None:
        """Wait on rank 0 until all have left, but not for long."""
        deadline = time.monotonic() + _FAREWELL
        with suppress(RuntimeError):
            while self._rank == 0 and self._store.check(["left"]) and time.monotonic() < deadline:
                time.sleep(_PAUSE / 10)

    def _count_in(self, ends: bool) -> None:
        """Be one more in the next window; the last one deletes the window before, of which all have heard."""
        self._window += 1
        if ends:
            self._store.add(f"{self._window}/ends", 1)
        if self._store.add(f"{self._window}/here", 1) == len(self._ranks):
            self._forget(self._window - 1)
            self._store.set(f"{self._window}/all", str(self._store.add(f"{self._window}/ends", 0)))

    def _forget(self, window: int) -> None:
        for name in ("here", "ends", "all"):
            self._store.delete_key(f"{window}/{name}")

    def _said(self, rank: int) -> tuple[int, int, str | None]:
        """Give the window of which a rank has spoken last, and what it has said of it."""
        key = f"said/{rank}"
        if not self._store.check([key]):
            return 0, 0, None
        window, count, error = json.loads(self._store.get(key))
        return window, count, error

    def _late(self) -> list[int]:
        """List the ranks that have not spoken of this window."""
        return [rank for rank in self._ranks if self._said(rank)[0] < self._window]

    def _wait_for(self, key: str) -> None:
        began = time.monotonic()
        patience = self._store.timeout.total_seconds()  # type: ignore[attr-defined]  # torch's stubs lack it
        while not self._store.check([key]):
            waited = time.monotonic() - began
            if waited > patience:
                raise RankDivergenceError(
                    f"rank {self._rank} goes on with {_WHAT}, but ranks {self._late()} have not come within "
                    f"{patience:g} s: they still load a batch, do something else, or have ended"
                )
            if waited > _SILENCE and not self._has_told:
                self._has_told = True
                _logger.warning(
                    "rank %d waits for ranks %s in %s, and will for %g s: they still load a batch, do something else, "
                    "or have ended",
                    *(self._rank, self._late(), _WHAT, patience),
                )
            time.sleep(min(_PAUSE, max(_PAUSE / 500, waited / 4)))
