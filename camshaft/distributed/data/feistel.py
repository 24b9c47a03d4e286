"""A Feistel network: a random order of a range, computed for any of its positions."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from camshaft.distributed.data.randomness import random_bits, signed

# After two, the differences between neighbours show in a million orders that something is wrong; after three nothing
# does, and what is left must be weaker by the square of the size of a half: nobody will see so many orders.
_DOUBLE_ROUNDS = 3


def _constant(number: int) -> Tensor:
    """Make an int32 scalar: torch takes it in half the time that a number takes."""
    return torch.tensor(signed(number, 32), dtype=torch.int32, device="cpu")


# Two multipliers and a shift that mix 32 bits well, found by Wellons (hash prospector, 2018).
_FACTORS = _constant(0x7FEB352D), _constant(0x846CA68B)
_SHIFT = _constant(15)
_SIGN, _ALL_BUT_SIGN = _constant(1 << 31), _constant(31)


class FeistelNetwork:
    """A family of random orders of ``range(size)``, where ``size`` is at least ``n``, and below ``n + 2 * n**0.5``.

    A value is a pair: ``left`` is one of about the square root of ``n`` numbers, ``right`` consists of bits. In turn
    each half is changed by a hash of the other and of a key: left is moved on, modulo its size, and right by exclusive
    or. A step can be undone by whoever knows the other half, so different values stay different. Luby and Rackoff
    (1988) have shown that few rounds of this look random; Black and Rogaway (2002) have put it on ranges of any size.

    Args:
        n: at least 3, and at most 2**62, so that each half has 31 bits at most.
        key: what decides the orders.
    """

    def __init__(self, n: int, key: int) -> None:
        self.key = key
        self._num_bits = (n - 1).bit_length() // 2
        num_left = -(-n >> self._num_bits)
        self.size = num_left << self._num_bits
        keys = random_bits(key, torch.arange(-2 * _DOUBLE_ROUNDS, 0, device="cpu"))  # members count from 0 on
        self._keys = (keys >> 32).to(torch.int32).view(-1, 2)
        self._minus_num_left = _constant(-num_left)
        self._scale = torch.tensor(num_left / 2**31, dtype=torch.float64, device="cpu")
        self._surplus = _constant(32 - self._num_bits)

    def __call__(self, values: Tensor, members: Tensor | None = None) -> Tensor:
        """Give what stands at positions, int64 in [0, size), in one order or in that of a member for each."""
        half = 1 << self._num_bits - 1  # right is kept as a signed number, as shifts give it
        left = (values >> self._num_bits).to(torch.int32)
        right = ((values & (2 * half - 1)) - half).to(torch.int32)
        hashed, spare = torch.empty_like(right), torch.empty_like(right)
        scaled = torch.empty_like(right, dtype=torch.float64)
        for right_key, left_key in self._round_keys(members):
            _hash(right, right_key, hashed, spare)
            hashed.bitwise_or_(_SIGN)  # below 0 ...
            torch.mul(hashed, self._scale, out=scaled)
            left.add_(hashed.copy_(scaled))  # ... and now down to -num_left
            torch.bitwise_right_shift(left, _ALL_BUT_SIGN, out=spare)  # -1 where left is below 0
            torch.addcmul(left, spare, self._minus_num_left, out=left)
            _hash(left, left_key, hashed, spare)
            right.bitwise_xor_(hashed.bitwise_right_shift_(self._surplus))
        return (left.to(torch.int64) << self._num_bits).add_(right).add_(half)

    def _round_keys(self, members: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Give two keys for each double round: scalars, or one for each value."""
        if members is None:
            yield from ((one, other) for one, other in self._keys)
            return
        bits = random_bits(self.key, members)
        high, low = (bits >> 32).to(torch.int32), (bits << 32 >> 32).to(torch.int32)
        yield from ((one + high, other + low) for one, other in self._keys)


def _hash(half: Tensor, key: Tensor, hashed: Tensor, spare: Tensor) -> None:
    """Mix 32 bits and a key into ``hashed``, the upper bits best."""
    torch.addcmul(key, half, _FACTORS[0], out=hashed)
    torch.bitwise_right_shift(hashed, _SHIFT, out=spare)
    hashed.bitwise_xor_(spare).mul_(_FACTORS[1])
