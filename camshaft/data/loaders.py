"""The loader of one rank: its batch size, its sampler, and its shard of a stream."""

from __future__ import annotations

import copy
import itertools
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from types import NoneType
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from camshaft.data.augmentation import SeededLoader, read_apart
from camshaft.data.orders import Order, Sequential, Shuffled
from camshaft.data.permutation import key_of
from camshaft.data.read_ahead import end_together
from camshaft.data.samplers import DistributedProxySampler, ExactBatchSampler, check_length, length_of
from camshaft.distributed.topology import Topology
from camshaft.errors import check_type, described
from camshaft.text import counted

_UNSET = -1  # no epoch was set
_END: Any = object()


class PlainLoader(DataLoader[Any]):
    """A ``DataLoader`` made by ``auto_dataloader`` that cannot seek.

    Attributes:
        is_skipped_forward: a run that resumes within a pass loads the batches that it had before, and discards them.
        share: of a stream that several ranks read, the number of the share: each draws its own random numbers.
    """

    is_skipped_forward = True
    share: int | None = None

    def _get_iterator(self) -> Any:
        if self.share is None:
            return super()._get_iterator()
        device = torch.get_default_device()
        drawn = torch.empty((), dtype=torch.int64, device=device).random_(generator=self.generator)  # as torch does
        seed = key_of(int(drawn), self.share)
        apart = copy.copy(self)
        vars(apart)["generator"] = torch.Generator(device=device).manual_seed(seed)
        iterator = DataLoader._get_iterator(apart)
        return iterator if self.num_workers else read_apart(iterator, seed)


class EvenLoader(PlainLoader):
    """A loader of a stream that ends on all ranks together; see :func:`end_together`."""

    total_batch_size: int | None = None
    _wrapped: Iterable[Any] | None = None

    def wrap(self, wrapper: Callable[[DataLoader[Any]], Iterable[Any]]) -> None:
        """Read batches through a wrapper of this loader, inside of the agreement on the end.

        A wrapper outside of it that reads in a thread would run collectives there.
        """
        plain = copy.copy(self)
        plain.__class__ = PlainLoader  # type: ignore[assignment]  # the same without an agreement
        self._wrapped = wrapper(plain)

    def __iter__(self) -> Any:
        return end_together(self._batches())

    def _batches(self) -> Iterator[Any]:
        yield from super().__iter__() if self._wrapped is None else self._wrapped

    def __len__(self) -> int:
        raise TypeError("the length of a loader that ends on all ranks together is not known in advance")


def make_loader(
    dataset: Dataset[Any], options: dict[str, Any], topology: Topology, place: tuple[int, int], logger: logging.Logger
) -> DataLoader[Any]:
    """Return the loader of one rank; see :func:`camshaft.distributed.auto_dataloader`, which must be the caller.

    Args:
        dataset: what to load.
        options: of the user.
        topology: the place of this process in the job.
        place: the index of its share of the data, and the number of shares.
        logger: reports the options that are chosen.
    """
    options = dict(options)
    (rank, size), local_size, is_alone = place, topology.local_world_size, topology.world_size == 1
    # torch checks these late, or not at all
    if options.get("shuffle") not in (None, True, False):
        raise TypeError(f"shuffle must be True, False or None, got {options['shuffle']!r}")
    check_type("num_workers", options.get("num_workers", 0), int, "an integer")
    check_type("generator", options.get("generator"), (torch.Generator, NoneType), "a torch.Generator or None")
    seed = options.pop("seed", None)
    if seed is None and options.get("generator") is not None:
        seed = options["generator"].initial_seed()
    if not is_alone and options.get("num_workers", 0) >= local_size:
        options["num_workers"] = -(-options["num_workers"] // local_size)
    if options.get("batch_sampler") is not None:
        return _with_batch_sampler(dataset, options, seed, size)
    options.pop("batch_sampler", None)
    batch_size = options.pop("batch_size", 1)
    per_rank = batch_size // size if isinstance(batch_size, int) and batch_size >= size else batch_size
    if isinstance(dataset, IterableDataset):
        return _over_stream(dataset, {**options, "batch_size": per_rank}, place, is_alone, logger)
    if not hasattr(dataset, "__getitem__"):
        expected = "a dataset with __getitem__() and __len__(), or an IterableDataset"
        raise TypeError(f"dataset must be {expected}, got {described(dataset)}")
    sampler = options.pop("sampler", None)
    if isinstance(sampler, DistributedSampler) and (sampler.rank, sampler.num_replicas) != place:
        among = "" if size == topology.world_size else ", of those that divide the data"
        warnings.warn(
            f"sampler was created for rank {sampler.rank} of {sampler.num_replicas}, but this is rank {rank} of "
            f"{size}{among}",
            stacklevel=3,
        )
    if not isinstance(sampler, Order | None) and not hasattr(sampler, "__iter__") and not hasattr(sampler, "__len__"):
        raise TypeError(f"sampler must be a sampler, an order or a sequence of indices, got {sampler!r}")
    if batch_size is None and not is_alone and not isinstance(sampler, DistributedSampler):
        if size > 1:
            warnings.warn(
                "with batch_size=None there are no batches of different sizes: if the samples cannot be divided "
                "evenly, some are repeated; pass a batch_size",
                stacklevel=3,
            )
        is_shuffled = options.pop("shuffle", None) is not False
        sampler = (
            DistributedSampler(dataset, size, rank, is_shuffled, seed or 0)
            if sampler is None
            else DistributedProxySampler(sampler, size, rank)
        )
    has_length = isinstance(sampler, Order | Sized | None) or not is_alone
    if batch_size is None or isinstance(sampler, DistributedSampler) or not has_length:
        return PlainLoader(dataset, batch_size=per_rank, sampler=sampler, **options)
    shuffle, drop_last = options.pop("shuffle", None), options.pop("drop_last", False)
    # this loader is not used: torch rejects contradictory arguments
    DataLoader(dataset, batch_size=batch_size, sampler=cast(Any, sampler), shuffle=shuffle, drop_last=drop_last)
    if sampler is None:
        length = len(cast(Sized, dataset))
        if length == 0:
            raise ValueError(f"dataset must have at least one sample, got an empty {type(dataset).__name__}")
        shuffle = not is_alone if shuffle is None else shuffle
        sampler = (Shuffled if shuffle else Sequential)(length)
        chosen_seed = "torch.initial_seed() of rank 0" if seed is None else seed
        logger.info(
            "distributing samples over %s, with shuffle=%s and seed=%s", counted(size, "rank"), shuffle, chosen_seed
        )
    total = batch_size if batch_size >= size else batch_size * size
    length = sampler.length if isinstance(sampler, Order) else length_of(sampler)
    if drop_last and length < total:
        raise ValueError(
            f"drop_last=True leaves nothing of {counted(length, 'sample')}, as one batch of all ranks takes {total}: "
            "pass a smaller batch_size, or drop_last=False"
        )
    batches = ExactBatchSampler(sampler, total, drop_last, seed=seed, num_replicas=size, rank=rank)
    return _exact(dataset, {**options, "batch_sampler": batches})


def _exact(dataset: Dataset[Any], options: dict[str, Any]) -> DataLoader[Any]:
    """Return the loader of an exact batch sampler, which is told what its indices refer to."""
    if not options.get("in_order", True):
        raise ValueError(
            "in_order must be True, got False: a run resumes after a number of batches, and would repeat or leave out "
            "those that came out of order"
        )
    batches: ExactBatchSampler = options["batch_sampler"]
    check_length(batches.source, dataset)
    loader: DataLoader[Any] = SeededLoader(dataset, **options)
    batches.dataset = dataset
    return loader


def _with_batch_sampler(dataset: Dataset[Any], options: dict[str, Any], seed: Any, size: int) -> DataLoader[Any]:
    sampler = options["batch_sampler"]
    can_seek = callable(getattr(sampler, "seek", None)) and callable(getattr(sampler, "position", None))
    if size == 1 and not can_seek and hasattr(sampler, "__len__") and not isinstance(dataset, IterableDataset):
        options["batch_sampler"] = sampler = ExactBatchSampler(sampler, None, seed=seed)
    if isinstance(sampler, ExactBatchSampler):
        return _exact(dataset, options)
    if size > 1:
        warnings.warn(
            "batch_sampler is used as it is: it must yield different batches on each rank; wrap one that yields the "
            "same on all ranks in ExactBatchSampler(batch_sampler, None)",
            stacklevel=4,
        )
    return PlainLoader(dataset, **options)


def _over_stream(
    dataset: IterableDataset[Any],
    options: dict[str, Any],
    place: tuple[int, int],
    is_alone: bool,
    logger: logging.Logger,
) -> DataLoader[Any]:
    (rank, size), kind, workers = place, type(dataset).__name__, options.get("num_workers", 0)
    has_shards = callable(getattr(dataset, "shard", None))
    if is_alone:
        shards = getattr(dataset, "num_shards", None)
        has_shards = has_shards and workers > 0 and not (isinstance(shards, int) and shards < workers)
    if has_shards or (options.get("persistent_workers") and callable(getattr(dataset, "set_epoch", None))):
        dataset = ShardedStream(dataset, *place) if has_shards else Stream(dataset)
    if is_alone:
        return PlainLoader(dataset, **options)
    if not has_shards:
        logger.info("using an iterable dataset as it is: it must yield different samples on each rank")
    if not has_shards and rank == 0 and size > 1:
        warnings.warn(
            f"{kind} has no method shard(num_shards, index), so each of the {size} ranks and each of its workers reads "
            "all of it, unless it splits itself: return the shard of the index-th of num_shards readers from such a "
            "method, for example itertools.islice(samples, index, None, num_shards); or split the samples in __iter__, "
            "by the index get_data_parallel_rank() * num_workers + worker_id (of torch.utils.data.get_worker_info()) "
            "of get_data_parallel_size() * num_workers readers, and ignore this warning",
            stacklevel=4,
        )
    loader = EvenLoader(dataset, **options)
    loader.share, per_rank = rank, options["batch_size"]
    loader.total_batch_size = per_rank and per_rank * size
    return loader


class Stream(IterableDataset[Any]):
    """An iterable dataset that knows the epoch in the workers of a loader, even if they outlast it.

    Other attributes are those of the dataset, except ``state_dict`` and ``load_state_dict``.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._epoch = torch.tensor(_UNSET)
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]  # so persistent workers learn of a new one
        self._has_epochs = callable(getattr(dataset, "set_epoch", None))

    def set_epoch(self, epoch: int) -> None:
        """Pass an epoch to the dataset, here and where the next pass over it is read."""
        self._epoch.fill_(epoch)
        if self._has_epochs:
            self._dataset.set_epoch(epoch)

    def __getattr__(self, name: str) -> Any:
        if name in ("_dataset", "state_dict", "load_state_dict") or name.startswith("__"):  # when unpickling
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        return getattr(self._dataset, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._informed(self._dataset))

    def _informed(self, dataset: Any) -> Any:
        if self._has_epochs and (epoch := int(self._epoch)) != _UNSET:
            dataset.set_epoch(epoch)
        return dataset


class ShardedStream(Stream):
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
        super().__init__(dataset)
        self._rank = rank
        self._world_size = world_size
        self._check_shards(1)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        workers, worker = (1, 0) if info is None else (info.num_workers, info.id)
        self._check_shards(workers)
        shard = self._dataset.shard(num_shards=self._world_size * workers, index=self._rank * workers + worker)
        return _hiding_workers(self._informed(shard))

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
