"""What MPI calls the data types and the reductions of torch, and what it can reduce."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from mpi4py import MPI

# MPI has no sum of these (Open MPI adds the bits of two bfloat16 as integers): they are reduced as wider ones.
# A bool becomes an int32, so that a SUM over more than 255 ranks is still true.
WIDER = {
    torch.bool: torch.int32,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}
_EVERY_KIND = ("SUM", "PRODUCT")
_REAL = (*_EVERY_KIND, "MIN", "MAX")
_FLOATING = (*_REAL, "AVG")
_COMPLEX = (*_EVERY_KIND, "AVG")
_INTEGER = (*_REAL, "BAND", "BOR", "BXOR")


@cache
def datatypes() -> dict[torch.dtype, MPI.Datatype]:
    """Give the MPI type of each dtype that MPI reduces."""
    from mpi4py import MPI

    return {
        torch.float32: MPI.FLOAT,
        torch.float64: MPI.DOUBLE,
        torch.int8: MPI.INT8_T,
        torch.int16: MPI.INT16_T,
        torch.int32: MPI.INT32_T,
        torch.int64: MPI.INT64_T,
        torch.uint8: MPI.UINT8_T,
        torch.uint16: MPI.UINT16_T,
        torch.uint32: MPI.UINT32_T,
        torch.uint64: MPI.UINT64_T,
        torch.complex64: MPI.C_FLOAT_COMPLEX,
        torch.complex128: MPI.C_DOUBLE_COMPLEX,
    }


@cache
def plain_types() -> dict[int, MPI.Datatype]:
    """Give an MPI type of each size in bytes, to move elements of any dtype.

    They are counted in elements, not in bytes, because some MPI libraries count no further than 2**31.
    """
    from mpi4py import MPI

    return {1: MPI.BYTE, 2: MPI.INT16_T, 4: MPI.INT32_T, 8: MPI.INT64_T, 16: MPI.C_DOUBLE_COMPLEX}


@cache
def _operations() -> dict[str, MPI.Op]:
    from mpi4py import MPI

    return {
        "SUM": MPI.SUM,
        "AVG": MPI.SUM,
        "PRODUCT": MPI.PROD,
        "MIN": MPI.MIN,
        "MAX": MPI.MAX,
        "BAND": MPI.BAND,
        "BOR": MPI.BOR,
        "BXOR": MPI.BXOR,
    }


def operation(op: Any, dtype: torch.dtype) -> MPI.Op:
    """Give the MPI operation for a reduction of torch.

    Raises:
        ValueError: it is none that MPI has (``PREMUL_SUM``), or none for this dtype.
    """
    name, allowed = name_of(op), _allowed(dtype)
    if name not in allowed:
        raise ValueError(f"op must be one of {', '.join(allowed)} for tensors of {dtype} over MPI, got {name}")
    return _operations()[name]


def is_average(op: Any) -> bool:
    """Tell whether the sum is still to be divided by the number of ranks."""
    return name_of(op) == "AVG"


def name_of(op: Any) -> str:
    """Give the name of a reduction: torch hands on both ``ReduceOp`` objects and the values of its enumeration."""
    kind: dist.ReduceOp.RedOpType = getattr(op, "op", op)
    return kind.name


def _allowed(dtype: torch.dtype) -> tuple[str, ...]:
    if WIDER.get(dtype, dtype) not in datatypes():
        known = ", ".join(str(known) for known in (*datatypes(), *WIDER))
        raise ValueError(f"MPI reduces tensors of {known}; got {dtype}")
    if dtype.is_complex:
        return _COMPLEX
    return _FLOATING if dtype.is_floating_point else _INTEGER
