"""All ranks get what each of them has."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import camshaft.distributed as idist
from tests.distributed.check_reductions import DTYPES, awkward, of_rank
from tests.distributed.checking import check, equal, here, in_turn, place, same

LONG = "größer 漢字 " * 10_000
VALUES: list[Any] = [
    *(0, 1, -3, 2**53 + 1, -(2**63), 2**70),
    *(0.1, -0.0, float("inf"), 1e-320),
    *(True, False, None, 2j),
    *("", "text", "größer 漢字 🙂", "a\0b", LONG),
    *(b"", b"\0\xff" * 3, Path("folder") / "größe.pt", torch.float16, torch.Size([2, 3])),
    *((), (1, "a"), [None, [2.5, {"k": [None, LONG]}]], {"k": (1, {2})}, OrderedDict(b=1, a=2), {3, 4}),
]


@check
def all_gather_joins_tensors_of_every_dtype_along_the_first_dimension() -> None:
    rank, size = place()
    for dtype in DTYPES:
        tensor = here(of_rank(rank, dtype))
        got = idist.all_gather(tensor)
        assert got.device == tensor.device
        same(got, torch.cat([of_rank(other, dtype) for other in range(size)]))
        same(tensor, of_rank(rank, dtype))


@check
def all_gather_takes_tensors_of_any_shape_however_they_lie_in_memory() -> None:
    rank, size = place()
    for tensor in awkward(float(rank)):
        got = idist.all_gather(tensor)
        same(got, torch.arange(float(size)).repeat_interleave(2)[:, None].expand(-1, 3))
    same(idist.all_gather(torch.tensor([rank])), torch.arange(size))  # from the CPU, whatever the device is
    got = idist.all_gather(here(torch.tensor(rank)))
    same(got, torch.tensor(rank) if idist.backend() is None else torch.arange(size))
    for dtype in (torch.float32, torch.int64):
        same(idist.all_gather(here(torch.empty(0, 3, dtype=dtype))), torch.empty(0, 3, dtype=dtype))
        same(idist.all_gather(here(torch.empty(2, 0, dtype=dtype))), torch.empty(2 * size, 0, dtype=dtype))


@check
def all_gather_keeps_type_and_value_of_everything_else() -> None:
    rank, size = place()
    for value in VALUES:
        for got in idist.all_gather(value):
            equal(got, value)
        equal(idist.all_gather((rank, value)), [(other, value) for other in range(size)])


@check
def all_gather_takes_values_of_different_lengths_and_kinds() -> None:
    rank, size = place()
    of_each: list[Callable[[int], Any]] = [
        *(lambda other: other, lambda other: 2**53 + other, lambda other: other / 3, lambda other: other == 0),
        *(lambda other, length=length: "ü" * length * other for length in (1, 200, 30_000)),
        lambda other: LONG if other == 0 else "",
        lambda other: None if other == 0 else other,
        lambda other: [0] * 9999 if other == size - 1 else "x",
    ]
    for value_of in of_each:
        equal(idist.all_gather(value_of(rank)), [value_of(other) for other in range(size)])


@check
def all_gather_takes_objects_with_tensors_in_them_but_none_that_cannot_be_pickled() -> None:
    rank, size = place()
    got = idist.all_gather({"weights": torch.full((rank, 2), rank), "names": [f"of {rank}"]})
    for other in range(size):
        same(got[other]["weights"], torch.full((other, 2), other))
        equal(got[other]["names"], [f"of {other}"])
    with pytest.raises(TypeError, match="picklable"):
        idist.all_gather(lambda: 1)


@check
def all_gather_with_shapes_takes_tensors_of_different_shapes() -> None:
    rank, size = place()
    for shapes in (
        [(other + 1, size - other) for other in range(size)],
        [(other,) for other in range(size)],  # rank 0 has nothing
        [(2, 3)] * size,
        [(1, other % 2 + 1, 2) for other in range(size)],
        [()] * size,
        [(0, 2)] * size,
    ):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
            tensor = here(torch.full(shapes[rank], rank, dtype=dtype))
            got = idist.all_gather_tensors_with_shapes(tensor, shapes)
            assert len(got) == size
            for other, one in enumerate(got):
                assert one.device == tensor.device
                same(one, torch.full(shapes[other], other, dtype=dtype))


@check
def all_gather_with_shapes_refuses_shapes_that_do_not_fit() -> None:
    rank, size = place()
    shapes = [(2, 1)] * size
    with pytest.raises(ValueError, match=r"shapes must hold \d values?, one for each rank"):
        idist.all_gather_tensors_with_shapes(torch.ones(2, 1), [*shapes, (2, 1)])
    with pytest.raises(ValueError, match=r"shapes must hold this rank's shape"):
        idist.all_gather_tensors_with_shapes(torch.ones(1, 2), shapes)
    for wrong in (5, [2] * size, [None] * size, [(2, 1.0)] * size):
        with pytest.raises(TypeError, match=r"shapes must hold a shape for each rank, as \(2, 3\), got"):
            idist.all_gather_tensors_with_shapes(torch.ones(2, 1), wrong)  # type: ignore[arg-type]  # what is refused
    if size > 1:
        with pytest.raises(ValueError, match="shapes must all have 2 dimensions"):
            idist.all_gather_tensors_with_shapes(torch.ones(2, 1), [*shapes[1:], (2,)])
    with pytest.raises(TypeError, match="tensor must be a tensor"):
        idist.all_gather_tensors_with_shapes(float(rank), shapes)  # type: ignore[arg-type]  # what is refused


@check
def gather_gives_one_rank_what_all_have() -> None:
    rank, size = place()
    for dst, dtype in in_turn(DTYPES):
        got = idist.gather(here(of_rank(rank, dtype)), dst)
        if rank == dst:
            same(got, torch.cat([of_rank(other, dtype) for other in range(size)]))
        else:
            assert got is None
    for dst in range(size):
        for value in (rank, f"of {rank}", {"rank": [rank]}, "ü" * 1000 * rank):
            values = idist.gather((rank, value), dst)
            assert values is None if rank != dst else values[rank] == (rank, value) and len(values) == size
