"""How many batches each rank has left: reported to all ranks off the device, one window of batches at a time."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

from camshaft.distributed.backend import Backend
from camshaft.distributed.collectives import all_gather
from camshaft.distributed.coordination.job_store import PAUSE, store_at, wait_for
from camshaft.errors import RankDivergenceError

_FAREWELL = 10.0  # seconds for which rank 0, whose process usually holds the store, stays until all have read it
_ENDED = 1 << 44  # in the counter of reports, a rank whose data have ended: above any number of reports
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

    For each window the ranks add themselves to a counter, and those whose data end in it also to its upper part: only
    if there are any, or a rank has left, are the reports of all ranks read. So a window costs a rank as much among a
    thousand ranks as among two. The last rank to leave deletes all keys.

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
        store = store_at(backend, backend.job.unique_name("batches"))
        return cls(store, backend.topology.rank, backend.topology.world_size, window)

    def report(self, mine: BatchCount) -> None:
        """Report for the next window, without waiting."""
        self._mine = mine
        self._window += 1
        if self._store is not None:
            self._write(self._store, has_left=False)
            self._store.add("reports", 1 if mine.count == self._full else 1 + _ENDED)

    def collect(self) -> list[BatchCount]:
        """Wait for the reports of all ranks, and return them in the order of the ranks.

        Raises:
            RankDivergenceError: one has left, or does not report in time.
        """
        store = self._store
        if store is None:
            return [BatchCount(*report) for report in all_gather((self._mine.count, self._mine.error))]

        def poll() -> list[tuple[int, bool, BatchCount]] | None:
            ended, reports = divmod(store.add("reports", 0), _ENDED)
            is_complete = reports >= self._window * len(self._ranks)
            if is_complete and not ended:
                return []
            if not is_complete and (not store.check(["left"]) or self._late(store)):
                return None
            return [_latest(store, rank) for rank in self._ranks]

        def detail() -> str:
            why = "they are still loading a batch, are elsewhere in the program, or have ended"
            return f"ranks {self._late(store)} in {_WHAT}: {why}"

        latest = wait_for(poll, store, _WHAT, ranks=self._ranks, rank=self._rank, detail=detail)
        if gone := [rank for rank, (window, *_) in enumerate(latest) if window < self._window]:
            raise RankDivergenceError(
                f"rank {self._rank} is in {_WHAT}, but ranks {gone} have failed or stopped before its end"
            )
        full = BatchCount(self._full)  # also of a rank that has reported for the next window
        return [report if window == self._window else full for window, _, report in latest] or [full] * len(self._ranks)

    def leave(self) -> None:
        """Report nothing more, and do not let the others wait; the last rank deletes what is left."""
        if self._store is None or self._has_left:
            return
        self._has_left = True
        with suppress(RuntimeError):  # the process that holds the store has ended already
            self._write(self._store, has_left=True)
            if self._store.add("left", 1) == len(self._ranks):
                for key in (*(f"rank/{rank}" for rank in self._ranks), "reports", "left"):
                    self._store.delete_key(key)

    def wait_for_readers(self) -> None:
        """Wait on rank 0 until all have left, but not for long: its process may end next, and the store with it."""
        deadline = time.monotonic() + _FAREWELL
        with suppress(RuntimeError):
            while self._store and not self._rank and self._store.check(["left"]) and time.monotonic() < deadline:
                time.sleep(PAUSE / 10)

    def _write(self, store: Store, has_left: bool) -> None:
        text = json.dumps([self._window, has_left, self._mine.count, self._mine.error])
        store.set(f"rank/{self._rank}", text)

    def _late(self, store: Store) -> list[int]:
        """Return the ranks that may still report for this window."""
        latest = (_latest(store, rank) for rank in self._ranks)
        return [rank for rank, (window, has_left, _) in enumerate(latest) if window < self._window and not has_left]


def _latest(store: Store, rank: int) -> tuple[int, bool, BatchCount]:
    """Return the window that a rank has reported for last, whether it has left, and the report."""
    key = f"rank/{rank}"
    window, has_left, *report = json.loads(store.get(key)) if store.check([key]) else (0, False, 0)
    return window, has_left, BatchCount(*report)
