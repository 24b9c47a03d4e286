"""What ranks agree on about their data, through the store of the job: the seed, what they read, and what is done."""

from __future__ import annotations

import json
import os
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from operator import attrgetter, index
from typing import Any

import torch
import torch.distributed as dist

from camshaft.distributed.backends.contract import Backend
from camshaft.distributed.collectives.api import broadcast
from camshaft.distributed.failures.alone import alone
from camshaft.distributed.failures.store import PAUSE, store_at, wait_for
from camshaft.distributed.failures.trace import num_begun
from camshaft.distributed.job import current, data_place
from camshaft.errors import RankDivergenceError, line_of_caller
from camshaft.text import counted

_DONE = ("epoch", "iteration", "done", "position")  # of the progress of an engine
_PATIENCE = 10.0  # seconds for which a rank that saves waits for the others to come as far


class SharedSource:
    """What the ranks that divide the data of a sampler have in common: its seed, and what else the order follows from.

    A sampler without a seed gets rank 0's ``torch.initial_seed()`` at the time it is created. Rank 0 writes it to the
    store without waiting. Every other rank reads it when it is first needed, which is when a pass starts, unless a
    saved position holds the seed; only then does it wait for rank 0 to create the sampler. Where there is no store, the
    seed is broadcast, deferred to the first use inside of ``one_rank_first``.

    When a rank reads the data for the first time, it compares with the rank that did so before, in one request: nobody
    waits. In debug mode, each pass is compared at its end.

    Ranks identify a sampler by the line of the user's code that creates it, and by how many were created there before.
    One that is created where only some ranks are, as in ``one_rank_only``, is their own. A copy is another sampler.

    Args:
        seed: of the user, or ``None``.
    """

    def __init__(self, seed: int | None) -> None:
        backend, here = current(), alone.get()
        self._own, self._value, self._place = torch.initial_seed(), seed, data_place(backend)
        self._compared: set[str] = set()
        self._passes, self._collectives = 0, 0
        self._missed: tuple[int, int] | None = None  # the run and the iteration of a wait in vain
        self.backend: Callable[[], Backend | None] = lambda: None
        if here is not None and here.turn is None:
            self._value = self._own if seed is None else seed
            return
        self._line = line_of_caller().rpartition(os.sep)[2]  # folders may differ between nodes
        self.backend = weakref.ref(backend)  # of the thread that creates the sampler; another thread may read it
        self._name = backend.job.unique_name(f"data/{self._line}")
        if seed is not None:
            return
        store = backend.store()
        if store is None and here is None:
            self._value = _from_rank_0(self._own)
        elif store is not None and backend.topology.rank == 0:
            self._value = self._own
            store.set(f"{self._name}/seed", str(self._own))

    def __reduce__(self) -> tuple[type[SharedSource], tuple[int]]:
        return SharedSource, (index(self),)

    def __index__(self) -> int:
        """Return the seed; the first call may ask the store for it, and wait until rank 0 has created the sampler.

        Raises:
            RankDivergenceError: rank 0 does not create the sampler, or the run has ended.
        """
        if self._value is None:
            self._value = self._read()
        return self._value

    def _store(self) -> Any:
        return store_at(self.backend(), self._name)

    def _read(self) -> int:
        backend, store = self.backend(), self._store()
        if backend is not None and backend.is_alive() and store is None:
            return _from_rank_0(self._own)
        if backend is None or store is None:
            raise RankDivergenceError(
                f"the job ended before this rank read the seed of the loader created at {self._line}, which rank 0 "
                "chose: iterate over the loader during the job, or pass seed= to auto_dataloader"
            )
        return wait_for(
            lambda: int(store.get("seed")) if store.check(["seed"]) else None,
            *(store, "the seed of a loader"),
            ranks=[0],
            rank=backend.topology.rank,
            detail=lambda: (
                f"rank 0 to create the loader that this rank creates at {self._line}, whose seed rank 0 chooses: "
                "create it on the same line on all ranks, or pass seed= to auto_dataloader"
            ),
        )

    def begin(self, source: Mapping[str, Any], is_announced: bool) -> None:
        """Compare with the other ranks what the first pass follows from.

        Args:
            source: by name.
            is_announced: all ranks were told where the pass begins. They may be told after a rank has read a batch, so
                the first such pass is compared too.

        Raises:
            ValueError: there is a difference.
            RuntimeError: the mesh of the job was created after the sampler, and divides the data in another way.
        """
        backend = self.backend()
        if backend is not None and backend.job.mesh is not None and (now := data_place(backend)) != self._place:
            raise RuntimeError(
                "this loader was created for part {} of {} of the data, but with the mesh, this rank reads part {} of "
                "{}: call make_mesh before auto_dataloader".format(*self._place, *now)
            )
        self._collectives, key = _num_collectives(), "announced" if is_announced else "first"
        if key not in self._compared and (is_announced or not self._compared):
            self._compare(key, source)

    def end(self, source: Mapping[str, Any]) -> None:
        """Compare a pass that was read to its end, in debug mode."""
        self._passes += 1
        if (backend := self.backend()) is not None and backend.job.compares_collectives:
            self._compare(f"pass/{self._passes}", source)

    def _compare(self, key: str, source: Mapping[str, Any]) -> None:
        self._compared.add(key)
        backend, store = self.backend(), self._store()
        if backend is None or store is None or alone.get() is not None:
            return
        rank = backend.topology.rank
        text = json.dumps([rank, source], default=index)
        try:
            found = store.compare_set(key, "", text)
        except RuntimeError:  # the process that holds the store has ended
            return
        (first, theirs), (_, mine) = json.loads(found), json.loads(text)
        differences = [
            f"{name} is {theirs[name]!r} on rank {first}, but {mine[name]!r} on rank {rank}"
            for name in mine
            if mine[name] != theirs[name]
        ]
        if differences:
            raise ValueError(
                "the ranks do not read the same data, so samples would be repeated or skipped: "
                f"{'; '.join(differences)} (a loader that only some ranks create belongs into one_rank_only)"
            )

    def completed_by_all(self, run: int, mine: Any, start: Any) -> Any:
        """Return the progress of the rank that has completed least, from which a run resumes without a gap.

        Steps with collectives keep the ranks together, and nothing is exchanged. If the ranks have not communicated
        since the pass began, each writes its progress to the store, when it saves and when its run ends. A rank that
        saves waits for the others to come as far or to end, but not for long: to resume from less repeats samples,
        which is better than to lose them. After a wait in vain, it waits again only once all of them have come as far,
        so that ranks that do not save cost a single wait.

        Args:
            run: number of the run of the engine.
            mine: the progress of this rank.
            start: that of the start of the run, for ranks that have not saved in it; ``None`` if the run has ended.
        """
        backend, here, pause, missed = self.backend(), alone.get(), PAUSE / 50, self._missed
        if backend is None or here is not None or self._collectives != _num_collectives():
            return mine
        if (store := self._store()) is None:
            return mine
        rank, keys = backend.topology.rank, [f"done/{rank}" for rank in range(backend.topology.world_size)]
        began = time.monotonic()
        row = json.dumps([run, {name: getattr(mine, name) for name in _DONE}, start is None])
        if start is None:
            with suppress(RuntimeError):  # the process that holds the store has ended
                store.set(keys[rank], row)
            return mine
        store.set(keys[rank], row)
        while True:
            rows = [json.loads(text) for text in store.multi_get(keys)] if store.check(keys) else []
            done = [mine._replace(**one) for number, one, _ in rows if number == run]
            least = min(done, key=attrgetter("iteration")) if len(done) == len(keys) else start
            if self._missed and rows and min((number, one["iteration"]) for number, one, _ in rows) >= self._missed:
                self._missed = None  # the others came, if late
            if len(done) == len(keys) and all(ended or one["iteration"] >= mine.iteration for _, one, ended in rows):
                break
            if self._missed or time.monotonic() - began > _PATIENCE:
                self._missed = self._missed or (run, mine.iteration)
                break
            time.sleep(pause)
            pause *= 2
        if missed is None and least is start and least.iteration < mine.iteration:
            warnings.warn(
                f"rank {rank} saves after {counted(mine.iteration, 'iteration')}, but not all ranks have saved in this "
                "run, and no collectives keep them together: what is saved is the progress that all of them have made "
                "for certain, which is that of the start of the run; save on all ranks",
                stacklevel=2,
            )
        return least if least.iteration < mine.iteration else mine


def _from_rank_0(seed: int) -> int:
    return int(broadcast(str(seed), src=0))  # as text: numbers travel with 63 bits, and seeds have 64


def _num_collectives() -> int:
    """Return how many collectives of torch this process has begun, in all groups."""
    groups: Any = dist.distributed_c10d._world.pg_map if dist.is_available() else ()
    return sum(num_begun(group) or 0 for group in tuple(groups))
