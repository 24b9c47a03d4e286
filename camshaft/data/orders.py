"""The order of the samples in an epoch: a function of seed, epoch and position. One class per policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from camshaft.data.permutation import BLOCK, LARGEST, Permutation, key_of, random_bits, uniform

VERSION = 1  # of the orders; increase it with any change that alters the order of a seed and an epoch
_permutation = lru_cache(maxsize=16)(Permutation)  # creating one takes as long as some thousand positions


class Order(ABC):
    """Maps each position of an epoch to a sample, without any state.

    A policy has ``length``, the number of positions in an epoch, and returns the samples at some positions (``_at``).
    """

    length: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
            if not 1 <= value <= LARGEST:
                raise ValueError(f"{name} must be in [1, 2**62], got {value}")

    @property
    def num_samples(self) -> int:
        """The number of samples; the same as the number of positions, unless a policy overrides it."""
        return self.length

    def describe(self) -> str:
        """Return a short text that differs wherever the order differs, apart from seed and epoch.

        It is saved with a position: resuming there under another description would train on the wrong samples.

        >>> Shuffled(10).describe()
        'Shuffled(length=10), version 1'
        """
        return f"{self!r}, version {VERSION}"

    @abstractmethod
    def _at(self, seed: int, epoch: int, positions: Tensor) -> Tensor:
        """Do what ``at`` does, for at most ``BLOCK`` positions that are already checked."""

    def at(self, seed: int, epoch: int, positions: Tensor) -> Tensor:
        """Return the samples at any positions of an epoch.

        Args:
            seed: any integer; each has different orders.
            epoch: any integer; each has a different order.
            positions: int64 in [0, length), of shape (k,).

        Returns:
            The indices of the samples, int64 of shape (k,).

        Raises:
            TypeError: positions is not such a tensor.
            ValueError: a position is not in the epoch.
        """
        if not isinstance(positions, Tensor) or positions.dtype != torch.int64 or positions.dim() != 1:
            raise TypeError(f"positions must be an int64 tensor of one dimension, got {positions!r}")
        if len(positions) and ((ends := positions.aminmax()).min < 0 or ends.max >= self.length):
            raise ValueError(f"positions must be in [0, {self.length}), got from {ends.min} to {ends.max}")
        blocks = positions.split(BLOCK)  # type: ignore[no-untyped-call]  # in torch
        return torch.cat([self._at(seed, epoch, block) for block in blocks])

    def indices(self, seed: int, epoch: int, begin: int, end: int) -> Tensor:
        """Return the samples at the positions from ``begin`` up to ``end`` of an epoch; see :meth:`at`.

        >>> Shuffled(10).indices(seed=0, epoch=1, begin=0, end=4)
        tensor([0, 3, 5, 1])
        """
        if not 0 <= begin <= end <= self.length:
            raise ValueError(f"begin and end must be in order and in [0, {self.length}], got {begin} and {end}")
        return self.at(seed, epoch, torch.arange(begin, end, device="cpu"))


@dataclass(frozen=True)
class Sequential(Order):
    """The samples in their own order, in every epoch.

    >>> Sequential(10).indices(seed=0, epoch=1, begin=2, end=5)
    tensor([2, 3, 4])
    """

    length: int

    def _at(self, seed: int, epoch: int, positions: Tensor) -> Tensor:
        return positions


@dataclass(frozen=True)
class Shuffled(Order):
    """All samples in a random order, a different one in each epoch, which is never held in memory.

    >>> Shuffled(5).indices(seed=0, epoch=1, begin=0, end=5).sort().values
    tensor([0, 1, 2, 3, 4])
    """

    length: int

    def _at(self, seed: int, epoch: int, positions: Tensor) -> Tensor:
        return _permutation(self.length, key_of(seed, epoch, self.length))(positions)


@dataclass(frozen=True)
class ShuffledWindows(Order):
    """The windows of the data in a random order, and the samples within each: for storage that seeks slowly.

    Args:
        length: the number of samples.
        window: how many neighbouring samples are read together; the last window may be shorter.

    >>> ShuffledWindows(8, window=3).indices(seed=0, epoch=1, begin=0, end=8)
    tensor([7, 6, 3, 4, 5, 1, 0, 2])
    """

    length: int
    window: int

    def _at(self, seed: int, epoch: int, positions: Tensor) -> Tensor:
        window = min(self.window, self.length)
        full, rest = divmod(self.length, window)
        key, windows_key, window_key, rest_key = (
            key_of(seed, epoch, self.length, self.window, use) for use in range(4)
        )
        begin = key % (full + 1) * window  # of the shorter window, which may come anywhere between the others
        end = begin + rest
        others = (positions - rest * (positions >= end)).clamp_(max=full * window - 1)  # as if it were absent
        places = others // window
        windows = _permutation(full, windows_key)(places)
        indices = _permutation(window, window_key)(others - places * window, windows) + windows * window
        if rest:
            inside = ((begin <= positions) & (positions < end)).nonzero().squeeze(1)
            among_rest = _permutation(rest, rest_key)(positions.index_select(0, inside) - begin)
            indices.index_copy_(0, inside, among_rest + full * window)
        return indices


class Weighted(Order):
    """Samples drawn with replacement, in proportion to their weights; some come several times, some never.

    Args:
        weights: one for each sample, not negative, and at least one above zero; a tensor or a sequence of numbers.
        length: how many are drawn in an epoch; ``None`` for as many as there are weights.

    >>> Weighted([0.0, 0.0, 3.0, 0.0], length=5).indices(seed=0, epoch=1, begin=0, end=5)
    tensor([2, 2, 2, 2, 2])
    """

    def __init__(self, weights: Tensor | Sequence[float], length: int | None = None) -> None:
        checked = _checked_weights(weights)
        self.length = len(checked) if length is None else length
        self.__post_init__()
        self._num_weights, self._fingerprint = len(checked), _fingerprint(checked)
        self._upper_ends = (checked / checked.max()).cumsum(0)  # divided first, so that no sum is infinite

    @property
    def num_samples(self) -> int:
        """The number of weights."""
        return self._num_weights

    def __repr__(self) -> str:
        return f"Weighted(<{self._num_weights} weights with hash {self._fingerprint}>, length={self.length})"

    def _at(self, seed: int, epoch: int, positions: Tensor) -> Tensor:
        chance = uniform(key_of(seed, epoch, self.length, self._num_weights), positions)
        return torch.searchsorted(self._upper_ends, chance * self._upper_ends[-1], right=True)


def _checked_weights(weights: Any) -> Tensor:
    """Return weights as a float64 tensor."""
    values = torch.as_tensor(weights, dtype=torch.float64, device="cpu").detach()
    if values.dim() != 1 or not len(values):
        raise ValueError(f"weights must have one dimension and not be empty, got the shape {tuple(values.shape)}")
    if not (values.isfinite() & (values >= 0)).all() or not values.any():
        raise ValueError(f"weights must be finite and not negative, and at least one above zero, got {values}")
    return values


def _fingerprint(weights: Tensor) -> str:
    """Hash numbers and their places to 16 hexadecimal digits."""
    total = 0
    for start in range(0, len(weights), BLOCK):
        bits = weights[start : start + BLOCK].view(torch.int64)
        places = random_bits(0, torch.arange(start, start + len(bits), device="cpu"))
        total += int(random_bits(places, bits).sum())
    return f"{total % 2**64:016x}"
