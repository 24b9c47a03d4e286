#!/usr/bin/env python3
"""What does it cost that the ranks of a job watch each other?

python benchmarks/watching.py --ranks 8 64 1024 4096
"""

from __future__ import annotations

import argparse
import multiprocessing
import pickle
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.multiprocessing.spawn import spawn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this clone, installed or not

import camshaft.distributed as idist
from benchmarks.measuring import Spread, report, table, verdict
from camshaft.distributed import job
from camshaft.distributed.backends.serial import SerialBackend
from camshaft.distributed.failures import board as module
from camshaft.distributed.failures import watcher as watcher_module
from camshaft.distributed.failures.board import Board
from camshaft.distributed.failures.watcher import Watcher
from camshaft.distributed.topology import Topology
from camshaft.engine import Engine

MICROSECOND = 1e-6
RANK_TARGET = 1  # request per second and rank
CPU_TARGET = 0.1  # percent of a core
ITERATION_TARGET = 0.1  # us
RANKS_PER_NODE = 8
POLLS, HANDLERS = 20, 3  # per second, of each stopping handler, before there were watchers


# --- requests to the store -------------------------------------------------------------------------------------------


class Counted(PrefixStore):
    """A store that counts its requests."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.requests: Counter[str] = Counter()

    def __getattribute__(self, name: str) -> Any:
        if name in ("add", "check", "compare_set", "delete_key", "get", "multi_get", "set"):
            self.requests[name] += 1
        return super().__getattribute__(name)

    def clone(self) -> Counted:
        """Return this object: thousands of boards share one connection."""
        return self


class _Backend(SerialBackend):
    """One of many ranks that share a store."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology


class Cluster:
    """The boards of all ranks of a simulated cluster, which share a store and take turns.

    Attributes:
        boards: by rank.
    """

    def __init__(self, store: Any, num_ranks: int) -> None:
        self.boards: list[Board] = []
        with mock.patch.object(module, "store_at", return_value=store):
            for rank in range(num_ranks):
                local_size = min(num_ranks, RANKS_PER_NODE)
                node, local_rank = divmod(rank, local_size)
                topology = Topology(rank, num_ranks, local_rank, local_size, node, num_ranks // local_size)
                self.boards.append(Board(_Backend(topology)))
                self.boards[-1].look()

    def next_second(self) -> None:
        """Let all boards look once."""
        for board in self.boards:
            board.look()

    def fail(self, rank: int) -> None:
        """Publish that a rank has failed."""
        self.boards[rank].decide({"kind": "failed", "text": "no data", "traceback": ""})

    @property
    def num_ended(self) -> int:
        """Number of ranks that raise an error from now on."""
        return sum(one.final is not None for one in self.boards)


def serve(connection: Any) -> None:
    """Run the server of a store; reply to each message with the CPU time of this process."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connection.send(store.port)
    while connection.recv():
        connection.send(time.process_time())


@contextmanager
def served() -> Iterator[tuple[TCPStore, Callable[[], float]]]:
    """Yield a client of a store in another process, and a function that returns the CPU time of its server."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs,))
    server.start()

    def cpu_time() -> float:
        ours.send(True)
        return float(ours.recv())

    try:
        yield TCPStore("127.0.0.1", ours.recv(), is_master=False), cpu_time
    finally:
        ours.send(False)
        server.join()


def measured_requests(num_ranks: int, seconds: int) -> dict[str, Any]:
    """Return what a cluster requests from the store: per second, and to end all ranks after one has failed."""
    num_nodes = max(1, num_ranks // RANKS_PER_NODE)
    with served() as (store, cpu_time):
        counted = Counted(str(num_ranks), store)
        cluster = Cluster(counted, num_ranks)
        before, cpu = counted.requests.total(), cpu_time()
        for _ in range(seconds):
            cluster.next_second()
        rate, load = (counted.requests.total() - before) / seconds, (cpu_time() - cpu) / seconds
        before, rounds = counted.requests.total(), 0
        cluster.fail(num_ranks - 1)
        while cluster.num_ended < num_ranks and rounds < 10:
            cluster.next_second()
            rounds += 1
    return {
        "nodes": num_nodes,
        "requests_per_second": rate,
        "server_ms_per_second": round(load * 1000, 2),
        "seconds_to_end": rounds,
        "requests_to_end": counted.requests.total() - before,
        "computed": {"polling handlers": num_ranks * POLLS * HANDLERS},
        "target": RANK_TARGET * num_ranks,
        "verdict": "reached" if rate <= RANK_TARGET * num_ranks else "missed",
    }


# --- CPU time --------------------------------------------------------------------------------------------------------


def thread_time(watcher: Watcher) -> float:
    """Return the seconds of CPU time that the thread of a watcher has used."""
    thread = watcher._thread.ident
    assert thread is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


def train_a_little(engine: Engine, batch: Any) -> None:
    """Be busy for a fifth of the time: a process that is not counts as one that waits."""
    end = time.thread_time() + 0.002
    while time.thread_time() < end:
        pass
    time.sleep(0.008)


def on_rank(rank: int, size: int, folder: str, options: argparse.Namespace) -> None:
    """Measure on each rank; rank 0 stores the results."""
    torch.set_num_threads(1)
    idist.initialize("gloo", init_method=f"file://{folder}/initialized", rank=rank, world_size=size)
    results: dict[str, Any] = {}
    tensor = torch.ones(4)
    for _ in range(64):
        idist.all_reduce(tensor)
    watcher = job.current().job.resource(Watcher)
    samples = []
    trainer = Engine(train_a_little)
    for _ in range(options.rounds + 1):
        began, used = time.monotonic(), thread_time(watcher)
        while time.monotonic() - began < watcher_module.PERIOD:
            trainer.run(range(10))
        samples.append(100 * (thread_time(watcher) - used) / (time.monotonic() - began))
    results["cpu"] = idist.all_gather(Spread.of(samples[1:]).median)
    if size == 2:
        results["iteration"] = measured_iterations(watcher, options)
    idist.barrier()
    idist.finalize()
    if rank == 0:
        Path(folder, "results").write_bytes(pickle.dumps(results))


def measured_iterations(watcher: Watcher, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of CPU time per iteration of empty steps, while the watcher looks or does not."""
    engine: Engine[Any, Any] = Engine(lambda engine, batch: None)
    samples: dict[str, list[float]] = {"on": [], "off": []}
    for _ in range(options.rounds + 1):
        for name, period in ("off", 3600.0), ("on", 1.0):
            with mock.patch.object(watcher_module, "PERIOD", period):
                watcher._wake.set()
                time.sleep(0.05)  # the round that this starts
                used, began, count = time.process_time(), time.monotonic(), 0
                while time.monotonic() - began < 1.0:
                    engine.run(range(options.iterations))
                    count += options.iterations
                samples[name].append((time.process_time() - used) / count)
    return {name: sample[1:] for name, sample in samples.items()}


def measured_cpu(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return by row what watchers take: percent of a core, by the number of ranks on a node; and us per iteration."""
    rows: dict[str, dict[str, Any]] = {}
    for size in options.processes:
        with tempfile.TemporaryDirectory() as folder:
            spawn(on_rank, (size, folder, options), nprocs=size)
            results = pickle.loads(Path(folder, "results").read_bytes())
        leader, *others = results["cpu"]
        spread = Spread(min(others, default=leader), leader, max(results["cpu"]))
        rows[f"watcher: percent of a core per rank, {size} ranks on a node"] = {
            "minimum": round(min(results["cpu"]), 4),
            "percent": spread,
            "target": CPU_TARGET,
        }
        if "iteration" in results:
            on, off = results["iteration"]["on"], results["iteration"]["off"]
            rows["watcher: us per iteration of empty steps"] = {
                "minimum": round((min(on) - min(off)) / MICROSECOND, 4),
                "off": Spread.of(off, MICROSECOND),
                "on": Spread.of(on, MICROSECOND),
                "us": Spread.of([one - other for one, other in zip(on, off, strict=True)], MICROSECOND),
                "target": ITERATION_TARGET,
            }
    return rows


# --- the program -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    torch.set_num_threads(1)
    rows = measured_cpu(options)
    lines = []
    for what, row in rows.items():
        minimum, sample = row["minimum"], row.get("us") or row["percent"]
        row["verdict"] = verdict(Spread(minimum, minimum, minimum), row["target"])
        lines.append([what, f"{minimum:.2f}", str(sample)])
    requests = {num_ranks: measured_requests(num_ranks, options.rounds) for num_ranks in options.ranks}
    print(
        "requests to the store per second, of simulated ranks and a real TCPStore; the column in brackets is computed"
    )
    head = ["ranks", "nodes", "[polling handlers]", "camshaft"]
    head += ["CPU time of the server, ms per second", "after a failure, all ranks end within s", "requests for that"]
    cells = []
    for num_ranks, row in requests.items():
        now = [row["computed"]["polling handlers"], f"{row['requests_per_second']:g}", row["server_ms_per_second"]]
        cells.append([num_ranks, row["nodes"], *now, row["seconds_to_end"], row["requests_to_end"]])
    print(table(head, [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in line] for line in cells]))
    print("microseconds, or percent; the minimum depends least on what else the machine does")
    head = ["what", "minimum", "median, and quartiles"]
    found = [{"what": what, **row} for what, row in rows.items()]
    found += [{"what": f"requests to the store: {num_ranks} ranks", **row} for num_ranks, row in requests.items()]
    report("watching", head, lines, {}, rows=found)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=100, help="calls per round (%(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of the watchers, one per second (%(default)s)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 1024, 4096], help="simulated (8 to 4,096)")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 8], help="real ranks on a node (2 and 8)")
    options = parser.parse_args(arguments)
    if min(options.iterations, options.rounds, *options.ranks, *options.processes) < 1:
        parser.error("all numbers must be at least 1")
    if any(num_ranks > RANKS_PER_NODE and num_ranks % RANKS_PER_NODE for num_ranks in options.ranks):
        parser.error(f"--ranks must be at most {RANKS_PER_NODE}, or divisible by it")
    return options


if __name__ == "__main__":
    main()
