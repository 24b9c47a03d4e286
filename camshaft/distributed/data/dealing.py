"""Who gets which positions of an epoch in which step: arithmetic alone, so that each rank knows it of all others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


class Deal(ABC):
    """Deals the positions of an epoch that are left to ranks, in steps.

    Every rank takes part in every step, with at least one sample; each position is dealt once. The positions of a
    step lie side by side, and so do those of each rank, in the order of the ranks: what makes up a step does not
    depend on the number of ranks.
    """

    ranks: int

    @property
    @abstractmethod
    def steps(self) -> int:
        """The number of steps."""

    @abstractmethod
    def bounds(self, step: int) -> tuple[int, int]:
        """Give the first position of a step, and that after its last."""

    def part(self, step: int, rank: int) -> tuple[int, int]:
        """Give the first position of a rank in a step, and that after its last: the sizes differ by one at most."""
        begin, end = self.bounds(step)
        count = end - begin
        return begin + rank * count // self.ranks, begin + (rank + 1) * count // self.ranks

    def samples_of(self, rank: int) -> int:
        """Count what a rank gets in all steps."""
        return sum(end - begin for begin, end in (self.part(step, rank) for step in range(self.steps)))

    def share(self, step: int, rank: int) -> float:
        """Give the size of a rank's batch over the mean size of those of all ranks.

        A mean over the samples of the rank, times this, and then averaged over ranks, is the mean over all samples of
        the step.

        >>> deal = EvenDeal(0, 7, 4, ranks=2)
        >>> [deal.share(step=1, rank=rank) for rank in range(2)]
        [0.6666666666666666, 1.3333333333333333]
        """
        begin, end = self.bounds(step)
        first, last = self.part(step, rank)
        return (last - first) * self.ranks / (end - begin)


@dataclass(frozen=True)
class EvenDeal(Deal):
    """Steps of one size, of which the last may be smaller, but not by more than half.

    Where less than half a step is left for the last one, it shares what the last two have evenly. So the steps follow
    from the length and the batch size alone, for any number of ranks up to half the batch size, rounded up. With more
    ranks than that, the last step may have less than one sample for each: then it joins the one before.

    Args:
        begin: the first position that is left.
        end: the length of the epoch.
        batch_size: samples of a step, of all ranks together; not less than ``ranks``.
        ranks: their number.
        drop_last: leave out a last step that is smaller.

    Raises:
        ValueError: fewer samples than ranks are left.

    >>> deal = EvenDeal(0, 9, 4, ranks=2)
    >>> [deal.bounds(step) for step in range(deal.steps)]
    [(0, 4), (4, 7), (7, 9)]
    """

    begin: int
    end: int
    batch_size: int
    ranks: int
    drop_last: bool = False

    def __post_init__(self) -> None:
        left = self.end - self.begin
        if not self.drop_last and 0 < left < self.ranks:
            raise ValueError(
                f"{left} samples cannot be dealt to {self.ranks} ranks, as each needs one in every step: take no more "
                f"than {left} processes" + (", until this epoch is over" if self.begin else ", or more samples")
            )

    @cached_property
    def steps(self) -> int:
        """The number of steps."""
        full, rest = divmod(self.end - self.begin, self.batch_size)
        return full if self.drop_last or self._last > self.batch_size else full + (rest > 0)

    @cached_property
    def _last(self) -> int:
        """The samples of the last step."""
        full, rest = divmod(self.end - self.begin, self.batch_size)
        if self.drop_last or not rest:
            return self.batch_size
        if not full:
            return rest
        last = rest if 2 * rest >= self.batch_size else (self.batch_size + rest) // 2
        return last if last >= self.ranks else self.batch_size + rest

    def bounds(self, step: int) -> tuple[int, int]:
        """Give the first position of a step, and that after its last."""
        begin = self.begin + step * self.batch_size
        if self.drop_last:
            return begin, begin + self.batch_size
        last = self.end - self._last
        return (last, self.end) if step == self.steps - 1 else (begin, min(begin + self.batch_size, last))

    def positions(self, steps: range, rank: int) -> tuple[Tensor, list[int]]:
        """Give the positions of a rank in steps that follow each other, and how many there are in each."""
        alike = range(steps.start, max(steps.start, min(steps.stop, self.steps - 2)))
        first, last = (number * self.batch_size // self.ranks for number in (rank, rank + 1))
        begins = torch.arange(alike.start, alike.stop).mul_(self.batch_size).add_(self.begin)
        positions = [(begins.unsqueeze(1) + torch.arange(first, last)).flatten()]
        sizes = [last - first] * len(alike)
        for step in range(alike.stop, steps.stop):  # the last two may be of other sizes
            begin, end = self.part(step, rank)
            positions.append(torch.arange(begin, end))
            sizes.append(end - begin)
        return torch.cat(positions), sizes

    def samples_of(self, rank: int) -> int:
        """Count what a rank gets in all steps, of which all but the last two are alike."""
        alike = max(0, self.steps - 2)
        begin, end = self.part(0, rank) if alike else (0, 0)
        rest = (self.part(step, rank) for step in range(alike, self.steps))
        return alike * (end - begin) + sum(last - first for first, last in rest)


class DealOfBatches(Deal):
    """Steps as somebody else cut them; one of fewer samples than ranks joins the next, the last joins the one before.

    Args:
        sizes: samples of each batch of the epoch.
        ranks: their number.
        begin: the first position that is left.

    Raises:
        ValueError: fewer samples than ranks are left.

    >>> deal = DealOfBatches([3, 1, 3, 1], ranks=2)
    >>> [deal.bounds(step) for step in range(deal.steps)]
    [(0, 3), (3, 8)]
    """

    def __init__(self, sizes: Sequence[int], ranks: int, begin: int = 0) -> None:
        self.ranks = ranks
        self._borders = [begin]
        position = begin
        for size in sizes:
            position += size
            if position - self._borders[-1] >= ranks:
                self._borders.append(position)
        if position > self._borders[-1]:
            if len(self._borders) == 1:
                raise ValueError(
                    f"{position - begin} samples cannot be dealt to {ranks} ranks, as each needs one in every step"
                )
            self._borders[-1] = position

    @property
    def steps(self) -> int:
        """The number of steps."""
        return len(self._borders) - 1

    def bounds(self, step: int) -> tuple[int, int]:
        """Give the first position of a step, and that after its last."""
        return self._borders[step], self._borders[step + 1]
