"""What all ranks read alike: the seed they share, and a comparison of the rest, in the store of the run."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import weakref
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from itertools import count
from operator import index
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from camshaft.distributed.backend import Backend
from camshaft.distributed.collectives import broadcast
from camshaft.distributed.context import current
from camshaft.distributed.guard import alone, check_all_present, line_of_caller
from camshaft.errors import RankDivergenceError

_PAUSE = 0.05  # seconds between questions to the store for a seed that is not there yet
_SILENCE = 10.0  # seconds after which a rank logs that it waits
_logger = logging.getLogger(__name__)
_seeds: weakref.WeakKeyDictionary[Backend, Counter[str]] = weakref.WeakKeyDictionary()
_SEEDS = "camshaft/seeds"
_runs = count(1)  # of this process: a store may be older than the run
_made: weakref.WeakKeyDictionary[Backend, tuple[int, Counter[str]]] = weakref.WeakKeyDictionary()


class Sameness:
    """What the passes of one sampler follow from, on this rank and on the others.

    The first rank that begins a pass writes down what it has, and each other compares with that: one or two questions
    to the store for a pass, and no rank waits for another. A rank that finds a difference raises and leaves word,
    which the others find when they begin their next pass. One that is a pass behind compares all but the place; so
    does one that was never told where a pass begins, until it has read two to their ends.

    Ranks know a sampler by the calls that led to where it was made, and by how many were made there before: so one
    that is made on a single rank, on a line of its own, confuses nobody. A copy is another one.
    """

    def __init__(self) -> None:
        backend = current()
        self._backend = weakref.ref(backend)
        if backend not in _made:
            _made[backend] = next(_runs), Counter()
        run, made = _made[backend]
        calls = _calls()
        made[calls] += 1
        self._name = f"camshaft/sameness/{run}/{calls}/{made[calls]}"
        self._passes, self._place, self._is_over, self._ended = 0, (0, 0), False, 0

    def __reduce__(self) -> tuple[type[Sameness], tuple[()]]:
        return Sameness, ()

    def move(self, epoch: int, consumed: int) -> None:
        """Count the pass that begins as another one: all ranks were told where it begins.

        One that was told again is the same, if only its first batches were looked at: perhaps on one rank alone.
        """
        if self._passes == 0 or self._is_over or self._place != (epoch, consumed):
            self._passes, self._place, self._is_over = self._passes + 1, (epoch, consumed), False

    def end(self) -> None:
        """Note that a pass has come to its end."""
        self._is_over = True
        self._ended += 1

    def check(self, source: Mapping[str, Any], drawn: str | None) -> None:
        """Compare with what the other ranks have.

        Args:
            source: what all passes follow from, by name.
            drawn: what else this one follows from.

        Raises:
            ValueError: there is a difference.
        """
        backend = self._backend()  # of the thread that made the loader; another thread may read it
        store = None if backend is None else _store_of(backend)
        if backend is None or store is None:
            return
        rank, place = backend.topology.rank, {"epoch": self._place[0], "samples left out": self._place[1]}
        mine = {**source, **place, "hash of the samples drawn": drawn}
        with suppress(RuntimeError):  # the process that holds the store has ended
            theirs = self._exchange(PrefixStore(self._name, store), rank, mine, compared=list(source))
            if theirs is not None:
                raise ValueError(theirs)

    def _exchange(self, store: Store, rank: int, mine: dict[str, Any], compared: list[str]) -> str | None:
        """Write down what this rank has unless somebody has done so; give what the difference is, if there is one."""
        text, there = json.dumps([self._passes, rank, mine], default=index), ""
        mine = json.loads(text)[-1]
        while True:  # the word of an earlier pass is replaced, if nobody else is faster
            there = store.compare_set("first", there, text).decode()
            passes, first, theirs = json.loads(there)
            if there == text or passes is None or passes >= self._passes:
                break
        if passes is None:
            return str(theirs)
        others_alone_were_told = self._passes == 0 and min(self._ended, passes) >= 2
        in_same_pass = passes == self._passes or others_alone_were_told
        differing = [name for name in (mine if in_same_pass else compared) if mine[name] != theirs[name]]
        if not differing:
            return None
        told = "; ".join(
            f"{name} is {theirs[name]!r} on rank {first}, but {mine[name]!r} on rank {rank}" for name in differing
        )
        told = f"the ranks do not read the same data, so samples would be given twice or never: {told}"
        store.set("first", json.dumps([None, rank, told]))
        return told


class SharedSeed:
    """The seed of loaders that are given none: rank 0's ``torch.initial_seed()`` at the time the loader is made.

    Rank 0 writes it to the store of the run without waiting for anyone. Every other rank reads it when it is first
    needed, which is when a pass begins, unless a saved position holds the seed; only then does it wait for rank 0 to
    make the loader. So making a loader never blocks where there is a store. Where there is none, it costs one
    broadcast, deferred to the first use inside of ``one_rank_first``.

    Ranks identify a loader by the line of the user's code that makes it, and by how many were made there before. A
    loader that is made in a part of the program that only some ranks run, as in ``one_rank_only``, takes the seed of
    its own rank.
    """

    def __init__(self) -> None:
        backend, here = current(), alone.get()
        self._own = torch.initial_seed()
        self._value: int | None = None
        if here is not None and here.turn is None:
            self._value = self._own
            return
        line = line_of_caller().rpartition(os.sep)[2]  # folders may differ between nodes
        made = _seeds.setdefault(backend, Counter())
        made[line] += 1
        self._backend, self._line, self._key = weakref.ref(backend), line, f"{line}/{made[line]}"
        store = _store_of(backend)
        self._is_broadcast = store is None
        if store is None:
            self._value = None if here else self._broadcast()
        elif backend.topology.rank == 0:
            self._value = self._own
            PrefixStore(_SEEDS, store).set(self._key, str(self._value))

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (self.value,)

    @property
    def value(self) -> int:
        """The seed; asks the store for it once, or waits until rank 0 has made the loader.

        Raises:
            RankDivergenceError: rank 0 does not make the loader, or the run has ended.
        """
        if self._value is None:
            self._value = self._broadcast() if self._is_broadcast else self._read()
        return self._value

    def _broadcast(self) -> int:
        return int(broadcast(str(self._own), src=0))  # as text: numbers travel with 63 bits, and seeds have 64

    def _read(self) -> int:
        backend = self._backend()
        store = None if backend is None else _store_of(backend)
        if backend is None or store is None:
            raise RankDivergenceError(
                f"the run has ended before this rank has read the seed of the loader made at {self._line}, which only "
                "rank 0 knows: read the loader during the run, or pass seed= to auto_dataloader"
            )
        seeds, rank = PrefixStore(_SEEDS, store), backend.topology.rank
        try:
            began, patience, has_logged = time.monotonic(), store.timeout.total_seconds(), False  # type: ignore[attr-defined]  # torch's stubs lack it
            while not seeds.check([self._key]):
                check_all_present("the seed of a loader", [0], rank)
                waited = time.monotonic() - began
                what = f"rank 0 to make the loader that rank {rank} makes at {self._line}, whose seed it chooses"
                if waited > patience:
                    raise RankDivergenceError(
                        f"waited {patience:g} s for {what}: make the loader on the same line on all ranks, or pass "
                        "seed= to auto_dataloader"
                    )
                if waited > _SILENCE and not has_logged:
                    has_logged = True
                    _logger.warning("waiting for %s; pass seed= to auto_dataloader if rank 0 makes none", what)
                time.sleep(_PAUSE)
            return int(seeds.get(self._key))
        except torch.distributed.DistNetworkError as error:
            raise RankDivergenceError("the process that holds the store of this run has ended") from error


def _store_of(backend: Backend) -> Store | None:
    """Give the store of a run, unless that has ended."""
    try:
        return backend.store() if backend.is_alive() else None
    except (RuntimeError, ValueError):
        return None


def _calls() -> str:
    """Name the chain of calls that led here."""
    frame, names = sys._getframe(), []
    while frame.f_back is not None:
        frame = frame.f_back
        names.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
    return sha256(" ".join(names).encode()).hexdigest()[:16]
