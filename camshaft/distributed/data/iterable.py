"""Iterable datasets split among ranks, and among the workers of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from camshaft.types import Stateful

_UNTOLD = -1  # no epoch was told


def sharded(dataset: IterableDataset[Any], rank: int, world_size: int) -> IterableDataset[Any]:
    """Give the part of an iterable dataset that is one rank's, and in the workers of a loader that of the worker.

    Args:
        dataset: has ``shard(num_shards, index)``, which gives a part of it, as those of Hugging Face's ``datasets``
            have. With an attribute ``num_shards`` it says into how many it can be split.
        rank: whose part.
        world_size: the number of ranks.

    Returns:
        A dataset with all else that the one inside has. Its ``state_dict``, if there is one, is that of the part.

    Raises:
        TypeError: ``dataset`` has no ``shard``.
        ValueError: ``rank`` is out of range, or there are fewer shards than ranks.
    """
    if not callable(getattr(dataset, "shard", None)):
        raise TypeError(f"dataset must have a method shard(num_shards, index), got {dataset!r}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in [0, {world_size}), got {rank}")
    _check_shards(dataset, world_size, 1)
    kind = StatefulSharded if isinstance(dataset, Stateful) else Sharded
    return kind(dataset, rank, world_size)


class Sharded(IterableDataset[Any]):
    """The part of one rank; see :func:`sharded`."""

    def __init__(self, dataset: Any, rank: int, world_size: int) -> None:
        self._dataset = dataset
        self._rank = rank
        self._world_size = world_size
        self._part: Any = None  # what is being read
        self._epoch = torch.tensor(_UNTOLD)
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]  # so workers that live on learn of a new one
        self._hears_epochs = callable(getattr(dataset, "set_epoch", None))

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset which epoch begins, and the part of it that is read next: a part may not know by itself."""
        self._epoch.fill_(epoch)
        if self._hears_epochs:
            self._dataset.set_epoch(epoch)

    def __getattr__(self, name: str) -> Any:
        if name == "_dataset" or name.startswith("__"):  # unpickling asks before there is a dataset
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        return getattr(self._dataset, name)

    def __iter__(self) -> Iterator[Any]:
        self._part = self._shard()
        return _unseen(self._part)

    def _shard(self) -> Any:
        info = get_worker_info()
        workers, worker = (1, 0) if info is None else (info.num_workers, info.id)
        _check_shards(self._dataset, self._world_size, workers)
        part = self._dataset.shard(num_shards=self._world_size * workers, index=self._rank * workers + worker)
        epoch = int(self._epoch)
        if self._hears_epochs and epoch != _UNTOLD:
            part.set_epoch(epoch)
        return part


class StatefulSharded(Sharded):
    """The part of one rank, which can be gone on with."""

    _state: Mapping[str, Any] | None = None  # to go on from

    def __iter__(self) -> Iterator[Any]:
        samples = super().__iter__()
        if self._state is not None:
            self._part.load_state_dict(self._state)
            self._state = None
        return samples

    def state_dict(self) -> Mapping[str, Any]:
        """Give the state of the part of this rank and worker."""
        if self._state is not None:
            return self._state
        state: Mapping[str, Any] = (self._part or self._shard()).state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Begin the next pass there."""
        self._state = state_dict


def _unseen(part: Iterable[Any]) -> Iterator[Any]:
    """Read a part that is one worker's alone: a dataset that finds other workers would split it among them again."""
    samples = _as_in_no_worker(lambda: iter(part))
    while True:
        try:
            sample = _as_in_no_worker(lambda: next(samples))
        except StopIteration:
            return
        yield sample


def _as_in_no_worker(call: Callable[[], Any]) -> Any:
    info, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        return call()
    finally:
        torch_worker._worker_info = info


def _check_shards(dataset: Any, world_size: int, workers: int) -> None:
    shards = getattr(dataset, "num_shards", None)
    if isinstance(shards, int) and shards < world_size * workers:
        what = f"{world_size} ranks with {workers} workers each" if workers > 1 else f"{world_size} ranks"
        raise ValueError(
            f"dataset must have at least as many shards as there are readers, got num_shards={shards} for {what}: "
            "split it into more, or use fewer workers"
        )
