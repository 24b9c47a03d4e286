"""How a context begins and ends, and groups are made once; what collectives give is in check_*.py."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

import camshaft.distributed as idist
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
