"""Random numbers of augmentation that follow from the sample, not from which worker loads it and what came before."""

from __future__ import annotations

import operator
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import memmove, string_at
from functools import partial
from hashlib import sha256
from typing import Any

import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset, default_collate, get_worker_info

from camshaft.distributed.data.randomness import key_of

_BITS = 2**64 - 1
_MT19937_BYTES = 625 * 4  # 624 words and the place in them
_OF_BATCH, _OF_COLLATE = 0, 1


class Indices(list[Any]):
    """The indices of a batch, and what the random numbers for its samples follow from.

    Args:
        indices: what the dataset is asked for, one by one.
        seed: of the run.
        epoch: the pass over the dataset.

    >>> batch = Indices([4, 2], seed=17, epoch=1)
    >>> batch, batch.seed, batch.epoch
    ([4, 2], 17, 1)
    """

    __slots__ = ("epoch", "seed")

    def __init__(self, indices: Sequence[Any], seed: int, epoch: int) -> None:
        super().__init__(indices)
        self.seed, self.epoch = seed, epoch


class SeededFetching:
    """Stand in for a dataset in a loader: fetch and collate a batch with generators that are seeded for it.

    Python's ``random``, NumPy's and torch's CPU generator are seeded for each sample with the seed, the epoch and the
    index. A dataset that fetches whole batches (``__getitems__``) is called once for a batch, and collating is one
    call in any case: for these, the generators are seeded with all indices of the batch, so what is drawn there
    repeats only in a batch of the same samples; torch's own collating draws nothing. In the main process all three are
    put back after each batch.

    A batch of plain indices is fetched as torch does it, and nothing is seeded.

    Seeding takes about 10 us a sample, half of it for Python: each generator fills 624 words. It cannot be left until
    a sample is seen to draw: one that puts the generators back, or asks for their seed, would not be seen. Putting
    back takes about 30 us a batch.

    Args:
        dataset: the dataset, map-style.
        collate: makes a batch of a list of samples.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any]) -> None:
        self.dataset, self.collate = dataset, collate
        self._in_batches, self._is_ready = fetches_batches(dataset), is_ready(dataset)
        self._is_plain = collate is default_collate and not self._in_batches and not self._is_ready

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        if not isinstance(indices, Indices):
            return self.collate(self._fetch(indices))
        if get_worker_info() is not None:
            return self._seeded(indices)
        with kept_generators():
            return self._seeded(indices)

    def _fetch(self, indices: Sequence[Any]) -> Any:
        if getattr(self.dataset, "__getitems__", None):
            return self.dataset.__getitems__(indices)
        return [self.dataset[index] for index in indices]

    def _seeded(self, indices: Indices) -> Any:
        if self._is_plain:
            return self.collate(self._fetch_one_by_one(indices))
        of_batch = key_of(indices.seed, indices.epoch, *map(_number, indices))
        if self._is_ready:
            samples = self._fetch(indices)
        elif self._in_batches:
            seed_generators(mixed(of_batch, _OF_BATCH))
            samples = self._fetch(indices)
        else:
            samples = self._fetch_one_by_one(indices)
        seed_generators(mixed(of_batch, _OF_COLLATE))
        return self.collate(samples)

    def _fetch_one_by_one(self, indices: Indices) -> list[Any]:
        key, dataset, samples = key_of(indices.seed, indices.epoch), self.dataset, []
        through_list = getattr(dataset, "__getitems__", None)  # of a Subset: what torch would call
        for index in indices:
            seed_generators(mixed(key, _number(index)))
            samples.append(through_list([index])[0] if through_list else dataset[index])
        return samples


def is_ready(dataset: Any) -> bool:
    """Tell whether a dataset surely holds its samples, and so draws no random numbers when it is asked for one."""
    kind = type(dataset)  # a subclass may do anything
    if kind is TensorDataset:
        return all(map(is_ready, dataset.tensors))
    if kind is Subset:
        return is_ready(dataset.dataset)
    if kind is ConcatDataset:
        return all(map(is_ready, dataset.datasets))
    return kind in (list, tuple, range, torch.Tensor)


def fetches_batches(dataset: Any) -> bool:
    """Tell whether a dataset fetches a batch at once, rather than hand on each index to one that does not."""
    fetch = getattr(type(dataset), "__getitems__", None)
    if fetch is Subset.__getitems__:
        return fetches_batches(dataset.dataset)
    if fetch is StackDataset.__getitems__:
        parts = dataset.datasets
        return any(map(fetches_batches, parts.values() if isinstance(parts, dict) else parts))
    return bool(getattr(dataset, "__getitems__", None))


def mixed(key: int, number: int) -> int:
    """Give 64 random bits: those of :func:`random_bits`, for one number and without tensors."""
    bits = (key + number * 0x9E3779B97F4A7C15) & _BITS
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & _BITS
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & _BITS
    return bits ^ bits >> 31


def seed_generators(bits: int) -> None:
    """Seed Python's ``random``, torch's CPU generator and, if it is in use, NumPy's with 64 random bits.

    torch and NumPy make the same numbers of the same 32 bits, and pay no heed to more: each gets a half.
    """
    random.seed(bits)
    torch.default_generator.manual_seed(bits & 0xFFFFFFFF)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(bits >> 32)


@contextmanager
def kept_generators() -> Iterator[None]:
    """Put back what :func:`seed_generators` seeds, also after an error.

    This is ``preserved_random_state`` without devices, in a tenth of the time: it is done for each batch.
    """
    python, torchs = random.getstate(), torch.default_generator.get_state()
    numpy = sys.modules.get("numpy")
    restore_numpy = _restorer_of_numpy(numpy.random) if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(python)
        torch.default_generator.set_state(torchs)
        if restore_numpy is not None:
            restore_numpy()


def _restorer_of_numpy(numpy_random: Any) -> Callable[[], None]:
    """Note the state of NumPy's generator, and give what puts it back.

    ``get_state`` and ``set_state`` go through the words of a Mersenne twister one by one, which takes 0.2 ms; here
    they are copied at once. That leaves the second half of a Gaussian pair, which NumPy keeps beside them: if there
    is one, it is what the next Gaussian is, and the twister does not move.
    """
    generator = numpy_random.get_bit_generator() if hasattr(numpy_random, "get_bit_generator") else None
    if not isinstance(generator, numpy_random.MT19937):
        return partial(numpy_random.set_state, numpy_random.get_state(legacy=False))
    address = generator.ctypes.state_address
    words = string_at(address, _MT19937_BYTES)
    gaussian = numpy_random.standard_normal()
    is_second_half = string_at(address, _MT19937_BYTES) == words

    def restore() -> None:
        numpy_random.seed(0)  # forgets a second half
        memmove(generator.ctypes.state_address, words, _MT19937_BYTES)
        if is_second_half:
            state = numpy_random.get_state(legacy=False)
            numpy_random.set_state({**state, "has_gauss": 1, "gauss": gaussian})

    return restore


def _number(index: Any) -> int:
    """Give an index as an integer; one that is none, such as a name, by its text."""
    try:
        return operator.index(index)
    except TypeError:
        return int.from_bytes(sha256(repr(index).encode()).digest()[:8], "little")
