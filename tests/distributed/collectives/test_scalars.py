"""Python numbers are reduced exactly, in their own kind, or all ranks say that they cannot be."""

from __future__ import annotations

import decimal
import enum
import fractions
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import camshaft.distributed as idist
from camshaft.distributed.collectives.values import plain_number
from tests.ranks import on_ranks

OPS = ("SUM", "MIN", "MAX", "PRODUCT", "AND", "OR")
BITWISE = ("AND", "OR")


class Colour(enum.IntEnum):
    RED = 2


def outcome(call):
    """Return what a call gives, or the kind of error."""
    try:
        return call()
    except (TypeError, ValueError) as error:
        return type(error)


@given(st.integers() | st.floats(allow_nan=False) | st.booleans(), st.sampled_from(OPS))
def test_a_single_process_gets_its_number_back(number, op):
    got = outcome(lambda: idist.all_reduce(number, op))
    if isinstance(number, float) and op in BITWISE:
        assert got is TypeError
    elif op == "SUM" and abs(number) >= 2**63 and isinstance(number, int):
        assert got is ValueError
    else:
        kind = int if isinstance(number, bool) and op in ("SUM", "PRODUCT") else type(number)
        assert got == number
        assert type(got) is kind or op == "PRODUCT"


@pytest.mark.parametrize(
    ("number", "op", "plain"),
    [
        (np.float32(0.5), "SUM", 0.5), (np.float64(0.1), "MAX", 0.1), (np.int8(-3), "SUM", -3), (np.uint64(3), "OR", 3),
        (Colour.RED, "SUM", 2), (True, "SUM", 1), (True, "PRODUCT", 1), (True, "MAX", True), (False, "AND", False),
        (np.True_, "SUM", 1), (np.True_, "MAX", True), (np.False_, "OR", False),
        (2j, "SUM", 2j), (np.complex64(2j), "PRODUCT", 2j), (10**30, "MAX", 10**30), (math.inf, "SUM", math.inf),
    ],
)  # fmt: skip
def test_numbers_of_other_libraries_become_python_numbers(number, op, plain):
    got = plain_number(number, op, 1)
    assert (got, type(got)) == (plain, type(plain))


@pytest.mark.parametrize(
    ("number", "op", "error"),
    [
        (decimal.Decimal("0.1"), "SUM", TypeError), (fractions.Fraction(1, 3), "MAX", TypeError),
        (2.0, "AND", TypeError),
        (2j, "MAX", TypeError), (2j, "OR", TypeError), (2**63, "SUM", ValueError), (-(2**63), "SUM", ValueError),
        ("3", "SUM", TypeError), (None, "SUM", TypeError), ([1], "SUM", TypeError), (np.ones(1), "SUM", TypeError),
    ],
)  # fmt: skip
def test_numbers_that_cannot_be_reduced_exactly_are_rejected(number, op, error):
    with pytest.raises(error, match="^tensor must be"):
        idist.all_reduce(number, op)
    with pytest.raises(error, match="^tensor must be"):
        idist.reduce(number, op=op)


@on_ranks(2)
def test_results_equal_those_of_python():
    rank, big = idist.get_rank(), -(2**62) + 1
    for one, other in ((3, 5), (big, big), (0.1, 0.2), (-0.0, 0.0), (True, False), (2, 7), (1e308, 1e308)):
        wanted = {"SUM": one + other, "MIN": min(one, other), "MAX": max(one, other), "PRODUCT": one * other}
        if isinstance(one, int):
            wanted |= {"AND": one & other, "OR": one | other}
        for op, result in wanted.items():
            got = idist.all_reduce((one, other)[rank], op)
            assert got == result, (op, one, other)
            assert type(got) is type(one + other if op in ("SUM", "PRODUCT") else one), (op, one, other)
    assert math.copysign(1, idist.all_reduce(-0.0)) == -1
    assert idist.all_reduce(1 + 2j * rank) == 2 + 2j
    assert math.isnan(idist.all_reduce(math.nan if rank else 1.0, "MIN"))
    assert math.isnan(idist.all_reduce(1.0 if rank else math.nan, "MAX"))
    assert idist.all_reduce(10**30 + rank, "MAX") == 10**30 + 1
    assert idist.reduce(10**30, op="PRODUCT") == (10**60 if rank == 0 else None)
    with pytest.raises(TypeError, match="numbers of the same kind, but this one has (0 of type int|0.5 of type float)"):
        idist.all_reduce(0 if rank else 0.5)
    assert idist.all_reduce(1) == 2


@on_ranks(3)
def test_all_ranks_get_the_same_result_or_an_error():
    kinds = (5, 2.5, math.nan, True, 1j, 2**70, decimal.Decimal(1))
    rank, bad = idist.get_rank(), []
    # each one of different kinds waits until it is known that the ranks have met in the same call
    cases = [("SUM", *pair, 5) for pair in itertools.combinations_with_replacement(kinds, 2)]
    cases += [("MIN", kind, 5, 2.5) for kind in kinds]
    for op, *numbers in cases:
        got = outcome(lambda op=op, number=numbers[rank]: idist.all_reduce(number, op))
        outcomes = idist.all_gather("an error" if isinstance(got, type) else repr(got))
        if len(set(outcomes)) > 1:
            bad.append((op, numbers, outcomes))
    assert not bad, bad[:5]
