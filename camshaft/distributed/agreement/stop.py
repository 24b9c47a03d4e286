"""Stop all ranks after the same step, whichever of them wants to stop, without a collective per step."""

from __future__ import annotations

import logging
import math
import time
from contextlib import suppress
from threading import Event, Lock

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from camshaft.distributed.collectives.api import all_reduce
from camshaft.distributed.failures import Board, watch
from camshaft.distributed.failures.store import EACH, PAUSE
from camshaft.distributed.job import current

_PAUSE = 0.005  # seconds, at least, between two requests while the ranks agree
_PATIENCE = 10.0  # seconds to wait for a rank that has not begun the run: it may not take part at all

logger = logging.getLogger(__name__)


def common_stop(name: str, step: int) -> CommonStop:
    """Take part in the stops that any rank may request.

    Args:
        name: of what stops, the same on all ranks; the ranks call this equally often for each name.
        step: the step that this rank is in, or begins next.
    """
    backend = current()
    topology, job = backend.topology, backend.job
    if topology.world_size == 1:
        return CommonStop()
    store = backend.store()
    if store is None:
        return StopByCollective()
    board = watch(backend).board
    topic = job.unique_name(f"stop/{name}")
    return StopInStore(board, topic, PrefixStore(topic, store), topology.rank, topology.world_size, step)


class CommonStop:
    """Decides before each step whether it may begin; this one in a single process."""

    def __init__(self) -> None:
        self._reason = 0

    def want(self, reason: int = 1) -> None:
        """Request to stop as soon as all ranks can do so after the same step, for a reason above 0."""
        self._reason = reason

    def may_begin(self, step: int) -> bool:
        """Return True if a step may begin; once a stop was requested, wait for the ranks to agree on the last step."""
        return not self._reason

    def settle(self) -> int:
        """Begin no more steps; return the reason why the ranks stop, the same on all, or 0 if the run just ended."""
        return self._reason

    def leave(self) -> None:
        """Begin no more steps, and wait for nobody."""


class StopByCollective(CommonStop):
    """A collective before each step, for backends without a store."""

    def __init__(self) -> None:
        super().__init__()
        self._wanted = 0

    def want(self, reason: int = 1) -> None:
        """Request to stop."""
        self._wanted = reason

    def may_begin(self, step: int) -> bool:
        """Return True if no rank has requested to stop."""
        self._reason = all_reduce(self._wanted, "MAX")
        return not self._reason


class StopInStore(CommonStop):
    """A stop that is announced to the watchers; until then, a step costs one check of a flag.

    Once a stop is announced, a rank begins no further step and reports the one that it is in. The furthest of all is
    the last step: the ranks before it proceed to it, and no rank waits within a step for one that has stopped earlier.
    If the run of a rank ended before it learned of the stop, the others stop, too, but without a reason, as that rank
    knows none. The last rank to report decides for all; the last one to leave deletes all keys. If some ranks never
    begin the run, those that have decide without them; they wait for each other, however slow they are.

    Args:
        board: of the job.
        topic: of this stop alone.
        store: for this stop alone.
        rank: of this process.
        size: the number of ranks.
        step: the step that this rank is in.
    """

    def __init__(self, board: Board, topic: str, store: Store, rank: int, size: int, step: int) -> None:
        super().__init__()
        self._board, self._topic, self._store = board, topic, store
        self._rank, self._size, self._step = rank, size, step
        self._lock = Lock()  # of the next two
        self._is_closed = False  # no step begins before the last one is known
        self._has_reported = self._is_wanted = False
        self._began: float | None = None
        self._last: int | None = None
        self._is_known = Event()
        with suppress(dist.DistError):  # the other ranks have gone, and the store with them
            store.append("members", f"{rank} ")  # type: ignore[attr-defined]  # torch's stubs
        board.watch(topic, self._agree)

    def want(self, reason: int = 1) -> None:
        """Begin no further step, and announce the stop."""
        with self._lock:
            self._is_closed = self._is_wanted = True
        with suppress(dist.DistError):  # the other ranks have gone, and the store with them
            self._store.set("reason", str(reason))
        self._board.announce(self._topic)

    def may_begin(self, step: int) -> bool:
        """Return True if no stop was announced; otherwise wait for the last step, and compare with it."""
        with self._lock:
            if not self._is_closed:
                self._step = step
                return True
        self._wait()
        if self._last is None:  # the store was lost: this rank obeys its own request, whenever it is made
            return not self._is_wanted
        return step <= self._last

    def settle(self) -> int:
        """Report that this rank has stopped, and wait for the others if a stop was announced before."""
        with suppress(dist.DistError):
            if not self._report(has_left=True):
                self._wait()
        return self._reason

    def leave(self) -> None:
        """Report where this rank has stopped."""
        self._board.forget(self._topic)
        with suppress(dist.DistError):
            self._report(has_left=True)
            if self._store.add("left", 1) == self._size:
                for key in ("members", "reports", "reason", "reported", "left", "last"):
                    self._store.delete_key(key)

    def _wait(self) -> None:
        """Wait for the last step; this thread asks for it, too, should the watcher not do so any more."""
        while not self._is_known.wait(_PATIENCE):
            self._agree()

    def _agree(self) -> float:
        """Find the last step, on the watcher's thread, in several calls."""
        if self._is_known.is_set():
            return math.inf
        try:
            if self._began is None:
                self._began = time.monotonic()
                self._report()
            if not self._store.check(["last"]):
                waited = time.monotonic() - self._began
                if waited < _PATIENCE:
                    return min(max(PAUSE, EACH * self._size), max(_PAUSE, waited / 4))
                if self._members() - {int(rank) for rank, _, _ in self._reports()}:
                    return _PATIENCE / 10
                self._decide()
            self._last, self._reason = map(int, self._store.get("last").split())
        except dist.DistError as error:
            logger.info("the ranks could not agree on the last step: %s", error)
            if self._is_wanted:
                self._last = self._step
        self._is_known.set()
        return math.inf

    def _report(self, has_left: bool = False) -> bool:
        """Report the step that this rank is in; it begins no further one before the last step is known.

        Args:
            has_left: whether the run of this rank has ended.

        Returns:
            Whether the rank leaves without knowing of a stop.
        """
        with self._lock:
            has_left = has_left and not self._is_closed
            if self._has_reported:
                return False
            self._has_reported = self._is_closed = True
            step = self._step
        self._store.append("reports", f"{self._rank} {step} {has_left:d};")  # type: ignore[attr-defined]  # torch's stubs
        if self._store.add("reported", 1) == self._size:
            self._decide()
        return has_left

    def _members(self) -> set[int]:
        """Return the ranks that have begun the run."""
        return set(map(int, self._store.get("members").split()))

    def _reports(self) -> list[list[str]]:
        """Return what the ranks have reported: number, step, and whether their run had ended."""
        return [report.split() for report in self._store.get("reports").decode().split(";")[:-1]]

    def _decide(self) -> None:
        """Write down the last step, as far as the ranks have reported."""
        reports = self._reports()
        there = {int(rank) for rank, _, _ in reports}
        if missing := [rank for rank in range(self._size) if rank not in there]:
            logger.warning("ranks %s did not respond to %s: the run stops without them", missing, self._topic)
        has_left = any(left == "1" for _, _, left in reports)
        reason = "0" if has_left else self._store.get("reason").decode()
        self._store.compare_set("last", "", f"{max(int(step) for _, step, _ in reports)} {reason}")
