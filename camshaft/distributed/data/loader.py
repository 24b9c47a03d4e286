"""A loader whose random augmentation is the same whoever loads a sample, and when."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from camshaft.distributed.data.augmentation import Indices, SeededFetching, is_ready
from camshaft.distributed.data.randomness import key_of

__all__ = ["Indices", "Loader", "PlainLoader"]

Sample = TypeVar("Sample", covariant=True)


class PlainLoader(DataLoader[Sample]):
    """A ``DataLoader`` that ``auto_dataloader`` made and that cannot start in the middle.

    Attributes:
        is_skipped_forward: a run that resumes in the middle of a pass loads the batches it had before, and throws them
            away.
    """

    is_skipped_forward = True


class Loader(DataLoader[Sample]):
    """A ``DataLoader`` whose samples follow from seed, epoch and index, also where random numbers make them.

    This holds for batch samplers that yield :class:`Indices`, with any number of workers, persistent or not, and from
    any place in an epoch on: see :class:`SeededFetching`. The random numbers of the main process stay as they are:
    also those with which torch seeds new workers come from the batch sampler's ``seed`` and ``epoch``, if it has them.
    With all else, and for datasets that hold their samples ready and are collated in torch's way, this is a
    ``DataLoader``.

    ``batch_size``, ``drop_last`` and ``sampler`` are those of the batch sampler, for whoever asks.

    Args:
        dataset: the dataset.
        args, kwargs: for ``torch.utils.data.DataLoader``.

    >>> class Noise(Dataset[float]):
    ...     def __getitem__(self, index: int) -> float:
    ...         return torch.rand(()).item()
    >>> batches = [Indices([0, 1], seed=17, epoch=1), Indices([2, 0], seed=17, epoch=1)]
    >>> first, second = Loader(Noise(), batch_sampler=batches)
    >>> bool(first[0] == second[1]), bool(first[0] == first[1])
    (True, False)
    """

    def __init__(self, dataset: Dataset[Sample], *args: Any, **kwargs: Any) -> None:
        super().__init__(dataset, *args, **kwargs)
        if self.batch_size is None and self.batch_sampler is not None:  # torch does not look at a given one
            for name in ("batch_size", "drop_last", "sampler"):
                if hasattr(self.batch_sampler, name):
                    vars(self)[name] = getattr(self.batch_sampler, name)

    def _get_iterator(self) -> Any:
        if self.batch_sampler is None or isinstance(self.dataset, IterableDataset):
            return super()._get_iterator()
        # iterators read all they need from the loader when they are made: so they may be made from another one
        seeding = copy.copy(self)
        attributes = vars(seeding)
        if not is_ready(self.dataset) or self.collate_fn is not default_collate:
            attributes["dataset"] = SeededFetching(self.dataset, self.collate_fn)
            attributes["collate_fn"] = _collated_already
            attributes["worker_init_fn"] = partial(_init_worker, self.worker_init_fn)
        seed, epoch = (getattr(self.batch_sampler, name, None) for name in ("seed", "epoch"))
        if self.generator is None and isinstance(seed, int) and isinstance(epoch, int):
            generator = torch.Generator(device=torch.get_default_device())  # torch draws with it there
            attributes["generator"] = generator.manual_seed(key_of(seed, epoch))
        return DataLoader._get_iterator(seeding)


def _collated_already(batch: Any) -> Any:
    return batch


def _init_worker(init: Callable[[int], object] | None, worker_id: int) -> None:
    """Let ``get_worker_info`` show the user's dataset in a new worker, and call what the user wants called there."""
    info = get_worker_info()
    assert info is not None, "torch calls this in workers only"
    fetching = info.dataset
    assert isinstance(fetching, SeededFetching), "that is what the iterator was made with"
    object.__setattr__(info, "dataset", fetching.dataset)  # it forbids changes
    if init is not None:
        init(worker_id)
