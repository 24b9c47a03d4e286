"""Waiting for other ranks: which of them can take part, and what they write to the store of the job."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from threading import get_ident
from typing import NamedTuple, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistNetworkError

from camshaft.distributed.backends.contract import Backend
from camshaft.distributed.failures.trace import num_begun
from camshaft.errors import RankDivergenceError
from camshaft.text import counted, shortened_ranks, spans

T = TypeVar("T")
PAUSE = 0.05  # longest time between two requests of a rank that waits, in seconds; later it is a second
EACH = 0.00025  # the same for each rank that waits, so that all together make at most 4,000 requests a second
SILENCE = 10.0  # time after which a rank logs that it waits, in seconds
_logger = logging.getLogger(__name__)


class Alone(NamedTuple):
    """A block of code that some ranks run and the others do not.

    Args:
        present: the ranks that run it.
        what: the block.
        where: its line.
        turn: in ``one_rank_first``, the rank that goes first and whether it is a local one.
    """

    present: frozenset[int]
    what: str
    where: str
    turn: tuple[int, bool] | None


alone: ContextVar[Alone | None] = ContextVar("camshaft_alone", default=None)
"""What this thread runs at the moment without other ranks; every collective checks it."""

inside: dict[int, list[Alone]] = {}
"""The same by the identifiers of threads, outermost first, for reports on this process."""

strays: deque[str] = deque(maxlen=4)
"""What this process has sent last in such blocks to ranks that do not run them, for the text of a verdict."""


@contextlib.contextmanager
def only(present: Sequence[int], what: str, where: str, turn: tuple[int, bool] | None = None) -> Iterator[None]:
    """Mark a block as run by some ranks only, for this thread."""
    outer = alone.get()
    here = frozenset(present)
    if outer is not None:
        here, turn = here & outer.present, turn or outer.turn
    block = Alone(here, what, where, turn)
    token, blocks = alone.set(block), inside.setdefault(get_ident(), [])
    blocks.append(block)
    before = _sent(here)
    try:
        yield
    finally:
        for ranks, number in (_sent(here) - before).items():
            strays.append(f"sent {counted(number, 'collective')} of ranks {spans(ranks)} in {what} ({where})")
        alone.reset(token)
        blocks.remove(block)
        if not blocks:
            inside.pop(get_ident(), None)


def _sent(present: frozenset[int]) -> Counter[frozenset[int]]:
    """Return how much this process has sent in torch's groups that have other ranks, too, by the ranks of the group."""
    sent = Counter[frozenset[int]]()
    if dist.is_available() and dist.is_initialized():
        for group, members in tuple(dist.distributed_c10d._world.pg_group_ranks.items()):
            if not present.issuperset(members):
                sent[frozenset(members)] += num_begun(group) or 0
    return sent


def check_all_present(collective: str, ranks: Sequence[int], rank: int) -> None:
    """Check that all ranks run the current block of code.

    Raises:
        RankDivergenceError: some do not, so the collective would hang.
    """
    here = alone.get()
    if here is None or here.present.issuperset(ranks):
        return
    absent, present = shortened_ranks(set(ranks) - here.present), shortened_ranks(here.present)
    raise RankDivergenceError(
        f"{collective} on rank {rank} waits for ranks {absent}, which do not run {here.what} ({here.where}); "
        f"only ranks {present} do: move the call outside of it, or use a group of these ranks"
    )


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
