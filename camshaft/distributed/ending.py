"""A last step that the ranks agree on, whoever of them wants to end; off the device."""

from __future__ import annotations

import logging
import time
import weakref
from collections import Counter
from threading import Event, Lock, Thread
from typing import Protocol

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from camshaft.distributed.backend import Backend
from camshaft.distributed.collectives import all_reduce
from camshaft.distributed.context import current

_PAUSE = 0.05  # seconds between questions to the store
_PATIENCE = 10.0  # seconds for a rank that does not answer: it may not be told of the end at all

logger = logging.getLogger(__name__)
_begun: weakref.WeakKeyDictionary[Backend, Counter[str]] = weakref.WeakKeyDictionary()


class CommonEnd(Protocol):
    """Asked before each step whether it may begin."""

    def want(self) -> None:
        """Say that this rank wants to end, as soon as all can do so at the same step."""

    def may_begin(self, step: int) -> bool:
        """Say whether a step may begin; waits if somebody wants to end, for all to say where they are."""

    def leave(self) -> None:
        """Begin no more steps."""


def common_end(name: str, step: int) -> CommonEnd | None:
    """Begin to watch for wishes to end.

    Args:
        name: of what ends; the same on all ranks, on which it is begun equally often.
        step: that this rank is in, or begins next.

    Returns:
        ``None`` for a single process, which needs nobody's consent.
    """
    backend = current()
    if backend.topology.world_size == 1:
        return None
    store = backend.store()
    if store is None:
        return EndByCollective()
    begun = _begun.setdefault(backend, Counter())
    begun[name] += 1
    place = PrefixStore(f"camshaft/end/{name}/{begun[name]}", store)
    return EndInStore(place, backend.topology.rank, backend.topology.world_size, step)


class EndByCollective:
    """Asks all before each step, where there is no store."""

    def __init__(self) -> None:
        self._is_wanted = False

    def want(self) -> None:
        """Say so when all are asked."""
        self._is_wanted = True

    def may_begin(self, step: int) -> bool:
        """Ask all, which do the same."""
        return not all_reduce(int(self._is_wanted), "MAX")

    def leave(self) -> None:
        """Do nothing: nobody can be told."""


class EndInStore:
    """A thread looks into the store, some times a second; a step costs a look at a flag.

    When somebody wants to end, each rank begins no further step until all have said which one they are in. The
    furthest is the last one: nobody then waits within a step for one that has stopped before it.

    Args:
        store: that of this end alone.
        rank: of this process.
        size: the number of ranks.
        step: that this rank is in.
    """

    def __init__(self, store: Store, rank: int, size: int, step: int) -> None:
        self._store = store
        self._rank = rank
        self._keys = [f"at/{other}" for other in range(size)]
        self._step = step
        self._lock = Lock()
        self._is_closed = False  # no step begins any more before the last one is known
        self._last: int | None = None
        self._is_known = Event()
        self._is_over = Event()
        self._thread = Thread(target=self._run, name="camshaft-end", daemon=True)
        self._thread.start()

    def want(self) -> None:
        """Close the gate here, and tell the others."""
        with self._lock:
            self._is_closed = True
        try:
            self._store.set("wanted", "")
        except dist.DistError:  # the others have gone, and the store with them: this rank ends where it is
            self._last = self._step if self._last is None else self._last
            self._is_known.set()

    def may_begin(self, step: int) -> bool:
        """Look whether the gate is closed; if so, wait for the last step."""
        with self._lock:
            if not self._is_closed:
                self._step = step
                return True
        self._is_known.wait()
        return self._last is None or step <= self._last

    def leave(self) -> None:
        """Say where this rank has stopped, and look no more."""
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            if self._is_wanted_some_day():
                self._agree()
            else:
                self._say()
        except dist.DistError as error:
            logger.info("the ranks do not end together: %s", error)  # the store has gone with its process
        finally:
            self._is_known.set()

    def _is_wanted_some_day(self) -> bool:
        while not self._store.check(["wanted"]):
            if self._is_over.wait(_PAUSE):
                return False
        return True

    def _say(self) -> None:
        with self._lock:
            self._is_closed = True
            step = self._step
        self._store.set(self._keys[self._rank], str(step))

    def _agree(self) -> None:
        self._say()
        began = time.monotonic()
        while not self._store.check(["last"]):
            there = [key for key in self._keys if self._store.check([key])]
            if len(there) == len(self._keys) or time.monotonic() - began > _PATIENCE:
                last = max(int(self._store.get(key)) for key in there)
                if len(there) < len(self._keys):
                    missing = [rank for rank, key in enumerate(self._keys) if key not in there]
                    logger.warning("the ranks %s do not answer: the run ends without them", missing)
                self._store.compare_set("last", "", str(last))
            elif self._is_over.wait(_PAUSE / 10):
                return
        self._last = int(self._store.get("last"))
