"""What samplers and batch samplers of users give, drawn for a whole epoch and alike on all ranks."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any
from zlib import crc32

import torch

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
        own = (getattr(part, "generator", None) for part in _chain(sampler))
        generators = [generator for generator in own if isinstance(generator, torch.Generator)]
        states = [generator.get_state() for generator in generators]
        with preserved_random_state():
            manual_seed(seed + epoch)
            for generator in generators:
                generator.manual_seed((seed + epoch) % 2**63)
            given = [list(batch) for batch in sampler] if batches else [list(sampler)]
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        self.epoch = epoch
        self.sizes = [len(batch) for batch in given]
        self.samples = [sample for batch in given for sample in batch]

    def fingerprint(self) -> str:
        """Hash what was drawn: the same on all ranks that drew the same."""
        try:
            numbers = array("q", self.samples).tobytes()
        except (TypeError, OverflowError):  # names, say
            numbers = repr(self.samples).encode()
        return f"{crc32(array('q', self.sizes).tobytes(), crc32(numbers)):08x}"


def _chain(sampler: Any) -> list[Any]:
    """List a sampler and those that it wraps."""
    found: list[Any] = []
    while sampler is not None and not any(sampler is one for one in found):
        found.append(sampler)
        sampler = getattr(sampler, "sampler", None) or getattr(sampler, "batch_sampler", None)
    return found
