"""The store of a job, and waiting for what other ranks write there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistNetworkError

from camshaft.distributed.backend import Backend
from camshaft.distributed.ranks import check_all_present
from camshaft.errors import RankDivergenceError

T = TypeVar("T")
PAUSE = 0.05  # longest time between two requests of a rank that waits, in seconds; later it is a second
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
    poll: Callable[[], T | None], store: Store, what: str, *, ranks: Sequence[int], rank: int, detail: Callable[[], str]
) -> T:
    """Query the store until it holds a value, and return it.

    Args:
        poll: asks; returns ``None`` where there is no answer yet.
        store: for its timeout.
        what: what the ranks do, for the message if this rank is where not all of them can follow.
        ranks: those that are waited for.
        rank: of this process.
        detail: returns who is waited for, and what may keep them.

    Raises:
        RankDivergenceError: the store's timeout has passed, or no value can arrive.
    """
    began, has_logged = time.monotonic(), False
    try:
        while (answer := poll()) is None:
            check_all_present(what, ranks, rank)
            timeout = store.timeout.total_seconds()  # type: ignore[attr-defined]  # torch's stubs lack it
            waited = time.monotonic() - began
            if waited > timeout:
                raise RankDivergenceError(f"rank {rank} timed out after {timeout:g} s waiting for {detail()}")
            if waited > SILENCE and not has_logged:
                has_logged = True
                _logger.warning("rank %d is waiting up to %g s for %s", rank, timeout, detail())
            time.sleep(min(PAUSE if waited < SILENCE else 1.0, max(PAUSE / 500, waited / 4)))
    except DistNetworkError as error:
        raise RankDivergenceError("the process that holds the store of this run has ended") from error
    return answer
