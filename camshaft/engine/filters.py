"""Filters by count: each accepts some counts and knows the next count that it accepts."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from camshaft.types import is_integer

NEVER = sys.maxsize
"""A count that no counter reaches."""


class CountFilter:
    """Accepts some counts. As the next accepted count is known, the filter is not called in between."""

    def __call__(self, engine: Any, count: int) -> bool:
        """Return whether handlers run at ``count``."""
        raise NotImplementedError

    def following(self, count: int) -> int:
        """Return the smallest accepted count above ``count``, or ``NEVER``."""
        raise NotImplementedError


@dataclass(frozen=True)
class Every(CountFilter):
    """Accept the multiples of ``every``.

    >>> [count for count in range(1, 7) if Every(3)(None, count)]
    [3, 6]
    """

    every: int

    def __call__(self, engine: Any, count: int) -> bool:
        """Return whether handlers run at ``count``."""
        return count % self.every == 0

    def following(self, count: int) -> int:
        """Return the next accepted count."""
        return (count // self.every + 1) * self.every

    def __repr__(self) -> str:
        return f"every={self.every}"


@dataclass(frozen=True)
class Once(CountFilter):
    """Accept the listed counts, which are in ascending order.

    >>> [count for count in range(1, 7) if Once((2, 5))(None, count)]
    [2, 5]
    """

    counts: tuple[int, ...]

    def __call__(self, engine: Any, count: int) -> bool:
        """Return whether handlers run at ``count``."""
        return count in self.counts

    def following(self, count: int) -> int:
        """Return the next accepted count."""
        place = bisect_right(self.counts, count)
        return self.counts[place] if place < len(self.counts) else NEVER

    def __repr__(self) -> str:
        return f"once={self.counts[0] if len(self.counts) == 1 else list(self.counts)}"


@dataclass(frozen=True)
class Window(CountFilter):
    """Accept every n-th count strictly between ``after`` and ``before``, starting with ``after + 1``.

    >>> [count for count in range(30) if Window(every=5, before=25)(None, count)]
    [1, 6, 11, 16, 21]
    """

    after: int = 0
    before: int = NEVER
    every: int = 1

    def __call__(self, engine: Any, count: int) -> bool:
        """Return whether handlers run at ``count``."""
        return self.after < count < self.before and (count - self.after - 1) % self.every == 0

    def following(self, count: int) -> int:
        """Return the next accepted count."""
        first = self.after + 1
        found = first + max(0, -((first - count - 1) // self.every)) * self.every
        return found if found < self.before else NEVER

    def __repr__(self) -> str:
        parts = {"every": (self.every, 1), "after": (self.after, 0), "before": (self.before, NEVER)}
        return ", ".join(f"{name}={value}" for name, (value, default) in parts.items() if value != default)


def counts_for_once(once: Any) -> tuple[int, ...]:
    """Return the counts of the ``once`` argument of an event, in ascending order."""
    given = tuple(once) if isinstance(once, Sequence) and not isinstance(once, str) else (once,)
    if not given or not all(is_integer(count) and count > 0 for count in given):
        raise ValueError(f"once must be an integer above 0, or a non-empty sequence of such integers, got {once!r}")
    return tuple(sorted({int(count) for count in given}))


def at_least(name: str, value: Any, lowest: int) -> int:
    """Return ``value``, an argument of an event, if it is an integer not below ``lowest``."""
    if not is_integer(value) or value < lowest:
        raise ValueError(f"{name} must be an integer >= {lowest}, got {value!r}")
    return int(value)
