"""Collectives that not every rank reaches raise at once, instead of waiting for ever."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from camshaft.errors import RankDivergenceError


@dataclass(frozen=True)
class Alone:
    """A part of the program that some ranks run while the others do not."""

    present: frozenset[int]
    what: str
    where: str


_alone: ContextVar[Alone | None] = ContextVar("camshaft_alone", default=None)


def check_all_present(collective: str, ranks: Sequence[int], rank: int) -> None:
    """Refuse a collective over ranks that are not all in the present part of the program.

    Raises:
        RankDivergenceError: some are not.
    """
    alone = _alone.get()
    if alone is None or alone.present.issuperset(ranks):
        return
    absent = sorted(set(ranks) - alone.present)
    raise RankDivergenceError(
        f"{collective} on rank {rank} waits for ranks {absent}, which do not run {alone.what} ({alone.where}); "
        f"only {sorted(alone.present)} do: move the call out of it, or make it over a group of those"
    )


@contextmanager
def only(present: Sequence[int], what: str, where: str) -> Iterator[None]:
    """Mark a part of the program as run by some ranks only."""
    outer = _alone.get()
    here = frozenset(present)
    token = _alone.set(Alone(here if outer is None else here & outer.present, what, where))
    try:
        yield
    finally:
        _alone.reset(token)


def line_of(function: Callable[..., Any]) -> str:
    """Say where a function is defined."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "a builtin" if code is None else f"{code.co_filename}:{code.co_firstlineno}"
