"""Train a model; each rank prints its completed iterations, and its weights at the end.

... -m tests.hosts.train '{"timeout": 30}' ITERATIONS        # with arguments of Parallel
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
from torch import Tensor

import camshaft.distributed as idist
from camshaft.engine import Engine, Events

PAUSE = 0.05  # seconds per iteration, so that a test can intervene
RATE = 0.1


def batches(part: int, parts: int, iterations: int) -> Iterator[Tensor]:
    """Yield one part of each batch of a run."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(iterations):
        yield torch.randn(12, 3, generator=generator).chunk(parts)[part]


def gradient(weight: Tensor, batch: Tensor) -> Tensor:
    """Return the gradient of the mean squared error of a linear model with the slopes 1, 2, and 3."""
    error = batch @ (weight - torch.tensor([1.0, 2.0, 3.0]))
    return 2 * (error.unsqueeze(1) * batch).mean(0)


def train(local_rank: int, iterations: int) -> None:
    rank, size, weight = idist.get_rank(), idist.get_world_size(), torch.zeros(3)
    ends = idist.all_reduce(rank, group=idist.new_group([0, size - 1]))

    def step(engine: Engine, batch: Tensor) -> None:
        time.sleep(PAUSE)
        weight.sub_(RATE * idist.all_reduce(gradient(weight, batch)) / size)

    def report(engine: Engine) -> None:
        print(f"rank {rank} did iteration {engine.state.iteration}\n", end="")

    trainer = Engine(step)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, report)
    trainer.run(batches(rank, size, iterations), epoch_length=iterations)
    place = f"node {idist.get_node_rank()} of {idist.get_nnodes()}, local rank {local_rank}"
    left = os.environ.get("GLOO_SOCKET_IFNAME")
    print(f"rank {rank} of {size}: {place}, ends {ends}, left {left}, learned {weight.tolist()}\n", end="")


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    with idist.Parallel("gloo", **options | {"timeout": timedelta(seconds=options["timeout"])}) as parallel:
        parallel.run(train, int(sys.argv[2]))
