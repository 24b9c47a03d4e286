"""Keyed permutations and random bits: functions of a key and a position, computed in vectorised blocks.

Nothing is drawn in sequence, so any process can compute any part of an order of 10**12 elements. All arithmetic is on
integers that wrap around: the results are the same on every machine and with every version of torch, which
``torch.Generator`` does not promise.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from hashlib import sha256

import torch
from torch import Tensor

_ALL = 2**64 - 1
LARGEST = 2**62
SORTED = 2**12  # up to this many elements, sorting is faster than a network
BLOCK = 2**15 - 1  # positions per block: from 2**15 on, torch starts threads, and the data leave the caches


def key_of(*numbers: int) -> int:
    """Hash integers of any size and sign, such as a seed and an epoch, to a key of 64 bits.

    >>> key_of(0, 1) == key_of(0, 1), key_of(0, 1) == key_of(1, 0)
    (True, False)
    """
    text = " ".join(f"{operator.index(number):x}" for number in numbers)
    return int.from_bytes(sha256(text.encode()).digest()[:8], "little")


def random_bits(key: int | Tensor, counters: Tensor) -> Tensor:
    """Return 64 random bits per counter, as int64: the output of SplitMix64 that many steps after the state ``key``.

    Steele, Lea and Flood: Fast splittable pseudorandom number generators (2014).

    Args:
        key: one for all counters, or an int64 tensor that broadcasts with them.
        counters: int64 of any shape; may be negative.
    """
    start = key if isinstance(key, Tensor) else signed(key, 64)
    bits = counters * signed(0x9E3779B97F4A7C15, 64) + start
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ shifted_right(bits, shift)) * signed(factor, 64)
    return bits ^ shifted_right(bits, 31)


def mixed(key: int, counter: int) -> int:
    """Return what :func:`random_bits` does, for one counter, as an unsigned number, and without tensors."""
    bits = key + counter * 0x9E3779B97F4A7C15 & _ALL
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & _ALL
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & _ALL
    return bits ^ bits >> 31


def shifted_right(bits: Tensor, shift: int) -> Tensor:
    """Shift int64 bits to the right and fill with zeros (``>>`` copies the sign)."""
    return (bits >> shift) & ((1 << 64 - shift) - 1)


def uniform(key: int, counters: Tensor) -> Tensor:
    """Return a float64 in [0, 1) per counter, with as many random bits as it holds."""
    return shifted_right(random_bits(key, counters), 11).to(torch.float64) * 2.0**-53


def signed(number: int, num_bits: int) -> int:
    """Return the signed integer of ``num_bits`` bits that is congruent to ``number``."""
    half = 1 << num_bits - 1
    return (number + half) % (2 * half) - half


class Permutation:
    """A keyed family of permutations of ``range(n)``; calling it with positions returns the elements there.

    Up to ``SORTED`` elements, a permutation sorts random numbers. Beyond, it is a Feistel network over a slightly
    longer range; elements outside ``range(n)`` pass through it again until they are inside, which keeps different
    elements different (cycle walking; Black and Rogaway: Ciphers with arbitrary finite domains, 2002).

    Args:
        n: number of elements, from 1 to 2**62.
        key: selects the family; see :func:`key_of`.

    >>> Permutation(5, key=1)(torch.arange(5))
    tensor([1, 4, 2, 3, 0])
    >>> Permutation(10**12, key=1)(torch.tensor([0, 1, 10**12 - 1]))
    tensor([282512742769, 682490581653, 145312056403])
    """

    def __init__(self, n: int, key: int) -> None:
        self.n, self.key = n, key
        self._network = FeistelNetwork(n, key) if n > SORTED else None

    def __call__(self, positions: Tensor, members: Tensor | None = None) -> Tensor:
        """Return the elements at positions, as int64 of shape (k,).

        Args:
            positions: int64 in [0, n), of shape (k,).
            members: which permutation of the family each position is in: int64 from 0 on, of shape (k,); ``None``:
                all are in one.
        """
        network = self._network
        if network is None:
            return self._look_up(positions, torch.zeros_like(positions) if members is None else members)
        values = network(positions, members)
        # Indexing with brackets would start threads, which cost much on busy cores; index_select does not.
        outside = (values >= self.n).nonzero().squeeze(1)
        while len(outside):
            their_members = None if members is None else members.index_select(0, outside)
            again = network(values.index_select(0, outside), their_members)
            values.index_copy_(0, outside, again)
            outside = outside.index_select(0, (again >= self.n).nonzero().squeeze(1))
        return values

    def _look_up(self, positions: Tensor, members: Tensor) -> Tensor:
        distinct, rows, counts = torch.unique_consecutive(members, return_inverse=True, return_counts=True)
        places = rows * self.n + positions  # in the permutations of all distinct members, concatenated
        per_block = max(1, BLOCK // self.n)
        found, done = [], 0
        for first in range(0, len(distinct), per_block):
            keys = random_bits(self.key, distinct[first : first + per_block]).unsqueeze(1)
            permutations = random_bits(keys, torch.arange(self.n, device="cpu")).argsort(dim=1).flatten()
            count = int(counts[first : first + per_block].sum())
            found.append(permutations.index_select(0, places[done : done + count] - first * self.n))
            done += count
        return torch.cat(found) if found else positions.clone()


# Two rounds leave a bias in the differences of neighbours that a million orders show. Three leave none that they show,
# and what remains should be weaker by the square of the size of a half: too weak to be seen in practice.
_DOUBLE_ROUNDS = 3


def _constant(number: int) -> Tensor:
    """Return an int32 scalar, which torch operations take in half the time of a Python number."""
    return torch.tensor(signed(number, 32), dtype=torch.int32, device="cpu")


# Two multipliers and a shift that mix 32 bits well: Wellons, hash prospector (2018).
_FACTORS = _constant(0x7FEB352D), _constant(0x846CA68B)
_SHIFT = _constant(15)
_SIGN, _ALL_BUT_SIGN = _constant(1 << 31), _constant(31)


class FeistelNetwork:
    """A keyed family of permutations of ``range(size)``, with ``n <= size < n + 2 * n**0.5``.

    A value is a pair: ``left`` is one of about the square root of ``n`` numbers, ``right`` consists of bits. In turn
    each half is changed by a hash of the other half and a key: left is added to, modulo its size, and right is
    xor-ed. Knowing the other half undoes a step, so different values stay different. Luby and Rackoff (1988) proved
    that few rounds look random; Black and Rogaway (2002) extended this to ranges of any size.

    Args:
        n: from 3 to 2**62, so that each half has at most 31 bits.
        key: selects the family.
    """

    def __init__(self, n: int, key: int) -> None:
        self.key = key
        self._num_bits = (n - 1).bit_length() // 2
        num_left = -(-n >> self._num_bits)
        self.size = num_left << self._num_bits
        keys = [_constant(mixed(key, round_) >> 32) for round_ in range(-2 * _DOUBLE_ROUNDS, 0)]  # members: from 0 on
        self._keys = list(zip(keys[::2], keys[1::2], strict=True))
        self._minus_num_left = _constant(-num_left)
        self._scale = torch.tensor(num_left / 2**31, dtype=torch.float64, device="cpu")
        self._surplus = _constant(32 - self._num_bits)

    def __call__(self, values: Tensor, members: Tensor | None = None) -> Tensor:
        """Return the images of values, int64 in [0, size), in one permutation or in that of a member for each."""
        half = 1 << self._num_bits - 1  # right is kept as a signed number, as shifts return it
        left = (values >> self._num_bits).to(torch.int32)
        right = ((values & (2 * half - 1)) - half).to(torch.int32)
        hashed, spare = torch.empty_like(right), torch.empty_like(right)
        scaled = torch.empty_like(right, dtype=torch.float64)
        keys: Iterable[tuple[Tensor, Tensor]] = self._keys  # two per double round: scalars, or one for each value
        if members is not None:
            bits = random_bits(self.key, members)
            high, low = (bits >> 32).to(torch.int32), (bits << 32 >> 32).to(torch.int32)
            keys = ((one + high, other + low) for one, other in self._keys)
        for right_key, left_key in keys:
            _hash(right, right_key, hashed, spare)
            hashed.bitwise_or_(_SIGN)  # below 0 ...
            torch.mul(hashed, self._scale, out=scaled)
            left.add_(hashed.copy_(scaled))  # ... and now down to -num_left
            torch.bitwise_right_shift(left, _ALL_BUT_SIGN, out=spare)  # -1 where left is below 0
            torch.addcmul(left, spare, self._minus_num_left, out=left)
            _hash(left, left_key, hashed, spare)
            right.bitwise_xor_(hashed.bitwise_right_shift_(self._surplus))
        return (left.to(torch.int64) << self._num_bits).add_(right).add_(half)


def _hash(half: Tensor, key: Tensor, hashed: Tensor, spare: Tensor) -> None:
    """Mix 32 bits and a key into ``hashed``; the upper bits are mixed best."""
    torch.addcmul(key, half, _FACTORS[0], out=hashed)
    torch.bitwise_right_shift(hashed, _SHIFT, out=spare)
    hashed.bitwise_xor_(spare).mul_(_FACTORS[1])
