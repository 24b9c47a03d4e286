"""What collectives cost, what debug mode shows, and how a context begins and ends; what they give is in check_*.py."""

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


def place():
    return idist.get_rank(), idist.get_world_size()


@on_ranks(2)
def test_a_group_that_is_named_by_its_ranks_is_made_once():
    before = len(dist.distributed_c10d._world.pg_map)
    for ranks in ([1], [1], [0, 1], [1, 0]):
        idist.all_reduce(1, group=ranks)
        idist.all_gather("mine", group=ranks)
    assert len(dist.distributed_c10d._world.pg_map) <= before + 2


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
