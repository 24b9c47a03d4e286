"""Dealing out what a sampler gives to the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from itertools import islice
from typing import Any, cast

import torch
from torch.utils.data import DistributedSampler, Sampler

from camshaft.distributed.context import current


def length_of(sampler: Any) -> int:
    """Give the length of a sampler.

    Raises:
        TypeError: it has none.
    """
    try:
        return len(cast(Sized, sampler))
    except (TypeError, NotImplementedError) as error:
        raise TypeError(f"sampler must have a length, got {sampler!r}") from error


class DistributedProxySampler(DistributedSampler[Any]):
    """Deal out what another sampler gives: each rank gets every ``num_replicas``-th of its indices.

    All ranks draw the same indices, since each seeds torch's generator with the epoch for it, and puts the generator
    back: the sampler must take its random numbers from there, or from a generator that is seeded alike on all ranks.
    What is missing to the same number for each rank is drawn once more.

    Args:
        sampler: with a length, and not dealt out already.
        num_replicas: number of ranks; that of the present context if ``None``.
        rank: number of this one; that of the present context if ``None``.

    Raises:
        TypeError: ``sampler`` is no sampler, has no length, or is dealt out already.

    >>> from torch.utils.data import SequentialSampler
    >>> list(DistributedProxySampler(SequentialSampler(range(5)), num_replicas=2, rank=1))
    [1, 3, 0]
    """

    def __init__(self, sampler: Sampler[Any], num_replicas: int | None = None, rank: int | None = None) -> None:
        if not isinstance(sampler, Sampler):
            raise TypeError(f"sampler must be a torch.utils.data.Sampler, got {sampler!r}")
        if isinstance(sampler, DistributedSampler):
            raise TypeError(f"sampler must not be a DistributedSampler, which deals out already, got {sampler!r}")
        length_of(sampler)
        topology = current().topology
        super().__init__(
            cast(Any, sampler),
            num_replicas=topology.world_size if num_replicas is None else num_replicas,
            rank=topology.rank if rank is None else rank,
            shuffle=False,
        )
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        indices: list[Any] = []
        generator = torch.default_generator
        state = generator.get_state()
        generator.manual_seed(self.epoch)  # torch.manual_seed would seed the devices too
        try:
            while len(indices) < self.total_size:
                drawn = list(islice(self.sampler, self.total_size - len(indices)))
                if not drawn:
                    raise ValueError(
                        f"sampler must give {length_of(self.sampler)} indices, as its length says, got none"
                    )
                indices += drawn
        finally:
            generator.set_state(state)
        return iter(indices[self.rank : self.total_size : self.num_replicas])
