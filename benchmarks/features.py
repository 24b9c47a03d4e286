#!/usr/bin/env python3
"""How do camshaft and its peers handle uneven data, a resume, a barrier on one rank, and a damaged file?

python benchmarks/features.py --libraries camshaft pytorch-ignite

Each cell was observed in real processes, two of which form a gloo job. Each library is used according to its
documentation.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this clone, installed or not

from benchmarks.libraries import LIBRARIES, PEERS, SAMPLES, WEIGHTS
from benchmarks.measuring import importable, report

HANGING = 10.0  # seconds after which a call counts as hanging
LIMIT = 1000.0  # seconds for everything else
NOTHING = "-"  # not supported by the library

context: Any = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a call on one rank; a hanging call has neither a value nor an error."""

    value: Any = None
    error: str = ""
    seconds: float = HANGING
    warned: bool = False
    waits: bool = False

    def __str__(self) -> str:
        if self.waits:
            return f"hangs ({HANGING:.0f} s and more)"
        return f"raises {self.error} after {self.seconds:.1f} s" if self.error else "returns"


def run_rank(connection: Any, name: str, environment: dict[str, str], what: str, arguments: tuple[Any, ...]) -> None:
    """Run a rank: report when the job has started, then the outcome of the call, and wait to be killed."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = LIBRARIES[name](int(environment.get("WORLD_SIZE", 1)))
    connection.send(None)
    began = time.perf_counter()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        value, error = None, ""
        try:
            value = getattr(library, what)(*arguments)
        except Exception as problem:  # any error is an outcome
            error = type(problem).__name__
    connection.send(Outcome(value, error, time.perf_counter() - began, bool(warned)))
    time.sleep(LIMIT)  # the exit of this rank would release a rank that hangs


def observe(name: str, size: int, what: str, *arguments: Any, limit: float = LIMIT) -> list[Outcome]:
    """Call a method of a library in new processes with the environment variables of torchrun."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    job |= {"TORCHELASTIC_RUN_ID": "features", "TORCHELASTIC_RESTART_COUNT": "0"}
    job |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    with ExitStack() as stack:
        connections = []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            environment = job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if size > 1 else {}
            process = context.Process(target=run_rank, args=(theirs, name, environment, what, arguments), daemon=True)
            process.start()
            theirs.close()
            stack.callback(process.join)
            stack.callback(process.kill)
            connections.append(ours)
        for connection in connections:
            if not connection.poll(LIMIT):
                raise TimeoutError(f"the ranks of {name} did not start within {LIMIT} s")
            connection.recv()
        return [one.recv() if one.poll(limit) else Outcome(waits=True) for one in connections]


def times_seen(samples: Sequence[int], length: int) -> str:
    """Return how often each sample was seen: "each once", "5 once, 2 twice"."""
    words = {0: "never", 1: "once", 2: "twice"}
    seen = Counter(Counter(samples)[sample] for sample in range(length))
    if list(seen) == [1]:
        return "each once"
    return ", ".join(f"{number} {words.get(times, f'{times} times')}" for times, number in sorted(seen.items()))


def joined(found: dict[str, str]) -> str:
    """Join the outcomes of several ways to use a library in one cell."""
    return "; ".join(f"{way}: {seen}" if way else seen for way, seen in found.items()) or NOTHING


def evaluated(name: str) -> str:
    return joined({way: evaluated_by(observe(name, 2, "evaluate", way)) for way in LIBRARIES[name].ways_to_evaluate})


def evaluated_by(ranks: Sequence[Outcome]) -> str:
    failed = [str(rank) for rank in ranks if rank.value is None]
    return failed[0] if failed else times_seen([sample for rank in ranks for sample in rank.value], 7)


def resumed(name: str, size: int) -> str:
    found = {}
    for way in LIBRARIES[name].resumes:
        with tempfile.TemporaryDirectory() as folder:
            [before] = observe(name, 1, "train", folder, way, False)
            after = observe(name, size, "train", folder, way, True)
        found[way] = resumed_by(before, after)
    return joined(found)


def resumed_by(before: Outcome, after: Sequence[Outcome]) -> str:
    """Describe a resume by the samples before the stop and, on each rank, after it."""
    failed = [str(rank) for rank in (before, *after) if not rank.value]
    if failed:
        return failed[0]
    seen = [sample for steps in [rank.value for rank in (before, *after)] for step in steps for sample in step]
    if (counts := times_seen(seen, SAMPLES)) == "each once":
        return "resumes with the next sample"
    first = sorted(sample for rank in after for sample in rank.value[0])
    return f"{'restarts the epoch' if first == sorted(before.value[0]) else 'another order'} ({counts})"


def damaged(name: str) -> str:
    """Flip a bit of the weights in the newest checkpoint and load it."""
    with tempfile.TemporaryDirectory() as folder:
        [saved] = observe(name, 1, "save", folder)
        content = bytearray(Path(saved.value).read_bytes())
        place = content.index(torch.full((WEIGHTS,), 2.0).numpy().tobytes()) + 2 * WEIGHTS
        content[place] ^= 16
        Path(saved.value).write_bytes(content)
        [loaded] = observe(name, 1, "load", folder, saved.value)
    return loaded_by(loaded)


def loaded_by(rank: Outcome) -> str:
    """Describe what was loaded: weights are 1 in the previous checkpoint, and 2 except for one in the newest."""
    if rank.value is None:
        return f"raises {rank.error}"
    weights = Counter(rank.value)
    took = "the previous checkpoint" if weights == {1.0: WEIGHTS} else "neither"
    took = "a wrong weight" if weights[2.0] == WEIGHTS - 1 else took
    return f"{'warns, and loads' if rank.warned else 'loads'} {took}"


ROWS = {
    "7 samples evaluated on 2 ranks": evaluated,
    "resume after a stop in the middle of an epoch": lambda name: resumed(name, 1),
    "the same, from 1 rank to 2": lambda name: resumed(name, 2),
    "a barrier in code for rank 0 only": lambda name: str(observe(name, 2, "barrier_of_one", limit=HANGING)[0]),
    "a flipped bit in the newest checkpoint": damaged,
    "backends by name": lambda name: LIBRARIES[name].backends(),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES), help="which (all)")
    asked = parser.parse_args(arguments).libraries
    present, skipped = importable({name: module for name, module in PEERS.items() if name in asked})
    names = [name for name in asked if name == "camshaft" or name in present]
    context.set_forkserver_preload(
        ["torch.nn.parallel", "torch._dynamo", "camshaft.handlers", *(PEERS[name] for name in present)]
    )
    rows: list[dict[str, Any]] = [
        {"what": what, "seen": {name: look(name) for name in names}} for what, look in ROWS.items()
    ]
    report("features", ["what", *names], [[row["what"], *row["seen"].values()] for row in rows], skipped, rows=rows)


if __name__ == "__main__":
    main()
