#!/usr/bin/env python3
"""Does the engine train an image classifier, or a transformer, as fast as a hand-written loop with the same options?

Both use mixed precision, a warm-up with a cosine schedule, and an average of the weights, on batches prepared in host
memory. On a GPU, a third contender prefetches them to the device.

python benchmarks/networks.py
python benchmarks/networks.py --model resnet50 --size 224 --batch_size 256 --compile     # on a GPU
python benchmarks/networks.py --model transformer --size 512 --batch_size 32             # tokens instead of images
"""

from __future__ import annotations

import argparse
import gc
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
from camshaft.data import prefetch_to_device
from examples import resnet

TARGET = 0.99
HORIZON = 10**6  # steps of the schedule, more than all rounds take
READY = 8  # distinct batches
WORDS = 8192  # of the transformer


class Batches:
    """A number of batches in host memory, pinned if there is a GPU."""

    def __init__(self, iterations: int, ready: list[tuple[Tensor, Tensor]]) -> None:
        self.iterations, self.ready = iterations, ready

    def __len__(self) -> int:
        return self.iterations

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return islice(cycle(self.ready), self.iterations)


class Bottleneck(nn.Module):
    """Three convolutions with a skip connection."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width

        def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> tuple[nn.Module, ...]:
            layer = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
            return layer, nn.BatchNorm2d(outputs)

        self.body = nn.Sequential(
            *(*convolution(inputs, width, 1), nn.ReLU(inplace=True)),
            *(*convolution(width, width, 3, stride), nn.ReLU(inplace=True)),
            *convolution(width, outputs, 1),
        )
        is_changed = stride > 1 or inputs != outputs
        self.around = nn.Sequential(*convolution(inputs, outputs, 1, stride)) if is_changed else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.body(x) + self.around(x), inplace=True)


def resnet50(classes: int) -> nn.Module:
    """Return a ResNet-50 with torch alone, as machines with GPUs may lack torchvision."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.BatchNorm2d(64)]
    layers += [nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
    inputs = 64
    for stage, count in enumerate((3, 4, 6, 3)):
        for number in range(count):
            layers.append(Bottleneck(inputs, 64 << stage, stride=2 if stage and number == 0 else 1))
            inputs = 256 << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


class Transformer(nn.Module):
    """Predicts each token from those before it; returns logits of shape [sequences * tokens, WORDS]."""

    def __init__(self, length: int, layers: int, width: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.scores = nn.Linear(width, WORDS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.scores(self.layers(self.words(x) + self.places, self.mask, is_causal=True))
        return scores.flatten(0, 1)


def make_ready(options: argparse.Namespace, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    ready = []
    for _ in range(READY):
        if options.model == "transformer":
            x = torch.randint(WORDS, (options.batch_size, options.size))
            y = x.roll(-1, dims=1).flatten()
        else:
            x = torch.randn(options.batch_size, 3, options.size, options.size)
            x = x.contiguous(memory_format=torch.channels_last)
            y = torch.randint(10, (options.batch_size,))
        ready.append((x.pin_memory(), y.pin_memory()) if device.type == "cuda" else (x, y))
    return ready


def make_network(options: argparse.Namespace, device: torch.device) -> Any:
    torch.manual_seed(0)
    network: Any
    if options.model == "transformer":
        network = Transformer(options.size, options.layers, 64 * options.layers)
    elif options.model == "resnet50":
        network = resnet50(10)
    else:
        network = resnet.make_model(options.model, 10, small_images=options.size <= 64)
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


def with_memory(make: Callable[[], Contender], device: torch.device) -> tuple[Contender, float]:
    """Return a contender, and the peak of its memory on a GPU in GB, after it is compiled; the others are idle."""
    gc.collect()
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    contender = make()
    if device.type == "cpu":
        return contender, 0.0
    contender.run(2)
    torch.cuda.reset_peak_memory_stats(device)
    contender.run(2)
    return contender, round((torch.cuda.max_memory_allocated(device) - before) / 1e9, 2)


def main(arguments: Sequence[str] | None = None) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options = parse(arguments)
    ready = make_ready(options, device)
    makers: list[Callable[[], Contender]] = [
        lambda: bare(options, ready, device),
        lambda: engine("camshaft", options, ready, device, ahead=False),
    ]
    if device.type == "cuda":
        makers.append(lambda: engine("camshaft, prefetching", options, ready, device, ahead=True))
    contenders, memory = [], {}
    for make in makers:
        contender, gigabytes = with_memory(make, device)
        contenders.append(contender)
        memory[contender.name] = gigabytes
    iterations, rounds = options.iterations, options.repetitions + 1
    if options.seconds is not None:
        slowest = max(one.run(2) / 2 for one in contenders)
        iterations = max(1, min(iterations, int(options.seconds / (slowest * len(contenders) * rounds))))
    seconds = interleave(contenders, iterations, options.repetitions)
    unit, amount = "images", options.batch_size
    if options.model == "transformer":
        unit, amount = "tokens", options.batch_size * options.size
    speeds = {name: Spread.of([amount / one for one in sample]) for name, sample in seconds.items()}
    baseline = seconds.pop("bare loop")
    times = {
        name: Spread.of([base / one for base, one in zip(baseline, sample, strict=True)])
        for name, sample in seconds.items()
    }
    verdicts = {name: verdict(one) for name, one in times.items()}
    shown = {name: f"{one:g}" if one else "" for name, one in memory.items()}
    rows = [["bare loop", str(speeds["bare loop"]), "", shown["bare loop"]]]
    rows += [[name, str(speeds[name]), str(one), shown[name]] for name, one in times.items()]
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    how = {key: getattr(options, key) for key in ("model", "size", "batch_size", "amp", "compile")}
    print(f"{unit} per second on {where}, " + ", ".join(f"{key} {value}" for key, value in how.items()))
    report(
        "networks", ["", f"{unit}/s", "times the bare loop", "peak memory, GB"], rows, {},
        device=where, options=how, unit=unit, per_second=speeds, times=times, target=TARGET, verdicts=verdicts,
        peak_gigabytes=memory,
    )  # fmt: skip


def verdict(times: Spread) -> str:
    return "reached" if times.median >= TARGET else "missed"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="small", help="resnet50, transformer, or a model of examples/resnet.py (%(default)s)"
    )
    parser.add_argument(
        "--size", type=int, default=32, help="edge length of images in pixels, or tokens of a sequence (%(default)s)"
    )
    parser.add_argument("--layers", type=int, default=12, help="layers of the transformer (%(default)s)")
    parser.add_argument(
        "--batch_size", type=int, default=512 if on_gpu else 32, help="images or sequences (%(default)s)"
    )
    parser.add_argument("--no_amp", dest="amp", action="store_false", help="train in float32")
    parser.add_argument("--compile", nargs="?", const="inductor", metavar="BACKEND", help="compile the model")
    parser.add_argument(
        "--iterations", type=int, default=200 if on_gpu else 20, help="iterations per run (%(default)s)"
    )
    parser.add_argument("--repetitions", type=int, default=10, help="rounds that are measured (%(default)s)")
    parser.add_argument("--seconds", type=float, help="reduce --iterations to measure for this long at most")
    options = parser.parse_args(arguments)
    options.lr = 0.01
    if min(options.repetitions, options.iterations, options.batch_size) < 1:
        parser.error("--repetitions, --iterations and --batch_size must be at least 1")
    return options


if __name__ == "__main__":
    main()
