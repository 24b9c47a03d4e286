"""How many batches each rank has left: reported to all ranks off the device, one window of batches at a time."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

from camshaft.distributed.backend import Backend
from camshaft.distributed.collectives import all_gather
from camshaft.distributed.coordination.job_store import PAUSE, lost_store_reported, store_at, unique_name, wait_for
from camshaft.errors import RankDivergenceError

_FAREWELL = 10.0  # seconds for which rank 0, whose process usually holds the store, stays until all have read it
_WHAT = "a pass over data that ends on all ranks together"


@dataclass(frozen=True)
class BatchCount:
    """What a rank reports.

    Args:
        count: how many batches of the window it has.
        error: what happened when it loaded one more.
    """

    count: int
    error: str | None = None


class BatchCounts:
    """The batch counts of all ranks in one pass, in the store of the job; without a store, one collective per window.

    For each window the ranks count themselves, and those whose data end in it; the last one publishes how many those
    are. Only if there are any are the reports of all ranks read. So a window costs a rank as much among a thousand
    ranks as among two. Nothing stays in the store: a window is deleted when all have reported the next one, and the
    rest by the last rank to leave.

    Args:
        store: for this pass alone, or ``None``.
        rank: of this process.
        size: the number of ranks.
        window: batches in a window.
    """

    def __init__(self, store: Store | None, rank: int, size: int, window: int) -> None:
        self._store, self._rank, self._ranks, self._full = store, rank, range(size), window
        self._mine = BatchCount(0)
        self._window = 0
        self._has_left = False

    @classmethod
    def of(cls, backend: Backend, window: int) -> BatchCounts:
        """Return those of the next pass; all ranks do the same."""
        store = store_at(backend, unique_name(backend, "batches"))
        return cls(store, backend.topology.rank, backend.topology.world_size, window)

    def report(self, mine: BatchCount) -> None:
        """Report for the next window, without waiting."""
        self._mine = mine
        if self._store is not None:
            self._store.set(f"rank/{self._rank}", json.dumps([self._window + 1, mine.count, mine.error]))
            self._count_in(self._store, ends=mine.count < self._full)

    def collect(self) -> list[BatchCount]:
        """Wait for the reports of all ranks, and return them in the order of the ranks.

        Raises:
            RankDivergenceError: one has left, or does not report in time.
        """
        if self._store is None:
            return [BatchCount(*report) for report in all_gather((self._mine.count, self._mine.error))]
        with lost_store_reported():
            ended = wait_for(
                self._store, f"{self._window}/ended", _WHAT, ranks=self._ranks, rank=self._rank, detail=self._late
            )
            if not int(ended):
                return [BatchCount(self._full)] * len(self._ranks)
            reports = [self._latest(rank) for rank in self._ranks]
        if gone := [rank for rank, (window, _) in enumerate(reports) if window < self._window]:
            raise RankDivergenceError(
                f"rank {self._rank} is in {_WHAT}, but ranks {gone} have failed or stopped before its end"
            )
        return [report for _, report in reports]

    def leave(self) -> None:
        """Report nothing more, and do not let the others wait; the last rank deletes what is left."""
        if self._store is None or self._has_left:
            return
        self._has_left = True
        with suppress(RuntimeError):  # the process that holds the store has ended already
            self._count_in(self._store, ends=True)
            if self._store.add("left", 1) == len(self._ranks):
                for window in range(self._window - 1, self._window + 2):
                    self._forget(window)
                for key in (*(f"rank/{rank}" for rank in self._ranks), "left"):
                    self._store.delete_key(key)

    def wait_for_readers(self) -> None:
        """Wait on rank 0 until all have left, but not for long: its process may end next, and the store with it."""
        deadline = time.monotonic() + _FAREWELL
        with suppress(RuntimeError):
            while self._store and not self._rank and self._store.check(["left"]) and time.monotonic() < deadline:
                time.sleep(PAUSE / 10)

    def _count_in(self, store: Store, ends: bool) -> None:
        """Count this rank in the next window; the last one deletes the window before, which all have read."""
        self._window += 1
        if ends:
            store.add(f"{self._window}/ending", 1)
        if store.add(f"{self._window}/reported", 1) == len(self._ranks):
            self._forget(self._window - 1)
            store.set(f"{self._window}/ended", str(store.add(f"{self._window}/ending", 0)))

    def _forget(self, window: int) -> None:
        assert self._store is not None, "nothing is kept without one"
        for name in ("reported", "ending", "ended"):
            self._store.delete_key(f"{window}/{name}")

    def _latest(self, rank: int) -> tuple[int, BatchCount]:
        """Return the window that a rank has reported for last, and the report."""
        assert self._store is not None, "reports are not kept without one"
        if not self._store.check([f"rank/{rank}"]):
            return 0, BatchCount(0)
        window, *report = json.loads(self._store.get(f"rank/{rank}"))
        return window, BatchCount(*report)

    def _late(self) -> str:
        late = [rank for rank in self._ranks if self._latest(rank)[0] < self._window]
        return f"ranks {late} in {_WHAT}: they are still loading a batch, are elsewhere in the program, or have ended"
