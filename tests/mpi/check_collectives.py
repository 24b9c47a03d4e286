"""Collectives for tensors of every dtype and layout."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from functools import reduce

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.checking import check
from tests.mpi.checking import place, same

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
INTEGER = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
EVERY = (*FLOATING, *COMPLEX, *INTEGER, torch.bool)
REDUCIBLE = (*FLOATING, *COMPLEX, *INTEGER[:5], torch.bool)  # torch cannot sum the others
Op = dist.ReduceOp


def of_rank(rank: int, dtype: torch.dtype, length: int = 3) -> Tensor:
    """Return a tensor that differs between ranks, with values so small that the product of four ranks fits an int8."""
    numbers = torch.tensor([(rank + index) % 3 for index in range(length)])
    return (numbers * (1.5 + 0.5j if dtype.is_complex else 1)).to(dtype)


def of_all(dtype: torch.dtype, length: int = 3) -> list[Tensor]:
    return [of_rank(rank, dtype, length) for rank in range(dist.get_world_size())]


def total(tensors: list[Tensor]) -> Tensor:
    """Sum in a wider dtype, as MPI does for half precision."""
    dtype = tensors[0].dtype
    wide = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.bool: torch.int32}.get(dtype, dtype)
    return sum(tensor.to(wide) for tensor in tensors).to(dtype)


@check
def tensors_of_every_dtype_are_summed() -> None:
    rank, size = place()
    for dtype in REDUCIBLE:
        tensor = of_rank(rank, dtype)
        dist.all_reduce(tensor)
        same(tensor, total(of_all(dtype)))
        tensor = of_rank(rank, dtype)
        dist.reduce(tensor, dst=size - 1)
        same(tensor, total(of_all(dtype)) if rank == size - 1 else of_rank(rank, dtype))
        mine, output = of_rank(rank, dtype, 3 * size), torch.empty(3, dtype=dtype)
        wanted = total(of_all(dtype, 3 * size))[3 * rank : 3 * rank + 3]
        dist.reduce_scatter(output, list(mine.chunk(size)))
        same(output, wanted)
        dist.reduce_scatter_tensor(output.zero_(), mine)
        same(output, wanted)


@check
def tensors_of_every_dtype_are_moved() -> None:
    rank, size = place()
    for dtype in EVERY:
        mine, everything = of_rank(rank, dtype), of_all(dtype)
        for src in range(size):
            tensor = mine.clone()
            dist.broadcast(tensor, src)
            same(tensor, everything[src])
        parts = [torch.empty(3, dtype=dtype) for _ in range(size)]
        dist.all_gather(parts, mine)
        same(torch.stack(parts), torch.stack(everything))
        joined = torch.empty(3 * size, dtype=dtype)
        dist.all_gather_into_tensor(joined, mine)
        same(joined, torch.cat(everything))
        for part in parts:
            part.zero_()
        output = torch.empty(3, dtype=dtype)
        dist.gather(mine, parts if rank == 1 else None, dst=1)
        dist.scatter(output, parts if rank == 1 else None, src=1)
        same(output, mine)
        output = torch.empty(size, dtype=dtype)
        dist.all_to_all_single(output, of_rank(rank, dtype, size))
        same(output, torch.stack([part[rank] for part in of_all(dtype, size)]))


@check
def half_precision_is_summed_in_a_wider_dtype() -> None:
    rank, size = place()
    tensor = torch.tensor([256.0 if rank == 0 else 0.75], dtype=torch.bfloat16)
    dist.all_reduce(tensor)
    same(tensor, torch.tensor([256 + 0.75 * (size - 1)]).to(torch.bfloat16))


@check
def every_operation_reduces() -> None:
    rank, size = place()
    ranks = range(size)
    for op, wanted in (
        (Op.SUM, sum(ranks) + size),
        (Op.PRODUCT, reduce(operator.mul, (rank + 1 for rank in ranks))),
        (Op.MIN, 1),
        (Op.MAX, size),
        (Op.BAND, reduce(operator.and_, (rank + 1 for rank in ranks))),
        (Op.BOR, reduce(operator.or_, (rank + 1 for rank in ranks))),
        (Op.BXOR, reduce(operator.xor, (rank + 1 for rank in ranks))),
    ):
        tensor = torch.tensor([rank + 1])
        dist.all_reduce(tensor, op)
        same(tensor, torch.tensor([wanted]))


@check
def floating_point_and_complex_tensors_are_averaged() -> None:
    for dtype in (*FLOATING, *COMPLEX):
        tensor = of_rank(dist.get_rank(), dtype)
        dist.all_reduce(tensor, Op.AVG)
        wide = torch.complex64 if dtype.is_complex else torch.float32
        wanted = (total(of_all(wide)) / dist.get_world_size()).to(dtype)
        same(tensor, wanted)
        output = torch.empty(3, dtype=dtype)
        dist.reduce_scatter_tensor(output, of_rank(dist.get_rank(), dtype).repeat(dist.get_world_size()), Op.AVG)
        same(output, wanted)


@check
def bools_are_reduced_logically() -> None:
    rank, size = place()
    for op, wanted in (
        (Op.SUM, [True, True]),
        (Op.PRODUCT, [True, False]),
        (Op.MIN, [True, False]),
        (Op.BXOR, [size % 2 == 1, True]),
    ):
        tensor = torch.tensor([True, rank == 0])
        dist.all_reduce(tensor, op)
        same(tensor, torch.tensor(wanted))


@check
def what_mpi_cannot_do_is_refused_before_communicating() -> None:
    world, size = dist.group.WORLD, dist.get_world_size()
    for op, dtype, message in (
        (Op.AVG, torch.int64, "op must be one of SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR for tensors of torch.int64"),
        (Op.BAND, torch.float32, "got BAND"),
        (Op.MAX, torch.complex64, "got MAX"),
        (dist._make_nccl_premul_sum(2.0), torch.float32, "got PREMUL_SUM"),
        (Op.SUM, torch.float8_e5m2, "MPI can reduce only tensors of"),
    ):
        options = dist.AllreduceOptions()
        options.reduceOp = op
        with pytest.raises(ValueError, match=message):
            world.allreduce([torch.ones(2).to(dtype)], options)
    numbers = torch.empty(2 * size, dtype=torch.int64)
    for call, message in (
        (lambda: dist.broadcast(torch.eye(2).to_sparse(), src=0), r"tensor must be dense .* torch.sparse_coo"),
        (
            lambda: world.allgather([[torch.empty(3)] * (size + 1)], [torch.empty(3)]),
            rf"must be split into {size} parts, one for each rank, which add up to \d+, got parts",
        ),
        (
            lambda: world.all_gather_single(torch.empty(2 * size), torch.empty(1)),
            "must have the elements of its output, 2 of torch.float32, got 1 of",
        ),
        (lambda: world.all_gather_single(numbers, torch.empty(2)), "output, 2 of torch.int64, got 2 of torch.float32"),
        (
            lambda: dist.all_to_all_single(torch.empty(3), torch.empty(3), [5] * size, [3] * size),
            f"3 elements must be split into {size} parts",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def awkward(value: float) -> Iterator[Tensor]:
    """Yield tensors of shape (2, 3) that are not contiguous, need resolving, or require gradients."""
    yield torch.full((3, 2), value).t()
    yield torch.full((2, 6), value)[:, ::2]
    yield torch.full((2, 3), value, requires_grad=True)
    yield torch._neg_view(torch.full((2, 3), -value))  # torch negates it when it is read
    yield torch.full((2, 3, 2, 2), value).to(memory_format=torch.channels_last)[..., 0, 0]


@check
def tensors_of_any_layout_are_reduced_gathered_and_broadcast() -> None:
    rank, size = place()
    for tensor, *parts in zip(awkward(float(rank)), *(awkward(-1.0) for _ in range(size)), strict=True):
        dist.all_gather(parts, tensor)
        for index, part in enumerate(parts):
            same(part, torch.full((2, 3), float(index)))
        dist.all_reduce(tensor)
        same(tensor, torch.full((2, 3), float(sum(range(size)))))
        dist.broadcast(parts[rank], src=1)
        same(parts[rank], torch.ones(2, 3))


@check
def empty_tensors_are_communicated() -> None:
    tensor = torch.empty(0, 3)
    dist.all_reduce(tensor)
    dist.broadcast(tensor, src=0)
    output = torch.empty(0, 3)
    dist.all_gather_into_tensor(output, tensor)
    assert output.shape == (0, 3)


@check
def all_gather_accepts_tensors_of_different_sizes() -> None:
    rank, size = place()
    parts = [torch.empty(index + 1) for index in range(size)]
    dist.all_gather(parts, torch.full((rank + 1,), float(rank)))
    for index, part in enumerate(parts):
        same(part, torch.full((index + 1,), float(index)))


@check
def input_and_output_may_share_memory() -> None:
    rank, size = place()
    output = torch.zeros(size, 5)
    output[rank] = rank + 1
    dist.all_gather_into_tensor(output, output[rank])
    same(output, torch.arange(1.0, size + 1).repeat_interleave(5).view(size, 5))
    tensor = torch.arange(float(size)).repeat(1)
    dist.reduce_scatter_tensor(tensor[rank : rank + 1], tensor)
    assert tensor[rank] == rank * size


@check
def all_to_all_accepts_chunks_of_different_sizes() -> None:
    rank, size = place()
    output = torch.empty((rank + 1) * size, 2)
    rows = torch.cat([torch.full((index + 1, 2), float(rank)) for index in range(size)])
    dist.all_to_all_single(output, rows, [rank + 1] * size, [index + 1 for index in range(size)])
    same(output, torch.arange(float(size)).repeat_interleave(rank + 1)[:, None].expand(-1, 2))
    parts = [torch.empty(rank + 1, 2) for _ in range(size)]
    dist.all_to_all(parts, [torch.full((index + 1, 2), float(rank)) for index in range(size)])
    for index, part in enumerate(parts):
        same(part, torch.full((rank + 1, 2), float(index)))
