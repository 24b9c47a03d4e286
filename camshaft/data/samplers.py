"""Samplers that distribute indices over ranks: each sample of an epoch once, also when a run resumes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from operator import attrgetter, index
from types import NoneType
from typing import Any, SupportsIndex, cast
from zlib import crc32

import torch
from torch.utils.data import BatchSampler, DistributedSampler, Sampler

from camshaft.arguments import check_type
from camshaft.data.augmentation import Indices
from camshaft.data.orders import Order, Sequential
from camshaft.data.partition import Partition, even_partition, partition_of_batches, too_few
from camshaft.data.permutation import BLOCK, key_of
from camshaft.distributed.agreement.seed import SharedSource
from camshaft.distributed.job import current, data_place
from camshaft.seeding import manual_seed, preserved_random_state
from camshaft.text import counted

_FIRST = 1 << 10  # indices in the first block of a pass: few, so that its first batch is ready soon


class DistributedProxySampler(DistributedSampler[Any]):
    """Distribute the indices of another sampler: each rank gets every ``num_replicas``-th of them.

    All ranks draw the same indices: each seeds torch's generator with the epoch, and restores it afterwards. So the
    sampler must take its random numbers from there, or from a generator that is seeded alike on all ranks. If the
    indices cannot be divided evenly, some are drawn again, so that each rank has the same number.

    Args:
        sampler: has a length, and is not distributed already.
        num_replicas: number of ranks that divide the data; :func:`camshaft.distributed.get_data_parallel_size` if
            ``None``.
        rank: index of this rank among them; :func:`camshaft.distributed.get_data_parallel_rank` if ``None``.

    Raises:
        TypeError: ``sampler`` is not a torch sampler, has no length, or is distributed already.

    >>> from torch.utils.data import SequentialSampler
    >>> list(DistributedProxySampler(SequentialSampler(range(5)), num_replicas=2, rank=1))
    [1, 3, 0]
    """

    def __init__(self, sampler: Sampler[Any], num_replicas: int | None = None, rank: int | None = None) -> None:
        check_type("sampler", sampler, Sampler, "a torch.utils.data.Sampler")
        if isinstance(sampler, DistributedSampler):
            raise TypeError(f"sampler must not be a DistributedSampler, which is distributed already, got {sampler!r}")
        length_of(sampler)
        place, size = data_place()
        super().__init__(
            cast(Any, sampler),
            num_replicas=size if num_replicas is None else num_replicas,
            rank=place if rank is None else rank,
            shuffle=False,
        )
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        indices: list[Any] = []
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.epoch)  # torch.manual_seed would seed the devices too
            while len(indices) < self.total_size:
                drawn = list(islice(self.sampler, self.total_size - len(indices)))
                if not drawn:
                    raise ValueError(
                        f"sampler must yield {length_of(self.sampler)} indices, as its length says, got none"
                    )
                indices += drawn
        return iter(indices[self.rank : self.total_size : self.num_replicas])


class ExactSampler(DistributedProxySampler):
    """The indices of this rank, one by one; for code that asks a loader for its ``DistributedSampler``.

    Args:
        batches: the batch sampler that distributes them.
    """

    num_replicas: Any = property(attrgetter("batches.num_replicas"))
    rank: Any = property(attrgetter("batches.rank"))
    drop_last: Any = property(attrgetter("batches.drop_last"))
    seed: Any = property(attrgetter("batches.seed"))
    epoch: Any = property(attrgetter("batches.epoch"))

    def __init__(self, batches: ExactBatchSampler) -> None:
        self.batches, self.sampler = batches, cast(Any, batches.source)
        self.shuffle = not isinstance(batches.source, Sequential)

    @property
    def num_samples(self) -> int:  # type: ignore[override]  # counted on demand
        """The number of samples of this rank in an epoch."""
        return self.batches._partition(0).num_samples(self.rank)

    @property
    def total_size(self) -> int:  # type: ignore[override]  # counted on demand
        """The number of samples of all ranks in an epoch."""
        partition = self.batches._partition(0)
        return partition.bounds(partition.steps - 1)[1] if partition.steps else 0

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(self.batches)

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next pass."""
        self.batches.set_epoch(epoch)


@dataclass
class _Pass:
    """A pass over the data: its epoch, and how what is left of it is partitioned."""

    seed: int
    epoch: int
    left_out: int  # batches that were done before a run resumed
    partition: Partition
    drawn: _DrawnEpoch | None


class ExactBatchSampler(BatchSampler):
    """Distribute the samples of each epoch over ranks in batches: each sample once, as many batches on every rank.

    Nothing is padded, repeated or dropped, so the sizes of batches may differ by one between ranks. The order is a
    function of seed and epoch. Which samples make up a step does not depend on the number of ranks, up to half the
    batch size, as long as the batch size over all ranks stays the same. An :class:`Order` is read in blocks: memory and
    start-up time do not grow with the length of the data.

    Args:
        source: an :class:`Order`; or a sampler, or a batch sampler whose batches are those of all ranks together.
            The latter two are drawn for a whole epoch, with random numbers that follow from seed and epoch, on every
            rank.
        batch_size: samples in a step, over all ranks; ``None`` for a batch sampler, which has its own.
        drop_last: leave out a last step that is smaller.
        seed: any integer, the same on all ranks. ``None``: ``torch.initial_seed()`` of rank 0, or the seed of the
            position that a run resumes from.
        num_replicas: number of ranks that divide the data; :func:`camshaft.distributed.get_data_parallel_size` if
            ``None``.
        rank: index of this rank among them; :func:`camshaft.distributed.get_data_parallel_rank` if ``None``.

    Attributes:
        dataset: what the indices refer to, set by :func:`camshaft.distributed.auto_dataloader`, so that indices beyond
            its length are found when they are drawn. ``None``: not known.

    Raises:
        TypeError: ``source`` is not one of these or has no length, or ``seed`` is not an integer.
        ValueError: fewer samples than ranks, a batch size below the number of ranks, or a number is out of range.

    >>> from camshaft.data import Sequential
    >>> for rank in range(2):
    ...     print(list(ExactBatchSampler(Sequential(7), batch_size=4, num_replicas=2, rank=rank)))
    [[0, 1], [4]]
    [[2, 3], [5, 6]]
    """

    def __init__(
        self,
        source: Order | Sampler[Any] | Iterable[Any],
        batch_size: int | None,
        drop_last: bool = False,
        *,
        seed: int | None = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        here = place, size = data_place()
        self.num_replicas = size if num_replicas is None else num_replicas
        self.rank = place if rank is None else rank
        check_type("batch_size", batch_size, (int, NoneType), "an integer or None")
        if batch_size is None and isinstance(source, Order):
            raise ValueError("batch_size must be given with an order, which has no batches of its own, got None")
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(f"rank must be in [0, {self.num_replicas}), got {self.rank}")
        if batch_size is not None and batch_size < self.num_replicas:
            raise ValueError(
                f"batch_size counts the samples of all ranks, so it must be at least their number, "
                f"{self.num_replicas}, got {batch_size}"
            )
        check_type("seed", seed, (SupportsIndex, NoneType), "an integer")
        self.source = source
        self.dataset: Any = None
        self.total_batch_size = batch_size
        self.batch_size = 1 if batch_size is None else batch_size // self.num_replicas
        self.drop_last = drop_last
        is_shared = current().topology.world_size > 1 and (self.rank, self.num_replicas) == here
        self._is_seed_given = seed is not None
        self._shared = SharedSource(None if seed is None else index(seed)) if is_shared else None
        self._seed: int | SharedSource = self._shared or index(torch.initial_seed() if seed is None else seed)
        self._epoch = 0
        self.sampler: Any = source if self.num_replicas == 1 and isinstance(source, Sampler) else ExactSampler(self)
        self._begin = 0  # where the next pass starts
        self._is_announced: bool | None = None  # whether set_epoch was called for it; None before the first pass
        self._pass: _Pass | None = None
        self._drawn: _DrawnEpoch | None = None
        length = source.length if isinstance(source, Order) else length_of(source)
        if batch_size is not None and not drop_last and 0 < length < self.num_replicas:
            raise too_few(length, self.num_replicas, " or more samples")

    @property
    def seed(self) -> int:
        """The seed that the order follows from; without one of its own, a rank may wait for rank 0 to choose it."""
        return index(self._seed)

    @property
    def epoch(self) -> int:
        """The number of the next pass."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next pass, which starts at its first sample."""
        self._enter(epoch)
        self._begin, self._is_announced = 0, True

    def _enter(self, epoch: int) -> None:
        """Move to an epoch, together with the samplers inside."""
        self._epoch = epoch
        for sampler in chain_of(self.source):
            if callable(getattr(sampler, "set_epoch", None)):
                sampler.set_epoch(epoch)
                self._drawn = None  # perhaps drawn before it knew

    def __len__(self) -> int:
        return self._partition(0).steps

    def __iter__(self) -> Iterator[Indices]:
        self._pass = None  # until its first batch is read
        return self._batches()

    def _batches(self) -> Iterator[Indices]:
        # A loader with workers asks for two iterators and uses the second: where to start holds until the first batch.
        check_length(self.source, self.dataset)
        if self._is_announced is False and self.num_replicas == 1 and self._shared is None:
            self._epoch += 1  # there are no other ranks to diverge from
        this: _Pass = self.next_pass()
        shared, source = self._shared, dict[str, Any]()
        if shared is not None:
            source = {"seed": this.seed, "order": self._describe(), "batch_size": self.total_batch_size}
            source |= {"drop_last": self.drop_last, "epoch": this.epoch, "samples skipped": self._begin}
            source["hash of the samples drawn"] = this.drawn and this.drawn.fingerprint
            shared.begin(source, bool(self._is_announced))
        self._pass = this
        self._begin, self._is_announced = 0, False
        steps, step, most = this.partition.steps, 0, _FIRST
        while step < steps:
            count = min(max(1, most // self.batch_size), steps - step)
            positions, sizes = this.partition.positions(self.rank, range(step, step + count))
            if this.drawn is None:
                samples = cast(Order, self.source).at(this.seed, this.epoch, positions).tolist()
            else:
                samples = [this.drawn.samples[position] for position in positions.tolist()]
            end = 0
            for number, size in enumerate(sizes, start=step + 1):
                begin, end = end, end + size
                if number == steps and shared is not None:
                    shared.end(source)
                yield Indices(samples[begin:end], this.seed, this.epoch)
            step, most = step + count, min(4 * most, BLOCK)

    def _partition(self, begin: int) -> Partition:
        """Partition what is left of the next epoch."""
        if isinstance(self.source, Order):
            end = self.source.length
        else:
            if self._drawn is None or self._drawn.epoch != self.epoch:
                self._drawn = _DrawnEpoch(
                    self.source, self.total_batch_size is None, self.seed, self.epoch, _length_of_dataset(self.dataset)
                )
            if self.total_batch_size is None:
                return partition_of_batches(begin, self._drawn.sizes, self.num_replicas)
            end = len(self._drawn.samples)
        return even_partition(begin, end, cast(int, self.total_batch_size), self.num_replicas, self.drop_last)

    # --- the place of a run in the data ----------------------------------------------------------------------

    def next_pass(self) -> Any:
        """Return the pass that starts next, for ``share`` and ``position``."""
        partition = self._partition(self._begin)
        left_out = len(self) - partition.steps if self._begin else 0
        return _Pass(self.seed, self.epoch, left_out, partition, self._drawn)

    def current_pass(self) -> Any:
        """Return the pass that started last, or else the next one: a value for ``share`` and ``position``.

        Whoever reads a pass keeps it, as others may start one over the same loader meanwhile.
        """
        return self._pass or self.next_pass()

    def share(self, batch: int, of: Any = None) -> float:
        """Return the size of this rank's batch, the ``batch``-th of a pass from 0, over the mean over ranks.

        Args:
            batch: counted from 0.
            of: the pass; the current one by default.
        """
        this: _Pass = of or self.current_pass()
        return this.partition.weight(self.rank, batch - this.left_out)

    def position(self, batches: int, *, over: bool = False, of: Any = None) -> dict[str, Any]:
        """Return the place of a run, from which :meth:`seek` resumes on any number of ranks.

        Args:
            batches: those of the pass that the run was given, including those left out as done before.
            over: the rest of the pass is given up.
            of: the pass; the current one by default.

        Returns:
            ``epoch``, the number of the pass; ``consumed``, how many of its samples all ranks together have used;
            ``seed``, ``order`` and ``drawn``, what the order of the samples follows from; ``steps``, the batches of a
            whole pass on each rank.
        """
        this: _Pass = of or self.current_pass()
        step = batches - this.left_out
        over = over or step >= this.partition.steps
        consumed = 0 if over else this.partition.bounds(step)[0]
        position = {"epoch": this.epoch + over, "consumed": consumed, "seed": this.seed, "order": self._describe()}
        position["steps"] = this.left_out + this.partition.steps
        if consumed and this.drawn is not None:
            position["drawn"] = this.drawn.fingerprint
        return position

    def completed_by_all(self, run: int, mine: Any, start: Any) -> Any:
        """Return the progress of a run that all ranks have completed; see :class:`SharedSource`."""
        return mine if self._shared is None else self._shared.completed_by_all(run, mine, start)

    def seek(self, position: Mapping[str, Any]) -> tuple[int, int]:
        """Start the next pass at the place of another run.

        Args:
            position: from :meth:`position`, on any number of ranks and with any batch size. A sampler without a seed of
                its own takes over that of the position.

        Returns:
            The number of the pass, and how many batches of it are left out.

        Raises:
            ValueError: it is of other data, or in another order, or fewer samples than ranks are left; then nothing
                has changed.
        """
        check_length(self.source, self.dataset)
        if not all(isinstance(position.get(name), int) for name in ("epoch", "consumed", "seed")):
            raise ValueError(f"position must contain the integers epoch, consumed and seed, got {dict(position)}")
        begin, seed, order = position["consumed"], position["seed"], self._describe()
        if position.get("order") != order:
            raise ValueError(
                f"the position was saved with other data: their order was {position.get('order')!r}, that of the "
                f"loader is {order!r}; resume with the same data and the same shuffle=, by default True on several "
                f"ranks and False on one, or {_RESTART_EPOCH}"
            )
        if self._is_seed_given and seed != self.seed:
            raise ValueError(
                f"the position was saved with seed {seed}, the loader has seed {self.seed}, so other samples would be "
                f"left; pass seed={seed} to auto_dataloader, or omit seed to use the saved one"
            )
        before = self._epoch, self._seed, self._drawn
        if not self._is_seed_given:
            self._seed, self._drawn = seed, None
        self._enter(position["epoch"])
        try:
            left = self._partition(begin).steps
            if begin and self._drawn and position.get("drawn") not in (None, self._drawn.fingerprint):
                raise ValueError(
                    "the position was saved within an epoch, so samples would be repeated or left out, as "
                    f"{type(self.source).__name__} yields other samples or another order now: resume with the same "
                    "sampler, which must take its random numbers from torch, NumPy or Python, which are seeded for "
                    "each epoch, or from a torch.Generator in an attribute generator, or seed its own in "
                    f"set_epoch(epoch); or {_RESTART_EPOCH}"
                )
        except Exception:
            self._enter(before[0])
            _, self._seed, self._drawn = before
            raise
        if left == 0:  # too little for a step of this size, and drop_last
            self._enter(self._epoch + 1)
            begin = 0
        self._begin, self._is_announced, self._pass = begin, True, None
        return self.epoch, self.next_pass().left_out

    def _describe(self) -> str:
        if isinstance(self.source, Order):
            return self.source.describe()
        return f"drawn from {type(self.source).__name__}, {length_of(self.source)} long"


_RESTART_EPOCH = "start a new epoch: leave 'position' out of the state dict"


class _DrawnEpoch:
    """One epoch of a sampler, or of a batch sampler, in memory, alike on all ranks.

    Args:
        sampler: yields indices, or with ``in_batches`` lists of them; its random numbers come from the generators of
            the process, or from an attribute ``generator``, and follow from seed and epoch.
        in_batches: it yields lists.
        seed: of the run.
        epoch: number of the epoch.
        length: of the dataset; ``None`` if it has other keys than the numbers below its length.

    Raises:
        ValueError: an index is not in the dataset, or negative.
    """

    def __init__(self, sampler: Iterable[Any], in_batches: bool, seed: int, epoch: int, length: int | None) -> None:
        own = (getattr(part, "generator", None) for part in chain_of(sampler))
        generators = [generator for generator in own if isinstance(generator, torch.Generator)]
        states = [generator.get_state() for generator in generators]
        key = key_of(seed, epoch)
        try:
            with preserved_random_state():
                manual_seed(key)
                for generator in generators:
                    generator.manual_seed(key)
                drawn = [list(batch) for batch in sampler] if in_batches else [list(sampler)]
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
        self.epoch = epoch
        self.sizes = [len(batch) for batch in drawn]
        self.samples = [sample for batch in drawn for sample in batch]
        if length is None or not self.samples:
            return
        with suppress(TypeError):  # names, for example
            if wrong := [sample for sample in (min(self.samples), max(self.samples)) if not 0 <= sample < length]:
                raise ValueError(
                    f"the sampler yielded index {wrong[0]}, but the dataset has {counted(length, 'sample')}"
                )

    @cached_property
    def fingerprint(self) -> str:
        """A hash of what was drawn: the same on all ranks that drew the same."""
        return f"{crc32(repr((self.sizes, self.samples)).encode()):08x}"


def chain_of(sampler: Any) -> list[Any]:
    """Return a sampler and those that it wraps."""
    found: list[Any] = []
    while sampler is not None and not any(sampler is one for one in found):
        found.append(sampler)
        inner = getattr(sampler, "sampler", None)
        sampler = getattr(sampler, "batch_sampler", None) if inner is None else inner
    return found


def length_of(sampler: Any) -> int:
    """Return the length of a sampler; raise ``TypeError`` if it has none."""
    try:
        return len(sampler)
    except (TypeError, NotImplementedError) as error:
        raise TypeError(f"sampler must have a length, got {sampler!r}") from error


def check_length(source: Any, dataset: Any) -> None:
    """Raise ``ValueError`` if a dataset, which may have changed, is longer or shorter than an order expects."""
    length = _length_of_dataset(dataset)
    if isinstance(source, Order) and length not in (None, source.num_samples):
        raise ValueError(
            f"the order is one of {counted(source.num_samples, 'sample')} ({source.describe()}), but the dataset has "
            f"{length}: create it for as many samples as the dataset has"
        )


def _length_of_dataset(dataset: Any) -> int | None:
    """Return the length of a dataset whose keys are the numbers below it; ``None`` where that is not known."""
    try:
        return None if isinstance(dataset, Mapping) else len(dataset)
    except (TypeError, NotImplementedError):
        return None
