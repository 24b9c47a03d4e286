"""Stop all ranks after the same step, whichever of them wants to stop, without a collective per step."""

from __future__ import annotations

import logging
import math
import time
from contextlib import suppress
from threading import Event, Lock

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from camshaft.distributed.collectives import all_reduce
from camshaft.distributed.coordination.watcher import Watcher
from camshaft.distributed.run import current

_PAUSE = 0.005  # seconds between requests while the ranks agree
_PATIENCE = 10.0  # seconds to wait for a rank that does not answer: it may not take part at all

logger = logging.getLogger(__name__)


def common_stop(name: str, step: int) -> CommonStop | None:
    """Take part in the stops that any rank may request.

    Args:
        name: of what stops, the same on all ranks; the ranks call this equally often for each name.
        step: the step that this rank is in, or begins next.

    Returns:
        ``None`` for a single process, which can stop at any time.
    """
    backend = current()
    topology, job = backend.topology, backend.job
    if topology.world_size == 1:
        return None
    store = backend.store()
    if store is None:
        return CommonStop()
    watcher = Watcher.of(backend)
    topic = job.unique_name(f"stop/{name}")
    return StopInStore(watcher, topic, PrefixStore(topic, store), topology.rank, topology.world_size, step)


class CommonStop:
    """Decides before each step whether it may begin; this one by a collective, for backends without a store."""

    def __init__(self) -> None:
        self._is_wanted = False

    def want(self) -> None:
        """Request to stop as soon as all ranks can do so after the same step."""
        self._is_wanted = True

    def may_begin(self, step: int) -> bool:
        """Return True if a step may begin; once a stop was requested, wait for the ranks to agree on the last step."""
        return not all_reduce(int(self._is_wanted), "MAX")

    def leave(self) -> None:
        """Begin no more steps."""


class StopInStore(CommonStop):
    """A stop that is announced to the watchers; until then, a step costs one check of a flag.

    Once a stop is announced, a rank begins no further step and reports the one that it is in. The furthest of all is
    the last step: the ranks before it proceed to it, and no rank waits within a step for one that has stopped earlier.
    The last rank to leave deletes all keys.

    Args:
        watcher: of the job.
        topic: of this stop alone.
        store: for this stop alone.
        rank: of this process.
        size: the number of ranks.
        step: the step that this rank is in.
    """

    def __init__(self, watcher: Watcher, topic: str, store: Store, rank: int, size: int, step: int) -> None:
        self._watcher, self._topic, self._store = watcher, topic, store
        self._rank, self._keys, self._step = rank, [f"at/{other}" for other in range(size)], step
        self._lock = Lock()  # of the next two
        self._is_closed = False  # no step begins before the last one is known
        self._has_reported = self._is_wanted = False
        self._deadline: float | None = None
        self._last: int | None = None
        self._is_known = Event()
        watcher.watch(topic, self._agree)

    def want(self) -> None:
        """Begin no further step, and announce the stop."""
        with self._lock:
            self._is_closed = self._is_wanted = True
        self._watcher.announce(self._topic)

    def may_begin(self, step: int) -> bool:
        """Return True if no stop was announced; otherwise wait for the last step, and compare with it."""
        with self._lock:
            if not self._is_closed:
                self._step = step
                return True
        self._is_known.wait()
        return self._last is None or step <= self._last

    def leave(self) -> None:
        """Report where this rank has stopped."""
        self._watcher.forget(self._topic)
        with suppress(dist.DistError):
            self._report()
            if self._store.add("left", 1) == len(self._keys):
                for key in (*self._keys, "reported", "left", "last"):
                    self._store.delete_key(key)

    def _agree(self) -> float:
        """Find the last step, on the watcher's thread, in several calls."""
        if self._is_known.is_set():
            return math.inf
        try:
            if self._deadline is None:
                self._deadline = time.monotonic() + _PATIENCE
                self._report()
            if not self._store.check(["last"]):
                is_late = time.monotonic() > self._deadline
                if self._store.add("reported", 0) < len(self._keys) and not is_late:
                    return _PAUSE
                there = [key for key in self._keys if not is_late or self._store.check([key])]
                if len(there) < len(self._keys):
                    missing = [rank for rank, key in enumerate(self._keys) if key not in there]
                    logger.warning("ranks %s did not respond: the run stops without them", missing)
                self._store.compare_set("last", "", str(max(map(int, self._store.multi_get(there)))))
            self._last = int(self._store.get("last"))
        except dist.DistError as error:
            logger.info("the ranks could not agree on the last step: %s", error)
            if self._is_wanted:
                self._last = self._step
        self._is_known.set()
        return math.inf

    def _report(self) -> None:
        """Report the step that this rank is in; it begins no further one before the last step is known."""
        with self._lock:
            if self._has_reported:
                return
            self._has_reported = self._is_closed = True
            step = self._step
        self._store.set(self._keys[self._rank], str(step))
        self._store.add("reported", 1)
