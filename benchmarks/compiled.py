#!/usr/bin/env python3
"""Compiled trainers: the time of a step of a small transformer, over that of the plain trainer and of a compiled loop.

    python benchmarks/compiled.py

On the CPU with one thread, on batches of 4 sequences of 16 tokens. Everything is compiled before the rounds that are
measured; a compilation in one of them is an error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this clone, installed or not

from benchmarks.measuring import Contender, Spread, interleave, report, seconds_of, verdict
from camshaft.engine import create_supervised_trainer
from camshaft.engine.compilation import compilations_since, now

MILLISECOND = 1e-3
TARGETS = {64: 0.65, 256: 0.85}
WORDS = 100


class Transformer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.embedding(tokens)))
        return logits


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def parts(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Transformer(width)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randint(WORDS, (4, 16)), torch.randint(WORDS, (4, 16))) for _ in range(count)]


def trainer(name: str, width: int, compile: Any) -> Contender:
    model, optimizer = parts(width)
    engine = create_supervised_trainer(model, optimizer, loss_of, compile=compile)
    return contender(name, lambda data: engine.run(data))


def by_hand(width: int, options: dict[str, Any]) -> Contender:
    """Return a loop whose forward pass and whose optimizer are compiled, with a tensor as the learning rate."""
    model, optimizer = parts(width)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)
    forward = torch.compile(lambda tokens, targets: loss_of(model(tokens), targets), **options)
    update = torch.compile(lambda: optimizer.step(), **options)

    def loop(data: Sequence[tuple[Tensor, Tensor]]) -> float:
        value = 0.0
        model.train()
        for tokens, targets in data:
            optimizer.zero_grad()
            loss = forward(tokens, targets)
            loss.backward()
            update()
            value = loss.item()
        return value

    return contender("compiled loop", loop)


def contender(name: str, run: Callable[[Sequence[tuple[Tensor, Tensor]]], object]) -> Contender:
    def measured(iterations: int) -> float:
        data = batches(iterations)
        return seconds_of(lambda: run(data))

    return Contender(name, measured)


def measure(width: int, options: dict[str, Any], iterations: int, repetitions: int) -> dict[str, list[float]]:
    contenders = [trainer("eager", width, False), trainer("compiled", width, options or True), by_hand(width, options)]
    for one in contenders:
        one.per_iteration(3)
    began = now()
    seconds = interleave(contenders, iterations, repetitions)
    if late := compilations_since(began):
        raise RuntimeError(f"{late[0].co_name} was compiled again: {late[0].recompile_reason}")
    return seconds


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    torch.set_num_threads(1)
    compile_options = {} if options.backend == "inductor" else {"backend": options.backend}
    lines, rows = [], []
    for width in options.widths:
        seconds = measure(width, compile_options, options.iterations, options.repetitions)
        spreads = {name: Spread.of(sample, MILLISECOND) for name, sample in seconds.items()}
        times = {
            name: Spread.of([one / eager for one, eager in zip(seconds[name], seconds["eager"], strict=True)])
            for name in ("compiled", "compiled loop")
        }
        target = TARGETS.get(width, 1.0)
        rows.append({
            "width": width, "ms": spreads, "times_eager": times, "target": target,
            "verdict": verdict(times["compiled"], target),
        })  # fmt: skip
        lines.append([str(width), *map(str, spreads.values()), *map(str, times.values())])
    print("milliseconds per step, and times the plain trainer")
    head = ["width", "plain trainer", "compiled trainer", "compiled loop", "trainer, times plain", "loop, times plain"]
    report("compiled", head, lines, {}, rows=rows)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=10, help="rounds that are measured (%(default)s)")
    parser.add_argument("--iterations", type=int, default=50, help="steps per run (%(default)s)")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256, 512], help="of the model (%(default)s)")
    parser.add_argument("--backend", default="inductor", help="of torch.compile (%(default)s)")
    options = parser.parse_args(arguments)
    if min(options.repetitions, options.iterations) < 1:
        parser.error("--repetitions and --iterations must be at least 1")
    return options


if __name__ == "__main__":
    main()
