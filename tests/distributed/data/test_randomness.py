"""Random numbers are a function of their key and counter: the published one, and no two keys share anything."""

from __future__ import annotations

import itertools

import pytest
import torch

from camshaft.distributed.data.randomness import key_of, random_bits, shifted_right, signed
from tests.distributed.data.chance import histogram, looks_random

# the first numbers of SplitMix64 from the state 1234567, as other implementations give them
SPLITMIX = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
SEEDS = [0, 1, -1, 2, 10, 16, 2**32, 2**63, -(2**63), 2**64, 2**64 + 1, -(2**64), 10**5000, 10**5000 + 1]


def test_the_numbers_are_those_of_splitmix() -> None:
    bits = random_bits(1234567, torch.arange(1, 6))
    assert [number % 2**64 for number in bits.tolist()] == SPLITMIX


def test_a_tensor_of_keys_is_as_each_key_alone() -> None:
    keys, counters = torch.tensor([[3], [-4]]), torch.arange(-5, 5)
    bits = random_bits(keys, counters)
    assert torch.equal(bits, torch.stack([random_bits(3, counters), random_bits(-4, counters)]))
    assert torch.equal(bits[1], random_bits(2**64 - 4, counters))


def test_each_bit_is_as_often_set_as_not_and_depends_on_no_other() -> None:
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


def test_keys_stay_what_they_are() -> None:
    """A position saved by an earlier version goes on with the same samples."""
    assert [key_of(0, 0), key_of(1, 2), key_of(-1, 2**64)] == [
        18155624764998497171,
        2998336559307561463,
        17014288614703852444,
    ]


def test_what_is_no_integer_makes_no_key() -> None:
    with pytest.raises(TypeError, match="integer"):
        key_of(0, 1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(("number", "expected"), [(0, 0), (127, 127), (128, -128), (255, -1), (256, 0), (-129, 127)])
def test_integers_wrap_around(number: int, expected: int) -> None:
    assert signed(number, 8) == expected


def test_zeros_are_shifted_in() -> None:
    assert shifted_right(torch.tensor([-1, -(2**63), 8]), 3).tolist() == [2**61 - 1, 2**60, 1]
