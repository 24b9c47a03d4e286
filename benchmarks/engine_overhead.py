#!/usr/bin/env python3
"""How much time does the engine add per iteration to a bare loop that does the same work?

python benchmarks/engine_overhead.py --rows 1 4
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this clone, installed or not

from benchmarks import training
from benchmarks.measuring import Contender, Spread, importable, interleave, over, report, seconds_of, verdict

MICROSECOND = 1e-6
ENGINES = {"camshaft": "camshaft", "pytorch-ignite": "ignite"}  # they have the same interface
PEERS = {"pytorch-ignite": "ignite", "lightning": "lightning", "accelerate": "accelerate"}


@dataclass(frozen=True)
class Row:
    """A measurement: its contenders, and the target of camshaft in microseconds per iteration."""

    what: str
    target: float
    contenders: Callable[[Sequence[str]], list[Contender]]
    share: float = 1.0


def empty_step(engine: Any, batch: Any) -> None:
    """Do nothing."""


def empty_handlers(count: int) -> list[Callable[[Any], None]]:
    """Return distinct functions that do nothing."""

    def make() -> Callable[[Any], None]:
        return lambda engine: None

    return [make() for _ in range(count)]


def bare_loop(iterations: int) -> None:
    step = empty_step
    for batch in range(iterations):
        step(None, batch)


def bare_loop_with_ten_calls(iterations: int) -> None:
    step = empty_step
    a, b, c, d, e, f, g, h, i, j = empty_handlers(10)
    for batch in range(iterations):
        step(None, batch)
        a(None), b(None), c(None), d(None), e(None), f(None), g(None), h(None), i(None), j(None)


def on_engines(bare: Callable[[int], None], num_handlers: int, slow: float = 1.0, **event_filter: int) -> Any:
    """Compare a bare loop with engines that have handlers on ``ITERATION_COMPLETED``."""

    def contenders(peers: Sequence[str]) -> list[Contender]:
        engines = [name for name in ENGINES if name == "camshaft" or name in peers]
        timed = Contender("bare loop", lambda iterations: seconds_of(lambda: bare(iterations)))
        return [timed, *(engine_with(name, num_handlers, slow, event_filter) for name in engines)]

    return contenders


def engine_with(name: str, num_handlers: int, slow: float, event_filter: dict[str, int]) -> Contender:
    module = import_module(f"{ENGINES[name]}.engine")
    engine, event = module.Engine(empty_step), module.Events.ITERATION_COMPLETED
    for handler in empty_handlers(num_handlers):
        engine.add_event_handler(event(**event_filter) if event_filter else event, handler)
    share = 1.0 if name == "camshaft" else slow
    return Contender(name, lambda iterations: seconds_of(lambda: engine.run(range(iterations), max_epochs=1)), share)


def on_trainers(peers: Sequence[str]) -> list[Contender]:
    return [training.bare(), training.engine("camshaft", "camshaft"), *(training.PEERS[peer]() for peer in peers)]


ROWS = {
    1: Row("an empty step", 0.2, on_engines(bare_loop, 0)),
    2: Row("10 handlers, over calling 10 functions", 0.5, on_engines(bare_loop_with_ten_calls, 10)),
    3: Row("100 handlers with `every=1000`", 0.25, on_engines(bare_loop, 100, slow=0.1, every=1000)),
    4: Row("a supervised step of a tiny model", 3.0, on_trainers, share=0.05),
}


def measure(row: Row, peers: Sequence[str], iterations: int, repetitions: int) -> dict[str, Spread]:
    """Return the bare loop's time per iteration, and the additional time of each contender."""
    contenders = row.contenders(peers)
    seconds = interleave(contenders, max(1, round(iterations * row.share)), repetitions)
    baseline = seconds.pop("bare loop")
    overheads = {name: Spread.of(over(baseline, sample), MICROSECOND) for name, sample in seconds.items()}
    return {"bare loop": Spread.of(baseline, MICROSECOND), **overheads}


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    peers, skipped = importable(PEERS)
    columns = ["bare loop", "camshaft", *peers]
    lines, results = [], []
    for number in options.rows:
        row = ROWS[number]
        spreads = measure(row, peers, options.iterations, options.repetitions)
        verdict_ = verdict(spreads["camshaft"], row.target)
        cells = [str(spreads.get(column, "")) for column in columns]
        lines.append([str(number), row.what, *cells])
        results.append({"row": number, "what": row.what, "target": row.target, "verdict": verdict_, "us": spreads})
    print("microseconds per iteration: the time of the bare loop, and the additional time of each contender")
    print(f"medians of {options.repetitions}, and quartiles")
    report("engine_overhead", ["", "what", *columns], lines, skipped, rows=results)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=50, help="rounds that are measured (%(default)s)")
    parser.add_argument(
        "--iterations", type=int, default=20_000, help="iterations per run; a twentieth in row 4 (%(default)s)"
    )
    parser.add_argument("--rows", type=int, nargs="+", choices=ROWS, default=list(ROWS), help="which rows (all)")
    options = parser.parse_args(arguments)
    if min(options.repetitions, options.iterations) < 1:
        parser.error("--repetitions and --iterations must be at least 1")
    return options


if __name__ == "__main__":
    main()
