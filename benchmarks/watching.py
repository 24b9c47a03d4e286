#!/usr/bin/env python3
"""What does it cost that a rank records its collectives, and that the others watch it?

python benchmarks/watching.py --repetitions 2000
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this clone, installed or not

from benchmarks.measuring import Contender, Spread, interleave, report, seconds_of, verdict
from camshaft.distributed.record import Record

MICROSECOND = 1e-6
RECORD_TARGET = 1.0  # us
NOTHING = "nothing"  # the loop and the call of an empty function, which is subtracted


def recorded(record: Record, value: Any, group: Any, ranks: Sequence[int]) -> Callable[[], None]:
    def call() -> None:
        record.end(record.begin(group, ranks, "all_reduce", value, "SUM", None))

    return call


def contender(name: str, function: Callable[[], None]) -> Contender:
    def run(iterations: int) -> float:
        def loop() -> None:
            for _ in range(iterations):
                function()

        return seconds_of(loop)

    return Contender(name, run)


def nothing() -> None:
    """Do nothing."""


def measured_record(iterations: int, repetitions: int) -> dict[str, dict[str, Any]]:
    """Return by row the microseconds to record a collective: the minimum, and the median with quartiles."""
    with tempfile.TemporaryDirectory() as folder:
        record = Record(0, 8, Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(folder))
        group, pair, half = object(), [0, 1], [0, 2, 4, 6]
        functions = {
            NOTHING: nothing,
            "of a tensor": recorded(record, torch.ones(4), None, range(8)),
            "of a tensor, in a group of 4": recorded(record, torch.ones(4), group, half),
            "of a number": recorded(record, 3, None, range(8)),
            "without a value, in a group of 2": recorded(record, None, [], pair),
        }
        seconds = interleave([contender(*one) for one in functions.items()], iterations, repetitions)
        record.close()
    idle = min(seconds.pop(NOTHING))
    return {
        f"record: begin and end of one collective {name}": {
            "minimum": round((min(sample) - idle) / MICROSECOND, 3),
            "us": Spread.of([one - idle for one in sample], MICROSECOND),
            "target": RECORD_TARGET,
        }
        for name, sample in seconds.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    torch.set_num_threads(1)
    rows = measured_record(options.iterations, options.repetitions)
    lines = []
    for what, row in rows.items():
        minimum = row["minimum"]
        row["verdict"] = verdict(Spread(minimum, minimum, minimum), row["target"])
        lines.append([what, f"{minimum:.2f}", str(row["us"]), f"<= {row['target']}", row["verdict"]])
    print("microseconds; the target is for the minimum, which depends least on what else the machine does")
    head = ["what", "minimum", "median, and quartiles", "target", "camshaft"]
    report("watching", head, lines, {}, rows=[{"what": what, **row} for what, row in rows.items()])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=1000, help="rounds that are measured (%(default)s)")
    parser.add_argument("--iterations", type=int, default=100, help="calls per round (%(default)s)")
    options = parser.parse_args(arguments)
    if min(options.repetitions, options.iterations) < 1:
        parser.error("--repetitions and --iterations must be at least 1")
    return options


if __name__ == "__main__":
    main()
