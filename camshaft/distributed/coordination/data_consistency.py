"""What all ranks must read alike: the seed they share, and a comparison of the rest, in the store of the job."""

from __future__ import annotations

import json
import os
import sys
import weakref
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from operator import index
from typing import Any

import torch

from camshaft.distributed.collectives import broadcast
from camshaft.distributed.coordination.job_store import store_at, wait_for
from camshaft.distributed.ranks import alone
from camshaft.distributed.run import current
from camshaft.errors import RankDivergenceError, line_of_caller


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
        self._backend = weakref.ref(backend)
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
        backend = self._backend()  # of the thread that created the loader; another thread may read it
        store = store_at(backend, self._name)
        if backend is None or store is None:
            return
        rank, place = backend.topology.rank, {"epoch": self._place[0], "samples left out": self._place[1]}
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
                message = "the ranks do not read the same data, so samples would be repeated or left out: "
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
                f"the run has ended before this rank has read the seed of the loader created at {self._line}, which "
                "only rank 0 knows: read the loader during the run, or pass seed= to auto_dataloader"
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
