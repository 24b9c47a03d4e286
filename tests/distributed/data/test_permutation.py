"""A permutation holds each element once, is the same again in any parts, and looks like drawn by chance."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from camshaft.distributed.data.permutation import BLOCK, LARGEST, SORTED, Permutation
from camshaft.distributed.data.randomness import key_of
from tests.distributed.data.chance import histogram, looks_random

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
def test_of_many_elements_each_part_is_the_same_alone(n: int, key: int, data: st.DataObject) -> None:
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
def test_members_have_orders_of_their_own(n: int) -> None:
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


def test_nothing_is_found_at_no_position() -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    for n in (1, SORTED, SORTED + 1):
        assert torch.equal(Permutation(n, 0)(nothing), nothing)
        assert torch.equal(Permutation(n, 0)(nothing, nothing), nothing)


def test_a_device_or_a_type_that_is_the_default_changes_nothing() -> None:
    with torch.device("meta"):
        again = [Permutation(n, 5)(torch.arange(9, device="cpu")) for n in (9, 10**9)]
    assert [one.tolist() for one in again] == [Permutation(n, 5)(torch.arange(9)).tolist() for n in (9, 10**9)]


@pytest.mark.parametrize(
    ("n", "error", "message"),
    [
        (0, ValueError, r"n must be in \[1, 2\*\*62\], got 0"),
        (-3, ValueError, r"n must be in \[1, 2\*\*62\], got -3"),
        (LARGEST + 1, ValueError, "n must be in"),
        (2.0, TypeError, "n must be an int, got 2.0 of type float"),
        (True, TypeError, "n must be an int, got True of type bool"),
        (None, TypeError, "n must be an int, got None"),
    ],
)
def test_a_number_of_elements_that_cannot_be_is_refused(n: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Permutation(n, 0)


@pytest.mark.parametrize(
    ("positions", "error", "message"),
    [
        (torch.tensor([0, 5]), ValueError, r"positions must be in \[0, 5\), got from 0 to 5"),
        (torch.tensor([-1, 4]), ValueError, r"positions must be in \[0, 5\), got from -1 to 4"),
        (torch.tensor([0], dtype=torch.int32), TypeError, "positions must be an int64 tensor of one dimension"),
        (torch.tensor([[0]]), TypeError, "positions must be an int64 tensor of one dimension"),
        ([0], TypeError, r"positions must be an int64 tensor of one dimension, got \[0\]"),
    ],
)
def test_positions_that_cannot_be_are_refused(positions: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Permutation(5, 0)(positions)


# From here on: is it random? Seeds are fixed, so a test that passes once passes always.


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_all_orders_of_a_few_come_equally_often(n: int) -> None:
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
def test_neighbours_have_nothing_to_do_with_each_other(n: int, count: int, lag: int) -> None:
    drawn = orders(n, count)
    steps = (drawn[:, lag:] - drawn[:, :-lag]) % n
    assert looks_random(histogram(steps.flatten() - 1, n - 1))  # 0 is no step: each element comes once


@pytest.mark.parametrize("n", [2**31 + 1, 10**12, LARGEST])
@pytest.mark.parametrize("exponent", [0, 1, 10, 15, 20, 30])
def test_nor_have_those_in_a_long_order(n: int, exponent: int) -> None:
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
def test_epochs_and_seeds_have_nothing_to_do_with_each_other(n: int) -> None:
    drawn = orders(n, 25)
    for one, other in [(drawn[:-1], drawn[1:]), (drawn, orders(n, 25, seed=1)), (drawn, orders(n, 25, seed=-1))]:
        assert looks_random(histogram(((one - other) % n).flatten() * 500 // n, 500))
        cells = one.flatten() * 20 // n * 20 + other.flatten() * 20 // n
        assert looks_random(histogram(cells, 400))


@pytest.mark.parametrize(("n", "count"), [(100, 400), (20_000, 120)])
def test_about_one_element_stands_where_it_stood(n: int, count: int) -> None:
    fixed = (orders(n, count) == torch.arange(n)).sum(1)
    expected = torch.tensor([math.exp(-1) / math.factorial(number) for number in range(3)])
    assert looks_random(histogram(fixed.clamp(max=3), 4), torch.cat([expected, 1 - expected.sum(0, keepdim=True)]))


def test_members_have_nothing_to_do_with_each_other() -> None:
    n, members = SORTED + 1, torch.arange(100_000)
    permutation = Permutation(n, key_of(5, 6))
    for position in (0, n - 1):
        found = torch.cat([permutation(torch.full_like(some, position), some) for some in members.split(BLOCK)])
        assert looks_random(histogram(found, n))
        assert looks_random(histogram((found[1:] - found[:-1]) % n, n))
