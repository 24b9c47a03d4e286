"""What the benchmarks share: contenders that take turns, medians with quartiles, a table, a JSON line."""

from __future__ import annotations

import datetime
import gc
import json
import os
import platform
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import version
from time import perf_counter
from typing import Any


@dataclass(frozen=True)
class Contender:
    """One of those that are compared.

    Args:
        name: what the table calls it.
        run: takes a number of iterations, and gives the seconds that they took.
        share: the part of the iterations that it runs; less than 1 for what is very slow.
    """

    name: str
    run: Callable[[int], float]
    share: float = 1.0

    def per_iteration(self, iterations: int) -> float:
        count = max(1, round(iterations * self.share))
        return self.run(count) / count


@dataclass(frozen=True)
class Spread:
    """The median of a sample, and its quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, sample: Sequence[float], unit: float = 1.0) -> Spread:
        """Describe a sample in units of ``unit`` seconds."""
        values = [value / unit for value in sample]
        low, median, high = statistics.quantiles(values, method="inclusive") if len(values) > 1 else values * 3
        return cls(*(round(value, 4) for value in (low, median, high)))

    def __str__(self) -> str:
        digits = max(0, 3 - len(str(int(abs(self.median)))))  # three figures in all
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def seconds_of(function: Callable[[], object]) -> float:
    began = perf_counter()
    function()
    return perf_counter() - began


def interleave(contenders: Sequence[Contender], iterations: int, repetitions: int) -> dict[str, list[float]]:
    """Let the contenders take turns, and give the seconds per iteration of each in each round.

    A drift of the machine meets all of them, and the order changes from round to round, the same way each time and on
    each rank: what one leaves to the next, such as freed memory, does not always meet the same one. The first round
    only warms up. What exists before is kept out of garbage collection, so that nobody pays for the size of another
    library; what a contender leaves behind in its own run, it pays for.
    """
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    order = random.Random(0)
    gc.collect()
    gc.freeze()
    try:
        for round_number in range(repetitions + 1):
            for contender in order.sample(contenders, len(contenders)):
                gc.collect()
                taken = contender.per_iteration(iterations)
                if round_number:
                    seconds[contender.name].append(taken)
    finally:
        gc.unfreeze()
    return seconds


def over(baseline: Sequence[float], sample: Sequence[float]) -> list[float]:
    """Subtract the baseline, round by round, so that what slowed a whole round down cancels out."""
    return [one - base for one, base in zip(sample, baseline, strict=True)]


def importable(peers: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Import peers, given as package and module name; give those that are there, and why each other is left out."""
    present, left_out = [], {}
    for name, module in peers.items():
        try:
            import_module(module)
            present.append(name)
        except Exception as error:  # a peer may be broken in any way; the others are compared all the same
            absent = isinstance(error, ModuleNotFoundError) and error.name == module
            left_out[name] = "not installed" if absent else f"{type(error).__name__}: {error}"
    return present, left_out


def machine() -> dict[str, Any]:
    """Return what a reader needs to judge the figures, without identifying the machine."""
    return {
        "date": datetime.date.today().isoformat(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def verdict(spread: Spread, target: float) -> str:
    return "reached" if spread.median <= target else "missed"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out a table that reads well as text and as Markdown."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def report(
    name: str, head: Sequence[str], lines: Sequence[Sequence[str]], left_out: dict[str, str], **facts: Any
) -> None:
    """Print the machine, the table and who was left out; the last line is all of it as JSON."""
    where = machine()
    print(", ".join(f"{key} {value}" for key, value in where.items()))
    print(table(head, lines))
    for peer, reason in left_out.items():
        print(f"left out: {peer} ({reason})")
    print(json.dumps({"benchmark": name, "machine": where, **facts, "left_out": left_out}, default=asdict))
