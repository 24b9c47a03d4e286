"""Which checkpoints are kept, given their scores and the order in which they were saved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Item(NamedTuple):
    """A checkpoint in the record of a handler."""

    priority: int | float
    filename: str


def retained(
    items: Sequence[Item],
    new: Item,
    n_saved: int | None,
    *,
    by_score: bool,
    ties_win: bool = False,
    always: bool = False,
) -> tuple[list[Item], list[str]] | None:
    """Return the record after a save, and the files that are no longer kept; ``None`` if it is not worth saving.

    By score, a checkpoint is saved if there is room or it is better than the worst one that is kept, but never in place
    of a better one of the same name.

    Args:
        items: the record, the first to be removed first.
        new: what may be saved.
        n_saved: how many to keep; ``None`` for all.
        by_score: keep the best instead of the newest.
        ties_win: save also if the scores are equal.
        always: save in any case.

    >>> retained([Item(1, "a"), Item(2, "b")], Item(3, "c"), 2, by_score=True)
    ([Item(priority=2, filename='b'), Item(priority=3, filename='c')], ['a'])
    """
    if by_score and not always:
        mine = comparable(new.priority)
        if n_saved is not None and len(items) >= n_saved:
            least = comparable(items[len(items) - n_saved].priority)
            if not (mine > least or (ties_win and mine == least)):
                return None
        if any(item.filename == new.filename and comparable(item.priority) > mine for item in items):
            return None
    kept = [item for item in items if item.filename != new.filename]
    num_dropped = 0 if n_saved is None else max(len(kept) + 1 - n_saved, 0)
    return in_order([*kept[num_dropped:], new], by_score), [item.filename for item in kept[:num_dropped]]


def in_order(items: Sequence[Item], by_score: bool) -> list[Item]:
    """Return items in the order in which they are removed: the worst first, without scores the oldest."""
    return sorted(items, key=lambda item: comparable(item.priority)) if by_score else list(items)


def comparable(priority: float) -> tuple[bool, float]:
    """Return the key for comparing priorities, where NaN is below all numbers."""
    return (False, 0.0) if math.isnan(priority) else (True, priority)
