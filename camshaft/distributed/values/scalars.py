"""Reduce Python numbers: sums fast, everything else exactly as Python does it.

A sum goes through the backend, an ``int`` as a 64-bit integer, a ``float`` in double precision. Both are eight bytes
long, so a rank that expects the other kind would misread them. A mark of the kind therefore travels with the number:
the marks add up to this rank's own times the number of ranks only if all are the same. Two elements take gloo hardly
longer than one; three would. For the other reductions, which a mark would not survive, all ranks gather all numbers.
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
from camshaft.distributed.values.exchange import Wrong, all_gather_values
from camshaft.distributed.values.serialization import Buffer

_BITWISE = ("AND", "OR")
_IN_PYTHON: dict[str, Callable[[Any, Any], Any]] = {
    "PRODUCT": operator.mul,
    "MIN": lambda one, other: other if other < one or other != other else one,  # NaN wins, as in torch
    "MAX": lambda one, other: other if other > one or other != other else one,
    "AND": operator.and_,
    "OR": operator.or_,
}
_MARKS: dict[type, float] = {int: 1, float: 1.0, complex: -1.0, type(None): 0}  # None: this rank has no valid number


def check_reduction(backend: Backend, tensor: Any, op: str) -> None:
    """Check the reduction, and whether it applies to a tensor.

    An argument that is neither a tensor nor a number is refused together with the other ranks, which may have numbers.
    ``None`` is refused at once: the other ranks may have tensors, and the exchanges would not match.
    """
    if tensor is None:
        raise TypeError("tensor must be a tensor or a number, got None")
    if op not in backend.reductions and (isinstance(tensor, Tensor) or op not in _IN_PYTHON):
        raise ValueError(f"op must be one of {backend.reductions} on {backend.model_name}, got {op!r}")
    if op in _BITWISE and isinstance(tensor, Tensor) and (tensor.is_floating_point() or tensor.is_complex()):
        raise TypeError(f"op {op!r} is for integers and bools, got a tensor of {tensor.dtype}")


def reduced_number(backend: Backend, number: Any, op: str, group: Group | None, size: int) -> Any:
    """Reduce a number over the ``size`` ranks of a group; all of them raise if one has no valid number.

    Raises:
        TypeError: it cannot be reduced exactly, or other ranks have numbers of another kind.
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
    if op != "SUM":  # of a single backend, for example AVERAGE
        if type(plain) is complex:
            return complex(*_moved(backend, torch.complex128, "=dd", [plain.real, plain.imag], op, group, wrong))
        dtype, form = (torch.float64, "=d") if type(plain) is float else (torch.int64, "=q")
        return _moved(backend, dtype, form, [0 if plain is None else plain], op, group, wrong)[0]
    if type(plain) is complex:
        real, imaginary = (_sum(backend, part, complex, group, size, wrong) for part in (plain.real, plain.imag))
        return complex(real, imaginary)
    return _sum(backend, plain, type(plain), group, size, wrong)


def plain_number(number: Any, op: str, size: int) -> int | float | complex:
    """Return a number as one of Python's own kinds; a ``bool`` counts in a sum and in a product.

    Raises:
        TypeError: it is not a number, or cannot be reduced exactly, or not with this ``op``.
        ValueError: the sum of ``size`` such numbers might not fit into 64 bits.

    >>> plain_number(True, "SUM", 2), plain_number(True, "MAX", 2)
    (1, True)
    """
    kind = type(number)
    if kind is float and op not in _BITWISE:
        return float(number)
    numpy = None if kind is int else sys.modules.get("numpy")  # whose bool is not registered as a Number
    if kind is bool or (numpy is not None and isinstance(number, numpy.bool_)):
        return int(number) if op in ("SUM", "PRODUCT") else bool(number)
    if kind is int or isinstance(number, Integral):
        whole, limit = int(number), (2**63 - 1) // size
        if op not in _IN_PYTHON and not -limit <= whole <= limit:
            raise ValueError(f"tensor must be such that the sum over {size} ranks fits into 64 bits, got {whole}")
        return whole
    if not isinstance(number, Number):
        got = f"{reprlib.repr(number)} of type {type(number).__name__}"
        raise TypeError(f"tensor must be a tensor or a number, got {got}")
    if op in _BITWISE:
        raise TypeError(f"tensor must be an integer for op={op!r}, got {number!r}")
    if isinstance(number, Real) and not isinstance(number, Rational):
        return float(number)
    if isinstance(number, Complex) and not isinstance(number, Real) and op not in ("MIN", "MAX"):
        return complex(number)
    raise TypeError(f"tensor must be a number that can be reduced exactly, got {number!r}: convert it to float")


def _sum(backend: Backend, value: Any, kind: type, group: Group | None, size: int, wrong: Wrong) -> Any:
    """Add a value and the mark of its kind over the ranks, and check the sum of the marks."""
    mark = _MARKS[kind]
    dtype, form = (torch.int64, "=qq") if type(mark) is int else (torch.float64, "=dd")
    total, marks = _moved(backend, dtype, form, [0 if value is None else value, mark], "SUM", group, wrong)
    if marks != mark * size:
        raise TypeError(
            f"all ranks must add numbers of the same kind, this one has {value!r} of type {kind.__name__}, and another "
            "rank a number of another kind, or one that cannot be added"
        )
    return total


def _moved(
    backend: Backend, dtype: torch.dtype, form: str, numbers: list[Any], op: str, group: Group | None, wrong: Wrong
) -> tuple[Any, ...]:
    """Reduce with the backend, also after an error on this rank, so that no rank waits."""
    buffer = Buffer(bytearray(struct.pack(form, *numbers)), backend.carrier, dtype)
    reduced = buffer.read(backend.all_reduce(buffer.tensor, op, group))
    if wrong is not None:
        raise wrong
    return struct.unpack(form, reduced)
