"""What samplers and batch samplers of users give, drawn for a whole epoch and alike on all ranks."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any
from zlib import crc32

import torch

from camshaft.distributed.data.orders import Order
from camshaft.distributed.data.randomness import key_of
from camshaft.seeding import manual_seed, preserved_random_state


class Drawn:
    """One epoch of a sampler, or of a batch sampler, in memory.

    Args:
        sampler: gives indices, or with ``batches`` lists of them; its random numbers come from the generators of
            the process, or from an attribute ``generator``, and follow from the seed and the epoch.
        batches: it gives lists.
        seed: of the run.
        epoch: number of the epoch.

    >>> Drawn([[0, 1], [2]], batches=True, seed=0, epoch=0).sizes
    [2, 1]
    """

    def __init__(self, sampler: Iterable[Any], *, batches: bool, seed: int, epoch: int) -> None:
        own = (getattr(part, "generator", None) for part in chain_of(sampler))
        generators = [generator for generator in own if isinstance(generator, torch.Generator)]
        states = [generator.get_state() for generator in generators]
        key = key_of(seed, epoch)
        try:
            with preserved_random_state():
                manual_seed(key)
                for generator in generators:
                    generator.manual_seed(key)
                given = [list(batch) for batch in sampler] if batches else [list(sampler)]
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
        self.epoch = epoch
        self.sizes = [len(batch) for batch in given]
        self.samples = [sample for batch in given for sample in batch]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of what was drawn: the same on all ranks that drew the same."""
        numbers = self._numbers
        text = repr(self.samples).encode() if numbers is None else numbers.tobytes()
        return f"{crc32(array('q', self.sizes).tobytes(), crc32(text)):08x}"

    @cached_property
    def _numbers(self) -> array[int] | None:
        try:
            return array("q", self.samples)
        except (TypeError, OverflowError):  # names, say
            return None

    def check(self, dataset: Any) -> None:
        """Refuse indices that a dataset lacks, also negative ones; other keys are the business of the dataset.

        Raises:
            ValueError: there is one.
        """
        length = length_of_dataset(dataset)
        if length is None or not self.samples or (numbers := self._numbers) is None:
            return
        indices = torch.frombuffer(numbers, dtype=torch.int64)
        if (ends := indices.aminmax()).min < 0 or ends.max >= length:
            where = int(((indices < 0) | (indices >= length)).nonzero()[0])
            raise ValueError(
                f"the sampler gave index {numbers[where]} at position {where}, but the dataset has {length} samples"
            )


def chain_of(sampler: Any) -> list[Any]:
    """List a sampler and those that it wraps."""
    found: list[Any] = []
    while sampler is not None and not any(sampler is one for one in found):
        found.append(sampler)
        inner = getattr(sampler, "sampler", None)
        sampler = getattr(sampler, "batch_sampler", None) if inner is None else inner
    return found


def length_of_dataset(dataset: Any) -> int | None:
    """Give the length of a dataset that is asked for numbers below it, as far as one can know."""
    try:
        return None if isinstance(dataset, Mapping) else len(dataset)
    except (TypeError, NotImplementedError):
        return None


def check_length(order: Order, dataset: Any) -> None:
    """Refuse a dataset that has other samples than those in the order.

    Raises:
        ValueError: it is longer or shorter.
    """
    length = length_of_dataset(dataset)
    if length not in (None, order.num_samples):
        raise ValueError(
            f"the order is one of {order.num_samples} samples ({order.describe()}), but the dataset has {length}: make "
            "it for as many samples as the dataset has"
        )
