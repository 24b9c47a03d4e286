"""Collectives that not every rank reaches raise at once, instead of waiting for ever."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from camshaft.errors import RankDivergenceError


@dataclass(frozen=True)
class Alone:
    """A part of the program that some ranks run while the others do not.

    Args:
        present: those ranks.
        what: the part.
        where: its line.
        turn: which rank runs it first and whether that is a local one, if the others follow.
    """

    present: frozenset[int]
    what: str
    where: str
    turn: tuple[int, bool] | None


_INNER = (os.path.join(os.path.dirname(__file__), ""), contextlib.__file__)  # what lies between us and the user

alone: ContextVar[Alone | None] = ContextVar("camshaft_alone", default=None)
"""What this thread runs just now without other ranks; each collective asks."""


def check_all_present(collective: str, ranks: Sequence[int], rank: int) -> None:
    """Refuse a collective over ranks that are not all in the present part of the program.

    Raises:
        RankDivergenceError: some are not.
    """
    here = alone.get()
    if here is None or here.present.issuperset(ranks):
        return
    absent = sorted(set(ranks) - here.present)
    raise RankDivergenceError(
        f"{collective} on rank {rank} waits for ranks {absent}, which do not run {here.what} ({here.where}); "
        f"only {sorted(here.present)} do: move the call out of it, or make it over a group of those"
    )


@contextlib.contextmanager
def only(present: Sequence[int], what: str, where: str, turn: tuple[int, bool] | None = None) -> Iterator[None]:
    """Mark a part of the program as run by some ranks only, for this thread."""
    outer = alone.get()
    here = frozenset(present)
    if outer is not None:
        here, turn = here & outer.present, turn or outer.turn
    token = alone.set(Alone(here, what, where, turn))
    try:
        yield
    finally:
        alone.reset(token)


def is_turn(turn: tuple[int, bool]) -> bool:
    """Say whether the ranks take turns in this very order already."""
    here = alone.get()
    return here is not None and here.turn == turn


def line_of(function: Callable[..., Any]) -> str:
    """Say where a function is defined."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "a builtin" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def line_of_caller(within: str | None = None) -> str:
    """Say on which line this package, or all that is in a folder, was called."""
    inner = _INNER if within is None else within
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inner):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
