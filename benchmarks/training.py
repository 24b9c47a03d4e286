"""A supervised step of a tiny model in the style of each library, on the same prepared batches."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import repeat
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.measuring import Contender, seconds_of

Batch = tuple[Tensor, Tensor]


class Batches:
    """The same batch of 4 samples repeatedly, with a length; loading takes no time."""

    def __init__(self, iterations: int) -> None:
        self.iterations = iterations
        self.batch = torch.randn(4, 8), torch.tensor([0, 1, 0, 1])

    def __len__(self) -> int:
        return self.iterations

    def __iter__(self) -> Iterator[Batch]:
        return repeat(self.batch, self.iterations)


def tiny() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(8, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def bare() -> Contender:
    """Return the work of a supervised trainer, written by hand.

    As is usual, the loop sets train mode once, while a supervised step ensures it each time. It keeps the loss without
    synchronizing.
    """
    model, optimizer = tiny()

    def loop(iterations: int) -> Tensor | None:
        output = None
        model.train()
        for x, y in Batches(iterations):
            optimizer.zero_grad(set_to_none=True)
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            output = loss.detach()
        return output

    return Contender("bare loop", lambda iterations: seconds_of(lambda: loop(iterations)))


def engine(name: str, package: str) -> Contender:
    """Return a contender of camshaft or PyTorch-Ignite, which have the same interface."""
    model, optimizer = tiny()
    trainer = import_module(f"{package}.engine").create_supervised_trainer(model, optimizer, cross_entropy)
    return Contender(name, lambda iterations: seconds_of(lambda: trainer.run(Batches(iterations), max_epochs=1)))


def accelerate() -> Contender:
    """Prepare model and optimizer; batches are not loaded with Accelerate."""
    accelerator = import_module("accelerate").Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*tiny())

    def loop(iterations: int) -> Tensor | None:
        output = None
        model.train()
        for x, y in Batches(iterations):
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            output = loss.detach()
        return output

    return Contender("accelerate", lambda iterations: seconds_of(lambda: loop(iterations)))


def lightning() -> Contender:
    """Time Lightning from the start of training to its end, without the setup of its trainer."""
    library: Any = import_module("lightning.pytorch")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(library.LightningModule):  # type: ignore[misc]  # the library may not be installed
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(8, 2)

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            x, y = batch
            return cross_entropy(self.model(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    class Clock(library.Callback):  # type: ignore[misc]  # as above
        def on_train_start(self, *_: Any) -> None:
            self.began = perf_counter()

        def on_train_end(self, *_: Any) -> None:
            self.seconds = perf_counter() - self.began

    def run(iterations: int) -> float:
        clock = Clock()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = library.Trainer(
                accelerator="cpu",
                max_epochs=1,
                callbacks=[clock],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            trainer.fit(Module(), Batches(iterations))
        assert trainer.global_step == iterations
        return clock.seconds

    return Contender("lightning", run)


PEERS: dict[str, Callable[[], Contender]] = {
    "pytorch-ignite": lambda: engine("pytorch-ignite", "ignite"),
    "lightning": lightning,
    "accelerate": accelerate,
}
