"""Data and runs for the tests of DeterministicEngine; at the top of a module, because workers import them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
)

from camshaft.engine import Events
from camshaft.engine.deterministic import DeterministicEngine
from camshaft.utils import manual_seed
from tests.ranks import context

SEED = 12


def noise() -> tuple[float, float, float]:
    """Draw from each generator, as augmentation does."""
    return random.random(), float(torch.rand(1)), float(numpy.random.rand())


class Numbers(Dataset[Any]):
    """Samples that are their own index, or, augmented, also noise; `loaded` tells which were asked for."""

    def __init__(self, size: int, augmented: bool = False) -> None:
        self.size = size
        self.augmented = augmented
        self.loaded: list[int] = []

    def __getitem__(self, index: int) -> Any:
        self.loaded.append(index)
        return (index, noise()) if self.augmented else index

    def __len__(self) -> int:
        return self.size


class Stream(IterableDataset[Any]):
    """The same samples, one after the other."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        return ((index, noise()) for index in range(self.size))


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.size


class Noisy:
    """Batches that can be iterated over again, each with noise."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.fetched = 0

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.size):
            self.fetched += 1
            yield index, noise()


class SizedNoisy(Noisy):
    def __len__(self) -> int:
        return self.size


class Backwards(BatchSampler):
    """A batch sampler of one's own."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter(list(super().__iter__())[::-1])


SAMPLERS: dict[str, Callable[[Numbers], Sampler[int]]] = {
    "random": lambda data: torch.utils.data.RandomSampler(data),
    "weighted": lambda data: WeightedRandomSampler([index + 1.0 for index in range(len(data))], len(data)),
    "distributed": lambda data: DistributedSampler(data, num_replicas=2, rank=1, seed=3),
}


def loader_of(size: int, batch_size: int = 2, sampler: str = "random", **options: Any) -> DataLoader[Any]:
    """Make a loader whose batches are lists of samples."""
    data = Numbers(size, options.pop("augmented", False))
    if options.get("num_workers"):
        options |= {"multiprocessing_context": context}
    if sampler == "backwards":
        batch_sampler = Backwards(SAMPLERS["random"](data), batch_size, drop_last=False)
        return DataLoader(data, batch_sampler=batch_sampler, collate_fn=list, **options)
    return DataLoader(data, batch_size, sampler=SAMPLERS[sampler](data), collate_fn=list, **options)


def progress(iteration: int, length: int | None, epochs: int) -> dict[str, Any]:
    return {"iteration": iteration, "epoch_length": length, "max_epochs": epochs, "rng_states": None}


def batches_of(
    data: Iterable[Any], epochs: int = 2, length: int | None = None, resumed_from: dict[str, Any] | None = None
) -> list[Any]:
    """Run over data, from the beginning or from a saved state, and give the batches seen."""
    batches: list[Any] = []
    engine = DeterministicEngine(lambda engine, batch: batches.append(batch))
    if resumed_from is not None:
        engine.load_state_dict(resumed_from)
    manual_seed(SEED)
    engine.run(data, max_epochs=epochs, epoch_length=length)
    return batches


def saved_at_every_iteration(data: Iterable[Any], epochs: int = 2, length: int | None = None) -> Any:
    """Run over data; give the batches, and the state dict after each of them."""
    batches: list[Any] = []
    saved: list[dict[str, Any]] = []
    engine = DeterministicEngine(lambda engine, batch: batches.append(batch))
    saved.append(engine.state_dict())
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: saved.append(engine.state_dict()))
    manual_seed(SEED)
    engine.run(data, max_epochs=epochs, epoch_length=length)
    return batches, saved
