"""A permutation holds each element once, is the same in any blocks, and looks random."""

from __future__ import annotations

import itertools
import math
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from camshaft.data.permutation import (
    BLOCK,
    LARGEST,
    SORTED,
    FeistelNetwork,
    Permutation,
    key_of,
    mixed,
    random_bits,
    shifted_right,
    signed,
)
from tests.data.chance import histogram, looks_random

# --- keys and random bits ----------------------------------------------------------------------------------------

# the first numbers of SplitMix64 from the state 1234567, as other implementations give them
SPLITMIX = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
SEEDS = [0, 1, -1, 2, 10, 16, 2**32, 2**63, -(2**63), 2**64, 2**64 + 1, -(2**64), 10**5000, 10**5000 + 1]


def test_the_numbers_are_those_of_splitmix() -> None:
    bits = random_bits(1234567, torch.arange(1, 6))
    assert [number % 2**64 for number in bits.tolist()] == SPLITMIX


def test_one_number_without_tensors_is_the_same() -> None:
    key, numbers = 0xFEDCBA9876543210, [0, 1, -1, 2**62, -(2**63)]
    assert [mixed(key, number) for number in numbers] == [
        bits % 2**64 for bits in random_bits(key, torch.tensor(numbers)).tolist()
    ]


def test_bits_are_unbiased_and_independent() -> None:
    bits = random_bits(key_of(0), torch.arange(20_000))
    places = [shifted_right(bits, place) & 1 for place in range(1, 64)] + [bits & 1]
    for one, other in itertools.pairwise(places):
        assert looks_random(histogram(2 * one + other, 4))
    for one in places:
        assert looks_random(histogram(2 * one[1:] + one[:-1], 4))


def test_keys_of_different_numbers_differ() -> None:
    numbers = [*itertools.product(SEEDS, range(3)), *((seed,) for seed in SEEDS), ()]
    keys = [key_of(*some) for some in numbers]
    assert len(set(keys)) == len(numbers)
    assert all(0 <= key < 2**64 for key in keys)


def test_keys_do_not_change_between_versions() -> None:
    """A position saved by an earlier version resumes with the same samples."""
    assert [key_of(0, 0), key_of(1, 2), key_of(-1, 2**64)] == [
        18155624764998497171,
        2998336559307561463,
        17014288614703852444,
    ]


# --- the network -------------------------------------------------------------------------------------------------

SIZES = [3, 4, 5, 100, 16385, 2**15, 10**6, 2**31 + 1, 10**12, 2**61 - 1, 2**61 + 1, 2**62]
KEY = 0x123456789ABCDEF


def hashed(half: int, key: int) -> int:
    mixed = signed(key + half * 0x7FEB352D, 32)
    return signed((mixed ^ (mixed >> 15)) * 0x846CA68B, 32)


def mapped_one_by_one(n: int, value: int, member: int | None) -> int:
    """Compute in Python integers what the network does in int32."""
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
def test_tensors_give_the_same_as_python_integers(n: int) -> None:
    network = FeistelNetwork(n, KEY)
    assert n <= network.size < n + 2 * n**0.5
    values = [value % network.size for value in (0, 1, 2, n // 3, n - 1, -1, *range(10**9, 10**20, 10**18 + 7))]
    members = [index * 1_000_003 for index in range(len(values))]
    expected = [mapped_one_by_one(n, value, None) for value in values]
    assert network(torch.tensor(values)).tolist() == expected
    expected = [mapped_one_by_one(n, value, member) for value, member in zip(values, members, strict=True)]
    assert network(torch.tensor(values), torch.tensor(members)).tolist() == expected
    assert all(0 <= value < network.size for value in expected)


# --- permutations ------------------------------------------------------------------------------------------------

KEYS = st.integers(0, 2**64 - 1)
HUGE = [SORTED + 1, 2**20 + 1, 10**8, 10**12, 2**40 + 1, LARGEST]
LAGS = [1, 2, 2**7, 2**7 + 1]  # 2**7 apart in an order of 20 000, only one half of the network's input differs


def order(n: int, seed: int, epoch: int) -> Tensor:
    return Permutation(n, key_of(seed, epoch))(torch.arange(n))


def orders(n: int, count: int, seed: int = 0) -> Tensor:
    return torch.stack([order(n, seed, epoch) for epoch in range(count)])


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3000) | st.integers(SORTED - 2, SORTED + 3000), KEYS)
def test_each_element_comes_once(n: int, key: int) -> None:
    elements = torch.arange(n)
    assert torch.equal(Permutation(n, key)(elements).sort().values, elements)


@settings(deadline=None, max_examples=50)
@given(st.sampled_from(HUGE) | st.integers(SORTED + 1, LARGEST), KEYS, st.data())
def test_any_part_of_a_long_permutation_can_be_computed_alone(n: int, key: int, data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, n - 1000))
    positions = torch.arange(begin, begin + 1000)
    permutation = Permutation(n, key)
    elements = permutation(positions)
    assert len(elements.unique()) == 1000
    assert (elements >= 0).all()
    assert (elements < n).all()
    cuts = sorted(data.draw(st.lists(st.integers(0, 1000), max_size=5)))
    parts = torch.tensor_split(positions, cuts)
    assert torch.equal(torch.cat([Permutation(n, key)(part) for part in parts]), elements)
    shuffled = torch.randperm(1000)
    assert torch.equal(permutation(positions[shuffled]), elements[shuffled])


@pytest.mark.parametrize("n", [1, 2, 10, 5000, SORTED + 1, 10**12])
def test_members_of_a_permutation_have_different_orders(n: int) -> None:
    permutation, count = Permutation(n, 7), min(n, 2000)
    positions, members = torch.arange(count), torch.arange(10)
    together = permutation(positions.repeat(10), members.repeat_interleave(count)).view(10, count)
    for member, elements in zip(members, together, strict=True):
        assert torch.equal(permutation(positions, member.expand(count)), elements)
        assert len(elements.unique()) == count
    mixed = torch.randint(10, (min(n, 100),))
    some = positions[: len(mixed)]
    assert torch.equal(permutation(some, mixed), together[mixed, some])
    if n >= 10:
        assert len(together.unique(dim=0)) == 10


def test_no_positions_have_no_elements() -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    for n in (1, SORTED, SORTED + 1):
        assert torch.equal(Permutation(n, 0)(nothing), nothing)
        assert torch.equal(Permutation(n, 0)(nothing, nothing), nothing)


def test_the_default_device_does_not_matter() -> None:
    with torch.device("meta"):
        again = [Permutation(n, 5)(torch.arange(9, device="cpu")) for n in (9, 10**9)]
    assert [one.tolist() for one in again] == [Permutation(n, 5)(torch.arange(9)).tolist() for n in (9, 10**9)]


# Statistical tests from here on; seeds are fixed, so a test that passes once always passes.


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_all_orders_of_few_elements_come_equally_often(n: int) -> None:
    place = {one: number for number, one in enumerate(permutations(range(n)))}
    found = torch.tensor([place[tuple(one)] for one in orders(n, 1000).tolist()])
    assert looks_random(histogram(found, math.factorial(n)))


@pytest.mark.parametrize("n", range(2, 12))
def test_odd_orders_are_as_likely_as_even_ones(n: int) -> None:
    first, second = torch.triu_indices(n, n, offset=1)
    drawn = orders(n, 400)
    assert looks_random(histogram((drawn[:, first] > drawn[:, second]).sum(1) % 2, 2))


@pytest.mark.parametrize("n", [10, 100, 1000, 20_000, 10**12])
def test_an_element_may_stand_anywhere(n: int) -> None:
    positions = torch.tensor([0, 1, n // 2, n - 1])
    found = torch.stack([Permutation(n, key_of(0, epoch))(positions) for epoch in range(500)])
    for elements in found.T:
        assert looks_random(histogram(elements * 10 // n, 10))
    joint = (found[:, 0] * 5 // n) * 5 + found[:, 1] * 5 // n
    if n >= 1000:  # of fewer, that no element comes twice can be seen
        assert looks_random(histogram(joint, 25))


@pytest.mark.parametrize("lag", LAGS)
@pytest.mark.parametrize(("n", "count"), [(1000, 50), (20_000, 40)])
def test_neighbours_are_independent(n: int, count: int, lag: int) -> None:
    drawn = orders(n, count)
    steps = (drawn[:, lag:] - drawn[:, :-lag]) % n
    assert looks_random(histogram(steps.flatten() - 1, n - 1))  # 0 is no step: each element comes once


@pytest.mark.parametrize("n", [2**31 + 1, 10**12, LARGEST])
@pytest.mark.parametrize("exponent", [0, 1, 10, 15, 20, 30])
def test_neighbours_in_a_long_order_are_independent(n: int, exponent: int) -> None:
    permutation = Permutation(n, key_of(3, 4))
    positions = torch.arange(20_000) * 2**10
    one, other = permutation(positions), permutation(positions + 2**exponent)
    cell = n // 32 + 1
    assert looks_random(histogram((one // cell) * 32 + other // cell, 32 * 32))
    assert looks_random(histogram((one - other) % n % 512, 512))
    assert looks_random(histogram(one % 512, 512))


@pytest.mark.parametrize("n", [1000, 20_000])
def test_four_that_the_network_could_confuse_are_independent(n: int) -> None:
    """In a network of too few steps, the differences in two columns of two rows are often the same."""
    drawn = orders(n, 30)
    upper = drawn[:, :-129] - drawn[:, 1:-128]
    lower = drawn[:, 128:-1] - drawn[:, 129:]
    assert looks_random(histogram(((upper - lower) % n).flatten() * 500 // n, 500))


@pytest.mark.parametrize("n", [1000, 20_000])
def test_epochs_and_seeds_are_independent(n: int) -> None:
    drawn = orders(n, 25)
    for one, other in [(drawn[:-1], drawn[1:]), (drawn, orders(n, 25, seed=1)), (drawn, orders(n, 25, seed=-1))]:
        assert looks_random(histogram(((one - other) % n).flatten() * 500 // n, 500))
        cells = one.flatten() * 20 // n * 20 + other.flatten() * 20 // n
        assert looks_random(histogram(cells, 400))


def test_members_are_independent() -> None:
    n, members = SORTED + 1, torch.arange(100_000)
    permutation = Permutation(n, key_of(5, 6))
    for position in (0, n - 1):
        found = torch.cat([permutation(torch.full_like(some, position), some) for some in members.split(BLOCK)])
        assert looks_random(histogram(found, n))
        assert looks_random(histogram((found[1:] - found[:-1]) % n, n))
