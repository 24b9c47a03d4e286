#!/usr/bin/env python3
"""How much slower are collectives and queries than the torch.distributed calls behind them, on two gloo ranks?

python benchmarks/collectives.py --rows "all_gather string"
"""

from __future__ import annotations

import argparse
import pickle
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this clone, installed or not

import camshaft.distributed as idist
from benchmarks.measuring import Contender, Spread, importable, interleave, report, seconds_of, verdict

MICROSECOND = 1e-6
TARGET = 1.10  # ratio to the bare call
QUERY_TARGET = 0.3  # us
PEERS = {"pytorch-ignite": "ignite"}
BUFFER = 512  # bytes; a fixed size for short strings and objects, as an expert would choose
TEXT = "checkpoint_12000.pt"
OBJECT = {"loss": 0.25, "epoch": 3, "names": ["a", "b"]}

Function = Callable[[], object]
gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Row:
    """A collective, written by hand with torch.distributed and called through the libraries.

    Args:
        by_hand: the bare call, including the conversion of the value to a tensor and back.
        through: the same call of a module with the interface of ``camshaft.distributed``.
        torch_has: the function of torch.distributed for it, if that is not the bare call.
    """

    by_hand: Callable[[], Function]
    through: Callable[[Any], Function]
    torch_has: Function | None = None


def reduce_tensor() -> Function:
    tensor = torch.ones(1)
    return lambda: dist.all_reduce(tensor)


def reduce_number(number: float) -> Function:
    def by_hand() -> object:
        tensor = torch.tensor([number], dtype=torch.int64 if isinstance(number, int) else torch.float64)
        dist.all_reduce(tensor)
        return tensor.item()

    return by_hand


def gather_tensor() -> Function:
    tensor = torch.ones(1)

    def by_hand() -> object:
        out = torch.empty(2)
        gather_single(out, tensor)
        return out

    return by_hand


def gather_number() -> object:
    out = torch.empty(2, dtype=torch.int64)
    gather_single(out, torch.tensor([3]))
    return out.tolist()


def gather_bytes(data: bytes) -> list[bytes]:
    row = torch.frombuffer(bytearray(data.ljust(BUFFER, b"\0")), dtype=torch.uint8)
    out = bytearray(2 * BUFFER)
    gather_single(torch.frombuffer(out, dtype=torch.uint8), row)
    return [bytes(out[:BUFFER]), bytes(out[BUFFER:])]


def gather_text() -> object:
    return [row.rstrip(b"\0").decode() for row in gather_bytes(TEXT.encode())]


def gather_object() -> object:
    return [pickle.loads(row) for row in gather_bytes(pickle.dumps(OBJECT))]


def broadcast_tensor() -> Function:
    tensor = torch.ones(1)
    return lambda: dist.broadcast(tensor, 0)


def broadcast_number() -> object:
    tensor = torch.tensor([3])
    dist.broadcast(tensor, 0)
    return tensor.item()


def broadcast_bytes(data: bytes) -> bytes:
    row = bytearray(data.ljust(BUFFER, b"\0") if dist.get_rank() == 0 else BUFFER)
    dist.broadcast(torch.frombuffer(row, dtype=torch.uint8), 0)
    return bytes(row)


def broadcast_text() -> object:
    return broadcast_bytes(TEXT.encode()).rstrip(b"\0").decode()


def broadcast_object() -> object:
    return pickle.loads(broadcast_bytes(pickle.dumps(OBJECT)))


def with_tensor(call: Callable[[Any], Callable[..., object]]) -> Callable[[Any], Function]:
    def through(module: Any) -> Function:
        tensor, function = torch.ones(1), call(module)
        return lambda: function(tensor)

    return through


ROWS = {
    "all_reduce tensor": Row(reduce_tensor, with_tensor(lambda module: module.all_reduce)),
    "all_reduce int": Row(lambda: reduce_number(3), lambda module: lambda: module.all_reduce(3)),
    "all_reduce float": Row(lambda: reduce_number(0.5), lambda module: lambda: module.all_reduce(0.5)),
    "all_gather tensor": Row(gather_tensor, with_tensor(lambda module: module.all_gather)),
    "all_gather number": Row(lambda: gather_number, lambda module: lambda: module.all_gather(3)),
    "all_gather string": Row(lambda: gather_text, lambda module: lambda: module.all_gather(TEXT)),
    "all_gather object": Row(
        lambda: gather_object,
        lambda module: lambda: module.all_gather(OBJECT),
        lambda: dist.all_gather_object([None, None], OBJECT),
    ),
    "broadcast tensor": Row(broadcast_tensor, with_tensor(lambda module: module.broadcast)),
    "broadcast number": Row(lambda: broadcast_number, lambda module: lambda: module.broadcast(3)),
    "broadcast string": Row(lambda: broadcast_text, lambda module: lambda: module.broadcast(TEXT)),
    "broadcast object": Row(
        lambda: broadcast_object,
        lambda module: lambda: module.broadcast(OBJECT),
        lambda: dist.broadcast_object_list([OBJECT]),
    ),
    "barrier": Row(lambda: dist.barrier, lambda module: lambda: module.barrier()),
}


def contender(name: str, function: Function) -> Contender:
    def run(iterations: int) -> float:
        def loop() -> None:
            for _ in range(iterations):
                function()

        return seconds_of(loop)

    return Contender(name, run)


def contenders(row: Row, peers: Sequence[str]) -> list[Contender]:
    found = [contender("bare call", row.by_hand()), contender("camshaft", row.through(idist))]
    if row.torch_has is not None:
        found.append(contender("torch's own", row.torch_has))
    for name in peers:
        function = row.through(import_module(f"{PEERS[name]}.distributed"))
        try:
            function()
        except TypeError:  # it does not support this type of value
            continue
        found.append(contender(name, function))
    return found


def measured(found: Sequence[Contender], iterations: int, repetitions: int) -> dict[str, Any]:
    """Return the microseconds of each contender, and the ratio of camshaft to the bare call in each round."""
    seconds = interleave(found, iterations, repetitions)
    pairs = zip(seconds["camshaft"], seconds["bare call"], strict=True)
    times = Spread.of([ours / bare for ours, bare in pairs])
    return {"us": {name: Spread.of(sample, MICROSECOND) for name, sample in seconds.items()}, "times": times}


def measured_queries(where: str, iterations: int, repetitions: int) -> dict[str, Any]:
    found = [contender("camshaft", idist.get_rank)]
    if dist.is_initialized():
        found.insert(0, contender("bare call", dist.get_rank))
    seconds = interleave(found, 100 * iterations, repetitions)
    return {f"get_rank, {where}": {"us": {name: Spread.of(sample, MICROSECOND) for name, sample in seconds.items()}}}


def on_rank(rank: int, folder: str, options: argparse.Namespace, peers: Sequence[str]) -> None:
    """Measure on each of the two ranks; rank 0 stores the results."""
    torch.set_num_threads(1)
    idist.initialize("gloo", init_method=f"file://{folder}/initialized", rank=rank, world_size=2)
    results = {
        what: measured(contenders(ROWS[what], peers), options.iterations, options.repetitions) for what in options.rows
    }
    results |= measured_queries("in a run", options.iterations, options.repetitions)
    idist.finalize()
    idist.set_local_rank(rank)
    dist.init_process_group("gloo", init_method=f"file://{folder}/adopted", rank=rank, world_size=2)
    results |= measured_queries("in an adopted run", options.iterations, options.repetitions)
    dist.destroy_process_group()
    if rank == 0:
        Path(folder, "results").write_bytes(pickle.dumps(results))


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    peers, skipped = importable(PEERS)
    with tempfile.TemporaryDirectory() as folder:
        spawn(on_rank, (folder, options, peers), nprocs=2)
        results = pickle.loads(Path(folder, "results").read_bytes())
    results |= measured_queries("in one process", options.iterations, options.repetitions)
    columns = ["bare call", "camshaft", "torch's own", *peers]
    lines = []
    for what, result in results.items():
        target, reached = TARGET, result.get("times")
        if reached is None:
            target, reached = QUERY_TARGET, result["us"]["camshaft"]
        result |= {"target": target, "verdict": verdict(reached, target)}
        cells = [str(result["us"].get(column, "")) for column in columns]
        lines.append([what, *cells, str(result.get("times", ""))])
    print("microseconds per call on 2 gloo ranks, and the ratio of camshaft to the bare call")
    print(f"medians of {options.repetitions}, and quartiles")
    rows = [{"what": what, **result} for what, result in results.items()]
    report("collectives", ["what", *columns, "times bare"], lines, skipped, rows=rows)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=500, help="rounds that are measured (%(default)s)")
    parser.add_argument(
        "--iterations", type=int, default=4, help="calls per round; 100 times as many for queries (%(default)s)"
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="which collectives (all)")
    options = parser.parse_args(arguments)
    if min(options.repetitions, options.iterations) < 1:
        parser.error("--repetitions and --iterations must be at least 1")
    return options


if __name__ == "__main__":
    main()
