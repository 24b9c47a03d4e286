"""Whatever is encoded comes back as it was; rows carry it, or say how much is missing, or why there is nothing."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import math
import pickle
from collections import OrderedDict, namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from camshaft.distributed.collectives.values import (
    CPU,
    ROOM,
    ROW,
    bytes_of,
    decode,
    encode,
    read_rows,
    refusal,
    rows_of,
)

Pair = namedtuple("Pair", "left right")


class Count(int):
    """An int that is more than that."""


class Name(str):
    """A string that is more than that."""


class Colour(enum.IntEnum):
    RED = 1


texts = st.text(st.characters(codec=None, categories=None))  # lone surrogates too
numbers = st.integers() | st.integers(-(2**64), 2**64) | st.floats() | st.booleans() | st.complex_numbers()
scalars = st.none() | numbers | texts | st.binary()
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(texts | st.integers(), inner)
        | st.builds(Pair, inner, inner)
        | st.builds(OrderedDict, st.dictionaries(texts, inner))
    ),
    max_leaves=20,
)
# torch warns of them, of those that it has: which there are depends on its version
STRANGE = {f"torch.{name}" for name in ("bcomplex32", "complex32", "qint8", "qint32", "quint8", "quint4x2", "quint2x4")}
DTYPES = sorted(
    {one for one in vars(torch).values() if isinstance(one, torch.dtype) and str(one) not in STRANGE}, key=str
)
SHAPES = [(), (0,), (3,), (2, 0), (2, 3), (1, 2, 1, 2)]


def same(got, wanted):
    """Return whether two values are the same in every type and bit."""
    return type(got) is type(wanted) and pickle.dumps(got) == pickle.dumps(wanted)


@given(values)
def test_values_round_trip(value):
    assert same(decode(encode(value)), value)
    assert same(decode(memoryview(encode(value))), value)


@pytest.mark.parametrize(
    "value",
    [
        True, False, 1, 0, -(2**63), 2**63 - 1, 2**63, -(2**63) - 1, 10**400, -0.0, math.inf, math.nan, 1e-320,
        "", "\ud800", "a\0b", b"\xff", Count(3), Name("x"), Colour.RED, decimal.Decimal("0.1"),
        fractions.Fraction(1, 3), Path("a") / "b", datetime.date(2000, 1, 1), Pair(1, [2]), ..., int, torch.float16,
        np.float32(1.5), np.int8(3), np.bool_(True), np.float64(0.1), torch.Size([2, 3]), frozenset([1]),
    ],
    ids=repr,
)  # fmt: skip
def test_values_keep_their_type(value):
    assert same(decode(encode(value)), value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_keep_every_bit(dtype):
    for shape in SHAPES:
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.numel():
            tensor.view(-1).view(torch.uint8).copy_(torch.arange(tensor.nbytes) % (2 if dtype is torch.bool else 251))
        got = decode(encode(tensor))
        assert (got.dtype, got.shape, bytes_of(got)) == (dtype, tensor.shape, bytes_of(tensor))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).t(), torch.ones(1).expand(3), torch.arange(10)[3:5],
        torch.ones(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)), torch.ones(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
        torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]).conj().imag, torch.eye(2).to_sparse(),
    ],
    ids=["transposed", "expanded", "part", "watched", "parameter", "channels_last", "conjugate", "negative", "sparse"],
)  # fmt: skip
def test_tensors_of_any_layout_round_trip(tensor):
    got = decode(encode(tensor))
    assert torch.equal(got.to_dense(), tensor.detach().to_dense())
    assert not got.requires_grad
    assert len(encode(torch.zeros(100_000)[:2])) < 200  # without the rest of the storage


class Vanishing:
    """What can be pickled here and unpickled nowhere."""

    def __reduce__(self):
        return fail, ()


def fail():
    raise ImportError("no such module here")


def test_values_that_cannot_be_pickled_or_unpickled_are_reported():
    with open(__file__) as file:
        for value in (lambda: 1, file, {"k": [lambda: 1]}, (part for part in "ab")):
            with pytest.raises(TypeError, match="must be picklable, got"):
                encode(value)
    with pytest.raises(TypeError, match="cannot be unpickled here.*no such module here"):
        decode(encode(Vanishing()))


@given(st.lists(st.binary(min_size=1, max_size=2 * ROW).filter(lambda data: data[0] != ord("!")), min_size=1))
def test_rows_hold_the_beginning_and_the_length_of_each_value(data):
    rows = rows_of(data, CPU)
    assert rows.tensor.shape == (ROW * len(data),)
    contents, lengths, longest = read_rows(rows.read())
    assert [bytes(content) for content in contents] == [one[:ROOM] for one in data]
    assert lengths == [len(one) for one in data]
    assert longest == max(lengths)


@given(st.sampled_from([TypeError, ValueError]), texts | st.text(min_size=600), st.integers(0, 10**6))
def test_a_refusal_raises_where_it_is_read(kind, text, rank):
    rows = rows_of([b"x", refusal(kind(text), rank)], CPU)
    with pytest.raises(kind, match=f"rank {rank} cannot take part"):
        read_rows(rows.read())
