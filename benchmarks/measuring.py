"""Helpers of the benchmarks: interleaved contenders, medians with quartiles, a table, and a JSON line."""

from __future__ import annotations

import contextlib
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
from pathlib import Path
from time import perf_counter
from typing import Any


@dataclass(frozen=True)
class Contender:
    """A program to compare with others.

    Args:
        name: its name in the table.
        run: takes a number of iterations and returns the seconds that they took.
        share: the fraction of the iterations to run; less than 1 for slow contenders.
    """

    name: str
    run: Callable[[int], float]
    share: float = 1.0

    def per_iteration(self, iterations: int) -> float:
        count = max(1, round(iterations * self.share))
        return self.run(count) / count


@dataclass(frozen=True)
class Spread:
    """The median and the quartiles of a sample."""

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
        digits = max(0, 3 - len(str(int(abs(self.median)))))  # three significant digits
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def seconds_of(function: Callable[[], object]) -> float:
    began = perf_counter()
    function()
    return perf_counter() - began


def interleave(contenders: Sequence[Contender], iterations: int, repetitions: int) -> dict[str, list[float]]:
    """Interleave the contenders and return the seconds per iteration of each contender in each round.

    A drift of the machine affects all contenders alike. Their order changes from round to round, so that side effects
    such as freed memory do not always affect the same one; it is the same in each run and on each rank. The first round
    is a warm-up; a single repetition, which only shows that the contenders run, has none. Objects that exist before are
    frozen, so that garbage collection does not depend on the size of other libraries; a contender still pays for the
    garbage of its own run.
    """
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    order = random.Random(0)
    warm_up = int(repetitions > 1)
    gc.collect()
    gc.freeze()
    try:
        for round_number in range(warm_up + repetitions):
            for contender in order.sample(contenders, len(contenders)):
                gc.collect()
                taken = contender.per_iteration(iterations)
                if round_number >= warm_up:
                    seconds[contender.name].append(taken)
    finally:
        gc.unfreeze()
    return seconds


def over(baseline: Sequence[float], sample: Sequence[float]) -> list[float]:
    """Subtract the baseline in each round, so that a slowdown of a whole round cancels out."""
    return [one - base for one, base in zip(sample, baseline, strict=True)]


def importable(peers: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Import peers, given by package and module name; return those available, and why the others are skipped."""
    present, skipped = [], {}
    for name, module in peers.items():
        try:
            import_module(module)
            present.append(name)
        except Exception as error:  # a broken peer must not prevent the comparison of the others
            absent = isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]
            skipped[name] = "not installed" if absent else f"broken: {type(error).__name__}: {error}"
    return present, skipped


def processor() -> str:
    """Return the name of the processor, as the system knows it."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        return next(line for line in lines if line.startswith("model name")).partition(":")[2].strip()
    return platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """Return the properties of the machine that affect the figures, without identifying it."""
    return {
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def verdict(spread: Spread, target: float) -> str:
    return "reached" if spread.median <= target else "missed"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table that is readable as text and valid as Markdown."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def report(
    name: str, head: Sequence[str], lines: Sequence[Sequence[str]], skipped: dict[str, str], **facts: Any
) -> None:
    """Print the machine, the table, and the skipped peers; the last line contains the same data as JSON."""
    where = machine()
    print(", ".join(f"{key} {value}" for key, value in where.items()))
    print(table(head, lines))
    for peer, reason in skipped.items():
        print(f"skipped: {peer} ({reason})")
    print(json.dumps({"benchmark": name, "machine": where, **facts, "skipped": skipped}, default=asdict))
