"""Exact partitions of an epoch into steps, and of each step over ranks: which each rank computes for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from camshaft.text import counted


class Partition(NamedTuple):
    """The positions of an epoch that are left, partitioned into steps, and each step over ranks.

    Every rank takes part in every step with at least one position; each position is in one step of one rank. A step is
    a range of positions and so is a rank's share of it, in the order of the ranks: what makes up a step does not depend
    on the number of ranks.

    Args:
        ranks: their number.
        begin: the first position that is left.
        step_size: positions in each of the equal steps, over all ranks.
        num_equal: how many steps of equal size come first.
        ends: the position after the last one of each further step.
    """

    ranks: int
    begin: int
    step_size: int
    num_equal: int
    ends: tuple[int, ...]

    @property
    def steps(self) -> int:
        """The number of steps."""
        return self.num_equal + len(self.ends)

    def bounds(self, step: int) -> tuple[int, int]:
        """Return the first position of a step, and the one after its last."""
        further = step - self.num_equal
        if further > 0:
            return self.ends[further - 1], self.ends[further]
        begin = self.begin + step * self.step_size
        return begin, begin + self.step_size if further < 0 else self.ends[0]

    def share_of(self, rank: int, step: int) -> tuple[int, int]:
        """Return the first position of a rank in a step, and the one after its last; sizes differ by one at most."""
        begin, end = self.bounds(step)
        count = end - begin
        return begin + rank * count // self.ranks, begin + (rank + 1) * count // self.ranks

    def num_samples(self, rank: int) -> int:
        """Return the number of positions of a rank in all steps."""
        begin, end = self.share_of(rank, 0) if self.num_equal else (0, 0)
        further = (self.share_of(rank, step) for step in range(self.num_equal, self.steps))
        return self.num_equal * (end - begin) + sum(last - first for first, last in further)

    def weight(self, rank: int, step: int) -> float:
        """Return the size of a rank's batch over the mean size of those of all ranks.

        A mean over the samples of the rank, times this, and averaged over ranks, is the mean over the whole step.

        >>> partition = even_partition(0, 7, batch_size=4, ranks=2)
        >>> [partition.weight(rank, step=1) for rank in range(2)]
        [0.6666666666666666, 1.3333333333333333]
        """
        begin, end = self.bounds(step)
        first, last = self.share_of(rank, step)
        return (last - first) * self.ranks / (end - begin)

    def positions(self, rank: int, steps: range) -> tuple[Tensor, list[int]]:
        """Return the positions of a rank in consecutive steps, and how many there are in each."""
        equal = range(steps.start, max(steps.start, min(steps.stop, self.num_equal)))
        first, last = (number * self.step_size // self.ranks for number in (rank, rank + 1))
        start, stop = (self.begin + step * self.step_size for step in (equal.start, equal.stop))
        begins = torch.arange(start, stop, self.step_size)
        positions, sizes = [(begins.unsqueeze(1) + torch.arange(first, last)).flatten()], [last - first] * len(equal)
        for step in range(equal.stop, steps.stop):
            begin, end = self.share_of(rank, step)
            positions.append(torch.arange(begin, end))
            sizes.append(end - begin)
        return torch.cat(positions), sizes


def even_partition(begin: int, end: int, batch_size: int, ranks: int, drop_last: bool = False) -> Partition:
    """Partition into steps of one size, of which the last may be smaller, but by no more than half.

    If less than half a step is left for the last one, it shares what the last two have evenly. So the steps follow from
    length and batch size alone, for any number of ranks up to half the batch size, rounded up. With more ranks, the
    last step may have less than one sample for each: then it joins the one before.

    Args:
        begin: the first position that is left.
        end: the length of the epoch.
        batch_size: positions in a step, over all ranks; at least ``ranks``.
        ranks: their number.
        drop_last: leave out a last step that is smaller.

    Raises:
        ValueError: fewer positions than ranks are left.

    >>> partition = even_partition(0, 9, 4, ranks=2)
    >>> [partition.bounds(step) for step in range(partition.steps)]
    [(0, 4), (4, 7), (7, 9)]
    """
    left = end - begin
    full, rest = divmod(left, batch_size)
    if drop_last or not rest:
        return Partition(ranks, begin, batch_size, full, ())
    if left < ranks:
        raise too_few(left, ranks, " until this epoch is over" if begin else " or more samples")
    last = rest if not full or 2 * rest >= batch_size else (batch_size + rest) // 2
    if last == rest >= ranks:
        return Partition(ranks, begin, batch_size, full, (end,))
    return Partition(ranks, begin, batch_size, full - 1, (end,) if last < ranks else (end - last, end))


def partition_of_batches(begin: int, sizes: Sequence[int], ranks: int) -> Partition:
    """Partition into given batches; one of fewer samples than ranks joins the next, the last one joins the one before.

    Args:
        begin: the first position that is left.
        sizes: samples in each batch of the whole epoch.
        ranks: their number.

    Raises:
        ValueError: fewer samples than ranks are left.

    >>> partition = partition_of_batches(0, [3, 1, 3, 1], ranks=2)
    >>> [partition.bounds(step) for step in range(partition.steps)]
    [(0, 3), (3, 8)]
    """
    ends, last, position = [], begin, 0
    for size in sizes:
        position += size
        if position - last >= ranks:
            ends.append(position)
            last = position
    if position > last:
        if not ends:
            raise too_few(position - begin, ranks, "")
        ends[-1] = position
    return Partition(ranks, begin, 1, 0, tuple(ends))


def too_few(left: int, ranks: int, otherwise: str) -> ValueError:
    """Return the error for fewer samples than ranks, and ``otherwise``, another way out than fewer ranks."""
    return ValueError(
        f"{counted(left, 'sample')} cannot be distributed over {ranks} ranks, as each needs at least one in every "
        f"step: use at most {counted(left, 'process')}{otherwise}"
    )
