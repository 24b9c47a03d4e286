"""The store of a job, and waiting for what other ranks write to it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistNetworkError

from camshaft.distributed.backends.contract import Backend
from camshaft.distributed.failures.alone import check_all_present
from camshaft.errors import RankDivergenceError

T = TypeVar("T")
PAUSE = 0.05  # longest time between two requests of a rank that waits, in seconds; later it is a second
EACH = 0.00025  # the same for each rank that waits, so that all together make at most 4,000 requests a second
SILENCE = 10.0  # time after which a rank logs that it waits, in seconds
_logger = logging.getLogger(__name__)


def store_at(backend: Backend | None, prefix: str) -> Store | None:
    """Return the store of a job, below a prefix; ``None`` if the backend has none or the job has ended."""
    try:
        store = backend.store() if backend is not None and backend.is_alive() else None
    except (RuntimeError, ValueError):
        return None
    return None if store is None else PrefixStore(prefix, store)


def wait_for(
    poll: Callable[[], T | None],
    store: Store,
    what: str,
    *,
    ranks: Sequence[int],
    rank: int,
    detail: Callable[[], str],
    is_watched: bool = False,
) -> T:
    """Query the store until it holds a value, and return it.

    Args:
        poll: queries the store; returns ``None`` as long as there is no value.
        store: for its timeout.
        what: what the ranks do, for the error if this rank is in code that not all of them run.
        ranks: the ranks to wait for.
        rank: of this process.
        detail: returns which ranks are missing, and the possible reasons.
        is_watched: whether the watcher of the job reports that this rank waits.

    Raises:
        RankDivergenceError: the timeout has passed, or no value can arrive.
    """
    began, has_logged = time.monotonic(), is_watched
    try:
        while (answer := poll()) is None:
            check_all_present(what, ranks, rank)
            timeout: float = store.timeout.total_seconds()  # type: ignore[attr-defined]  # torch's stubs
            waited = time.monotonic() - began
            if waited > SILENCE and not has_logged:
                has_logged = True
                _logger.warning("rank %d is waiting up to %g s for %s", rank, timeout, detail())
            if waited > timeout:
                raise RankDivergenceError(f"rank {rank} timed out after {timeout:g} s waiting for {detail()}")
            longest = max(PAUSE if waited < SILENCE else 1.0, EACH * len(ranks))
            time.sleep(min(longest, max(PAUSE / 500, waited / 4)))
    except DistNetworkError as error:
        raise RankDivergenceError("the process that hosts the store of this job has ended") from error
    return answer
