"""Random orders of ``range(n)`` that a key decides, and that are computed position by position.

Nobody holds such an order: it may have 10**12 elements, and be read from anywhere, in any parts, by any process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from camshaft.distributed.data.feistel import FeistelNetwork
from camshaft.distributed.data.randomness import random_bits

LARGEST = 2**62
SORTED = 2**12  # up to so many elements, sorting is faster than a network
BLOCK = 2**15 - 1  # positions that are best done at once: with one more torch starts threads, and caches are left


class Permutation:
    """A family of random orders of ``range(n)``: call it with positions, and it gives what stands there.

    Up to ``SORTED`` elements, an order is that of random numbers. Beyond, it comes from a Feistel network, whose range
    is a little longer than ``n``; what falls behind ``n`` goes through it again until it falls before, which keeps
    different elements different (cycle walking; Black and Rogaway: Ciphers with arbitrary finite domains, 2002).

    Args:
        n: the number of elements, from 1 to 2**62.
        key: what decides the orders, see :func:`key_of`.

    >>> Permutation(5, key=1)(torch.arange(5))
    tensor([1, 4, 2, 3, 0])
    >>> Permutation(10**12, key=1)(torch.tensor([0, 1, 10**12 - 1]))
    tensor([282512742769, 682490581653, 145312056403])
    """

    def __init__(self, n: int, key: int) -> None:
        check_count("n", n)
        self.n, self.key = n, key
        self._network = FeistelNetwork(n, key) if n > SORTED else None

    def __call__(self, positions: Tensor, members: Tensor | None = None) -> Tensor:
        """Give the elements at positions; what this needs of memory besides is a few times the result.

        Args:
            positions: int64 in [0, n), of shape (k,).
            members: the order that each position is in, int64 from 0 on, of shape (k,); None: all are in the same.

        Returns:
            int64 of shape (k,).
        """
        check_positions(positions, self.n)
        if self._network is None:
            return self._look_up(positions, torch.zeros_like(positions) if members is None else members)
        return self._walk(self._network, positions, members)

    # Indexing with brackets would start threads, which cost much where others use the cores; index_select does not.

    def _look_up(self, positions: Tensor, members: Tensor) -> Tensor:
        distinct, rows, counts = torch.unique_consecutive(members, return_inverse=True, return_counts=True)
        places = rows * self.n + positions  # in the orders of all distinct members, one after the other
        at_once = max(1, BLOCK // self.n)
        found, done = [], 0
        for first in range(0, len(distinct), at_once):
            orders = self._sorted_orders(distinct[first : first + at_once])
            count = int(counts[first : first + at_once].sum())
            found.append(orders.index_select(0, places[done : done + count] - first * self.n))
            done += count
        return torch.cat(found) if found else positions.clone()

    def _sorted_orders(self, members: Tensor) -> Tensor:
        keys = random_bits(self.key, members).unsqueeze(1)
        return random_bits(keys, torch.arange(self.n, device="cpu")).argsort(dim=1).flatten()

    def _walk(self, network: FeistelNetwork, positions: Tensor, members: Tensor | None) -> Tensor:
        values = network(positions, members)
        outside = (values >= self.n).nonzero().squeeze(1)
        while len(outside):
            its_members = None if members is None else members.index_select(0, outside)
            again = network(values.index_select(0, outside), its_members)
            values.index_copy_(0, outside, again)
            outside = outside.index_select(0, (again >= self.n).nonzero().squeeze(1))
        return values


def check_count(name: str, value: Any) -> None:
    """Refuse what is not a number of samples."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
    if not 1 <= value <= LARGEST:
        raise ValueError(f"{name} must be in [1, 2**62], got {value}")


def check_positions(positions: Any, n: int) -> None:
    """Refuse what is not a row of positions below ``n``."""
    if not isinstance(positions, Tensor) or positions.dtype != torch.int64 or positions.dim() != 1:
        raise TypeError(f"positions must be an int64 tensor of one dimension, got {positions!r}")
    if len(positions) and ((ends := positions.aminmax()).min < 0 or ends.max >= n):
        raise ValueError(f"positions must be in [0, {n}), got from {ends.min} to {ends.max}")
