"""The end of uneven streams: ranks agree, through the store of the job, how many batches all of them have."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch._C._distributed_c10d import Store

from camshaft.distributed.backends.contract import Backend
from camshaft.distributed.collectives.api import all_gather
from camshaft.distributed.failures.store import PAUSE, store_at, wait_for
from camshaft.errors import RankDivergenceError

_FAREWELL = 10.0  # seconds for which rank 0, whose process usually holds the store, stays until all have read it
# In the counter of reports, a rank whose data have ended, and one that has left: above any number of the one before.
_ENDED, _LEFT = 1 << 32, 1 << 47
_WHAT = "a synchronized pass over the data"


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

    For each window the ranks add themselves to a counter, which also counts those whose data have ended and those that
    have left. Only if there are any, a rank reads which ones, from one list. So a rank makes as many requests among a
    thousand ranks as among two. The last rank to leave deletes all keys.

    Args:
        store: for this pass alone, or ``None``.
        rank: of this process.
        size: the number of ranks.
        window: batches in a window.
    """

    def __init__(self, store: Store | None, rank: int, size: int, window: int) -> None:
        self._store, self._rank, self._ranks, self._full = store, rank, range(size), window
        self._mine, self._window, self._has_left = BatchCount(0), 0, False

    @classmethod
    def of(cls, backend: Backend, window: int) -> BatchCounts:
        """Return those of the next pass; all ranks do the same."""
        store = store_at(backend, backend.job.unique_name("batches"))
        return cls(store, backend.topology.rank, backend.topology.world_size, window)

    def report(self, mine: BatchCount) -> None:
        """Report for the next window, without waiting."""
        self._mine, self._window = mine, self._window + 1
        if (store := self._store) is None:
            return
        store.append(f"window/{self._window}", f"{self._rank} ")  # type: ignore[attr-defined]  # torch's stubs
        if self._rank == 0:
            store.delete_key(f"window/{self._window - 2}")  # all have reported for the one after it
        if has_ended := mine.count < self._full:
            self._list(store, mine.count, mine.error)
        store.add("reports", 1 + has_ended * _ENDED)

    def collect(self) -> list[BatchCount]:
        """Wait for the reports of all ranks, and return them in the order of the ranks.

        Raises:
            RankDivergenceError: one has left, or does not report in time.
        """
        store, window = self._store, self._window
        if store is None:
            return [BatchCount(*report) for report in all_gather((self._mine.count, self._mine.error))]

        def poll() -> list[list[Any]] | None:
            left, others = divmod(store.add("reports", 0), _LEFT)
            ended, reports = divmod(others, _ENDED)
            missing = window * len(self._ranks) - reports
            if not left and (missing > 0 or not ended):
                return None if missing > 0 else []
            listed: list[list[Any]] = json.loads(b"[" + store.get("ends")[:-1] + b"]")
            # a rank that has left lacks every window since
            missing -= sum(max(0, window - last) for _, last, count, _ in listed if count is None)
            return None if missing > 0 else listed

        def detail() -> str:
            reported = store.get(f"window/{window}").split()
            late = [rank for rank in self._ranks if str(rank).encode() not in reported]
            return f"ranks {late} in {_WHAT}: they are still loading a batch, run other code, or have exited"

        listed = wait_for(poll, store, _WHAT, ranks=self._ranks, rank=self._rank, detail=detail)
        if gone := sorted(rank for rank, last, count, _ in listed if count is None and last < window):
            raise RankDivergenceError(
                f"rank {self._rank} is in {_WHAT}, but ranks {gone} failed or stopped before its end"
            )
        reports = [BatchCount(self._full)] * len(self._ranks)  # also of a rank that has reported for the next window
        for rank, last, count, error in listed:
            if last == window and count is not None:
                reports[rank] = BatchCount(count, error)
        return reports

    def leave(self) -> None:
        """Report nothing more, and do not let the others wait; the last rank deletes what is left."""
        store = self._store
        if store is None or self._has_left:
            return
        self._has_left = True
        with suppress(RuntimeError):  # the process that holds the store has ended already
            self._list(store, None, None)
            if store.add("reports", _LEFT) // _LEFT == len(self._ranks):
                windows = (f"window/{self._window + offset}" for offset in (-1, 0, 1))
                for key in (*windows, "ends", "reports"):
                    store.delete_key(key)

    def wait_for_readers(self) -> None:
        """Wait on rank 0 until all have left, but not for long: its process may end next, and the store with it."""
        began = time.monotonic()
        with suppress(RuntimeError):
            while self._store and not self._rank and self._store.check(["reports"]):
                if (waited := time.monotonic() - began) > _FAREWELL:
                    break
                time.sleep(min(PAUSE, max(PAUSE / 50, waited / 4)))

    def _list(self, store: Store, count: int | None, error: str | None) -> None:
        """Add this rank to those whose data have ended in this window or, without a count, that have left after it."""
        entry = json.dumps([self._rank, self._window, count, error]) + ","
        store.append("ends", entry)  # type: ignore[attr-defined]  # torch's stubs
