from __future__ import annotations

from collections import OrderedDict, namedtuple
from decimal import Decimal
from fractions import Fraction

import numpy
import pytest
import torch

from camshaft.text import to_str_list

Pair = namedtuple("Pair", "first second")
TEN = torch.arange(10)
TEN_TEXTS = ", ".join(f"{number}.0000" for number in range(10))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        # numbers and 0-d tensors: 4 decimals
        (1, ["1.0000"]),
        (True, ["1.0000"]),
        (-0.123456, ["-0.1235"]),
        (float("nan"), ["nan"]),
        (1 + 2j, ["1.0000+2.0000j"]),
        (Fraction(1, 4), ["0.2500"]),
        (Decimal("0.5"), ["0.5000"]),
        (numpy.float32(0.5), ["0.5000"]),
        (numpy.int64(3), ["3.0000"]),
        (torch.tensor(0.5), ["0.5000"]),
        (torch.tensor(3), ["3.0000"]),
        # 1-d tensors: in brackets, at most 10 elements; higher dimensions: the shape
        (torch.tensor([]), ["[]"]),
        (torch.tensor([1.0, 2.5]), ["[1.0000, 2.5000]"]),
        (TEN, [f"[{TEN_TEXTS}]"]),
        (torch.arange(11), [f"[{TEN_TEXTS}, ...]"]),
        (torch.ones(2, 3), ["Shape[2, 3]"]),
        (torch.ones(1, 0, 2), ["Shape[1, 0, 2]"]),
        # dict items: prefixed
        ({"loss": 0.5, "acc": torch.tensor(1)}, ["loss: 0.5000", "acc: 1.0000"]),
        (OrderedDict([(2, 1), (1, 2)]), ["2: 1.0000", "1: 2.0000"]),
        # sequences: joined with commas
        ([1, 2.5], ["1.0000, 2.5000"]),
        ((1, [2, 3]), ["1.0000, 2.0000, 3.0000"]),
        (Pair(1, torch.tensor([2])), ["1.0000, [2.0000]"]),
        ({"a": range(2)}, ["a: 0.0000, 1.0000"]),
        # None and empty containers: only the prefix, or nothing
        (None, []),
        ([], []),
        ({}, []),
        ({"a": None, "b": [], "c": ()}, ["a: ", "b: ", "c: "]),
        ([None, 1], ["1.0000"]),
        # strings and unknown types are dropped
        ("text", []),
        ({"a": "text", "b": b"raw", "c": 1}, ["c: 1.0000"]),
        (["text", 1], ["1.0000"]),
        ({"a": {1, 2}, "b": object()}, []),
        # nested dicts: separate entries, before their parent's text
        ({"a": {"b": 1, "c": 2}, "d": 3}, ["b: 1.0000", "c: 2.0000", "a: ", "d: 3.0000"]),
        ({"a": [1, {"b": 2}, 3]}, ["b: 2.0000", "a: 1.0000, 3.0000"]),
        ([1, {"b": {"c": 2}}], ["c: 2.0000", "b: ", "1.0000"]),
        ([{"b": 2}], ["b: 2.0000"]),
    ],
)
def test_texts(data, expected):
    assert to_str_list(data) == expected
