"""Batches of indices in which each sample of an epoch occurs once, over all ranks, also after a resume."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, Sampler

from camshaft.distributed.context import current
from camshaft.distributed.data.dealing import Deal, DealOfBatches, EvenDeal
from camshaft.distributed.data.drawing import Drawn, chain_of, check_length
from camshaft.distributed.data.loader import Indices
from camshaft.distributed.data.one_by_one import ExactSampler
from camshaft.distributed.data.orders import Order
from camshaft.distributed.data.permutation import BLOCK
from camshaft.distributed.data.position import check_drawn, check_position
from camshaft.distributed.data.randomness import check_seed
from camshaft.distributed.data.sameness import Sameness, SharedSeed
from camshaft.distributed.sampling import length_of

_FIRST = 1 << 10  # indices that are read at first, so that a pass begins soon


@dataclass
class _Pass:
    """A pass over the data: which epoch it is, and how what is left of it is dealt."""

    seed: int
    epoch: int
    left_out: int  # batches that a resumed run had before
    deal: Deal
    drawn: Drawn | None


class ExactBatchSampler(BatchSampler):
    """Deal the samples of each epoch to ranks in batches: each sample once, as many batches on every rank.

    Nothing is padded, repeated or dropped, so the sizes of batches may differ by one between ranks. The order is a
    function of seed and epoch; which samples make up a step does not depend on the number of ranks, up to half the
    batch size, as long as the batch size of all together stays the same. An order of ours is read in blocks: memory and
    start-up do not grow with the length of the data.

    Args:
        source: an :class:`Order`; or a sampler, or a batch sampler whose batches are those of all ranks together.
            These are drawn for a whole epoch, with random numbers that follow from seed and epoch, on every rank.
        batch_size: samples of a step, of all ranks together; ``None`` for a batch sampler, which has its own.
        drop_last: leave out a last step that is smaller.
        seed: any integer, the same on all ranks. ``None``: ``torch.initial_seed()`` of rank 0, or the seed of the
            position that a run resumes from.
        num_replicas: number of ranks; that of the present context if ``None``.
        rank: number of this one; that of the present context if ``None``.

    Attributes:
        dataset: what the indices are for; :func:`camshaft.distributed.auto_dataloader` tells it, so that indices beyond
            its length are found when they are drawn. ``None``: not known.

    Raises:
        TypeError: ``source`` is none of these, or has no length, or ``seed`` is no integer.
        ValueError: fewer samples than ranks, a batch size below the number of ranks, or a number is out of range.

    >>> from camshaft.distributed.data import Sequential
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
        topology = current().topology
        self.num_replicas = topology.world_size if num_replicas is None else num_replicas
        self.rank = topology.rank if rank is None else rank
        if not isinstance(batch_size, int | None):
            raise TypeError(f"batch_size must be an integer or None, got {batch_size!r}")
        if batch_size is None and isinstance(source, Order):
            raise ValueError("batch_size must be given with an order, which has no batches of its own, got None")
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(f"rank must be in [0, {self.num_replicas}), got {self.rank}")
        if batch_size is not None and batch_size < self.num_replicas:
            raise ValueError(
                f"batch_size must be at least the number of ranks, {self.num_replicas}, as that of all ranks together, "
                f"got {batch_size}"
            )
        if seed is not None:
            check_seed(seed)
            seed = operator.index(seed)
        self.source = source
        self.dataset: Any = None
        self.total_batch_size = batch_size
        self.batch_size = 1 if batch_size is None else batch_size // self.num_replicas
        self.drop_last = drop_last
        shared = self.num_replicas > 1 and (self.rank, self.num_replicas) == (topology.rank, topology.world_size)
        self._is_seed_given = seed is not None
        self._seed: int | SharedSeed = seed if seed is not None else SharedSeed() if shared else torch.initial_seed()
        self._epoch = 0
        self.sampler: Any = source if self.num_replicas == 1 and isinstance(source, Sampler) else ExactSampler(self)
        self._begin = self._left_out = 0
        self._told, self._moved = True, False
        self._pass: _Pass | None = None
        self._drawn: Drawn | None = None
        self._sameness = Sameness() if shared else None
        if isinstance(source, Order):
            self._deal(0)
        else:
            length = length_of(source)
            if batch_size is not None:
                EvenDeal(0, length, batch_size, self.num_replicas, drop_last)  # checks it before anything is drawn

    @property
    def seed(self) -> int:
        """What the order follows from; without one of its own, a rank may wait for rank 0 to make the sampler."""
        return self._seed.value if isinstance(self._seed, SharedSeed) else self._seed

    @property
    def epoch(self) -> int:
        """The number of the next pass."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the number of the next pass, which begins at its first sample."""
        self._go_to(epoch)
        self._begin, self._left_out, self._told, self._moved = 0, 0, True, True

    def _go_to(self, epoch: int) -> None:
        """Be in an epoch, as must be samplers that want to know which one it is."""
        self._epoch = epoch
        for one in chain_of(self.source):
            if callable(getattr(one, "set_epoch", None)):
                one.set_epoch(epoch)
                self._drawn = None  # perhaps before it knew

    def __len__(self) -> int:
        return self._deal(0).steps

    def __iter__(self) -> Iterator[Indices]:
        self._pass = None  # until its first batch is read
        return self._batches()

    def _batches(self) -> Iterator[Indices]:
        # A loader with workers asks for two iterators and uses the second: where to begin holds until the first batch.
        self._check_length()
        if not self._told and self.num_replicas == 1:
            self._epoch += 1  # nobody else to part from
        now: _Pass = self.next_pass()
        if self._sameness is not None:
            self._compare(self._sameness, now)
        self._pass = now
        self._begin, self._left_out, self._told, self._moved = 0, 0, False, False
        steps, step, most = now.deal.steps, 0, _FIRST
        while step < steps:
            count = min(max(1, most // self.batch_size), steps - step)
            samples, sizes = self._read(now, range(step, step + count))
            end = 0
            for number, size in enumerate(sizes, start=step + 1):
                begin, end = end, end + size
                if number == steps and self._sameness is not None:
                    self._sameness.end()
                yield Indices(samples[begin:end], now.seed, now.epoch)
            step, most = step + count, min(4 * most, BLOCK)

    def _check_length(self) -> None:
        """Refuse a dataset that an order does not fit: one that has grown or shrunk since the loader was made."""
        if isinstance(self.source, Order):
            check_length(self.source, self.dataset)

    def next_pass(self) -> Any:
        """Return the pass that starts next, for ``share`` and ``position``."""
        return _Pass(self.seed, self.epoch, self._left_out, self._deal(self._begin), self._drawn)

    def _compare(self, sameness: Sameness, now: _Pass) -> None:
        """See that the other ranks deal out the same: what each gets is a part of that."""
        if self._moved:
            sameness.move(now.epoch, self._begin)
        source = {
            "seed": now.seed,
            "order": self._describe(),
            "batch_size": self.total_batch_size,
            "drop_last": self.drop_last,
        }
        sameness.check(source, None if now.drawn is None else now.drawn.fingerprint)

    def _read(self, now: _Pass, steps: range) -> tuple[list[Any], list[int]]:
        """Give the samples of this rank in some steps, and how many there are in each."""
        if now.drawn is not None:
            parts = [now.deal.part(step, self.rank) for step in steps]
            drawn = [sample for begin, end in parts for sample in now.drawn.samples[begin:end]]
            return drawn, [end - begin for begin, end in parts]
        assert isinstance(self.source, Order), "all else is drawn"
        assert isinstance(now.deal, EvenDeal), "an order has no batches of its own"
        positions, sizes = now.deal.positions(steps, self.rank)
        return self.source.at(now.seed, now.epoch, positions).tolist(), sizes

    def _deal(self, begin: int) -> Deal:
        """Deal what is left of the next epoch."""
        if isinstance(self.source, Order):
            assert self.total_batch_size is not None, "an order has no batches of its own"
            return EvenDeal(begin, self.source.length, self.total_batch_size, self.num_replicas, self.drop_last)
        cuts = self.total_batch_size is None
        if self._drawn is None or self._drawn.epoch != self.epoch:
            drawn = Drawn(self.source, batches=cuts, seed=self.seed, epoch=self.epoch)
            drawn.check(self.dataset)
            self._drawn = drawn
        if self.total_batch_size is not None:
            end = len(self._drawn.samples)
            return EvenDeal(begin, end, self.total_batch_size, self.num_replicas, self.drop_last)
        ends = itertools.accumulate(self._drawn.sizes)
        sizes = [size for size, end in zip(self._drawn.sizes, ends, strict=True) if end > begin]
        return DealOfBatches(sizes, self.num_replicas, begin)

    # --- where a run stands --------------------------------------------------------------------------------

    def current_pass(self) -> Any:
        """Return the pass that was started last, or else the next one: a value for ``share`` and ``position``.

        Whoever reads a pass keeps it, as others may start one over the same loader meanwhile.
        """
        return self._pass or self.next_pass()

    def share(self, batch: int, of: Any = None) -> float:
        """Return the size of this rank's batch, the ``batch``-th of a pass from 0, over the mean over ranks.

        Args:
            batch: counted from 0.
            of: the pass; the current one by default.
        """
        now: _Pass = of or self.current_pass()
        return now.deal.share(batch - now.left_out, self.rank)

    def position(self, batches: int, *, over: bool = False, of: Any = None) -> dict[str, Any]:
        """Return the place of a run; see :func:`check_position`.

        Args:
            batches: those of the pass that the run was given, or had left out as done before.
            over: the rest of the pass is given up.
            of: the pass; the current one by default.
        """
        now: _Pass = of or self.current_pass()
        step = batches - now.left_out
        over = over or step >= now.deal.steps
        consumed = 0 if over else now.deal.bounds(step)[0]
        position = {
            "epoch": now.epoch + over,
            "consumed": consumed,
            "seed": now.seed,
            "order": self._describe(),
            "steps": now.left_out + now.deal.steps,
        }
        return {**position, "drawn": now.drawn.fingerprint} if consumed and now.drawn is not None else position

    def seek(self, position: Mapping[str, Any]) -> tuple[int, int]:
        """Let the next pass begin where another run stood.

        Args:
            position: what :meth:`position` gave, on any number of ranks and with any batch size. A sampler that was
                given no seed takes over that of the position.

        Returns:
            The number of the pass, and how many batches of it are left out.

        Raises:
            ValueError: it is of other data, or in another order, or fewer samples than ranks are left; then nothing
                has changed.
        """
        self._check_length()
        check_position(position, seed=self.seed if self._is_seed_given else None, order=self._describe())
        before, seed, drawn, begin = self._epoch, self._seed, self._drawn, position["consumed"]
        if not self._is_seed_given:
            self._seed, self._drawn = position["seed"], None
        self._go_to(position["epoch"])
        try:
            left = self._deal(begin).steps
            if begin and self._drawn is not None:
                check_drawn(position, self._fingerprints(), type(self.source).__name__)
        except Exception:
            self._go_to(before)
            self._seed, self._drawn = seed, drawn
            raise
        if left == 0:  # too little for a step of this size, and drop_last
            self._go_to(self._epoch + 1)
            begin, left = 0, len(self)
        self._begin, self._left_out, self._told, self._moved = begin, len(self) - left, True, True
        self._pass = None
        return self.epoch, self._left_out

    def _fingerprints(self) -> Iterator[str]:
        """Give the hash of what was drawn for the next pass, and then what it is when that is drawn anew."""
        while True:
            self._deal(0)
            assert self._drawn is not None, "orders have no hash"
            yield self._drawn.fingerprint
            self._drawn = None
            self._go_to(self._epoch)

    def _describe(self) -> str:
        if isinstance(self.source, Order):
            return self.source.describe()
        return f"drawn from {type(self.source).__name__}, {length_of(self.source)} long"
