"""Iterable datasets, sharded over ranks and over the workers of each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from camshaft.text import counted

_UNSET = -1  # no epoch was set
_END: Any = object()


class ShardedStream(IterableDataset[Any]):
    """The shard of an iterable dataset that one rank reads; in the workers of a loader, that of the worker.

    Other attributes are those of the dataset, except ``state_dict`` and ``load_state_dict``, which concern all shards.

    Args:
        dataset: has ``shard(num_shards, index)``, which returns a shard of it, as those of Hugging Face's ``datasets``
            do. An attribute ``num_shards`` is the largest number of shards.
        rank: the rank that reads it.
        world_size: the number of ranks.

    Raises:
        ValueError: there are fewer shards than ranks.
    """

    def __init__(self, dataset: Any, rank: int, world_size: int) -> None:
        self._dataset = dataset
        self._rank = rank
        self._world_size = world_size
        self._epoch = torch.tensor(_UNSET)
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]  # so persistent workers learn of a new one
        self._has_epochs = callable(getattr(dataset, "set_epoch", None))
        self._check_shards(1)

    def set_epoch(self, epoch: int) -> None:
        """Pass an epoch to the dataset, and to the next shard, which may not get it from there."""
        self._epoch.fill_(epoch)
        if self._has_epochs:
            self._dataset.set_epoch(epoch)

    def __getattr__(self, name: str) -> Any:
        if name in ("_dataset", "state_dict", "load_state_dict") or name.startswith("__"):  # when unpickling
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        return getattr(self._dataset, name)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        workers, worker = (1, 0) if info is None else (info.num_workers, info.id)
        self._check_shards(workers)
        shard = self._dataset.shard(num_shards=self._world_size * workers, index=self._rank * workers + worker)
        if self._has_epochs and (epoch := int(self._epoch)) != _UNSET:
            shard.set_epoch(epoch)
        return _hiding_workers(shard)

    def _check_shards(self, workers: int) -> None:
        shards = getattr(self._dataset, "num_shards", None)
        if isinstance(shards, int) and shards < self._world_size * workers:
            readers = counted(self._world_size, "rank") + (f" with {workers} workers each" if workers > 1 else "")
            raise ValueError(
                f"dataset must have at least as many shards as there are readers, got num_shards={shards} for "
                f"{readers}: split it into more, or use fewer workers"
            )


def _hiding_workers(shard: Any) -> Iterator[Any]:
    """Read the shard of one worker; a dataset that sees the other workers would split it among them again."""
    samples = itertools.chain(shard)  # asks for the iterator with the first sample
    while True:
        info, torch_worker._worker_info = torch_worker._worker_info, None
        try:
            sample = next(samples, _END)
        finally:
            torch_worker._worker_info = info
        if sample is _END:
            return
        yield sample
