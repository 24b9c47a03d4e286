"""One rank gets what all have, and all get their part of what one, or each, has."""

from __future__ import annotations

import pytest
import torch

import camshaft.distributed as idist
from tests.distributed.check_gathers import VALUES
from tests.distributed.check_reductions import (
    BITWISE,
    DTYPES,
    FLOATING,
    INTEGER,
    REDUCTIONS,
    awkward,
    known,
    of_rank,
    over_ranks,
)
from tests.distributed.checking import check, equal, here, in_turn, place, same


@check
def reduce_gives_the_result_to_one_rank_and_leaves_the_tensor_alone() -> None:
    rank = idist.get_rank()
    ops = [(op, dtype) for op in known(REDUCTIONS) for dtype in (INTEGER if op in BITWISE else (*FLOATING, *INTEGER))]
    for dst, (op, dtype) in in_turn(ops):
        tensor = here(of_rank(rank, dtype))
        got = idist.reduce(tensor, dst, op)
        same(tensor, of_rank(rank, dtype))
        assert (got is None) == (rank != dst)
        if got is not None:
            assert got.device == tensor.device
            same(got, over_ranks(op, dtype))


@check
def reduce_takes_numbers() -> None:
    rank, size = place()
    for dst in range(size):
        equal(idist.reduce(2**53 + 1, dst), size * (2**53 + 1) if rank == dst else None)
        equal(idist.reduce(0.1 * (rank + 1), dst, "MAX"), 0.1 * size if rank == dst else None)
    with pytest.raises(TypeError, match="tensor must be a tensor or a number"):
        idist.reduce("text")


@check
def scatter_gives_every_rank_its_own_tensor() -> None:
    rank, size = place()
    for src, dtype in in_turn(DTYPES):
        tensors = [here(of_rank(other, dtype)) for other in range(size)]
        same(idist.scatter(tensors if rank == src else None, src), of_rank(rank, dtype))
    shapes = [(size - other, other) for other in range(size)]
    got = idist.scatter([torch.full(shape, 1.5, requires_grad=True) for shape in shapes] if rank == 0 else None)
    assert not got.requires_grad
    same(got, torch.full(shapes[rank], 1.5))
    same(idist.scatter([torch.tensor(other) for other in range(size)]), torch.tensor(rank))


@check
def scatter_gives_every_rank_its_own_value() -> None:
    rank, size = place()
    for src, value in in_turn([*VALUES, *["ü" * 500] * size]):
        values = [(other, value) for other in range(size)] if rank == src else None
        equal(idist.scatter(values, src), (rank, value))


@check
def reduce_scatter_gives_each_rank_its_part_of_the_result() -> None:
    rank, size = place()
    for op in known(REDUCTIONS):
        for dtype in (*FLOATING, *INTEGER) if op == "SUM" else (torch.int32,):
            tensor = here(of_rank(rank, dtype).repeat(size, 2))  # two rows for each rank
            same(idist.reduce_scatter(tensor, op), over_ranks(op, dtype).repeat(1, 2))
            same(tensor, of_rank(rank, dtype).repeat(size, 2))
    rows = here(torch.arange(float(size)))
    same(idist.reduce_scatter(rows + rank), torch.tensor([rank * size + sum(range(size))], dtype=torch.float32))


@check
def reduce_scatter_takes_tensors_however_they_lie_in_memory() -> None:
    rank, size = place()
    for tensor in awkward(float(rank)):
        whole = tensor.repeat(1, size).t()
        same(idist.reduce_scatter(whole), torch.full((3, 2), float(sum(range(size)))))
    same(idist.reduce_scatter(here(torch.empty(0, 3))), torch.empty(0, 3))


@check
def reduce_scatter_refuses_what_cannot_be_cut_into_equal_parts() -> None:
    size = idist.get_world_size()
    for value in (torch.tensor(1.0), 1.0, *([torch.ones(size + 1, 2)] if size > 1 else ())):
        with pytest.raises(ValueError, match=f"first dimension is a multiple of {size}"):
            idist.reduce_scatter(value)


@check
def all_to_all_exchanges_tensors() -> None:
    rank, size = place()
    for dtype in DTYPES:
        tensors = [here(of_rank(rank + other, dtype)) for other in range(size)]
        for other, got in enumerate(idist.all_to_all(tensors)):
            same(got, of_rank(rank + other, dtype))
    shapes = [[(one, 3 * two) for two in range(size)] for one in range(size)]  # from one to two
    sent = [torch.full(shapes[rank][other], rank) for other in range(size)]
    for other, got in enumerate(idist.all_to_all(sent)):
        same(got, torch.full(shapes[other][rank], other))


@check
def all_to_all_exchanges_values() -> None:
    rank, size = place()
    for value in VALUES:
        got = idist.all_to_all([(rank, other, value) for other in range(size)])
        equal(got, [(other, rank, value) for other in range(size)])
    got = idist.all_to_all(["ü" * 500 * rank * other for other in range(size)])
    equal(got, ["ü" * 500 * rank * other for other in range(size)])
    equal(idist.all_to_all([rank if other else str(rank) for other in range(size)])[0], 0 if rank else "0")


@check
def scatter_and_all_to_all_refuse_another_number_of_values_than_ranks() -> None:
    size = idist.get_world_size()
    for count in {0, size - 1, size + 1}:
        with pytest.raises(ValueError, match=f"values must hold {size} values?, one for each rank"):
            idist.all_to_all([1] * count)
    for values in (None, [], [1, 2]) if size == 1 else ():
        with pytest.raises(ValueError, match="values must hold 1 value, one for each rank"):
            idist.scatter(values)
