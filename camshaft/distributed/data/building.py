"""The arguments of a loader, for one rank of several."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Iterator, Sized
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from camshaft.distributed.data.drawing import check_length
from camshaft.distributed.data.ending import EvenLoader
from camshaft.distributed.data.iterable import sharded
from camshaft.distributed.data.loader import Loader, PlainLoader
from camshaft.distributed.data.orders import Order, Sequential, Shuffled
from camshaft.distributed.data.sameness import SharedSeed
from camshaft.distributed.data.sampler import ExactBatchSampler
from camshaft.distributed.sampling import DistributedProxySampler, length_of
from camshaft.distributed.topology import Topology

_warned: weakref.WeakSet[type] = weakref.WeakSet()  # classes of iterable datasets


def make_loader(
    dataset: Dataset[Any], options: dict[str, Any], topology: Topology, logger: logging.Logger
) -> DataLoader[Any]:
    """Make the loader of one rank; see :func:`camshaft.distributed.auto_dataloader`."""
    options = dict(options)
    size, local_size = topology.world_size, topology.local_world_size
    seed = _checked_seed(options)
    if size > 1 and options.get("num_workers", 0) >= local_size:
        options["num_workers"] = -(-options["num_workers"] // local_size)
    if options.get("batch_sampler") is not None:
        return _with_batches_of_the_user(dataset, options, seed, topology)
    options.pop("batch_sampler", None)
    if isinstance(dataset, IterableDataset):
        return _iterable(dataset, options, topology, logger)
    sampler, batch_size = options.pop("sampler", None), options.pop("batch_size", 1)
    if not _can_be_dealt(sampler, batch_size, topology):
        if batch_size is None and size > 1 and not isinstance(sampler, DistributedSampler):
            return _without_batches(dataset, sampler, options, seed, topology)
        return PlainLoader(dataset, batch_size=_per_rank(batch_size, size), sampler=sampler, **options)
    chosen = {name: options.pop(name, default) for name, default in (("shuffle", None), ("drop_last", False))}
    DataLoader(dataset, batch_size=batch_size, sampler=cast(Any, sampler), **chosen)  # torch finds what contradicts
    shuffle = chosen["shuffle"]
    if sampler is None:
        shuffle = size > 1 if shuffle is None else shuffle
        sampler = (Shuffled if shuffle else Sequential)(_length(dataset))
        chosen_seed = "torch.initial_seed() of rank 0" if seed is None else seed
        logger.info("the samples are dealt out to %d ranks, with shuffle=%s and seed=%s", size, shuffle, chosen_seed)
    total = batch_size if batch_size >= size else batch_size * size
    length = sampler.length if isinstance(sampler, Order) else length_of(sampler)
    if chosen["drop_last"] and length < total:
        raise ValueError(
            f"drop_last=True leaves nothing of {length} samples, as one batch of all ranks takes {total}: "
            "give a smaller batch_size, more samples, or drop_last=False"
        )
    batches = ExactBatchSampler(sampler, total, chosen["drop_last"], seed=seed, num_replicas=size, rank=topology.rank)
    return _exact(dataset, {**options, "batch_sampler": batches})


def _checked_seed(options: dict[str, Any]) -> Any:
    """Refuse options that torch does not look at, or not before the first batch; take the seed out of them."""
    shuffle, workers, generator = (options.get(name) for name in ("shuffle", "num_workers", "generator"))
    if shuffle not in (None, True, False):
        raise TypeError(f"shuffle must be True, False or None, got {shuffle!r}")
    if "num_workers" in options and not isinstance(workers, int):
        raise TypeError(f"num_workers must be an integer, got {workers!r}")
    if not isinstance(generator, torch.Generator | None):
        raise TypeError(f"generator must be a torch.Generator or None, got {generator!r}")
    seed = options.pop("seed", None)
    return generator.initial_seed() if seed is None and generator is not None else seed


def _exact(dataset: Dataset[Any], options: dict[str, Any]) -> Loader[Any]:
    """Make the loader of an exact batch sampler, which learns what its indices are for."""
    batches: ExactBatchSampler = options["batch_sampler"]
    if isinstance(batches.source, Order):
        check_length(batches.source, dataset)
    loader: Loader[Any] = Loader(dataset, **options)
    batches.dataset = dataset
    return loader


def _with_batches_of_the_user(
    dataset: Dataset[Any], options: dict[str, Any], seed: int | None, topology: Topology
) -> DataLoader[Any]:
    sampler = options["batch_sampler"]
    alone = topology.world_size == 1 and not isinstance(dataset, IterableDataset)
    if alone and hasattr(sampler, "__len__") and not _begins_anywhere(sampler):
        options["batch_sampler"] = sampler = ExactBatchSampler(sampler, None, seed=seed)
    if isinstance(sampler, ExactBatchSampler):
        return _exact(dataset, options)
    if topology.world_size > 1:
        warnings.warn(
            "batch_sampler is used as it is: it must give each rank its own batches; one that gives all the same "
            "is dealt out by ExactBatchSampler(batch_sampler, None)",
            stacklevel=4,
        )
    return PlainLoader(dataset, **options)


def _begins_anywhere(sampler: Any) -> bool:
    return callable(getattr(sampler, "seek", None)) and callable(getattr(sampler, "position", None))


def _iterable(
    dataset: IterableDataset[Any], options: dict[str, Any], topology: Topology, logger: logging.Logger
) -> DataLoader[Any]:
    size = topology.world_size
    options["batch_size"] = _per_rank(options.pop("batch_size", 1), size)
    if size == 1:
        return PlainLoader(dataset, **options)
    if callable(getattr(dataset, "shard", None)):
        dataset = sharded(dataset, topology.rank, size)
    else:
        logger.info("an iterable dataset is used as it is: it must give each rank its own data")
        if topology.rank == 0:
            _warn_of_whole_stream(dataset, size)
    return EvenLoader(dataset, **options)


def _warn_of_whole_stream(dataset: IterableDataset[Any], size: int) -> None:
    """Warn, once for each class, that every rank may read all of an iterable dataset."""
    kind = type(dataset)
    pipes: Any = getattr(torch.utils.data, "IterDataPipe", ())  # whose sharding_filter torch applies on each rank
    if kind in _warned or isinstance(dataset, pipes):
        return
    _warned.add(kind)
    warnings.warn(
        f"{kind.__name__} has no method shard(num_shards, index), so each of the {size} ranks and each of its workers "
        "reads all of it, unless it splits itself: return the part of the index-th of num_shards readers from such a "
        "method, for example itertools.islice(samples, index, None, num_shards), and auto_dataloader calls it for each "
        "rank and worker; or split the samples in __iter__, by the index get_rank() * num_workers + worker_id (of "
        "torch.utils.data.get_worker_info()) of get_world_size() * num_workers readers, and ignore this warning",
        stacklevel=5,
    )


def _can_be_dealt(sampler: Any, batch_size: Any, topology: Topology) -> bool:
    """Say whether the samples are ours to deal: batches have a size, and nobody has dealt them out before."""
    if not isinstance(sampler, DistributedSampler):
        if not isinstance(sampler, Order | None):
            if not (hasattr(sampler, "__iter__") or hasattr(sampler, "__getitem__")):
                raise TypeError(f"sampler must be a sampler, an order or a sequence of indices, got {sampler!r}")
            if topology.world_size > 1:
                length_of(sampler)  # checks it
        return batch_size is not None and isinstance(sampler, Order | Sized | None)
    if (sampler.rank, sampler.num_replicas) != (topology.rank, topology.world_size):
        warnings.warn(
            f"sampler is made for rank {sampler.rank} of {sampler.num_replicas}, but this is rank {topology.rank} of "
            f"{topology.world_size}",
            stacklevel=4,
        )
    return False


def _without_batches(
    dataset: Dataset[Any], sampler: Any, options: dict[str, Any], seed: int | None, topology: Topology
) -> DataLoader[Any]:
    """Deal out single samples, in torch's way."""
    size, rank, shuffle = topology.world_size, topology.rank, options.pop("shuffle", None)
    dealt = (
        _Shared(dataset, size, rank, shuffle is None or bool(shuffle), seed)
        if sampler is None
        else DistributedProxySampler(sampler if isinstance(sampler, Sampler) else _Given(sampler), size, rank)
    )
    loader: DataLoader[Any] = PlainLoader(dataset, batch_size=None, sampler=dealt, **options)
    warnings.warn(
        "batch_size=None leaves no batches to even out: where the samples cannot be divided evenly, some are repeated; "
        "give a batch_size",
        stacklevel=4,
    )
    return loader


class _Shared(DistributedSampler[Any]):
    """A ``DistributedSampler`` that takes the seed of rank 0 if it is given none, when its first pass begins."""

    def __init__(self, dataset: Any, size: int, rank: int, shuffle: bool, seed: int | None) -> None:
        super().__init__(dataset, size, rank, shuffle=shuffle)
        self._seed = SharedSeed() if seed is None and shuffle else seed or 0

    def __iter__(self) -> Iterator[Any]:
        self.seed = (self._seed.value if isinstance(self._seed, SharedSeed) else self._seed) % 2**62
        return super().__iter__()


class _Given(Sampler[Any]):
    """A sequence of indices, as a sampler."""

    def __init__(self, indices: Any) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[Any]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


def _per_rank(batch_size: Any, size: int) -> Any:
    return batch_size // size if isinstance(batch_size, int) and batch_size >= size else batch_size


def _length(dataset: Any) -> int:
    try:
        length = len(dataset)
    except TypeError as error:
        raise TypeError(
            f"dataset must have a length, or be an IterableDataset, or come with a sampler, got {dataset!r}"
        ) from error
    if length == 0:
        raise ValueError(f"dataset must have a sample at least, got an empty {type(dataset).__name__}")
    return length
