#!/usr/bin/env python3
"""Does the engine train an image classifier as fast as a hand-written loop with the same options?

Both use mixed precision, a warm-up with a cosine schedule, and an average of the weights, on batches prepared in host
memory. On a GPU, a third contender prefetches them to the device.

python benchmarks/resnet.py
python benchmarks/resnet.py --model resnet50 --size 224 --batch_size 256 --compile     # on a GPU
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this clone, installed or not

from benchmarks.measuring import Contender, Spread, interleave, report, seconds_of
from camshaft.distributed.data import prefetch_to_device
from examples import resnet

TARGET = 0.99
HORIZON = 10**6  # steps of the schedule, more than all rounds take
READY = 8  # distinct batches


class Batches:
    """A number of batches in host memory, pinned if there is a GPU."""

    def __init__(self, iterations: int, ready: list[tuple[Tensor, Tensor]]) -> None:
        self.iterations, self.ready = iterations, ready

    def __len__(self) -> int:
        return self.iterations

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return islice(cycle(self.ready), self.iterations)


def make_ready(options: argparse.Namespace, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    shape = (options.batch_size, 3, options.size, options.size)
    ready = []
    for _ in range(READY):
        x = torch.randn(shape).contiguous(memory_format=torch.channels_last)
        y = torch.randint(10, shape[:1])
        ready.append((x.pin_memory(), y.pin_memory()) if device.type == "cuda" else (x, y))
    return ready


def make_network(options: argparse.Namespace, device: torch.device) -> Any:
    torch.manual_seed(0)
    network: Any = resnet.make_model(options.model, 10, small_images=options.size <= 64)
    return network.to(device, memory_format=torch.channels_last)


def seconds_until_done(run: Callable[[], object], device: torch.device) -> float:
    """Time a run, including the queued work of the device."""

    def whole() -> None:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return seconds_of(whole)


def bare(options: argparse.Namespace, ready: list[tuple[Tensor, Tensor]], device: torch.device) -> Contender:
    """Return the training of the example, written by hand with torch."""
    network = make_network(options, device)
    model: Any = torch.compile(network, backend=options.compile) if options.compile else network
    average = deepcopy(network).requires_grad_(False).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
    warm_up = HORIZON // 10 - 1  # steps until the learning rate is at its maximum
    momentum = min(0.5, 20 / HORIZON)

    def factor(step: int) -> float:
        return min(step / warm_up, (1 + math.cos(math.pi * max(0, step - warm_up) / (HORIZON - warm_up))) / 2)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    averages, weights = (list(one.parameters()) for one in (average, network))
    copies, buffers = (list(one.buffers()) for one in (average, network))

    def loop(iterations: int) -> Any:
        output = None
        model.train()
        for batch in Batches(iterations, ready):
            x, y = (one.to(device, non_blocking=True) for one in batch)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=options.amp):
                loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                torch._foreach_lerp_(averages, weights, momentum)
                torch._foreach_copy_(copies, buffers)
            output = loss.detach()
        return output

    return Contender("bare loop", lambda iterations: seconds_until_done(lambda: loop(iterations), device))


def engine(
    name: str, options: argparse.Namespace, ready: list[tuple[Tensor, Tensor]], device: torch.device, ahead: bool
) -> Contender:
    """Return the trainer of the example."""
    trainer, *_ = resnet.make_trainer(make_network(options, device), options, steps=HORIZON)

    def run(iterations: int) -> None:
        batches: Any = Batches(iterations, ready)
        trainer.run(prefetch_to_device(batches) if ahead else batches, max_epochs=1)

    return Contender(name, lambda iterations: seconds_until_done(lambda: run(iterations), device))


def main(arguments: Sequence[str] | None = None) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options = parse(arguments)
    ready = make_ready(options, device)
    contenders = [bare(options, ready, device), engine("camshaft", options, ready, device, ahead=False)]
    if device.type == "cuda":
        contenders.append(engine("camshaft, prefetching", options, ready, device, ahead=True))
    seconds = interleave(contenders, options.iterations, options.repetitions)
    speeds = {name: Spread.of([options.batch_size / one for one in sample]) for name, sample in seconds.items()}
    baseline = seconds.pop("bare loop")
    times = {
        name: Spread.of([base / one for base, one in zip(baseline, sample, strict=True)])
        for name, sample in seconds.items()
    }
    verdicts = {name: verdict(one) for name, one in times.items()}
    rows = [["bare loop", str(speeds["bare loop"]), "", "", ""]]
    rows += [[name, str(speeds[name]), str(one), f">= {TARGET}", verdicts[name]] for name, one in times.items()]
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    how = {key: getattr(options, key) for key in ("model", "size", "batch_size", "amp", "compile")}
    print(f"images per second on {where}, " + ", ".join(f"{key} {value}" for key, value in how.items()))
    report(
        "resnet", ["", "images/s", "times the bare loop", "target", "verdict"], rows, {}, device=where, options=how,
        images_per_second=speeds, times=times, target=TARGET, verdicts=verdicts,
    )  # fmt: skip


def verdict(times: Spread) -> str:
    return "reached" if times.median >= TARGET else "missed"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="small", help="model of examples/resnet.py (%(default)s)")
    parser.add_argument("--size", type=int, default=32, help="edge length of images in pixels (%(default)s)")
    parser.add_argument("--batch_size", type=int, default=512 if on_gpu else 32, help="images (%(default)s)")
    parser.add_argument("--no_amp", dest="amp", action="store_false", help="train in float32")
    parser.add_argument("--compile", nargs="?", const="inductor", metavar="BACKEND", help="compile the model")
    parser.add_argument(
        "--iterations", type=int, default=200 if on_gpu else 20, help="iterations per run (%(default)s)"
    )
    parser.add_argument("--repetitions", type=int, default=10, help="rounds that are measured (%(default)s)")
    options = parser.parse_args(arguments)
    options.lr = 0.01
    if min(options.repetitions, options.iterations, options.batch_size) < 1:
        parser.error("--repetitions, --iterations and --batch_size must be at least 1")
    return options


if __name__ == "__main__":
    main()
