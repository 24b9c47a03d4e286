"""Whether all ranks read the same data: compared when a pass begins, in the store of the run, and without waiting."""

from __future__ import annotations

import json
import sys
import weakref
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from itertools import count
from operator import index
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from camshaft.distributed.backend import Backend
from camshaft.distributed.context import current

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
