"""What ranks agree on about their data: a seed, that all read the same, and how many batches each of them has left.

All of this goes through the store of the job, off the device.
"""

from __future__ import annotations

import json
import os
import sys
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from operator import index
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from camshaft.distributed.backend import Backend
from camshaft.distributed.collectives import all_gather, broadcast
from camshaft.distributed.failures.waiting import PAUSE, alone, store_at, wait_for
from camshaft.distributed.run import current
from camshaft.errors import RankDivergenceError, line_of_caller

_FAREWELL = 10.0  # seconds for which rank 0, whose process usually holds the store, stays until all have read it
# In the counter of reports, a rank whose data have ended, and one that has left: above any number of the one before.
_ENDED, _LEFT = 1 << 32, 1 << 47
_WHAT = "a synchronized pass over the data"

# --- the same data ---------------------------------------------------------------------------------------------------


class DataConsistency:
    """Compares what the passes of one sampler follow from on all ranks.

    The first rank that starts a pass writes down what it has, and each other rank compares with that: one or two
    requests to the store per pass, and no rank waits for another. A rank that finds a difference raises and leaves the
    message, which the others find when they start their next pass. A rank that is a pass behind compares all but the
    place; so does one that was never told where a pass begins, until it has read two to their ends.

    Ranks identify a sampler by the chain of calls that created it, and by how many were created there before: one that
    a single rank creates, on a line of its own, is not confused with another. A copy is another sampler.
    """

    def __init__(self) -> None:
        backend = current()
        self.backend = weakref.ref(backend)  # of the thread that creates the sampler; another thread may read it
        self._name = backend.job.unique_name(f"data/{_calls()}")
        self._passes, self._place, self._is_over, self._num_ended = 0, (0, 0), False, 0

    def __reduce__(self) -> tuple[type[DataConsistency], tuple[()]]:
        return DataConsistency, ()

    def place(self, epoch: int, consumed: int) -> None:
        """Count the pass that starts as a new one: all ranks were told where it begins.

        The same place again is the same pass if only its first batches were read, perhaps on one rank alone.
        """
        if self._passes == 0 or self._is_over or self._place != (epoch, consumed):
            self._passes, self._place, self._is_over = self._passes + 1, (epoch, consumed), False

    def end(self) -> None:
        """Note that a pass was read to its end."""
        self._is_over = True
        self._num_ended += 1

    def check(self, source: Mapping[str, Any], drawn: str | None) -> None:
        """Compare with what the other ranks have.

        Args:
            source: what all passes follow from, by name.
            drawn: what else this one follows from.

        Raises:
            ValueError: there is a difference.
        """
        backend = self.backend()
        store = store_at(backend, self._name)
        if backend is None or store is None:
            return
        rank, place = backend.topology.rank, {"epoch": self._place[0], "samples skipped": self._place[1]}
        entry = {**source, **place, "hash of the samples drawn": drawn}
        text, there = json.dumps([self._passes, rank, entry], default=index), ""
        mine = json.loads(text)[-1]
        with suppress(RuntimeError):  # the process that holds the store has ended
            while True:  # replace the entry of an earlier pass, unless another rank is faster
                there = store.compare_set("first", there, text).decode()
                passes, first, theirs = json.loads(there)
                if there == text or passes is None or passes >= self._passes:
                    break
            if passes is None:
                raise ValueError(theirs)
            only_others_were_told = self._passes == 0 and min(self._num_ended, passes) >= 2
            in_same_pass = passes == self._passes or only_others_were_told
            differences = [
                f"{name} is {theirs[name]!r} on rank {first}, but {mine[name]!r} on rank {rank}"
                for name in (mine if in_same_pass else source)
                if mine[name] != theirs[name]
            ]
            if differences:
                message = "the ranks do not read the same data, so samples would be repeated or skipped: "
                message += "; ".join(differences)
                store.set("first", json.dumps([None, rank, message]))
                raise ValueError(message)


class SharedSeed:
    """The seed of loaders created without one: rank 0's ``torch.initial_seed()`` at the time the loader is created.

    Rank 0 writes it to the store without waiting. Every other rank reads it when it is first needed, which is when a
    pass starts, unless a saved position holds the seed; only then does it wait for rank 0 to create the loader. So
    creating a loader never blocks where there is a store. Where there is none, it costs one broadcast, deferred to the
    first use inside of ``one_rank_first``.

    Ranks identify a loader by the line of the user's code that creates it, and by how many were created there before.
    A loader created where only some ranks are, as in ``one_rank_only``, takes the seed of its own rank.
    """

    def __init__(self) -> None:
        backend, here = current(), alone.get()
        self._own = torch.initial_seed()
        self._value: int | None = None
        if here is not None and here.turn is None:
            self._value = self._own
            return
        self._line = line_of_caller("distributed").rpartition(os.sep)[2]  # folders may differ between nodes
        self._backend, self._name = weakref.ref(backend), backend.job.unique_name(f"seed/{self._line}")
        store = store_at(backend, self._name)
        self._is_broadcast = store is None
        if store is None:
            self._value = None if here else self._broadcast()
        elif backend.topology.rank == 0:
            self._value = self._own
            store.set("seed", str(self._value))

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (index(self),)

    def __index__(self) -> int:
        """Return the seed; the first call may ask the store for it, and wait until rank 0 has created the loader.

        Raises:
            RankDivergenceError: rank 0 does not create the loader, or the run has ended.
        """
        if self._value is None:
            self._value = self._broadcast() if self._is_broadcast else self._read()
        return self._value

    def _broadcast(self) -> int:
        return int(broadcast(str(self._own), src=0))  # as text: numbers travel with 63 bits, and seeds have 64

    def _read(self) -> int:
        backend = self._backend()
        store = store_at(backend, self._name)
        if backend is None or store is None:
            raise RankDivergenceError(
                f"the job ended before this rank read the seed of the loader created at {self._line}, which rank 0 "
                "chose: iterate over the loader during the job, or pass seed= to auto_dataloader"
            )
        detail = (
            f"rank 0 to create the loader that this rank creates at {self._line}, whose seed rank 0 chooses: create it "
            "on the same line on all ranks, or pass seed= to auto_dataloader"
        )
        return wait_for(
            lambda: int(store.get("seed")) if store.check(["seed"]) else None,
            *(store, "the seed of a loader"),
            ranks=[0],
            rank=backend.topology.rank,
            detail=lambda: detail,
        )


def _calls() -> str:
    """Return a hash of the chain of calls that led here."""
    frame, names = sys._getframe(), []
    while frame.f_back is not None:
        frame = frame.f_back
        names.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
    return sha256(" ".join(names).encode()).hexdigest()[:16]


# --- the same number of batches ---------------------------------------------------------------------------------------


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
        store = self._store
        if store is None:
            return
        store.append(f"window/{self._window}", f"{self._rank} ")  # type: ignore[attr-defined]  # torch's stubs
        if self._rank == 0:
            store.delete_key(f"window/{self._window - 2}")  # all have reported for the one after it
        has_ended = mine.count < self._full
        if has_ended:
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
