"""Tensors of dtypes that gloo does not support: the result is the one that their own dtype would give."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import camshaft.distributed as idist
from camshaft.distributed.backends.dtypes import FLOAT8
from camshaft.distributed.backends.torch_distributed import NativeBackend
from camshaft.distributed.collectives.values import bytes_of, check_reduction
from camshaft.distributed.job import current
from tests.ranks import on_ranks

UNKNOWN = (torch.int16, torch.uint16, torch.uint32, torch.uint64)  # to gloo
BITS = {torch.int16: 16, torch.uint16: 16, torch.uint32: 32, torch.uint64: 64}
WANTED = {
    "SUM": lambda one, other: one + other,
    "PRODUCT": lambda one, other: one * other,
    "MIN": min,
    "MAX": max,
    "AND": lambda one, other: one & other,
    "OR": lambda one, other: one | other,
}


def numbers_of(rank, dtype):
    """Return four numbers; the sums of the greatest ones wrap around."""
    limits = torch.iinfo(dtype)
    return [[limits.max, 1, 3, limits.min], [limits.max - 1, 2, 5, limits.max]][rank]


def wrapped(number, dtype):
    """Wrap a number around as its dtype does."""
    number %= 2 ** BITS[dtype]
    return number - 2 ** BITS[dtype] if number > torch.iinfo(dtype).max else number


@on_ranks(2)
def test_integers_that_gloo_does_not_reduce():
    rank = idist.get_rank()
    for dtype in UNKNOWN:
        for op, reduced in WANTED.items():
            pairs = zip(numbers_of(0, dtype), numbers_of(1, dtype), strict=True)
            wanted = [wrapped(reduced(*pair), dtype) for pair in pairs]
            tensor = torch.tensor(numbers_of(rank, dtype), dtype=dtype)
            before = tensor.tolist()
            on_first = idist.reduce(tensor, op=op)
            part = idist.reduce_scatter(tensor, op)
            assert tensor.tolist() == before
            assert on_first is None if rank else (on_first.tolist(), on_first.dtype) == (wanted, dtype)
            assert (part.tolist(), part.dtype) == (wanted[2 * rank :][:2], dtype)
            assert idist.all_reduce(tensor, op) is tensor
            assert tensor.tolist() == wanted, (dtype, op)


@on_ranks(2)
def test_bools_stay_bools():
    rank = idist.get_rank()
    mine = torch.tensor([True, rank == 0, False, False])
    for op, wanted in (("SUM", [1, 1, 0, 0]), ("PRODUCT", [1, 0, 0, 0])):
        on_first, part = idist.reduce(mine, op=op), idist.reduce_scatter(mine, op)
        assert on_first is None if rank else on_first.view(torch.uint8).tolist() == wanted
        assert part.view(torch.uint8).tolist() == wanted[2 * rank :][:2]


@on_ranks(2)
def test_tensors_that_gloo_does_not_move():
    rank = idist.get_rank()
    for dtype in (*UNKNOWN, *FLOAT8, torch.complex64):
        for shape in ((), (3,), (2, 3), (0, 2)):
            mine, other = (torch.full(shape, number).to(dtype) for number in (rank + 1.0, 2.0 - rank))
            both = torch.stack([mine, other] if rank == 0 else [other, mine])
            joined = both.flatten(0, 1) if shape else both
            for got, wanted in (
                (idist.all_gather(mine), joined),
                (idist.gather(mine, dst=1), joined if rank == 1 else None),
                (idist.all_gather_tensors_with_shapes(mine, [shape, shape])[1], both[1]),
                (idist.broadcast(mine.clone(), src=1), both[1]),
                (idist.broadcast(mine, src=1, safe_mode=True), both[1]),
                (current().scatter(both if rank == 1 else None, torch.empty_like(mine), 1, None), mine),
                (current().all_to_all(both, [1, 1], [1, 1], None), torch.stack([mine, mine])),
            ):
                if wanted is None:
                    assert got is None
                else:
                    assert (got.dtype, got.shape) == (dtype, wanted.shape)
                    assert bytes_of(got) == bytes_of(wanted)


@on_ranks(2)
def test_what_cannot_be_reduced_is_refused_on_all_ranks():
    calls = idist.all_reduce, idist.reduce, idist.reduce_scatter
    tensor = torch.tensor([1 + 2j, 3j])
    for call in calls:
        for op in ("PRODUCT", "MIN", "MAX"):
            with pytest.raises(TypeError, match=f"op '{op}' is not supported for complex numbers"):
                call(tensor.clone(), op=op)
    assert idist.all_reduce(tensor).tolist() == [2 + 4j, 6j]
    assert FLOAT8
    for dtype in FLOAT8:
        for call in calls:
            with pytest.raises(TypeError, match=f"16 bits or more.* got {dtype}: convert it first") as caught:
                call(torch.ones(2).to(dtype))
            assert caught.value.__notes__[0].startswith(f"in {call.__name__} on rank ")
    assert idist.all_reduce(1) == 2  # all ranks are in step


@on_ranks(2)
def test_nccl_has_no_bitwise_reductions_of_tensors():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda group=None: "cpu:gloo,cuda:nccl")
        on_gpu, on_cpu = (NativeBackend(current().topology, torch.device(name)) for name in ("cuda", "cpu"))
    assert on_gpu.reductions == ("SUM", "PRODUCT", "MIN", "MAX")
    assert "AND" in on_cpu.reductions
    for op in ("AND", "OR"):
        with pytest.raises(ValueError, match=rf"op must be one of \('SUM', .*\) on native-dist, got '{op}'"):
            check_reduction(on_gpu, torch.ones(2, dtype=torch.int64), op)
        check_reduction(on_gpu, 3, op)  # numbers are gathered and reduced here
