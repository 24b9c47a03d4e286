"""A loader whose random augmentation depends on the sample, not on the worker that loads it or on earlier samples."""

from __future__ import annotations

import copy
import itertools
import operator
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import lru_cache, partial
from hashlib import sha256
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, default_collate, get_worker_info

from camshaft.data.permutation import key_of, mixed

_FETCHING, _COLLATING = 0, 1

Sample = TypeVar("Sample", covariant=True)


class Indices(list[Any]):
    """The indices of a batch, with the seed and the epoch that the random numbers for its samples follow from.

    Args:
        indices: passed to the dataset one by one.
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


class SeededLoader(DataLoader[Sample]):
    """A ``DataLoader`` whose samples depend only on seed, epoch and index, even if they are random.

    This holds for batch samplers that yield :class:`Indices`, with any number of workers, persistent or not, and from
    any place in an epoch: see :class:`_SeededFetching`. The random states of the main process do not change, and those
    with which torch seeds new workers come from the batch sampler's ``seed`` and ``epoch``, if it has them. For other
    batch samplers, and for in-memory datasets with torch's default collation, this is a ``DataLoader``.

    >>> class Noise(torch.utils.data.Dataset[float]):
    ...     def __getitem__(self, index: int) -> float:
    ...         return torch.rand(()).item()
    >>> batches = [Indices([0, 1], seed=17, epoch=1), Indices([2, 0], seed=17, epoch=1)]
    >>> first, second = SeededLoader(Noise(), batch_sampler=batches)
    >>> bool(first[0] == second[1]), bool(first[0] == first[1])
    (True, False)
    """

    def _get_iterator(self) -> Any:
        if self.batch_sampler is None or isinstance(self.dataset, IterableDataset):
            return super()._get_iterator()
        # an iterator reads all it needs from the loader when it is created: so it may be created from another one
        seeding = copy.copy(self)
        attributes = vars(seeding)
        if not is_ready(self.dataset) or self.collate_fn is not default_collate:
            attributes["dataset"] = _SeededFetching(self.dataset, self.collate_fn)
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
    """Make ``get_worker_info`` show the user's dataset in a new worker, and call the user's function there."""
    info: Any = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.dataset)  # it forbids changes
    if init is not None:
        init(worker_id)


class _SeededFetching:
    """Replaces a dataset in a loader: fetches and collates a batch with generators that are seeded for it.

    torch's CPU generator is seeded for each sample with the seed, the epoch and the index, and so are Python's
    ``random`` and NumPy's once samples draw from them in this process. A dataset that fetches whole batches
    (``__getitems__``) is called once per batch, and so is collating: for these, the generators are seeded with all
    indices of the batch, so what is drawn there repeats only in a batch of the same samples; torch's own collating
    draws nothing. In the main process all three are restored after each batch.

    A batch of plain indices is fetched as torch does it, and nothing is seeded.

    Seeding takes time: each generator fills 624 words, Python's three times. So until a sample draws from ``random`` or
    NumPy, that generator is seeded only once per batch, with the seed and the epoch. If its state has changed after the
    first sample or after a batch, these samples are fetched again, with the generator seeded for each sample from then
    on. So ``__getitem__`` may be called twice for an index, but a sample does not depend on which others were fetched.
    A sample that draws from ``random`` or NumPy and restores the state goes unnoticed: there it sees the same numbers
    as all others of the epoch, until one draws without restoring. torch's generator does not wait, since samples that
    restore it (``fork_rng``) or ask for its seed are common.

    Args:
        dataset: a map-style dataset.
        collate: makes a batch of a list of samples.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any]) -> None:
        self.dataset, self.collate = dataset, collate
        self._in_batches, self._is_ready = fetches_batches(dataset), is_ready(dataset)
        self._has_epochs = callable(getattr(dataset, "set_epoch", None))
        self._epoch: int | None = None  # that a worker has announced
        self._has_fetched = False
        self._drawn: list[_Generator] = []  # to seed for each sample, besides torch's
        self._idle = [_Generator(_seed_python, _python_words), _Generator(_seed_numpy, _numpy_words)]
        with suppress(ImportError):  # before the first sample that uses it; in a worker, torch does so
            import_module("numpy.random")

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        if not isinstance(indices, Indices):
            return self.collate(self._fetch(indices))
        in_worker = get_worker_info() is not None  # where torch imports numpy.random, and nothing needs to be restored
        if in_worker and self._has_epochs and indices.epoch != self._epoch:  # a persistent worker has its own dataset
            self.dataset.set_epoch(indices.epoch)
            self._epoch = indices.epoch
        with nullcontext() if in_worker else preserved_generators():
            if self._is_ready or self._in_batches:
                if not self._is_ready:
                    _seed_for(indices, _FETCHING)
                samples = self._fetch(indices)
            else:
                key, samples = key_of(indices.seed, indices.epoch), []
                for part in [indices] if self._has_fetched else [indices[:1], indices[1:]]:
                    samples += self._fetch_each(part, key)
                self._has_fetched = True
            if self.collate is not default_collate:
                _seed_for(indices, _COLLATING)
            return self.collate(samples)

    def _fetch_each(self, indices: Sequence[Any], key: int) -> list[Any]:
        """Fetch samples one by one, and all of them again if one draws from a generator that was not seeded for it."""
        bits = [mixed(key, _number(index)) for index in indices]  # all at once, while this code is in the caches
        while True:
            samples: list[Any] = []
            for generator in self._idle:
                generator.seed(key)
            try:
                for index, own in zip(indices, bits, strict=True):
                    _seed_torch(own)
                    for generator in self._drawn:
                        generator.seed(own)
                    samples += self._fetch([index])
            except Exception:  # also one that would not occur with the right random numbers
                if not self._find_drawn(key):
                    raise
            else:
                if not self._find_drawn(key):
                    return samples

    def _find_drawn(self, key: int) -> bool:
        """Return True if generators were used that only ``key`` had seeded; they will be seeded for each sample."""
        drawn = [generator for generator in self._idle if generator.words() != _first_words(generator, key)]
        self._idle = [generator for generator in self._idle if generator not in drawn]
        self._drawn += drawn
        return bool(drawn)

    def _fetch(self, indices: Sequence[Any]) -> Any:
        if getattr(self.dataset, "__getitems__", None):
            return self.dataset.__getitems__(indices)
        return [self.dataset[index] for index in indices]


def is_ready(dataset: Any) -> bool:
    """Return True if a dataset is known to hold its samples, so that fetching one draws no random numbers."""
    kind = type(dataset)  # a subclass may do anything
    if kind is torch.utils.data.TensorDataset:
        return all(map(is_ready, dataset.tensors))
    if kind is Subset:
        return is_ready(dataset.dataset)
    if kind is torch.utils.data.ConcatDataset:
        return all(map(is_ready, dataset.datasets))
    return kind in (list, tuple, range, torch.Tensor)


def fetches_batches(dataset: Any) -> bool:
    """Return True if a dataset fetches whole batches, rather than pass each index to one that does not."""
    fetch = getattr(type(dataset), "__getitems__", None)
    if fetch is Subset.__getitems__:
        return fetches_batches(dataset.dataset)
    if fetch is torch.utils.data.StackDataset.__getitems__:
        parts = dataset.datasets
        return any(map(fetches_batches, parts.values() if isinstance(parts, dict) else parts))
    return bool(getattr(dataset, "__getitems__", None))


def _seed_for(indices: Indices, use: int) -> None:
    """Seed the generators for what is done with a whole batch."""
    seed_generators(mixed(key_of(indices.seed, indices.epoch, *map(_number, indices)), use))


def seed_generators(bits: int) -> None:
    """Seed Python's ``random``, torch's CPU generator and, if it was imported, NumPy's with 64 random bits.

    torch and NumPy draw the same numbers from the same 32 bits, and ignore the others: each gets a half.
    """
    _seed_torch(bits)
    _seed_python(bits)
    _seed_numpy(bits)


def _seed_torch(bits: int) -> None:
    torch.default_generator.manual_seed(bits & 0xFFFFFFFF)


def _seed_python(bits: int) -> None:
    random.seed(bits)


def _seed_numpy(bits: int) -> None:
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed(bits >> 32)


# All that a Mersenne Twister will ever draw follows from its next 624 words. Drawing them takes 3 us, where reading the
# state takes 10 us for Python and 40 us for NumPy. The second half of a pair of Gaussians needs no look: seeding
# forgets it, so there is none before a draw.


def _python_words() -> int:
    return random.getrandbits(624 * 32)


def _numpy_words() -> bytes | None:
    numpy_random = sys.modules.get("numpy.random")
    return None if numpy_random is None else numpy_random.get_bit_generator().random_raw(624).tobytes()


class _Generator(NamedTuple):
    """How to seed a generator, and how to draw as many words from it as its state consists of."""

    seed: Callable[[int], None]
    words: Callable[[], object]


@lru_cache(maxsize=4)  # of two generators, for a loader that is read while another one is
def _first_words(generator: _Generator, key: int) -> object:
    generator.seed(key)
    return generator.words()


_spares: list[Any] = []  # bit generators of NumPy, each of which takes 0.1 ms to create


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore what :func:`seed_generators` seeds, also after an error.

    This is ``preserved_random_state`` without devices, in a tenth of the time, as it is done for each batch. NumPy gets
    another generator meanwhile, since to read and set the state of its own takes 0.2 ms. It then forgets the second
    half of a pair of Gaussians, if it holds one.
    """
    python, torchs = random.getstate(), torch.default_generator.get_state()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        own = numpy_random.get_bit_generator()
        spare = _spares.pop() if _spares else numpy_random.MT19937(0)
        numpy_random.set_bit_generator(spare)
    try:
        yield
    finally:
        random.setstate(python)
        torch.default_generator.set_state(torchs)
        if numpy_random is not None:
            numpy_random.set_bit_generator(own)
            _spares.append(spare)


def read_apart(batches: Iterator[Sample], seed: int) -> Iterator[Sample]:
    """Yield batches that are read in the main process with random numbers of their own, not those of the training."""
    for number in itertools.count():
        with preserved_generators():
            seed_generators(mixed(seed, number))
            try:
                batch = next(batches)
            except StopIteration:
                return
        yield batch


def _number(index: Any) -> int:
    """Return an index as an integer; other keys, such as names, are hashed by their text."""
    try:
        return operator.index(index)
    except TypeError:
        return int.from_bytes(sha256(repr(index).encode()).digest()[:8], "little")
