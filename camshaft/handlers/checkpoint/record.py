"""The record of checkpoints kept: which are worth keeping, and which one has to go."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from numbers import Integral, Number
from pathlib import PurePath
from typing import Any, NamedTuple

from camshaft.engine.lazy import LazyNumber


class Item(NamedTuple):
    """One checkpoint of the record."""

    priority: int | float
    filename: str


def as_priority(value: Any, source: str) -> int | float:
    """Turn a number of any kind into a plain one, which ``torch.load(weights_only=True)`` reads back.

    Raises:
        ValueError: it is not a number that can be compared.

    >>> as_priority(True, "score_function"), as_priority(0.5, "score_function")
    (1, 0.5)
    """
    if isinstance(value, LazyNumber):
        value = value.read()
    if isinstance(value, Number) and not isinstance(value, complex):
        return int(value) if isinstance(value, Integral) else float(value)  # type: ignore[arg-type]  # real, or a Decimal
    hint = "; give score.item()" if hasattr(value, "item") else ""
    raise ValueError(f"{source} must give a real number, got {value!r} of type {type(value).__name__}{hint}")


def rank_of(priority: float) -> tuple[bool, float]:
    """Give what priorities are compared by: their value, and below all values NaN.

    >>> sorted([0.5, float("nan"), float("-inf")], key=rank_of)
    [nan, -inf, 0.5]
    """
    return (False, 0.0) if math.isnan(priority) else (True, priority)


def is_wanted(saved: Sequence[Item], priority: float, most: int | None, ties_win: bool) -> bool:
    """Say whether a checkpoint is to be saved: there is room, or it is better than the lowest one kept."""
    if most is None or len(saved) < most:
        return True
    new, lowest = rank_of(priority), rank_of(saved[0].priority)
    return new > lowest or (ties_win and new == lowest)


def with_item(saved: Sequence[Item], item: Item, most: int | None) -> tuple[list[Item], str | None]:
    """Give the record with an item more, lowest priority first, and the file that is no longer in it.

    An item of the same file name is replaced, since its file is; otherwise the lowest goes if the record is full.

    >>> with_item([Item(1, "a"), Item(2, "b")], Item(3, "c"), most=2)
    ([Item(priority=2, filename='b'), Item(priority=3, filename='c')], 'a')
    """
    kept = [one for one in saved if one.filename != item.filename]
    dropped = None
    if len(kept) == len(saved) and most is not None and len(kept) >= most:
        dropped = kept.pop(0).filename
    return in_order([*kept, item]), dropped


def in_order(items: Sequence[Item]) -> list[Item]:
    """Sort by priority; among equals the order stays, so that the newest is last."""
    return sorted(items, key=lambda item: rank_of(item.priority))


def record_of(items: Sequence[Item]) -> OrderedDict[str, Any]:
    """Give a record as it is saved."""
    return OrderedDict(_saved=[tuple(item) for item in items])


def read_items(value: Any) -> list[Item]:
    """Check a saved record, and give its items in order.

    Raises:
        ValueError: it is not a sequence of pairs of a number and a file name.
    """
    try:
        return in_order([Item(as_priority(priority, "_saved"), _text(filename)) for priority, filename in value])
    except (TypeError, ValueError) as error:
        raise ValueError(f"_saved must be a list of pairs (priority, file name), got {value!r}: {error}") from error


def _text(filename: Any) -> str:
    if not isinstance(filename, str):
        raise TypeError(f"a file name must be a str, got {filename!r}")
    path = PurePath(filename)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"a file name must stay in its directory, got {filename!r}")  # files of a record are removed
    if "\0" in filename:
        raise ValueError(f"a file name must not contain NUL, got {filename!r}")
    return filename
