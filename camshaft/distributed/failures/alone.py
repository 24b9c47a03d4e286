"""Code that some ranks run and the others do not, where a collective of all of them would hang."""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from threading import get_ident
from typing import NamedTuple

import torch.distributed as dist

from camshaft.distributed.failures.trace import num_begun
from camshaft.errors import RankDivergenceError
from camshaft.text import counted, shortened_ranks, spans


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
