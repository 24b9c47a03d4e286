"""Each policy returns the order it promises, reproducibly and at random, and refuses invalid arguments."""

from __future__ import annotations

import itertools
import math
import pickle
from functools import partial
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from camshaft.data import permutation
from camshaft.data.orders import Order, Sequential, Shuffled, ShuffledWindows, Weighted
from camshaft.data.permutation import BLOCK, LARGEST, SORTED, key_of, mixed, random_bits, shifted_right

AROUND_LIMITS = st.integers(SORTED - 2, SORTED + 3000) | st.sampled_from([BLOCK + 1, 10**5])
LENGTHS = st.integers(1, 3000) | AROUND_LIMITS
WINDOWS = st.integers(1, 400) | st.sampled_from([SORTED, SORTED + 1, 10**6])
HUGE = st.integers(SORTED + 1, LARGEST) | st.sampled_from([2**20 + 1, 10**8, 10**12, 2**40 + 1, LARGEST])
INTEGERS = st.integers(-(2**70), 2**70)


def full(lengths: st.SearchStrategy[int], windows: st.SearchStrategy[int]) -> st.SearchStrategy[Order]:
    return st.one_of(
        st.builds(Sequential, lengths), st.builds(Shuffled, lengths), st.builds(ShuffledWindows, lengths, windows)
    )


DRAWN = st.builds(Weighted, st.lists(st.floats(0, 1), min_size=1, max_size=50).filter(any), LENGTHS)
RANDOM: list[Order] = [
    Shuffled(50),
    Shuffled(10**12),
    ShuffledWindows(50, 7),
    ShuffledWindows(10**12, 10**6),
    Weighted([1.0, 2.0, 3.0], 50),
]


def epoch_of(order: Order, seed: int = 0, epoch: int = 0) -> Tensor:
    return order.indices(seed, epoch, 0, order.length)


def orders(length: int, epochs: int, seed: int = 0) -> Tensor:
    return torch.stack([epoch_of(Shuffled(length), seed, epoch) for epoch in range(epochs)])


def histogram(values: Tensor, num_bins: int) -> Tensor:
    return torch.bincount(values, minlength=num_bins)


def looks_random(counts: Tensor, expected: Tensor | None = None) -> bool:
    """Compare counts with the expected ones (by default equal in all bins) by a chi-square test.

    Seeds are fixed, so a test that passes once always passes.
    """
    if expected is None:
        expected = torch.ones(len(counts))
    expected = expected.to(torch.float64) * (counts.sum() / expected.sum())
    assert expected.min() >= 5, "too few counts for a chi-square test"
    deviation = ((counts - expected) ** 2 / expected).sum()
    chance = torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).to(torch.float64), deviation / 2)
    return float(chance) > 1e-6


@settings(deadline=None, max_examples=60)
@given(full(LENGTHS, WINDOWS), INTEGERS, INTEGERS)
def test_each_sample_comes_once_in_an_epoch(order: Order, seed: int, epoch: int) -> None:
    samples = epoch_of(order, seed, epoch)
    assert samples.dtype == torch.int64
    assert torch.equal(samples.sort().values, torch.arange(order.length))


@settings(deadline=None, max_examples=80)
@given(full(LENGTHS | HUGE, WINDOWS | HUGE) | DRAWN, INTEGERS, INTEGERS, st.data())
def test_any_part_of_an_epoch_can_be_computed_alone(order: Order, seed: int, epoch: int, data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, order.length - 1))
    count = min(1000, order.length - begin)
    positions = torch.arange(begin, begin + count)
    samples = order.indices(seed, epoch, begin, begin + count)
    assert samples.min() >= 0
    assert samples.max() < order.num_samples
    assert isinstance(order, Weighted) or len(samples.unique()) == count
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=5)))
    again = pickle.loads(pickle.dumps(order))
    assert torch.equal(
        torch.cat([again.at(seed, epoch, part) for part in torch.tensor_split(positions, cuts)]), samples
    )
    anywhere = torch.randint(count, (100,))
    assert torch.equal(again.at(seed, epoch, positions[anywhere]), samples[anywhere])
    assert again.describe() == order.describe()


@pytest.mark.parametrize("order", RANDOM, ids=Order.describe)
def test_each_seed_and_epoch_has_its_own_order(order: Order) -> None:
    pairs = [(0, 0), (0, 1), (1, 0), (1, 1), (-1, 0), (0, -1), (2**64, 0), (10**5000, 7)]
    drawn = [tuple(order.indices(seed, epoch, 0, 50).tolist()) for seed, epoch in pairs]
    assert len(set(drawn)) == len(pairs)


def test_orders_do_not_change_between_versions() -> None:
    """A position saved by an earlier version resumes with the same samples; otherwise, increase VERSION."""
    all_kinds = [
        *map(Shuffled, (10, 20_000, 2**31 + 1, 10**12, LARGEST)),
        *(ShuffledWindows(20, 6), ShuffledWindows(10**12, 10**6), Weighted([1.0, 2.0, 3.0], 9)),
    ]
    assert [one.indices(3, 5, 2, 7).tolist() for one in all_kinds] == [
        [0, 5, 2, 3, 8],
        [5132, 12145, 9949, 8648, 4111],
        [1723301490, 507805055, 2144464765, 603359546, 1004183892],
        [204420443588, 271999526730, 410553074276, 18603537290, 81286935599],
        [3865964209502491790, 3562878636776632793, 1392526157386581650, 667689402841711599, 3681616639744226273],
        [7, 6, 8, 10, 16],
        [749389927796, 749389909191, 749389138823, 749389217121, 749389102894],
        [1, 0, 0, 2, 1],
    ]
    keys = [key_of(0, 0), key_of(1, 2), key_of(-1, 2**64)]
    assert keys == [18155624764998497171, 2998336559307561463, 17014288614703852444]


@pytest.mark.parametrize("order", [Sequential(9), *RANDOM], ids=Order.describe)
def test_the_result_shares_no_memory_with_the_order(order: Order) -> None:
    positions = torch.arange(9)
    samples = order.at(0, 0, positions)
    kept = samples.clone()
    samples.zero_()
    assert positions.tolist() == list(range(9))
    assert torch.equal(order.at(0, 0, positions), kept)
    assert order.indices(0, 0, 4, 4).tolist() == []
    weights = torch.ones(100, dtype=torch.float64)
    drawn = epoch_of(of_weights := Weighted(weights))
    weights.zero_()
    assert torch.equal(epoch_of(of_weights), drawn)
    assert len(drawn) == 100


def test_the_default_device_does_not_matter() -> None:
    with torch.device("meta"):
        again = [Shuffled(length).indices(0, 0, 0, 9).tolist() for length in (9, 10**9)]
    assert again == [Shuffled(length).indices(0, 0, 0, 9).tolist() for length in (9, 10**9)]


# --- randomness ------------------------------------------------------------------------------------------------------


def test_random_bits_are_those_of_splitmix_and_independent() -> None:
    bits = random_bits(1234567, torch.arange(1, 6))
    assert [number % 2**64 for number in bits.tolist()] == [  # as other implementations give them
        *(6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821)
    ]
    numbers = [0, 1, -1, 2**62, -(2**63)]
    expected = [one % 2**64 for one in random_bits(0xFEDCBA9876543210, torch.tensor(numbers)).tolist()]
    assert [mixed(0xFEDCBA9876543210, number) for number in numbers] == expected
    bits = random_bits(key_of(0), torch.arange(20_000))
    places = [shifted_right(bits, place) & 1 for place in range(1, 64)] + [bits & 1]
    for one, other in itertools.pairwise(places):
        assert looks_random(histogram(2 * one + other, 4))
    for one in places:
        assert looks_random(histogram(2 * one[1:] + one[:-1], 4))


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_all_orders_of_few_elements_come_equally_often(n: int) -> None:
    place = {one: number for number, one in enumerate(permutations(range(n)))}
    found = torch.tensor([place[tuple(one)] for one in orders(n, 1000).tolist()])
    assert looks_random(histogram(found, math.factorial(n)))


@pytest.mark.parametrize("n", [100, 20_000, 10**12])
def test_an_element_may_stand_anywhere(n: int) -> None:
    positions = torch.tensor([0, 1, n // 2, n - 1])
    found = torch.stack([Shuffled(n).at(0, epoch, positions) for epoch in range(500)])
    for elements in found.T:
        assert looks_random(histogram(elements * 10 // n, 10))
    joint = (found[:, 0] * 5 // n) * 5 + found[:, 1] * 5 // n
    if n >= 1000:  # of fewer, that no element comes twice can be seen
        assert looks_random(histogram(joint, 25))


@pytest.mark.parametrize("lag", [1, 2, 2**7, 2**7 + 1])  # at 2**7, one half of the network's input differs
@pytest.mark.parametrize(("n", "count"), [(1000, 50), (20_000, 40)])
def test_neighbours_are_independent(n: int, count: int, lag: int) -> None:
    drawn = orders(n, count)
    steps = (drawn[:, lag:] - drawn[:, :-lag]) % n
    assert looks_random(histogram(steps.flatten() - 1, n - 1))  # 0 is no step: each element comes once


@pytest.mark.parametrize("n", [2**31 + 1, 10**12, LARGEST])
@pytest.mark.parametrize("exponent", [0, 1, 10, 15, 20, 30])
def test_neighbours_in_a_long_order_are_independent(n: int, exponent: int) -> None:
    positions = torch.arange(20_000) * 2**10
    one, other = (Shuffled(n).at(3, 4, places) for places in (positions, positions + 2**exponent))
    cell = n // 32 + 1
    assert looks_random(histogram((one // cell) * 32 + other // cell, 32 * 32))
    assert looks_random(histogram((one - other) % n % 512, 512))
    assert looks_random(histogram(one % 512, 512))


def test_four_that_the_network_could_confuse_are_independent() -> None:
    """In a network of too few steps, the differences in two columns of two rows are often the same."""
    n = 20_000
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


# --- windows ---------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(LENGTHS, WINDOWS, st.integers(0, 5))
def test_windows_stay_together(length: int, window: int, epoch: int) -> None:
    windows = epoch_of(ShuffledWindows(length, window), epoch=epoch) // window
    number, counts = torch.unique_consecutive(windows, return_counts=True)
    assert len(number) == -(-length // window)
    assert sorted(number.tolist()) == list(range(len(number)))
    assert torch.equal(counts[number != length // window], torch.full((length // window,), window))


@pytest.mark.parametrize("length", [40, 43])
def test_each_window_may_come_anywhere_and_so_may_each_sample_within(length: int) -> None:
    order, epochs = ShuffledWindows(length, 10), 500
    drawn = torch.stack([epoch_of(order, epoch=epoch) for epoch in range(epochs)])
    windows = torch.stack([torch.unique_consecutive(one) for one in drawn // 10])
    count = windows.shape[1]
    for place in range(count):
        assert looks_random(histogram(windows[:, place], count))
    within = drawn[drawn < 40].view(epochs, 4, 10) % 10
    for place in (0, 3, 9):
        assert looks_random(histogram(within[:, :, place].flatten(), 10))
        assert looks_random(histogram(within[:, 0, place] * 10 + within[:, 1, place], 100))  # of two windows


@pytest.mark.parametrize("window", [100, SORTED + 3])
def test_each_window_is_shuffled_differently(window: int) -> None:
    within = epoch_of(ShuffledWindows(20 * window, window)).view(20, window) % window
    steps = (within[1:] - within[:-1]) % window
    assert looks_random(histogram(steps.flatten() * 20 // window, 20))
    assert (within[1:] == within[:-1]).sum(1).max() < 10


# --- weights ---------------------------------------------------------------------------------------------------------


def test_samples_come_as_often_as_their_weights_say() -> None:
    weights = torch.tensor([0.0, 1, 0, 2, 3, 0.5, 0, 3.5, 0])
    drawn = epoch_of(Weighted(weights, 50_000))
    possible = weights > 0
    assert set(drawn.tolist()) == set(possible.nonzero().flatten().tolist())
    assert looks_random(histogram(drawn, 9)[possible], weights[possible])


def test_draws_are_independent() -> None:
    order = Weighted(torch.ones(20), 50_000)
    drawn, later, other = epoch_of(order), epoch_of(order, epoch=1), epoch_of(order, seed=1)
    assert looks_random(histogram(drawn[1:] * 20 + drawn[:-1], 400))
    assert looks_random(histogram(drawn * 20 + later, 400))
    assert looks_random(histogram(drawn * 20 + other, 400))


@pytest.mark.parametrize(
    "weights",
    [[5e-324, 0.0, 5e-324], [1.7e308, 0.0, 1.7e308], [1, 0, 1], [True, False, True], torch.tensor([3, 0, 3])],
    ids=["tiny", "huge", "integers", "truths", "tensor"],
)
def test_weights_of_any_size_and_type_are_accepted(weights: Any) -> None:
    drawn = epoch_of(Weighted(weights, 10_000))
    assert looks_random(histogram(drawn, 3)[[0, 2]])
    assert 1 not in drawn


@pytest.mark.parametrize("bits", [0, -1], ids=["lowest", "highest"])
@pytest.mark.parametrize("weight", [1.0, 1 + 2**-52, 2 - 2**-52, 0.1])
def test_the_smallest_and_largest_random_numbers_draw_a_sample_with_a_weight(
    bits: int, weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = Weighted([0.0, weight, 0.0, 0.0])
    monkeypatch.setattr(permutation, "random_bits", lambda key, positions: torch.full_like(positions, bits))
    assert epoch_of(order).tolist() == [1, 1, 1, 1]


# --- what tells orders apart, and what is refused --------------------------------------------------------------------


def test_descriptions_differ_where_orders_differ() -> None:
    swapped = torch.ones(BLOCK + 4)
    swapped[[3, BLOCK + 3]] = torch.tensor([2.0, 3.0])
    other = torch.ones(BLOCK + 4)
    other[[3, BLOCK + 3]] = torch.tensor([3.0, 2.0])
    different: list[Order] = [
        *(Sequential(10), Sequential(11), Shuffled(10), Shuffled(11)),
        *(ShuffledWindows(10, 5), ShuffledWindows(10, 4), ShuffledWindows(11, 5)),
        *(Weighted([1.0, 2.0]), Weighted([2.0, 1.0]), Weighted([1.0, 2.0], 3), Weighted([1.0, 2.0, 0.0], 2)),
        *(Weighted(swapped), Weighted(other)),
    ]
    descriptions = [order.describe() for order in different]
    assert len(set(descriptions)) == len(different)
    assert Shuffled(10).describe() == "Shuffled(length=10), version 1"
    assert Weighted([1, 2]).describe() == Weighted(torch.tensor([1.0, 2.0])).describe()


@pytest.mark.parametrize(
    ("make", "argument", "error", "message"),
    [
        (Sequential, 0, ValueError, "length"),
        (Shuffled, 2**62 + 1, ValueError, "length"),
        (Shuffled, "10", TypeError, "length"),
        (partial(ShuffledWindows, 10), 0, ValueError, "window"),
        (partial(ShuffledWindows, 10), 2.5, TypeError, "window"),
        (partial(Weighted, [1.0]), 0, ValueError, "length"),
        *((Weighted, weights, ValueError, "weights .* shape") for weights in ([], [[1.0]], torch.tensor(1.0))),
        *((Weighted, [1.0, weight], ValueError, "not negative") for weight in (-0.5, math.nan, math.inf)),
        (Weighted, [0.0, 0.0], ValueError, "weights"),
    ],
)
def test_invalid_orders_are_refused(make: Any, argument: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(argument)


@pytest.mark.parametrize("order", [Sequential(10), Shuffled(10), ShuffledWindows(10, 3), Weighted([1.0], 10)])
def test_invalid_positions_seeds_and_epochs_are_refused(order: Order) -> None:
    for begin, end in [(-1, 3), (3, 11), (5, 4)]:
        with pytest.raises(ValueError, match=rf"begin and end must be .* in \[0, 10\], got {begin} and {end}"):
            order.indices(0, 0, begin, end)
    with pytest.raises(ValueError, match=r"positions must be in \[0, 10\), got from 3 to 10"):
        order.at(0, 0, torch.tensor([10, 3]))
    for positions in ([1], torch.tensor([1.0]), torch.tensor(1)):
        with pytest.raises(TypeError, match="positions must be an int64 tensor of one dimension"):
            order.at(0, 0, positions)  # type: ignore[arg-type]
