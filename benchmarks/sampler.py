#!/usr/bin/env python3
"""What does shuffling an epoch cost: the time to the first index, the time per index, memory, and loading speed?

python benchmarks/sampler.py --lengths 10000 1000000
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this clone, installed or not

from benchmarks.measuring import Contender, Spread, interleave, report, seconds_of
from camshaft.data import ExactBatchSampler, Shuffled
from camshaft.distributed import auto_dataloader

MILLISECOND = 1e-3
LENGTHS = (10**4, 10**6, 10**8, 10**12)
LONGEST_OF_PEERS = 10**7  # by default
LONGEST_READ = 10**6
BATCH_SIZE = 64  # per rank

Epochs = Callable[[int], Iterator[int]]  # takes the number of an epoch and returns the indices of one rank


def random_sampler(length: int, ranks: int) -> Epochs:
    sampler = RandomSampler(range(length))
    return lambda epoch: iter(sampler)


def distributed_sampler(length: int, ranks: int) -> Epochs:
    sampler: DistributedSampler[Any] = DistributedSampler(cast(Any, range(length)), num_replicas=ranks, rank=ranks - 1)

    def indices(epoch: int) -> Iterator[int]:
        sampler.set_epoch(epoch)
        return iter(sampler)

    return indices


def camshaft(length: int, ranks: int) -> Epochs:
    batches = ExactBatchSampler(Shuffled(length), BATCH_SIZE * ranks, num_replicas=ranks, rank=ranks - 1)

    def indices(epoch: int) -> Iterator[int]:
        batches.set_epoch(epoch)
        return iter(batches.sampler)

    return indices


# by column: the contender, and the number of ranks
CONTENDERS: dict[str, tuple[Callable[[int, int], Epochs], int]] = {
    "torch": (random_sampler, 1),
    "camshaft": (camshaft, 1),
    "torch, 1 of 2": (distributed_sampler, 2),
    "camshaft, 1 of 2": (camshaft, 2),
    "torch, 1 of 8": (distributed_sampler, 8),
    "camshaft, 1 of 8": (camshaft, 8),
}
CEILINGS = {"first index, ms": 5.0, "memory, MB": 5.0}  # for each camshaft column, from 10**8 samples
SPEEDS = {  # ratios to the peers, at 10**6 samples
    ("camshaft", "torch"): 0.5,
    ("camshaft, 1 of 2", "torch, 1 of 2"): 1.0,
    ("camshaft, 1 of 8", "torch, 1 of 8"): 1.0,
}
SPEED = "million indices per s"


class Images(Dataset[Any]):
    """Small images of bytes, enlarged to float images; the size determines the work per sample."""

    def __init__(self, length: int, side: int) -> None:
        self.side = side
        self.pictures = torch.randint(0, 256, (length, 3, side // 2, side // 2), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> torch.Tensor:
        picture = self.pictures[index].float().div_(255).sub_(0.5)
        return torch.nn.functional.interpolate(picture.unsqueeze(0), size=(self.side, self.side), mode="bilinear")[0]


class Augmented(Images):
    """The same images, cropped and flipped with torch's random numbers, as torchvision's transforms do it."""

    def __getitem__(self, index: int) -> torch.Tensor:
        padded = torch.nn.functional.pad(super().__getitem__(index), (4, 4, 4, 4))
        top, left = torch.randint(0, 9, (2,)).tolist()
        picture = padded[:, top : top + self.side, left : left + self.side]
        return picture.flip(2) if torch.rand(()) < 0.5 else picture


def with_our_sampler(data: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_sampler=ExactBatchSampler(Shuffled(len(data)), BATCH_SIZE))


def with_our_loader(data: Any) -> DataLoader[Any]:
    return auto_dataloader(data, batch_size=BATCH_SIZE, shuffle=True)


LOADED: dict[str, tuple[Callable[[], Any], Callable[[Any], DataLoader[Any]]]] = {  # epochs take a fraction of a second
    "DataLoader, tensors": (lambda: TensorDataset(torch.randn(16384, 32)), with_our_sampler),
    "DataLoader, images of 32 x 32": (lambda: Images(4096, 32), with_our_sampler),
    "auto_dataloader, tensors": (lambda: TensorDataset(torch.randn(16384, 32)), with_our_loader),
    "auto_dataloader, images of 32 x 32": (lambda: Images(4096, 32), with_our_loader),
    "auto_dataloader, images of 32 x 32, augmented": (lambda: Augmented(4096, 32), with_our_loader),
    "auto_dataloader, images of 256 x 256": (lambda: Images(256, 256), with_our_loader),
}
LOADED_OF_PEER = 0.98  # ratio to the samples per second of torch's loader


def first_index(name: str, epochs: Epochs) -> Contender:
    numbers = itertools.count()
    return Contender(name, lambda iterations: seconds_of(lambda: next(epochs(next(numbers)))))


def all_indices(name: str, epochs: Epochs, longest: int) -> Contender:
    """Time an epoch, or the start of a very long one, per index."""
    numbers = itertools.count()

    def run(iterations: int) -> float:
        began = perf_counter()
        ((count, _),) = deque(enumerate(itertools.islice(epochs(next(numbers)), longest), start=1), maxlen=1)
        return (perf_counter() - began) / count

    return Contender(name, run)


def memory_of(name: str, length: int) -> float:
    """Return the peak memory of an epoch in MB, measured in a fresh process."""
    command = [sys.executable, __file__, "--memory-of", name, "--lengths", str(length)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def peak_memory(name: str, length: int) -> float:
    make, ranks = CONTENDERS[name]
    for warm_up in (100, 10**5):  # for what torch loads and allocates once, for any length
        list(make(warm_up, ranks)(0))
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak, on Linux
    for _ in itertools.islice(make(length, ranks)(0), LONGEST_READ):
        pass
    return round(
        max(0, resident("VmHWM") - before) / 1024, 2
    )  # the kernel updates the counters with a delay of a few pages


def resident(what: str) -> int:
    """Return a memory size of this process in KB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{what}:"))


def measure(names: Sequence[str], length: int, repetitions: int) -> dict[str, dict[str, Spread]]:
    """Interleave contenders at one length; return all figures of each."""
    epochs = {name: CONTENDERS[name][0](length, CONTENDERS[name][1]) for name in names}
    firsts = interleave([first_index(name, epochs[name]) for name in names], 1, repetitions)
    # peers compute the whole order in advance, so they are measured over all of it
    longest = {name: LONGEST_READ if name.startswith("camshaft") else length for name in names}
    reads = interleave([all_indices(name, epochs[name], longest[name]) for name in names], 1, repetitions)
    return {
        "first index, ms": {name: Spread.of(sample, MILLISECOND) for name, sample in firsts.items()},
        "memory, MB": {name: Spread.of([memory_of(name, length)]) for name in names},
        SPEED: {name: Spread.of([1e-6 / seconds for seconds in sample]) for name, sample in reads.items()},
    }


def all_batches(name: str, loader: DataLoader[Any]) -> Contender:
    """Time an epoch, per batch."""
    return Contender(name, lambda iterations: seconds_of(lambda: deque(loader, maxlen=0)) / len(loader))


def load(what: str, repetitions: int) -> dict[str, Any]:
    """Interleave the loaders of torch and camshaft over the same data in this process; compare them round by round."""
    make_data, make_ours = LOADED[what]
    data = make_data()
    made = {"torch": DataLoader(data, batch_size=BATCH_SIZE, shuffle=True), "camshaft": make_ours(data)}
    taken = interleave([all_batches(name, loader) for name, loader in made.items()], 1, repetitions)
    ratio = Spread.of([peer / ours for peer, ours in zip(taken["torch"], taken["camshaft"], strict=True)])
    figures = {name: Spread.of([BATCH_SIZE / seconds / 1000 for seconds in sample]) for name, sample in taken.items()}
    return {
        "length": len(data),
        "what": f"{what}: thousand samples per s",
        "target": f">= {LOADED_OF_PEER} times torch's",
        "verdict": "reached" if ratio.median >= LOADED_OF_PEER else "missed",
        "figures": figures,
        "ratio": ratio,
    }


def judge(what: str, length: int, spreads: dict[str, Spread]) -> tuple[str, str]:
    """Return the target of a figure and whether camshaft reaches it, or empty strings without a target."""
    if what in CEILINGS and length >= 10**8:
        ours = [spread.median for name, spread in spreads.items() if name.startswith("camshaft")]
        return f"<= {CEILINGS[what]}", "reached" if max(ours) <= CEILINGS[what] else "missed"
    if what == SPEED and length == 10**6:
        reached = all(spreads[ours].median >= times * spreads[peer].median for (ours, peer), times in SPEEDS.items())
        return f">= {', '.join(map(str, SPEEDS.values()))} times torch's", "reached" if reached else "missed"
    return "", ""


def short(length: int) -> str:
    return f"{length:.0e}".replace("e+", "e")


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.memory_of:
        print(peak_memory(options.memory_of, options.lengths[0]))
        return
    torch.set_num_threads(1)
    ours = [name for name in CONTENDERS if name.startswith("camshaft")]
    skipped, lines = {}, []
    results: list[dict[str, Any]] = []
    for length in options.lengths:
        found = measure(list(CONTENDERS) if length <= LONGEST_OF_PEERS else ours, length, options.repetitions)
        if LONGEST_OF_PEERS < length <= options.peers_up_to:
            for name in CONTENDERS.keys() - set(ours):  # one at a time and only once, because it needs gigabytes
                for what, spreads in measure([name], length, 1).items():
                    found[what] |= spreads
        elif length > LONGEST_OF_PEERS:
            skipped[f"torch's samplers at {short(length)}"] = f"--peers-up-to is {short(options.peers_up_to)}"
        for what, spreads in found.items():
            target, verdict = judge(what, length, spreads)
            cells = [str(spreads.get(name, "")) for name in CONTENDERS]
            lines.append([short(length), what, *cells, ""])
            result = {"length": length, "what": what, "target": target, "verdict": verdict, "figures": spreads}
            results.append(result)
    for what in LOADED:
        result = load(what, options.repetitions)
        cells = [str(result["figures"].get(name, "")) for name in CONTENDERS]
        lines.append([str(result["length"]), result["what"], *cells, str(result["ratio"])])
        results.append(result)
    print(f"figures of one rank by samples per epoch; medians of {options.repetitions}, and quartiles")
    report("sampler", ["samples", "what", *CONTENDERS, "times torch"], lines, skipped, rows=results)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=9, help="rounds that are measured (%(default)s)")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="samples per epoch (%(default)s)")
    parser.add_argument(
        "--peers-up-to",
        type=int,
        default=LONGEST_OF_PEERS,
        help="the longest epoch of torch's samplers; 100000000 samples take minutes and 5 GB (%(default)s)",
    )
    parser.add_argument("--memory-of", choices=CONTENDERS, help="only print the peak memory of this contender in MB")
    options = parser.parse_args(arguments)
    if min(options.repetitions, *options.lengths) < 1:
        parser.error("--repetitions and --lengths must be at least 1")
    return options


if __name__ == "__main__":
    main()
