"""Reducing Python numbers: sums fast, all else exactly as Python does it.

A sum goes through the backend, an ``int`` as a 64-bit integer, a ``float`` in double precision. Both are eight bytes on
their way, which a rank that expects the other would take for something else. So a mark of its kind travels with the
number: the marks add up to the number of ranks times this rank's own only if all are the same. Two elements take gloo
not much longer than one; three would. For the other reductions, of which a mark can learn nothing, all ranks get the
numbers of all.
"""

from __future__ import annotations

import functools
import operator
import reprlib
import struct
import sys
from collections.abc import Callable
from numbers import Complex, Integral, Number, Rational, Real
from typing import Any

import torch
from torch import Tensor

from camshaft.distributed.backend import Backend, Group
from camshaft.distributed.exchange import Wrong, all_gather_values
from camshaft.distributed.rows import Parcel

_BITWISE = ("AND", "OR")
_IN_PYTHON: dict[str, Callable[[Any, Any], Any]] = {
    "PRODUCT": operator.mul,
    "MIN": lambda one, other: other if other < one or other != other else one,  # also the one that is not a number
    "MAX": lambda one, other: other if other > one or other != other else one,
    "AND": operator.and_,
    "OR": operator.or_,
}
_MARKS: dict[type, float] = {int: 1, float: 1.0, complex: -1.0, type(None): 0}  # none: something is wrong with it


def check_reduction(backend: Backend, tensor: Any, op: str) -> None:
    """Refuse a reduction that the backend does not know, and tensors that it is not for.

    Whatever else is no number is refused with the others, who may have numbers. They may have tensors where this rank
    has nothing: what they exchange would not fit together then, so ``None`` is refused at once.
    """
    if tensor is None:
        raise TypeError("tensor must be a tensor or a number, got None")
    if op not in backend.reductions and (isinstance(tensor, Tensor) or op not in _IN_PYTHON):
        raise ValueError(f"op must be one of {backend.reductions} on {backend.model_name}, got {op!r}")
    if op in _BITWISE and isinstance(tensor, Tensor) and (tensor.is_floating_point() or tensor.is_complex()):
        raise TypeError(f"op {op!r} is for whole numbers and bools, got a tensor of {tensor.dtype}")


def reduced_number(backend: Backend, number: Any, op: str, group: Group | None, size: int) -> Any:
    """Reduce a number over the ranks of a group of ``size``; all of them raise if one cannot take part.

    Raises:
        TypeError: it cannot be reduced exactly, or others add numbers of another kind.
        ValueError: the sum might not fit into 64 bits.
    """
    plain: int | float | complex | None = None
    wrong: Wrong = None
    try:
        plain = plain_number(number, op, size)
    except (TypeError, ValueError) as error:
        wrong = error
    if op in _IN_PYTHON:
        return functools.reduce(_IN_PYTHON[op], all_gather_values(backend, plain, group, wrong))
    if op != "SUM":  # what one backend alone has, an average say
        return _unmarked(backend, 0 if plain is None else plain, op, group, wrong)
    if type(plain) is not complex:
        return _sum(backend, plain, type(plain), group, size, wrong)
    real, imaginary = (_sum(backend, part, complex, group, size, wrong) for part in (plain.real, plain.imag))
    return complex(real, imaginary)


def plain_number(number: Any, op: str, size: int) -> int | float | complex:
    """Give a number as one of Python's own kinds; a ``bool`` counts in a sum and in a product.

    Raises:
        TypeError: it is none, or of a kind that cannot be reduced exactly, or not with this ``op``.
        ValueError: the sum of ``size`` such numbers does not fit into 64 bits.

    >>> plain_number(True, "SUM", 2), plain_number(True, "MAX", 2)
    (1, True)
    """
    kind = type(number)
    if kind is float and op not in _BITWISE:
        return float(number)
    if kind is bool and op in ("MIN", "MAX", *_BITWISE):
        return bool(number)
    if kind is int or isinstance(number, Integral):
        return _checked_size(int(number), op, size)
    if _is_bool_of_numpy(number):
        return plain_number(bool(number), op, size)
    if not isinstance(number, Number):
        got = f"{reprlib.repr(number)} of type {type(number).__name__}"
        raise TypeError(f"tensor must be a tensor or a number, got {got}")
    if op in _BITWISE:
        raise TypeError(f"tensor must be a whole number for op={op!r}, got {number!r}")
    if isinstance(number, Real) and not isinstance(number, Rational):
        return float(number)
    if isinstance(number, Complex) and not isinstance(number, Real) and op not in ("MIN", "MAX"):
        return complex(number)
    raise TypeError(f"tensor must be a number that can be reduced exactly, got {number!r}: convert it to float")


def _is_bool_of_numpy(value: Any) -> bool:
    """Tell the one scalar of numpy that does not say that it is a number; who has one has imported numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.bool_)


def _checked_size(number: int, op: str, size: int) -> int:
    limit = (2**63 - 1) // size
    if op not in _IN_PYTHON and not -limit <= number <= limit:
        raise ValueError(f"tensor must be such that the sum over {size} ranks fits into 64 bits, got {number}")
    return number


def _sum(backend: Backend, value: Any, kind: type, group: Group | None, size: int, wrong: Wrong) -> Any:
    """Add a value and a mark of its kind over the ranks, and see what became of the mark."""
    mark = _MARKS[kind]
    dtype, form = (torch.int64, "=qq") if type(mark) is int else (torch.float64, "=dd")
    total, marks = _moved(
        backend, dtype, struct.pack(form, 0 if value is None else value, mark), form, "SUM", group, wrong
    )
    if marks != mark * size:
        raise TypeError(
            f"all ranks must add numbers of the same kind, this one gave {value!r}, a {kind.__name__}, and another "
            "one a number of another kind, or one that cannot be added"
        )
    return total


def _unmarked(backend: Backend, value: Any, op: str, group: Group | None, wrong: Wrong) -> Any:
    if type(value) is complex:
        parts = struct.pack("=dd", value.real, value.imag)
        return complex(*_moved(backend, torch.complex128, parts, "=dd", op, group, wrong))
    dtype, form = (torch.float64, "=d") if type(value) is float else (torch.int64, "=q")
    return _moved(backend, dtype, struct.pack(form, value), form, op, group, wrong)[0]


def _moved(
    backend: Backend, dtype: torch.dtype, data: bytes, form: str, op: str, group: Group | None, wrong: Wrong
) -> tuple[Any, ...]:
    """Let the backend reduce, also where something is wrong, so that nobody waits."""
    parcel = Parcel(bytearray(data), backend.carrier, dtype)
    reduced = parcel.read(backend.all_reduce(parcel.tensor, op, group))
    if wrong is not None:
        raise wrong
    return struct.unpack(form, reduced)
