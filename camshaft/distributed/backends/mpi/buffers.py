"""Memory that MPI can read and write, for tensors that may be strided, narrow, or on another device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from camshaft.distributed.backends.mpi.types import WIDER, datatypes, is_average, plain_types

if TYPE_CHECKING:
    from mpi4py import MPI

Message = list[Any]  # what mpi4py takes: [memory, type] or [memory, counts, type]


def sendable(tensor: Tensor) -> Tensor:
    """Give the tensor itself if MPI can read it where it is, else a copy on the CPU, one element after the other."""
    if _is_plain(tensor):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def receivable(tensor: Tensor) -> Tensor:
    """Give the tensor itself if MPI can write to it where it is, else memory of its own for :func:`deliver`."""
    return tensor if _is_plain(tensor) else torch.empty(tensor.shape, dtype=tensor.dtype)


def deliver(buffer: Tensor, tensor: Tensor) -> None:
    """Bring what was received to the tensor that it is for."""
    if buffer is not tensor:
        with torch.no_grad():  # the tensor may be a leaf that requires gradients
            tensor.copy_(buffer.view(tensor.shape))


def deliver_parts(buffer: Tensor, tensors: Sequence[Tensor]) -> None:
    """Cut what was received into the tensors that it is for, one after the other."""
    for part, tensor in zip(torch.split(buffer, [tensor.numel() for tensor in tensors]), tensors, strict=True):
        deliver(part, tensor)


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Lay tensors one after the other, to send them as one."""
    return torch.cat([sendable(tensor).detach().reshape(-1) for tensor in tensors])


def widened(tensor: Tensor) -> Tensor:
    """Give memory with the tensor's values in a dtype that MPI reduces; the tensor itself if that can be."""
    return sendable(tensor).to(WIDER.get(tensor.dtype, tensor.dtype))


def finish_reduction(buffer: Tensor, tensor: Tensor, op: Any, size: int) -> None:
    """Turn the sum into an average if that is wanted, and bring it to the tensor that it is for."""
    if is_average(op):
        with torch.no_grad():
            buffer.div_(size)
    deliver(buffer, tensor)


def apart(source: Tensor, target: Tensor) -> Tensor:
    """Give the source, or a copy of it where both lie in the same memory, as when FSDP gathers in place.

    MPICH refuses buffers that overlap, Open MPI takes them and may send what it has just received.
    """
    overlap = _start(source) < _end(target) and _start(target) < _end(source)
    return source.clone() if overlap else source


def raw(tensor: Tensor) -> Message:
    """Describe a buffer that is moved as it is, whatever its dtype; mpi4py counts, and knows in how many parts."""
    return [_memory(tensor), plain_types()[tensor.element_size()]]


def in_parts(tensor: Tensor, counts: Sequence[int]) -> Message:
    """Describe a buffer that is moved as it is, in a part for each rank, of so many elements."""
    return [_memory(tensor), counts, plain_types()[tensor.element_size()]]


def typed(tensor: Tensor) -> Message:
    """Describe a buffer that is reduced."""
    return [_memory(tensor), datatypes()[tensor.dtype]]


def _memory(tensor: Tensor) -> MPI.buffer:
    from mpi4py import MPI

    return MPI.buffer.fromaddress(tensor.data_ptr(), _size(tensor))


def _is_plain(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided:
        raise ValueError(f"tensor must be dense to travel over MPI, got layout {tensor.layout}: call to_dense() first")
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _start(tensor: Tensor) -> int:
    return tensor.data_ptr()


def _end(tensor: Tensor) -> int:
    return tensor.data_ptr() + _size(tensor)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
