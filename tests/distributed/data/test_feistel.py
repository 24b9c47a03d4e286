"""The network in tensors does what it does number by number, and keeps all values apart, whatever the size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from camshaft.distributed.data.feistel import FeistelNetwork
from camshaft.distributed.data.randomness import random_bits, signed

SIZES = [3, 4, 5, 100, 16385, 2**15, 10**6, 2**31 + 1, 10**12, 2**61 - 1, 2**61 + 1, 2**62]
KEY = 0x123456789ABCDEF


def hashed(half: int, key: int) -> int:
    mixed = signed(key + half * 0x7FEB352D, 32)
    return signed((mixed ^ (mixed >> 15)) * 0x846CA68B, 32)


def one_by_one(n: int, value: int, member: int | None) -> int:
    """Do in integers of any size what the network does in int32."""
    num_bits = (n - 1).bit_length() // 2
    num_left, half = -(-n // 2**num_bits), 2**num_bits // 2
    keys = [key >> 32 for key in random_bits(KEY, torch.arange(-6, 0)).tolist()]
    high = low = 0
    if member is not None:
        bits = int(random_bits(KEY, torch.tensor(member)))
        high, low = bits >> 32, signed(bits, 32)
    left, right = value >> num_bits, value % (2 * half) - half
    for right_key, left_key in zip(keys[::2], keys[1::2], strict=True):
        down = int((hashed(right, right_key + high) | -(2**31)) * (num_left / 2**31))
        left = (left + down) % num_left
        right ^= hashed(left, left_key + low) >> (32 - num_bits)
    return (left << num_bits) + right + half


@pytest.mark.parametrize("n", SIZES)
def test_tensors_give_what_plain_integers_give(n: int) -> None:
    network = FeistelNetwork(n, KEY)
    assert n <= network.size < n + 2 * n**0.5
    values = [value % network.size for value in (0, 1, 2, n // 3, n - 1, -1, *range(10**9, 10**20, 10**18 + 7))]
    members = [index * 1_000_003 for index in range(len(values))]
    expected = [one_by_one(n, value, None) for value in values]
    assert network(torch.tensor(values)).tolist() == expected
    expected = [one_by_one(n, value, member) for value, member in zip(values, members, strict=True)]
    assert network(torch.tensor(values), torch.tensor(members)).tolist() == expected
    assert all(0 <= value < network.size for value in expected)


@settings(deadline=None, max_examples=60)
@given(st.integers(3, 40_000), st.integers(0, 2**64 - 1), st.none() | st.integers(0, 2**62))
def test_each_value_of_the_range_comes_once(n: int, key: int, member: int | None) -> None:
    network = FeistelNetwork(n, key)
    values = torch.arange(network.size)
    given_back = network(values, None if member is None else torch.full_like(values, member))
    assert torch.equal(given_back.sort().values, values)


@pytest.mark.parametrize("n", SIZES[-6:])
def test_values_of_a_long_range_stay_apart(n: int) -> None:
    network = FeistelNetwork(n, KEY)
    values = torch.cat([torch.arange(10_000) + start for start in (0, network.size // 2, network.size - 10_000)])
    given_back = network(values)
    assert len(given_back.unique()) == len(values)
    assert (given_back >= 0).all()
    assert (given_back < network.size).all()


def test_members_and_keys_have_orders_of_their_own() -> None:
    values = torch.arange(1000)
    orders = [FeistelNetwork(1000, key)(values) for key in (1, 2, 2**63)]
    orders += [FeistelNetwork(1000, 1)(values, torch.full_like(values, member)) for member in (0, 1, 2**40)]
    for number, one in enumerate(orders):
        for other in orders[:number]:
            assert (one == other).sum() < 10
