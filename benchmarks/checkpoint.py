#!/usr/bin/env python3
"""How long does saving a checkpoint interrupt training, of a state on the GPU if there is one?

python benchmarks/checkpoint.py --sizes 0.1 1 4
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this clone, installed or not

from benchmarks.measuring import Contender, Spread, importable, interleave, report, seconds_of, verdict
from camshaft.engine import Engine
from camshaft.handlers import Checkpoint, DiskSaver

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TENSORS = 50  # in a state
PEERS = {"pytorch-ignite": "ignite", "lightning": "lightning"}
TARGETS = {"camshaft": 1.1, "camshaft, asynchronous": 0.15}
BASELINE = "torch.save and fsync"
State = dict[str, torch.Tensor]


class Weights:
    """A stateful object with a state of a given size, created once."""

    def __init__(self, gigabytes: float) -> None:
        count = round(gigabytes * 1e9 / 4 / TENSORS)
        self.state = {
            f"tensor_{number}": torch.full((count,), float(number), device=DEVICE) for number in range(TENSORS)
        }

    def state_dict(self) -> State:
        return self.state


def time_saves(save: Callable[[], object], afterwards: Callable[[], object] = lambda: None) -> Callable[[int], float]:
    """Time saves, without the work in the background afterwards and without pending writes of other contenders.

    A save that queues copies from the GPU interrupts training until they are made.
    """

    def interrupt() -> None:
        save()
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    def run(saves: int) -> float:
        seconds = 0.0
        for _ in range(saves):
            os.sync()
            seconds += seconds_of(interrupt)
            afterwards()
        return seconds

    return run


def plain(weights: Weights, folder: Path) -> Contender:
    """Save to a new file and rename it over the previous one, which stays valid until then."""

    def save() -> None:
        with open(folder / "new.pt", "wb") as file:
            torch.save(weights.state_dict(), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(folder / "new.pt", folder / "plain.pt")

    return Contender(BASELINE, time_saves(save))


def ours(weights: Weights, folder: Path, asynchronous: bool) -> Contender:
    engine: Engine[Any, Any] = Engine(lambda engine, batch: None)
    checkpoint = Checkpoint({"weights": weights}, DiskSaver(folder), asynchronous=asynchronous)

    def save() -> None:
        engine.state.iteration += 1
        checkpoint(engine)

    name = "camshaft, asynchronous" if asynchronous else "camshaft"
    return Contender(name, time_saves(save, afterwards=checkpoint.state_dict))  # waits for the pending save


def ignite(weights: Weights, folder: Path) -> Contender:
    saver = import_module("ignite.handlers").DiskSaver(str(folder), require_empty=False)
    return Contender("pytorch-ignite", time_saves(lambda: saver(weights.state_dict(), "weights.pt")))


def lightning(weights: Weights, folder: Path) -> Contender:
    saver = import_module("lightning.pytorch.plugins.io").TorchCheckpointIO()
    return Contender(
        "lightning", time_saves(lambda: saver.save_checkpoint(weights.state_dict(), str(folder / "weights.ckpt")))
    )


MAKERS = {"pytorch-ignite": ignite, "lightning": lightning}


def measure(gigabytes: float, peers: Sequence[str], parent: Path, repetitions: int) -> dict[str, list[float]]:
    """Return the seconds per save for each contender."""
    weights = Weights(gigabytes)
    with tempfile.TemporaryDirectory(dir=parent) as name:
        folder = Path(name)
        contenders = [plain(weights, folder)]
        for asynchronous in (False, True):
            place = folder / f"camshaft_{asynchronous}"
            contenders.append(ours(weights, place, asynchronous))
        contenders += [MAKERS[peer](weights, folder) for peer in peers]
        return interleave(contenders, 1, repetitions)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    logging.disable(logging.WARNING)
    peers, skipped = importable(PEERS)
    columns = [BASELINE, *TARGETS, *peers]
    lines, results = [], []
    for size in options.sizes:
        seconds = measure(size, peers, options.folder, options.repetitions)
        spreads = {name: Spread.of(sample) for name, sample in seconds.items()}
        times = {
            name: Spread.of([one / base for one, base in zip(seconds[name], seconds[BASELINE], strict=True)])
            for name in columns[1:]
        }
        verdicts = [verdict(times[name], target) for name, target in TARGETS.items()]
        cells = [str(spreads[BASELINE]), *(f"{spreads[name]}: {times[name].median:.2f} x" for name in columns[1:])]
        lines.append([f"{size:g}", *cells])
        results.append({"gigabytes": size, "seconds": spreads, "times": times, "verdicts": verdicts})
    print(f"seconds that a save of a state on {DEVICE} interrupts training, and the ratio to torch.save and fsync")
    print(f"medians of {options.repetitions}, and quartiles")
    report("checkpoint", ["GB", *columns], lines, skipped, device=DEVICE, rows=results)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=9, help="rounds that are measured (%(default)s)")
    parser.add_argument(
        "--sizes", type=float, nargs="+", default=[0.1, 1.0], help="sizes of the state in GB (%(default)s)"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path.cwd(), help="folder on the disk to measure (current folder)"
    )
    options = parser.parse_args(arguments)
    if options.repetitions < 1 or min(options.sizes) <= 0:
        parser.error("--repetitions must be at least 1, and --sizes above 0")
    return options


if __name__ == "__main__":
    main()
