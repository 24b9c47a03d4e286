"""All ranks get what one of them has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import camshaft.distributed as idist
from tests.distributed.check_gathers import VALUES
from tests.distributed.check_reductions import DTYPES, awkward, of_rank
from tests.distributed.checking import check, equal, here, in_turn, place, same


@check
def broadcast_overwrites_tensors_of_every_dtype_in_place() -> None:
    rank = idist.get_rank()
    for src, dtype in in_turn(DTYPES):
        tensor = here(of_rank(rank, dtype))
        assert idist.broadcast(tensor, src) is tensor
        same(tensor, of_rank(src, dtype))


@check
def broadcast_and_all_reduce_work_in_place_however_the_tensor_lies_in_memory() -> None:
    rank, size = place()
    total = float(sum(range(size)))
    calls: list[tuple[Callable[[Tensor], Tensor], float]] = [
        (lambda tensor: idist.broadcast(tensor, size - 1), size - 1.0),
        (idist.all_reduce, total),
    ]
    for call, wanted in calls:
        numbers = here(torch.tensor(float(rank))), torch.full((3,), float(rank))  # the second one on the CPU
        for tensor in (*awkward(float(rank)), here(torch.empty(0, 3)), *numbers):
            watched, device = tensor.requires_grad, tensor.device
            got = call(tensor)
            assert got is tensor or device != idist.device()
            assert (got.requires_grad, got.grad_fn, got.device) == (watched, None, device)
            same(got, torch.full(tensor.shape, wanted))


@check
def broadcast_keeps_type_and_value_of_everything_else() -> None:
    for src, value in in_turn(VALUES):
        if value is not None:
            equal(idist.broadcast(value, src), value)


@check
def broadcast_gives_the_value_of_its_source_not_of_this_rank() -> None:
    rank, size = place()
    for src in range(size):
        for of in (
            *(lambda one: one, lambda one: one / 3, lambda one: "ü" * 700 * one),
            *(lambda one: Path(str(one)), lambda one: {"rank": [one]}),
        ):
            equal(idist.broadcast(of(rank), src), of(src))


@check
def broadcast_in_safe_mode_asks_nothing_of_the_other_ranks() -> None:
    rank, size = place()
    elsewhere: tuple[Any, ...] = (None, "text", 1.5, torch.ones(7), object(), {"k": rank})
    for src, value in in_turn(VALUES):
        if value is not None:
            equal(idist.broadcast(value if rank == src else None, src, safe_mode=True), value)
    for src in range(size):
        for other in elsewhere:
            equal(idist.broadcast(("from", src) if rank == src else other, src, safe_mode=True), ("from", src))


@check
def broadcast_in_safe_mode_tells_shape_and_dtype_of_a_tensor() -> None:
    rank, size = place()
    elsewhere: tuple[Any, ...] = (1.5, torch.ones(7), object())
    shapes = torch.tensor(1.5), torch.empty(2, 0), torch.full((1, 2, 1, 3), 7).mT, torch.arange(999)
    for src, tensor in in_turn([*(of_rank(0, dtype) for dtype in DTYPES), *shapes]):
        mine = here(tensor) if rank == src else None
        got = idist.broadcast(mine, src, safe_mode=True)
        same(got, tensor)
        assert got is mine or rank != src
    for src in range(size):
        for other in elsewhere:
            got = idist.broadcast(here(torch.arange(src)) if rank == src else other, src, safe_mode=True)
            same(got, torch.arange(src))


@check
def broadcast_refuses_none_where_a_value_is_needed() -> None:
    rank, size = place()
    for src in range(size):
        with pytest.raises(ValueError, match="tensor must not be None"):
            idist.broadcast(None, src)
    if size == 1:
        with pytest.raises(ValueError, match="tensor must not be None"):
            idist.broadcast(None, rank, safe_mode=True)
