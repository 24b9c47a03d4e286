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
def all_reduce_knows_each_reduction_that_the_backend_names_in_place() -> None:
    assert {"SUM", "PRODUCT", "MIN", "MAX"} <= set(current().reductions)
    for op in known(REDUCTIONS):
        for dtype in INTEGER if op in BITWISE else (*FLOATING, *INTEGER):
            tensor = here(of_rank(idist.get_rank(), dtype))
            assert idist.all_reduce(tensor, op) is tensor
            same(tensor, over_ranks(op, dtype))


@check
def all_reduce_takes_bools_for_truth_values() -> None:
    rank, size = place()
    any_of_them, all_of_them = [True, True, False], [True, size == 1, False]
    for op in known(REDUCTIONS):
        wanted = torch.tensor(any_of_them if op in ("SUM", "MAX", "OR") else all_of_them)
        tensor = here(torch.tensor([True, rank == 0, False]))
        assert idist.all_reduce(tensor, op) is tensor
        same(tensor, wanted)
        same(tensor.view(torch.uint8), wanted.to(torch.uint8))  # and no other byte in it


@check
def all_reduce_refuses_what_it_cannot_reduce() -> None:
    for op in ("sum", "MEAN", None):
        for call in (idist.all_reduce, lambda value, op: idist.reduce(value, op=op), idist.reduce_scatter):
            with pytest.raises(ValueError, match=r"op must be one of .*'SUM'"):
                call(torch.ones(idist.get_world_size()), op)
        with pytest.raises(ValueError, match=r"op must be one of .*'SUM'"):
            idist.all_reduce(1, op)  # type: ignore[arg-type]  # None is none
    for op in known(BITWISE):
        for dtype in (torch.float32, torch.complex64):
            with pytest.raises(TypeError, match=f"op '{op}' is for integers and bools, got a tensor of {dtype}"):
                idist.all_reduce(here(torch.ones(2, dtype=dtype)), op)
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
def all_reduce_keeps_numbers_exact_and_in_their_kind() -> None:
    rank, size = place()
    equal(idist.all_reduce(2**53 + 1), size * (2**53 + 1))
    equal(idist.all_reduce(2**53 + 1 + rank, "MAX"), 2**53 + size)
    equal(idist.all_reduce(-rank, "MIN"), 1 - size)
    equal(idist.all_reduce(rank + 1, "PRODUCT"), math.factorial(size))
    for op in known(BITWISE):
        equal(idist.all_reduce(rank + 4, op), REDUCTIONS[op]([other + 4 for other in range(size)]))
    equal(idist.all_reduce(rank + 2.0**-40), sum(range(size)) + size * 2.0**-40)
    equal(idist.all_reduce(0.1 * (rank + 1), "MAX"), 0.1 * size)
    equal(idist.all_reduce(math.inf if rank == 0 else 0.0, "MAX"), math.inf)
    assert idist.all_reduce(True) == size
    assert idist.all_reduce(rank == 0) == 1
    assert idist.all_reduce(rank == 0, "MIN") == (size == 1)
