"""All ranks get the sum, or another reduction, of what each has."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import camshaft.distributed as idist
from camshaft.distributed.job import current
from tests.distributed.checking import check, equal, here, place, same

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGER = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
DTYPES = (*FLOATING, *INTEGER, torch.bool)
REDUCTIONS: dict[str, Callable[[Sequence[int]], Any]] = {
    "SUM": sum,
    "PRODUCT": math.prod,
    "MIN": min,
    "MAX": max,
    "AND": lambda numbers: functools.reduce(operator.and_, numbers),
    "OR": lambda numbers: functools.reduce(operator.or_, numbers),
}
BITWISE = ("AND", "OR")


def of_rank(rank: int, dtype: torch.dtype) -> Tensor:
    """Make a tensor that differs over the ranks, exact in every dtype, also when four are multiplied."""
    return torch.tensor([[rank + 1, 2, 0], [rank % 2, 3 - rank % 3, 1]]).to(dtype)


def known(ops: Iterable[str]) -> list[str]:
    """Yield the reductions that the backend supports, on all ranks in the same order."""
    return [op for op in ops if op in current().reductions]


def over_ranks(op: str, dtype: torch.dtype) -> Tensor:
    """Reduce the tensors of all ranks, one number at a time."""
    rows = [of_rank(rank, torch.int64).flatten().tolist() for rank in range(idist.get_world_size())]
    return torch.tensor([REDUCTIONS[op](numbers) for numbers in zip(*rows, strict=True)]).view(2, 3).to(dtype)


@check
def all_reduce_adds_tensors_of_every_dtype_in_place() -> None:
    for dtype in (*FLOATING, *INTEGER):
        tensor = here(of_rank(idist.get_rank(), dtype))
        assert idist.all_reduce(tensor) is tensor
        same(tensor, over_ranks("SUM", dtype))


@check
def all_reduce_knows_each_reduction_that_the_backend_names() -> None:
    assert {"SUM", "PRODUCT", "MIN", "MAX"} <= set(current().reductions)
    for op in known(REDUCTIONS):
        for dtype in INTEGER if op in BITWISE else (torch.float32, torch.bfloat16, *INTEGER):
            tensor = here(of_rank(idist.get_rank(), dtype))
            idist.all_reduce(tensor, op)
            same(tensor, over_ranks(op, dtype))


@check
def all_reduce_takes_bools_for_truth_values() -> None:
    rank, size = place()
    for op, wanted in (
        ("SUM", [True, True, False]),
        ("PRODUCT", [True, size == 1, False]),
        ("MAX", [True, True, False]),
        ("MIN", [True, size == 1, False]),
        ("OR", [True, True, False]),
        ("AND", [True, size == 1, False]),
    ):
        if op in current().reductions:
            tensor = here(torch.tensor([True, rank == 0, False]))
            assert idist.all_reduce(tensor, op) is tensor
            same(tensor, torch.tensor(wanted))
            same(tensor.view(torch.uint8), torch.tensor(wanted, dtype=torch.uint8))  # and no other byte in it


@check
def all_reduce_refuses_an_op_that_the_backend_does_not_name() -> None:
    for op in ("sum", "MEAN", "", None):
        for value in (torch.ones(2), 1):
            with pytest.raises(ValueError, match=r"op must be one of .*'SUM'"):
                idist.all_reduce(value, op)  # type: ignore[arg-type]  # None is none
    with pytest.raises(ValueError, match="op must be one of"):
        idist.reduce(1, op="sum")
    with pytest.raises(ValueError, match="op must be one of"):
        idist.reduce_scatter(torch.ones(idist.get_world_size()), op="sum")


@check
def all_reduce_refuses_to_take_floating_point_for_bits() -> None:
    for op in known(BITWISE):
        for dtype in (torch.float32, torch.complex64):
            with pytest.raises(TypeError, match=f"op '{op}' is for integers and bools, got a tensor of {dtype}"):
                idist.all_reduce(here(torch.ones(2, dtype=dtype)), op)


@check
def all_reduce_refuses_what_is_neither_tensor_nor_number() -> None:
    for value in ("text", None, [1.0]):
        with pytest.raises(TypeError, match="tensor must be a tensor or a number"):
            idist.all_reduce(value)


def awkward(value: float) -> Iterator[Tensor]:
    """Yield tensors of shape (2, 3) that are not contiguous or require gradients."""
    yield here(torch.full((3, 2), value)).t()
    yield here(torch.full((2, 6), value))[:, ::2]
    yield here(torch.full((4, 3), value))[1:3]
    yield here(torch.full((2, 3), value)).requires_grad_()


@check
def all_reduce_leaves_the_neighbours_of_a_view_alone() -> None:
    size = idist.get_world_size()
    whole = here(torch.arange(6.0))
    idist.all_reduce(whole[2:4])
    same(whole, torch.tensor([0.0, 1.0, 2.0 * size, 3.0 * size, 4.0, 5.0]))


@check
def all_reduce_keeps_whole_numbers_whole_and_exact() -> None:
    rank, size = place()
    equal(idist.all_reduce(2**53 + 1), size * (2**53 + 1))
    equal(idist.all_reduce(2**53 + 1 + rank, "MAX"), 2**53 + size)
    equal(idist.all_reduce(-rank, "MIN"), 1 - size)
    equal(idist.all_reduce(rank + 1, "PRODUCT"), math.factorial(size))
    for op in known(BITWISE):
        equal(idist.all_reduce(rank + 4, op), REDUCTIONS[op]([other + 4 for other in range(size)]))


@check
def all_reduce_keeps_floating_point_numbers_in_double_precision() -> None:
    rank, size = place()
    equal(idist.all_reduce(rank + 2.0**-40), sum(range(size)) + size * 2.0**-40)
    equal(idist.all_reduce(0.1 * (rank + 1), "MAX"), 0.1 * size)
    equal(idist.all_reduce(math.inf if rank == 0 else 0.0, "MAX"), math.inf)


@check
def all_reduce_counts_bools() -> None:
    rank, size = place()
    assert idist.all_reduce(True) == size
    assert idist.all_reduce(rank == 0) == 1
    assert idist.all_reduce(rank == 0, "MIN") == (size == 1)
