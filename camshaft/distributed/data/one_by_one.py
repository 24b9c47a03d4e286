"""The indices that a rank gets in batches, one by one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from camshaft.distributed.data.orders import Sequential
from camshaft.distributed.sampling import DistributedProxySampler

if TYPE_CHECKING:
    from camshaft.distributed.data.sampler import ExactBatchSampler


class ExactSampler(DistributedProxySampler):
    """The indices of this rank, one by one; for code that asks a loader for its ``DistributedSampler``.

    Args:
        batches: which deals them out.
    """

    def __init__(self, batches: ExactBatchSampler) -> None:
        self.batches, self.sampler = batches, cast(Any, batches.source)
        self.num_replicas, self.rank = batches.num_replicas, batches.rank
        self.drop_last = batches.drop_last
        self.shuffle = not isinstance(batches.source, Sequential)

    @property
    def seed(self) -> int:  # type: ignore[override]  # that of the batches
        """What the order follows from."""
        return self.batches.seed

    @property
    def epoch(self) -> int:  # type: ignore[override]  # that of the batches
        """The number of the next pass."""
        return self.batches.epoch

    @property
    def num_samples(self) -> int:  # type: ignore[override]  # counted when asked for
        """Samples of this rank in an epoch."""
        return self.batches._deal(0).samples_of(self.rank)

    @property
    def total_size(self) -> int:  # type: ignore[override]  # counted when asked for
        """Samples of all ranks in an epoch."""
        deal = self.batches._deal(0)
        return deal.bounds(deal.steps - 1)[1] if deal.steps else 0

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(self.batches)

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Choose the number of the next pass."""
        self.batches.set_epoch(epoch)
