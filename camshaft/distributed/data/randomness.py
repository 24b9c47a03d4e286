"""Random numbers that are a function of what they are for: of a seed, an epoch and a position.

Nothing is drawn one after the other, so any process can compute any of them. All arithmetic is on integers that wrap
around: the same numbers on every machine and with every torch, which ``torch.Generator`` does not promise.
"""

from __future__ import annotations

import operator
from hashlib import sha256
from typing import Any

from torch import Tensor

VERSION = 1  # of the orders: to be raised with every change after which a seed and an epoch give another one

_STEP = 0x9E3779B97F4A7C15
_MIXERS = (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)


def key_of(*numbers: int) -> int:
    """Make a key of 64 bits from integers of any size and sign, such as a seed and an epoch.

    Keys of different numbers, or of the same in another order, have nothing to do with each other.

    >>> key_of(0, 1) == key_of(0, 1), key_of(0, 1) == key_of(1, 0)
    (True, False)
    """
    text = " ".join(f"{operator.index(number):x}" for number in numbers)
    return int.from_bytes(sha256(text.encode()).digest()[:8], "little")


def check_seed(seed: Any) -> None:
    """Refuse what no order can follow from."""
    if not hasattr(seed, "__index__"):
        raise TypeError(f"seed must be an integer, got {seed!r} of type {type(seed).__name__}")


def random_bits(key: int | Tensor, counters: Tensor) -> Tensor:
    """Give 64 random bits for each counter, as int64: what SplitMix64 gives after so many steps from ``key``.

    Steele, Lea and Flood: Fast splittable pseudorandom number generators (2014).

    Args:
        key: one for all counters, or an int64 tensor that broadcasts with them.
        counters: int64, of any shape; those below zero are as good as others.
    """
    start = key if isinstance(key, Tensor) else signed(key, 64)
    bits = counters * signed(_STEP, 64) + start
    for shift, factor in _MIXERS:
        bits = (bits ^ shifted_right(bits, shift)) * signed(factor, 64)
    return bits ^ shifted_right(bits, 31)


def shifted_right(bits: Tensor, shift: int) -> Tensor:
    """Shift int64 bits to the right, and zeros in from the left (``>>`` copies the sign)."""
    return (bits >> shift) & ((1 << 64 - shift) - 1)


def signed(number: int, num_bits: int) -> int:
    """Give the signed integer of so many bits that stands for ``number``."""
    half = 1 << num_bits - 1
    return (number + half) % (2 * half) - half
