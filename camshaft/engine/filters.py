"""Filters by count: each accepts some counts and knows which one it accepts next."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol, runtime_checkable

NEVER = sys.maxsize
"""A count that no counter reaches."""


@runtime_checkable
class CountFilter(Protocol):
    """Accepts counts, and tells the next one it will accept, so that nobody needs to ask in between."""

    def __call__(self, engine: Any, count: int) -> bool:
        """Say whether a handler runs at ``count``."""

    def following(self, count: int) -> int:
        """Give the smallest accepted count above ``count``, or ``NEVER``."""


@dataclass(frozen=True)
class Every:
    """Accept the multiples of ``every``.

    >>> [count for count in range(1, 7) if Every(3)(None, count)]
    [3, 6]
    """

    every: int

    def __call__(self, engine: Any, count: int) -> bool:
        """Say whether a handler runs at ``count``."""
        return count % self.every == 0

    def following(self, count: int) -> int:
        """Give the next accepted count."""
        return (count // self.every + 1) * self.every

    def __repr__(self) -> str:
        return f"every={self.every}"


@dataclass(frozen=True)
class Once:
    """Accept the listed counts, given in rising order.

    >>> [count for count in range(1, 7) if Once((2, 5))(None, count)]
    [2, 5]
    """

    counts: tuple[int, ...]

    def __call__(self, engine: Any, count: int) -> bool:
        """Say whether a handler runs at ``count``."""
        return count in self.counts

    def following(self, count: int) -> int:
        """Give the next accepted count."""
        place = bisect_right(self.counts, count)
        return self.counts[place] if place < len(self.counts) else NEVER

    def __repr__(self) -> str:
        return f"once={self.counts[0] if len(self.counts) == 1 else list(self.counts)}"


@dataclass(frozen=True)
class Window:
    """Accept counts strictly between ``after`` and ``before``, every n-th of them from ``after + 1`` on.

    >>> [count for count in range(30) if Window(every=5, before=25)(None, count)]
    [1, 6, 11, 16, 21]
    """

    after: int = 0
    before: int = NEVER
    every: int = 1

    def __call__(self, engine: Any, count: int) -> bool:
        """Say whether a handler runs at ``count``."""
        return self.after < count < self.before and (count - self.after - 1) % self.every == 0

    def following(self, count: int) -> int:
        """Give the next accepted count."""
        first = self.after + 1
        steps = max(0, -((first - count - 1) // self.every))
        found = first + steps * self.every
        return found if found < self.before else NEVER

    def __repr__(self) -> str:
        parts = {"every": (self.every, 1), "after": (self.after, 0), "before": (self.before, NEVER)}
        return ", ".join(f"{name}={value}" for name, (value, default) in parts.items() if value != default)


def counts_for_once(once: Any) -> tuple[int, ...]:
    """Check the ``once`` argument of an event and give its counts in rising order."""
    given = tuple(once) if isinstance(once, Sequence) and not isinstance(once, str) else (once,)
    if not given or not all(is_integer(count) and count > 0 for count in given):
        raise ValueError(f"once must be an integer above 0, or a non-empty sequence of such, got {once!r}")
    return tuple(sorted({int(count) for count in given}))


def at_least(name: str, value: Any, lowest: int) -> int:
    """Check that an argument of an event is an integer not below ``lowest``."""
    if not is_integer(value) or value < lowest:
        raise ValueError(f"{name} must be an integer >= {lowest}, got {value!r}")
    return int(value)


def is_integer(value: Any) -> bool:
    """Say whether a value is an integer of any kind."""
    return isinstance(value, Integral)
