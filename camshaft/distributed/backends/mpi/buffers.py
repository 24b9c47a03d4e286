"""Tensors as mpi4py takes them: memory and types for tensors that may be strided, narrow, or on another device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# MPI does not add these up (Open MPI adds the bits of two bfloat16 as integers): they are reduced as wider ones.
# A bool becomes an int32, so that a SUM over more than 255 ranks is still true.
WIDER = {
    torch.bool: torch.int32,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}
_REDUCED = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint8: "UINT8_T",
    torch.uint16: "UINT16_T",
    torch.uint32: "UINT32_T",
    torch.uint64: "UINT64_T",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
}
# by the size of an element: some MPI libraries count no further than 2**31, so elements are counted, not bytes
_MOVED = {1: "BYTE", 2: "INT16_T", 4: "INT32_T", 8: "INT64_T", 16: "C_DOUBLE_COMPLEX"}
_OPERATIONS = {"AVG": "SUM", "PRODUCT": "PROD"}  # the others have one name in torch and in MPI

Message = list[Any]  # what mpi4py takes: [memory, type] or [memory, counts, type]


def mpi() -> Any:
    """Return ``mpi4py.MPI``, whose first import initializes MPI."""
    from mpi4py import MPI

    return MPI


def operation(op: Any, dtype: torch.dtype) -> Any:
    """Return the MPI operation for a reduction of torch.

    Raises:
        ValueError: MPI has none (``PREMUL_SUM``), or none for this dtype.
    """
    if WIDER.get(dtype, dtype) not in _REDUCED:
        raise ValueError(f"MPI reduces tensors of {', '.join(map(str, (*_REDUCED, *WIDER)))}; got {dtype}")
    allowed = ["SUM", "PRODUCT"]
    allowed += [] if dtype.is_complex else ["MIN", "MAX"]
    allowed += ["AVG"] if dtype.is_complex or dtype.is_floating_point else ["BAND", "BOR", "BXOR"]
    if (name := name_of(op)) not in allowed:
        raise ValueError(f"op must be one of {', '.join(allowed)} for tensors of {dtype} over MPI, got {name}")
    return getattr(mpi(), _OPERATIONS.get(name, name))


def name_of(op: Any) -> str:
    """Return the name of a reduction: torch passes both ``ReduceOp`` objects and the values of its enumeration."""
    kind: dist.ReduceOp.RedOpType = getattr(op, "op", op)
    return kind.name


def sendable(tensor: Tensor) -> Tensor:
    """Return the tensor itself if MPI can read it where it is, else a contiguous copy on the CPU."""
    if _is_plain(tensor):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors, to send them as one."""
    return torch.cat([sendable(tensor).detach().reshape(-1) for tensor in tensors])


def receivable(tensors: Sequence[Tensor]) -> Tensor:
    """Return memory for tensors that are received one after the other: the tensor itself if MPI can write to it."""
    if len(tensors) == 1 and _is_plain(tensors[0]):
        return tensors[0]
    return torch.empty(sum(sizes(tensors)), dtype=tensors[0].dtype)


def widened(tensor: Tensor) -> Tensor:
    """Return memory with the tensor's values in a dtype that MPI reduces: the tensor itself if possible."""
    return sendable(tensor).to(WIDER.get(tensor.dtype, tensor.dtype))


def disjoint(source: Tensor, target: Tensor) -> Tensor:
    """Return the source, or a copy of it where both overlap in memory, as when FSDP gathers in place.

    MPICH refuses buffers that overlap, Open MPI takes them and may send what it has just received.
    """
    start, other_start = source.data_ptr(), target.data_ptr()
    overlap = start < other_start + target.nbytes and other_start < start + source.nbytes
    return source.clone() if overlap else source


def moved(tensor: Tensor, counts: Sequence[int] | None = None) -> Message:
    """Describe a buffer that is moved as it is, in a part of so many elements for each rank if counts are given."""
    parts = [] if counts is None else [counts]
    return [_memory(tensor), *parts, getattr(mpi(), _MOVED[tensor.element_size()])]


def reduced(tensor: Tensor) -> Message:
    """Describe a buffer that is reduced."""
    return [_memory(tensor), getattr(mpi(), _REDUCED[tensor.dtype])]


def sizes(tensors: Sequence[Tensor]) -> list[int]:
    """Return the number of elements of each tensor."""
    return [tensor.numel() for tensor in tensors]


def _memory(tensor: Tensor) -> Any:
    return mpi().buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


def _is_plain(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided:
        raise ValueError(f"tensor must be dense to travel over MPI, got layout {tensor.layout}: call to_dense() first")
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
