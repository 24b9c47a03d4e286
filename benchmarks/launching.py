#!/usr/bin/env python3
"""How soon do the processes of `Parallel` communicate, and how much longer do their steps take than under torchrun?

python benchmarks/launching.py
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this clone, installed or not

import camshaft.distributed as idist
from benchmarks.measuring import Contender, Spread, interleave, report, seconds_of, table, verdict

TARGET = 1.1  # times the seconds under torchrun
FIRST, AGAIN = 0.4, 0.1  # times the seconds from torch's spawn to the first collective, also when repeated
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


def torchs_rank(rank: int, size: int, port: int, path: str) -> None:
    """Do by hand what `Parallel` does, up to the first collective."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    dist.all_reduce(torch.ones(1))
    arrive(rank, path)
    dist.destroy_process_group()


def rank_of_parallel(rank: int, path: str) -> None:
    idist.all_reduce(torch.ones(1))
    arrive(rank, path)


def arrive(rank: int, path: str) -> None:
    if rank == 0:
        Path(path).write_text(str(time.time()))  # the clock that all processes share


def seconds_to_first_collective(name: str, size: int, path: str) -> float:
    began = time.time()
    if name == "torch's spawn":
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        spawn(torchs_rank, (size, port, path), nprocs=size)
    else:
        with idist.Parallel("gloo", nproc_per_node=size) as parallel:
            parallel.run(rank_of_parallel, path)
    return float(Path(path).read_text()) - began


def starter(name: str, size: int, is_repeated: bool) -> Contender:
    """Start processes in a process of its own, as a script does, or for the second time in one, as a notebook does."""

    def run(_: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder, "seconds"))
            command = [sys.executable, __file__, f"--first={name}", f"--start={size}", f"--train={path}"]
            done = subprocess.run(
                [*command, *["--again"] * is_repeated], env=free_environment(), capture_output=True, text=True
            )
            if done.returncode:
                raise RuntimeError(f"{name} failed:\n{done.stderr}")
            return float(done.stdout.splitlines()[-1])

    return Contender(name, run)


def free_environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key not in FREE}


def contender(name: str, processes: int) -> Contender:
    def run(iterations: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "seconds")
            words = [word.format(processes=processes) for word in LAUNCHERS[name]]
            command = [sys.executable, *words, f"--train={path}", f"--iterations={iterations}"]
            done = subprocess.run(command, env=free_environment(), capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{name} failed:\n{done.stderr}")
            return float(path.read_text())

    return Contender(name, run)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.first:
        taken = [
            seconds_to_first_collective(options.first, options.start, options.train) for _ in range(1 + options.again)
        ]
        print(taken[-1])
        return
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
    rows, starts = [row], list[list[str]]()
    for is_repeated, target in ((False, FIRST), (True, AGAIN)):
        starters = [starter(name, options.starting, is_repeated) for name in ("torch's spawn", "Parallel")]
        seconds = interleave(starters, 1, options.repetitions)
        times = Spread.of([ours / theirs for theirs, ours in zip(*seconds.values(), strict=True)])
        what = f"first collective, {options.starting} processes{', second run' if is_repeated else ''}"
        spreads = {name: Spread.of(one, 1e-3) for name, one in seconds.items()}
        rows.append({"what": what, "ms": spreads, "times": times, "target": target, "verdict": verdict(times, target)})
        starts.append([what, *map(str, spreads.values()), str(times)])
    print(table(["what, in milliseconds", "torch's spawn", "Parallel", "times torch's spawn"], starts))
    report("launching", ["what", *LAUNCHERS, "times torchrun"], [cells], {}, rows=rows)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=10, help="jobs of each launcher (%(default)s)")
    parser.add_argument("--iterations", type=int, default=50, help="steps of a job (%(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="processes of a job (%(default)s)")
    parser.add_argument("--starting", type=int, default=4, help="processes to be started (%(default)s)")
    parser.add_argument("--first", help=argparse.SUPPRESS)  # this is one that starts processes, and prints how soon
    parser.add_argument("--again", action="store_true", help=argparse.SUPPRESS)  # twice
    parser.add_argument("--train", help=argparse.SUPPRESS)  # this is a process of a job
    parser.add_argument("--start", type=int, help=argparse.SUPPRESS)  # or the one that starts them
    options = parser.parse_args(arguments)
    if min(options.repetitions, options.iterations, options.processes) < 1:
        parser.error("--repetitions, --iterations and --processes must be at least 1")
    return options


if __name__ == "__main__":
    main()
