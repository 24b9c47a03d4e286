#!/usr/bin/env python3
"""How much longer do training steps take in processes that `Parallel` starts than in those of torchrun?

python benchmarks/launching.py
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this clone, installed or not

import camshaft.distributed as idist
from benchmarks.measuring import Contender, Spread, interleave, report, seconds_of, verdict

TARGET = 1.1  # times the seconds under torchrun
LAUNCHERS = {
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node={processes}", __file__),
    "Parallel": (__file__, "--start={processes}"),
}
FREE = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # the launchers decide


def training(local_rank: int, path: str, iterations: int) -> None:
    """Train a network whose layers are large enough for several threads; rank 0 writes down the seconds."""
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(256, 512)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        for parameter in model.parameters():
            idist.all_reduce(parameter.grad)
        optimizer.step()

    def steps() -> None:
        for _ in range(iterations):
            step()
        idist.barrier()

    step()
    idist.barrier()
    seconds = seconds_of(steps)
    if idist.get_rank() == 0:
        Path(path).write_text(str(seconds))


def contender(name: str, processes: int) -> Contender:
    def run(iterations: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "seconds")
            words = [word.format(processes=processes) for word in LAUNCHERS[name]]
            command = [sys.executable, *words, f"--train={path}", f"--iterations={iterations}"]
            environment = {key: value for key, value in os.environ.items() if key not in FREE}
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{name} failed:\n{done.stderr}")
            return float(path.read_text())

    return Contender(name, run)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.train:
        with idist.Parallel("gloo", nproc_per_node=options.start) as parallel:
            parallel.run(training, options.train, options.iterations)
        return
    contenders = [contender(name, options.processes) for name in LAUNCHERS]
    seconds = interleave(contenders, options.iterations, options.repetitions)
    times = Spread.of([ours / theirs for ours, theirs in zip(seconds["Parallel"], seconds["torchrun"], strict=True)])
    what, spreads = (
        f"step, {options.processes} processes",
        {name: Spread.of(one, 1e-3) for name, one in seconds.items()},
    )
    row = {"what": what, "ms": spreads, "times": times, "target": TARGET, "verdict": verdict(times, TARGET)}
    print(f"milliseconds per training step on gloo ranks; medians of {options.repetitions}, and quartiles")
    cells = [what, *map(str, spreads.values()), str(times)]
    report("launching", ["what", *LAUNCHERS, "times torchrun"], [cells], {}, rows=[row])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=10, help="jobs of each launcher (%(default)s)")
    parser.add_argument("--iterations", type=int, default=50, help="steps of a job (%(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="processes of a job (%(default)s)")
    parser.add_argument("--train", help=argparse.SUPPRESS)  # this is a process of a job
    parser.add_argument("--start", type=int, help=argparse.SUPPRESS)  # or the one that starts them
    options = parser.parse_args(arguments)
    if min(options.repetitions, options.iterations, options.processes) < 1:
        parser.error("--repetitions, --iterations and --processes must be at least 1")
    return options


if __name__ == "__main__":
    main()
