"""Collectives over real gloo ranks, and in one process: the same answers, types and values kept."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import camshaft.distributed as idist
from camshaft.distributed import agreement
from camshaft.distributed.context import current
from camshaft.errors import RankDivergenceError
from tests.ranks import on_ranks

VALUES = [
    0,
    1,
    -3,
    2**53 + 1,
    2**70,
    0.1,
    float("inf"),
    True,
    "",
    "größer 漢字",
    "x" * 90_000,
    None,
    (1, "a"),
    {"k": [None, 2.5]},
]


def place():
    return idist.get_rank(), idist.get_world_size()


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:20])
def test_one_process_gives_every_value_back(value):
    assert idist.all_gather(value) == [value]
    assert type(idist.all_gather(value)[0]) is type(value)
    if value is not None:
        assert idist.broadcast(value) == value


@on_ranks(2)
def test_values_of_every_kind_keep_type_and_value():
    rank, size = place()
    for value in VALUES:
        mine = (rank, value)
        assert idist.all_gather(mine) == [(other, value) for other in range(size)]
        assert idist.all_gather(value) == [value] * size
        assert [type(one) for one in idist.all_gather(value)] == [type(value)] * size
        if value is not None:
            for source in range(size):
                got = idist.broadcast(value if rank == source else None, src=source, safe_mode=True)
                assert (got, type(got)) == (value, type(value))
    assert idist.all_gather("a" * 700 * rank) == ["a" * 700 * other for other in range(size)]
    assert idist.all_gather(1 if rank else 2.5) == [2.5, *[1] * (size - 1)]


@on_ranks(2)
def test_numbers_are_reduced_in_their_own_kind():
    rank, size = place()
    assert idist.all_reduce(2**40 + rank) == size * 2**40 + sum(range(size))
    assert isinstance(idist.all_reduce(1), int)
    assert idist.all_reduce(0.1 * (rank + 1), "MAX") == 0.1 * size
    assert idist.all_reduce(rank + 1, "PRODUCT") == 2
    assert idist.all_reduce(6 if rank else 3, "AND") == 2
    assert idist.reduce(rank + 1, dst=1) == (3 if rank == 1 else None)


@on_ranks(2)
def test_tensors_are_reduced_and_overwritten_in_place():
    rank, _ = place()
    tensor = torch.full((2, 3), float(rank))
    assert idist.all_reduce(tensor) is tensor
    assert tensor.tolist() == [[1.0] * 3] * 2
    strided = torch.full((3, 2), float(rank)).t()
    assert idist.all_reduce(strided) is strided
    assert strided.tolist() == [[1.0] * 3] * 2
    sent = torch.arange(3) if rank == 1 else torch.zeros(3, dtype=torch.long)
    assert idist.broadcast(sent, src=1) is sent
    assert sent.tolist() == [0, 1, 2]
    number = torch.tensor(rank)
    assert idist.all_reduce(number).tolist() == 1
    kept = torch.ones(2)
    assert idist.reduce(kept) is not kept
    assert kept.tolist() == [1.0, 1.0]


@on_ranks(2)
def test_tensors_are_gathered_scattered_and_exchanged():
    rank, size = place()
    assert idist.all_gather(torch.tensor([rank, -rank])).tolist() == [0, 0, 1, -1]
    assert idist.all_gather(torch.tensor(rank)).tolist() == [0, 1]
    shapes = [(other + 1, 3 - other) for other in range(size)]
    gathered = idist.all_gather_tensors_with_shapes(torch.full(shapes[rank], float(rank)), shapes)
    assert [(one.shape, float(one.mean())) for one in gathered] == [(shape, float(k)) for k, shape in enumerate(shapes)]
    at_one = idist.gather(torch.tensor([rank]), dst=1)
    assert at_one is None if rank == 0 else at_one.tolist() == [0, 1]
    parts = [torch.ones(1), torch.zeros(2, 2)]
    assert idist.scatter(parts if rank == 0 else None).shape == parts[rank].shape
    assert idist.scatter(["a", "b" * 5000] if rank == 1 else None, src=1) == ["a", "b" * 5000][rank]
    assert idist.reduce_scatter(torch.arange(4)).tolist() == ([0, 2] if rank == 0 else [4, 6])
    assert idist.all_to_all([f"{rank} to {other}" * 300 * other for other in range(size)]) == [
        f"{other} to {rank}" * 300 * rank for other in range(size)
    ]


@on_ranks(2)
def test_safe_mode_tells_shape_and_dtype_first():
    rank, _ = place()
    tensor = torch.tensor(1.5, dtype=torch.float64) if rank == 1 else "anything"
    got = idist.broadcast(tensor, src=1, safe_mode=True)
    assert (got.dtype, got.shape, float(got)) == (torch.float64, torch.Size([]), 1.5)


@on_ranks(2)
def test_a_group_may_be_a_list_of_ranks_and_is_made_once():
    rank, _ = place()
    before = len(dist.distributed_c10d._world.pg_map)
    for _ in range(3):
        got = idist.all_reduce(torch.tensor([1 + rank]), group=[1])
        assert got.tolist() == [1 + rank]
        assert idist.all_gather("mine", group=[1]) == (["mine"] if rank == 1 else "mine")
    assert len(dist.distributed_c10d._world.pg_map) <= before + 1
    made = idist.new_group([0, 1])
    assert idist.all_reduce(1, group=made) == 2
    if rank == 0:
        with pytest.raises(RankDivergenceError, match="not in its group"):
            idist.reduce(1, dst=1, group=[1])
    idist.barrier()


def count_calls(call):
    calls = []

    backend = current()
    for name in ("all_reduce", "all_gather", "broadcast"):
        original = getattr(backend, name)
        setattr(backend, name, lambda *args, original=original, name=name: calls.append(name) or original(*args))
    try:
        call()
    finally:
        for name in ("all_reduce", "all_gather", "broadcast"):
            delattr(backend, name)
    return calls


@on_ranks(2)
def test_what_is_small_takes_one_exchange_and_nothing_takes_more_than_two():
    for small in (1, 0.5, "text", {"a": 1}):
        assert len(count_calls(lambda small=small: idist.all_gather(small))) == 1
        assert len(count_calls(lambda small=small: idist.broadcast(small))) == 1
    assert len(count_calls(lambda: idist.all_reduce(3))) == 1
    assert len(count_calls(lambda: idist.all_gather("long" * 1000))) == 2
    assert len(count_calls(lambda: idist.broadcast("long" * 1000))) == 2


@on_ranks(2)
def test_debug_mode_shows_who_does_what():
    rank, _ = place()
    agreement.enable(3.0)
    idist.barrier()
    with pytest.raises(RankDivergenceError, match=r"all_reduce[\s\S]*barrier|barrier[\s\S]*all_reduce"):
        idist.all_reduce(1) if rank == 0 else idist.barrier()
    with pytest.raises(RankDivergenceError, match=r"\[2\][\s\S]*\[3\]"):
        idist.all_reduce(torch.ones(2 + rank))
    if rank == 0:
        with pytest.raises(RankDivergenceError, match="nothing in time"):
            idist.all_reduce(1)
    agreement.enable(None)


@pytest.mark.parametrize(
    ("call", "error", "named"),
    [
        (lambda: idist.all_reduce("text"), TypeError, "tensor"),
        (lambda: idist.all_reduce(1, op="sum"), ValueError, "op"),
        (lambda: idist.all_reduce(1, group=3), ValueError, "group"),
        (lambda: idist.all_reduce(1, group=[4]), ValueError, "ranks"),
        (lambda: idist.broadcast(None), ValueError, "None"),
        (lambda: idist.broadcast(1, src=2), ValueError, "src"),
        (lambda: idist.new_group((0,)), ValueError, "ranks"),
        (lambda: idist.all_gather(lambda: 1), TypeError, "picklable"),
        (lambda: idist.scatter([1, 2]), ValueError, "values"),
        (lambda: idist.all_gather_tensors_with_shapes(torch.ones(2), [(3,)]), ValueError, "shapes"),
    ],
)
def test_wrong_arguments_are_named(call, error, named):
    with pytest.raises(error, match=named):
        call()


def test_a_context_begins_and_ends_and_leaves_nothing():
    idist.initialize("gloo", timeout=timedelta(seconds=20))
    try:
        assert (idist.backend(), idist.model_name(), place()) == ("gloo", "native-dist", (0, 1))
        assert idist.all_gather("x") == ["x"]
        with pytest.raises(RuntimeError, match="finalize"):
            idist.initialize("gloo")
    finally:
        idist.finalize()
    assert (idist.backend(), dist.is_initialized()) == (None, False)


@pytest.mark.parametrize(
    ("name", "options", "error", "named"),
    [
        ("glo", {}, ValueError, "glo"),
        ("gloo", {"time_out": 3}, TypeError, "time_out"),
        ("gloo", {"rank": 0}, ValueError, "world_size"),
        ("gloo", {"rank": 2, "world_size": 2}, ValueError, "rank"),
        ("gloo", {"init_method": "file:///tmp/no"}, ValueError, "rank and world_size"),
    ],
)
def test_a_context_that_cannot_begin_leaves_nothing(name, options, error, named):
    with pytest.raises(error, match=named):
        idist.initialize(name, **options)
    assert (idist.backend(), dist.is_initialized()) == (None, False)


def test_a_group_that_somebody_else_made_is_taken_over_and_left():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert (idist.backend(), idist.get_world_size()) == ("gloo", 1)
    finally:
        dist.destroy_process_group()
    assert idist.backend() is None
