"""The collectives and messages of torch, each as one call of MPI that is ready to be begun.

All calls are MPI's nonblocking ones, since those that block take a whole core and know no timeout. What is wrong
with the arguments is found here, before anything has begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from camshaft.distributed.backends.mpi.attendance import farewell_tag
from camshaft.distributed.backends.mpi.buffers import (
    apart,
    deliver,
    deliver_parts,
    finish_reduction,
    in_parts,
    joined,
    raw,
    receivable,
    sendable,
    typed,
    widened,
)
from camshaft.distributed.backends.mpi.types import operation
from camshaft.distributed.backends.mpi.work import Transfer

if TYPE_CHECKING:
    from mpi4py import MPI


def all_reduce(comm: MPI.Intracomm, tensor: Tensor, op: Any) -> Transfer:
    """Reduce a tensor over all ranks, in place."""
    from mpi4py import MPI

    mpi_op, buffer = operation(op, tensor.dtype), widened(tensor)
    return Transfer(
        lambda: comm.Iallreduce(MPI.IN_PLACE, typed(buffer), mpi_op),
        lambda: finish_reduction(buffer, tensor, op, comm.size),
    )


def reduce(comm: MPI.Intracomm, tensor: Tensor, op: Any, root: int) -> Transfer:
    """Reduce a tensor over all ranks, in place on ``root``; elsewhere it stays as it is."""
    from mpi4py import MPI

    mpi_op, buffer = operation(op, tensor.dtype), widened(tensor)
    if comm.rank != root:
        return Transfer(lambda: comm.Ireduce(typed(buffer), None, mpi_op, root))
    return Transfer(
        lambda: comm.Ireduce(MPI.IN_PLACE, typed(buffer), mpi_op, root),
        lambda: finish_reduction(buffer, tensor, op, comm.size),
    )


def broadcast(comm: MPI.Intracomm, tensor: Tensor, root: int) -> Transfer:
    """Give every rank the tensor of ``root``, in place."""
    if comm.rank == root:
        buffer = sendable(tensor)
        return Transfer(lambda: comm.Ibcast(raw(buffer), root))
    buffer = receivable(tensor)
    return Transfer(lambda: comm.Ibcast(raw(buffer), root), lambda: deliver(buffer, tensor))


def all_gather(comm: MPI.Intracomm, tensors: Sequence[Tensor], tensor: Tensor) -> Transfer:
    """Fill ``tensors`` with the tensor of each rank; they may differ in size over the ranks."""
    _check_parts("output_tensors", tensors, comm.size, tensor.dtype)
    _check_sizes("output", tensors[comm.rank].numel(), "input", tensor.numel())
    buffer, source = _room_for(tensors), sendable(tensor)
    return Transfer(
        lambda: comm.Iallgatherv(raw(source), in_parts(buffer, _sizes(tensors))),
        lambda: deliver_parts(buffer, tensors),
    )


def all_gather_single(comm: MPI.Intracomm, output: Tensor, tensor: Tensor) -> Transfer:
    """Fill ``output`` with the tensors of all ranks, one after the other."""
    _check_parts("output", [output], 1, tensor.dtype)
    _check_sizes("output", output.numel(), "input times ranks", tensor.numel() * comm.size)
    buffer = receivable(output)
    source = apart(sendable(tensor), buffer)
    return Transfer(lambda: comm.Iallgather(raw(source), raw(buffer)), lambda: deliver(buffer, output))


def gather(comm: MPI.Intracomm, tensors: Sequence[Tensor], tensor: Tensor, root: int) -> Transfer:
    """Fill ``tensors`` on ``root`` with the tensor of each rank; they may differ in size over the ranks."""
    source = sendable(tensor)
    if comm.rank != root:
        return Transfer(lambda: comm.Igatherv(raw(source), None, root))
    _check_parts("gather_list", tensors, comm.size, tensor.dtype)
    buffer = _room_for(tensors)
    return Transfer(
        lambda: comm.Igatherv(raw(source), in_parts(buffer, _sizes(tensors)), root),
        lambda: deliver_parts(buffer, tensors),
    )


def scatter(comm: MPI.Intracomm, output: Tensor, tensors: Sequence[Tensor], root: int) -> Transfer:
    """Fill ``output`` with the one of ``root``'s tensors that is for this rank."""
    buffer = receivable(output)
    if comm.rank != root:
        return Transfer(lambda: comm.Iscatterv(None, raw(buffer), root), lambda: deliver(buffer, output))
    _check_parts("scatter_list", tensors, comm.size, output.dtype)
    source = joined(tensors)
    return Transfer(
        lambda: comm.Iscatterv(in_parts(source, _sizes(tensors)), raw(buffer), root), lambda: deliver(buffer, output)
    )


def reduce_scatter(comm: MPI.Intracomm, output: Tensor, tensors: Sequence[Tensor], op: Any) -> Transfer:
    """Reduce each of ``tensors`` over the ranks, and fill ``output`` with the one that is for this rank."""
    _check_parts("input_list", tensors, comm.size, output.dtype)
    return _reduce_scatter(comm, output, widened(joined(tensors)), _sizes(tensors), op)


def reduce_scatter_single(comm: MPI.Intracomm, output: Tensor, tensor: Tensor, op: Any) -> Transfer:
    """Reduce a tensor over the ranks, and fill ``output`` with the part of it that is for this rank."""
    _check_parts("input", [tensor], 1, output.dtype)
    _check_sizes("input", tensor.numel(), "output times ranks", output.numel() * comm.size)
    return _reduce_scatter(comm, output, widened(tensor), [output.numel()] * comm.size, op)


def _reduce_scatter(comm: MPI.Intracomm, output: Tensor, source: Tensor, sizes: list[int], op: Any) -> Transfer:
    mpi_op = operation(op, output.dtype)
    _check_sizes("output", output.numel(), "this rank's part of the input", sizes[comm.rank])
    buffer = receivable(output) if source.dtype == output.dtype else torch.empty(output.shape, dtype=source.dtype)
    source = apart(source, buffer)
    return Transfer(
        lambda: comm.Ireduce_scatter(typed(source), typed(buffer), sizes, mpi_op),
        lambda: finish_reduction(buffer, output, op, comm.size),
    )


def all_to_all(comm: MPI.Intracomm, outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> Transfer:
    """Send each rank one of ``tensors``, and fill ``outputs`` with what each rank sends."""
    _check_parts("output_tensor_list", outputs, comm.size, tensors[0].dtype)
    _check_parts("input_tensor_list", tensors, comm.size, outputs[0].dtype)
    buffer, source = _room_for(outputs), joined(tensors)
    return Transfer(
        lambda: comm.Ialltoallv(in_parts(source, _sizes(tensors)), in_parts(buffer, _sizes(outputs))),
        lambda: deliver_parts(buffer, outputs),
    )


def all_to_all_single(
    comm: MPI.Intracomm, output: Tensor, tensor: Tensor, receives: Sequence[int], sends: Sequence[int]
) -> Transfer:
    """Send each rank its rows of ``tensor``, and fill ``output`` with what each rank sends; no splits are even ones."""
    _check_parts("output", [output], 1, tensor.dtype)
    incoming, outgoing = _split(output, receives, comm.size), _split(tensor, sends, comm.size)
    buffer = receivable(output)
    source = apart(sendable(tensor), buffer)
    return Transfer(
        lambda: comm.Ialltoallv(in_parts(source, outgoing), in_parts(buffer, incoming)), lambda: deliver(buffer, output)
    )


def barrier(comm: MPI.Intracomm) -> Transfer:
    """Wait for all ranks."""
    return Transfer(comm.Ibarrier)


def send(comm: MPI.Intracomm, tensor: Tensor, peer: int, tag: int) -> Transfer:
    """Send a tensor to one rank; it has been sent when that one receives it, however short it is, as with gloo."""
    _check_tag(tag)
    source = sendable(tensor)
    return Transfer(lambda: comm.Issend(raw(source), peer, tag), peer=peer)


def receive(comm: MPI.Intracomm, tensor: Tensor, peer: int | None, tag: int) -> Transfer:
    """Fill a tensor with what one rank sends, or any rank if ``peer`` is ``None``."""
    from mpi4py import MPI

    _check_tag(tag)
    buffer, source = receivable(tensor), MPI.ANY_SOURCE if peer is None else peer
    return Transfer(
        lambda: comm.Irecv(raw(buffer), source, tag),
        lambda: deliver(buffer, tensor),
        peer=peer,
        expected=tensor.numel() * tensor.element_size(),
    )


def _room_for(tensors: Sequence[Tensor]) -> Tensor:
    return torch.empty(sum(_sizes(tensors)), dtype=tensors[0].dtype)


def _sizes(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor.numel() for tensor in tensors]


def _split(tensor: Tensor, rows: Sequence[int], size: int) -> list[int]:
    """Count the elements of each rank's rows."""
    length = tensor.shape[0]
    rows = rows or [length // size] * size
    if len(rows) != size or sum(rows) != length:
        raise ValueError(f"split sizes must be {size} that add up to the {length} rows of the tensor, got {list(rows)}")
    width = tensor.numel() // length if length else 0
    return [count * width for count in rows]


def _check_parts(name: str, tensors: Sequence[Tensor], size: int, dtype: torch.dtype) -> None:
    if len(tensors) != size:
        raise ValueError(f"{name} must have a tensor for each of the {size} ranks, got {len(tensors)}")
    for tensor in tensors:
        if tensor.dtype != dtype:
            raise ValueError(f"{name} must have the dtype of the other side, {dtype}, got {tensor.dtype}")


def _check_sizes(name: str, size: int, other: str, other_size: int) -> None:
    if size != other_size:
        raise ValueError(f"{name} must have as many elements as {other}, {other_size}, got {size}")


def _check_tag(tag: int) -> None:
    if not 0 <= tag < farewell_tag():
        raise ValueError(f"tag must be in [0, {farewell_tag()}), got {tag}")
