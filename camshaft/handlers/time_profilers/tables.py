"""What was measured, as statistics, text and files."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

Extreme = tuple[float, int]


class Statistics(NamedTuple):
    """Of some seconds: their sum, the smallest and the largest with their places, the mean and the deviation."""

    total: float
    smallest: Extreme
    largest: Extreme
    mean: float
    std: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Statistics | None:
        """Compute them; ``None`` if there is nothing.

        >>> Statistics.of([1.0, 3.0])
        Statistics(total=4.0, smallest=(1.0, 0), largest=(3.0, 1), mean=2.0, std=1.4142135623730951)
        """
        if not seconds:
            return None
        values = torch.tensor(seconds, dtype=torch.float64)
        low, high = int(values.argmin()), int(values.argmax())
        std = values.std().item() if len(seconds) > 1 else 0.0
        return cls(values.sum().item(), (seconds[low], low), (seconds[high], high), values.mean().item(), std)


def name_of(handler: Any) -> str:
    """Name a handler by its qualified name, or that of its class, or of what a partial calls.

    >>> name_of(partial(sorted, reverse=True)), name_of([].append), name_of(object())
    ('sorted', 'list.append', 'object')
    """
    while isinstance(handler, partial):
        handler = handler.func
    return getattr(handler, "__qualname__", None) or type(handler).__qualname__


def write_table(path: str | os.PathLike[str], header: Iterable[str], columns: Iterable[Iterable[Any]]) -> None:
    """Write columns into a CSV file."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(zip(*columns, strict=True))
