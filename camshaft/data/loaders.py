"""The loader of one rank: its batch size, its sampler, and its shard of a stream."""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from types import NoneType
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from camshaft.arguments import check_known, check_type, described
from camshaft.data.augmentation import SeededLoader, read_apart
from camshaft.data.orders import Order, Sequential, Shuffled
from camshaft.data.permutation import key_of
from camshaft.data.read_ahead import end_together
from camshaft.data.samplers import ExactBatchSampler, check_length, length_of
from camshaft.distributed.job import current, data_place
from camshaft.text import counted

_OPTIONS = {*inspect.signature(DataLoader).parameters, "seed"} - {"dataset"}
_UNSET = -1  # no epoch was set
_logger = logging.getLogger("camshaft.distributed.auto.auto_dataloader")


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
    _wrapped: Iterable[Any] = ()

    def wrap(self, wrapper: Callable[[DataLoader[Any]], Iterable[Any]]) -> None:
        """Read batches through a wrapper of this loader, inside of the agreement on the end.

        A wrapper outside of it that reads in a thread would run collectives there.
        """
        plain = copy.copy(self)
        plain.__class__ = PlainLoader  # type: ignore[assignment]  # the same without an agreement
        self._wrapped = wrapper(plain)

    def __iter__(self) -> Any:
        return end_together(iter(self._wrapped))

    def __len__(self) -> int:
        raise TypeError("the length of a loader that ends on all ranks together is not known in advance")


def auto_dataloader(dataset: Dataset[Any] | Sequence[Any], **kwargs: Any) -> DataLoader[Any]:
    """Create a loader that yields this rank's share of the data.

    Each sample of an epoch goes to one rank, once: nothing is padded, repeated or dropped, and every rank makes the
    same number of batches, so the sizes of batches may differ by one between ranks; :attr:`Engine.batch_share`
    corrects for it in training. Which samples make up a step follows from ``seed``, epoch and step alone, on any number
    of ranks up to half the batch size; beyond that, a last step of fewer samples than ranks joins the one before. An
    engine announces the epoch; one that is saved and loaded resumes with the very next sample, also on another number
    of ranks. With a mesh (:func:`make_mesh`), "ranks" means those that divide the data: peers along ``cp`` and ``tp``
    get the same samples, with the same random augmentation.

    On several ranks, ``batch_size`` is that of all ranks together, or of each if it is smaller than their number;
    ``num_workers`` is that of a node, divided by its processes and rounded up; and the samples are **shuffled unless
    shuffle=False is given**. A batch sampler must yield different batches on each rank; in a single process it is drawn
    for a whole epoch. An iterable dataset that has ``shard(num_shards=..., index=...)``, as those of Hugging Face, is
    sharded by rank and worker; any other must itself yield different data on each rank, and the same data on peers. All
    ranks end at the same step, when the first of them runs out of data. Each rank draws its own random numbers for a
    stream.

    Args:
        dataset: what to load.
        kwargs: for ``torch.utils.data.DataLoader``; ``pin_memory`` is on by default if the device is a GPU.
            In addition, ``seed``: any integer, the same on all ranks. By default it is that of ``generator``, else
            rank 0's ``torch.initial_seed()``, on all ranks; it is saved with the position, and a resumed run takes it
            over. ``sampler`` may be an :class:`Order <camshaft.data.Order>`, such as
            ``ShuffledWindows(len(dataset), 1000)``; other samplers, also plain sequences of indices, are drawn for a
            whole epoch, alike on all ranks, and distributed.

    Returns:
        The loader; on XLA one that moves the batches to the device.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: there are fewer samples than ranks, or with ``drop_last`` than a batch of all ranks; an order
            expects more or fewer samples than the dataset has; ``in_order`` is False; or ``batch_size`` is ``None`` on
            several ranks. While it is read, if the ranks do not read the same data in the same order, if the dataset
            has changed its length, or if a sampler yields an index that it lacks.

    >>> auto_dataloader([1.0, 2.0, 3.0], batch_size=2).batch_size
    2
    """
    if isinstance(dataset, DataLoader):
        raise TypeError(
            "dataset must be a dataset, got a DataLoader: pass loader.dataset, and the arguments of the loader "
            "(batch_size, shuffle, collate_fn, ...) as keywords of auto_dataloader"
        )
    if kwargs.keys() - _OPTIONS:
        check_known(kwargs, _OPTIONS, "auto_dataloader")
    backend, place, options = current(), data_place(), dict(kwargs)
    is_alone, num_local = backend.topology.world_size == 1, backend.topology.local_world_size
    device = backend.device.type
    if device == "xla" and options.get("pin_memory"):
        warnings.warn("pin_memory=True has no effect on XLA, and is turned off", stacklevel=2)
        options["pin_memory"] = False
    options.setdefault("pin_memory", device == "cuda")
    given = dict(options)
    # torch checks these late, or not at all
    if options.get("shuffle") not in (None, True, False):
        raise TypeError(f"shuffle must be True, False or None, got {options['shuffle']!r}")
    check_type("batch_size", options.get("batch_size"), (int, NoneType), "an integer or None")
    check_type("num_workers", options.get("num_workers", 0), int, "an integer")
    check_type("generator", options.get("generator"), (torch.Generator, NoneType), "a torch.Generator or None")
    seed, batch_sampler = options.pop("seed", None), options.pop("batch_sampler", None)
    if seed is None and options.get("generator") is not None:
        seed = options["generator"].initial_seed()
    if not is_alone and options.get("num_workers", 0) >= num_local:
        options["num_workers"] = -(-options["num_workers"] // num_local)
    if batch_sampler is not None:
        loader = _over_batches(dataset, options, seed, batch_sampler, place[1])
    elif isinstance(dataset, IterableDataset):
        loader = _over_stream(dataset, options, place, is_alone)
    else:
        loader = _over_samples(dataset, options, seed, place, is_alone)
    final = {name: getattr(loader, name) for name in ("batch_size", "num_workers", "sampler")}
    _logger.info("DataLoader of %s with %s", type(dataset).__name__, {**given, **final})
    if isinstance(loader, EvenLoader):
        loader.wrap(backend.wrap_loader)
        return loader
    return cast("DataLoader[Any]", backend.wrap_loader(loader))


def _over_samples(
    dataset: Any, options: dict[str, Any], seed: int | None, place: tuple[int, int], is_alone: bool
) -> DataLoader[Any]:
    if not hasattr(dataset, "__getitem__"):
        expected = "a dataset with __getitem__() and __len__(), or an IterableDataset"
        raise TypeError(f"dataset must be {expected}, got {described(dataset)}")
    (rank, size), sampler, batch_size = place, options.pop("sampler", None), options.pop("batch_size", 1)
    is_distributed = isinstance(sampler, DistributedSampler)
    if is_distributed and (sampler.rank, sampler.num_replicas) != place:
        warnings.warn(
            f"sampler was created for rank {sampler.rank} of {sampler.num_replicas}, but this is rank {rank} of "
            f"{size}, of those that divide the data",
            stacklevel=3,
        )
    if not isinstance(sampler, Order | None) and not hasattr(sampler, "__iter__") and not hasattr(sampler, "__len__"):
        raise TypeError(f"sampler must be a sampler, an order or a sequence of indices, got {sampler!r}")
    total = batch_size if batch_size is None or batch_size >= size else batch_size * size
    if is_distributed or (is_alone and (total is None or not isinstance(sampler, Order | Sized | None))):
        return PlainLoader(dataset, batch_size=total and total // size, sampler=sampler, **options)
    if total is None:
        raise ValueError(
            "batch_size must be a number on several ranks, got None: samples without batches cannot always be divided "
            "evenly; pass a batch_size, or a DistributedSampler, which repeats some of them"
        )
    shuffle, drop_last = options.pop("shuffle", None), options.pop("drop_last", False)
    # this loader is not used: torch rejects contradictory arguments
    DataLoader(dataset, batch_size=batch_size, sampler=cast(Any, sampler), shuffle=shuffle, drop_last=drop_last)
    if sampler is None:
        if len(dataset) == 0:
            raise ValueError(f"dataset must have at least one sample, got an empty {type(dataset).__name__}")
        shuffle = not is_alone if shuffle is None else shuffle
        sampler = (Shuffled if shuffle else Sequential)(len(dataset))
        chosen = "torch.initial_seed() of rank 0" if seed is None else seed
        _logger.info("distributing samples over %d ranks, with shuffle=%s and seed=%s", size, shuffle, chosen)
    else:
        check_length(sampler, dataset)
    if drop_last and (length := sampler.length if isinstance(sampler, Order) else length_of(sampler)) < total:
        raise ValueError(
            f"drop_last=True leaves nothing of {counted(length, 'sample')}, as one batch of all ranks takes {total}: "
            "pass a smaller batch_size, or drop_last=False"
        )
    return _exact(dataset, options, ExactBatchSampler(sampler, total, drop_last, seed=seed))


def _exact(dataset: Any, options: dict[str, Any], batches: ExactBatchSampler) -> DataLoader[Any]:
    if not options.get("in_order", True):
        raise ValueError(
            "in_order must be True, got False: a run resumes after a number of batches, and would repeat or leave out "
            "those that came out of order"
        )
    loader: DataLoader[Any] = SeededLoader(dataset, batch_sampler=batches, **options)
    vars(loader).update(batch_size=batches.batch_size, drop_last=batches.drop_last, sampler=batches.sampler)
    batches.dataset = dataset
    return loader


def _over_batches(
    dataset: Any, options: dict[str, Any], seed: int | None, batch_sampler: Any, size: int
) -> DataLoader[Any]:
    can_seek = callable(getattr(batch_sampler, "seek", None)) and callable(getattr(batch_sampler, "position", None))
    if size == 1 and not can_seek and hasattr(batch_sampler, "__len__") and not isinstance(dataset, IterableDataset):
        batch_sampler = ExactBatchSampler(batch_sampler, None, seed=seed)
    if isinstance(batch_sampler, ExactBatchSampler):
        check_length(batch_sampler.source, dataset)
        return _exact(dataset, options, batch_sampler)
    if size > 1:
        warnings.warn(
            "batch_sampler is used as it is: it must yield different batches on each rank; wrap one that yields the "
            "same on all ranks in ExactBatchSampler(batch_sampler, None)",
            stacklevel=3,
        )
    return PlainLoader(dataset, batch_sampler=batch_sampler, **options)


def _over_stream(
    dataset: IterableDataset[Any], options: dict[str, Any], place: tuple[int, int], is_alone: bool
) -> DataLoader[Any]:
    (rank, size), workers, batch_size = place, options.get("num_workers", 0), options.pop("batch_size", 1)
    has_shards = callable(getattr(dataset, "shard", None))
    per_rank = batch_size if batch_size is None or batch_size < size else batch_size // size
    if is_alone:
        shards = getattr(dataset, "num_shards", None)
        has_shards = has_shards and workers > 0 and not (isinstance(shards, int) and shards < workers)
    if not has_shards and not is_alone:
        _logger.info("using an iterable dataset as it is: it must yield different samples on each rank")
    if not has_shards and rank == 0 and size > 1:
        warnings.warn(
            f"{type(dataset).__name__} has no method shard(num_shards, index), so each of the {size} ranks and each of "
            "its workers reads all of it, unless it splits itself: return the shard of the index-th of num_shards "
            "readers from such a method, for example itertools.islice(samples, index, None, num_shards); or split the "
            "samples in __iter__, by the index get_data_parallel_rank() * num_workers + worker_id (of "
            "torch.utils.data.get_worker_info()) of get_data_parallel_size() * num_workers readers, and ignore this "
            "warning",
            stacklevel=3,
        )
    if has_shards or (options.get("persistent_workers") and callable(getattr(dataset, "set_epoch", None))):
        dataset = Stream(dataset, place if has_shards else None, workers)
    loader = (PlainLoader if is_alone else EvenLoader)(dataset, batch_size=per_rank, **options)
    if isinstance(loader, EvenLoader):
        loader.share, loader.total_batch_size = rank, per_rank and per_rank * size
    return loader


class Stream(IterableDataset[Any]):
    """An iterable dataset that knows the epoch in the workers of a loader, even if they outlast it, and its shard.

    Other attributes are those of the dataset, except ``state_dict`` and ``load_state_dict``, which concern all shards.

    Args:
        dataset: with ``place``, it has ``shard(num_shards, index)``, which returns a shard of it, as those of Hugging
            Face's ``datasets`` do. An attribute ``num_shards`` is the largest number of shards.
        place: the index of the rank that reads it, and the number of ranks; each of its workers reads one shard.
            ``None``: all of it is read.
        workers: of the loader on each rank.

    Raises:
        ValueError: there are fewer shards than readers.
    """

    def __init__(self, dataset: Any, place: tuple[int, int] | None = None, workers: int = 0) -> None:
        self._dataset, self._place = dataset, place
        self._epoch = torch.tensor(_UNSET)
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]  # so persistent workers learn of a new one
        self._has_epochs = callable(getattr(dataset, "set_epoch", None))
        size, shards = 0 if place is None else place[1], getattr(dataset, "num_shards", None)
        if isinstance(shards, int) and shards < size * max(workers, 1):
            readers = counted(size, "rank") + (f" with {workers} workers each" if workers > 1 else "")
            raise ValueError(
                f"dataset must have at least as many shards as there are readers, got num_shards={shards} for "
                f"{readers}: split it into more, or use fewer workers"
            )

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
        dataset, info = self._dataset, get_worker_info()
        if self._place is not None:
            (rank, size), workers, worker = self._place, info.num_workers if info else 1, info.id if info else 0
            dataset = dataset.shard(num_shards=size * workers, index=rank * workers + worker)
        if self._has_epochs and (epoch := int(self._epoch)) != _UNSET:
            dataset.set_epoch(epoch)
        return iter(dataset) if self._place is None else _hiding_workers(dataset)


def _hiding_workers(shard: Any) -> Iterator[Any]:
    """Read the shard of one worker; a dataset that sees the other workers would split it among them again."""
    samples = itertools.chain(shard)  # asks for the iterator with the first sample
    while True:
        info, torch_worker._worker_info = torch_worker._worker_info, None
        try:
            sample = next(samples)
        except StopIteration:
            return
        finally:
            torch_worker._worker_info = info
        yield sample
