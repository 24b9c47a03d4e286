"""Groups that a list of ranks names: their members make them, in any order, and wait for nobody else."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

import camshaft.distributed as idist
from camshaft.distributed import agreement
from camshaft.errors import RankDivergenceError
from tests.ranks import on_ranks


@on_ranks(3, limit=20)
def test_only_the_members_need_to_name_a_list():
    rank = idist.get_rank()
    if rank < 2:
        assert idist.all_reduce(1, group=[0, 1]) == 2
    if rank > 0:
        assert idist.all_gather(rank, group=(2, 1)) == [1, 2]
    if rank == 0:
        assert idist.all_reduce(5, group=[1, 2]) == 5  # who is not in it makes nothing and gets the argument back
        assert idist.all_gather("x", group=[0]) == ["x"]
    assert idist.all_reduce(1, group=[2, 0, 1]) == 3


@on_ranks(3, limit=20)
def test_lists_do_not_depend_on_the_groups_that_each_rank_is_in():
    """The names that torch gives to groups of members count the groups of a rank."""
    rank = idist.get_rank()
    if rank == 0:
        assert idist.all_reduce(1, group=[0]) == 1
    if rank != 2:
        assert idist.all_reduce(1, group=[0, 1]) == 2
    if rank != 0:
        assert idist.all_reduce(1, group=[1, 2]) == 2
    if rank != 1:
        assert idist.all_reduce(1, group=[0, 2]) == 2
    group = idist.new_group([0, 2])  # all ranks still agree on the groups that all of them make
    assert idist.all_reduce(1, group=group) == (1 if rank == 1 else 2)
    assert idist.all_reduce(rank, group=dist.new_group([1, 2])) == (0 if rank == 0 else 3)


@on_ranks(2, limit=20)
def test_a_list_is_the_same_group_after_the_run_was_looked_up_again():
    assert idist.all_reduce(1, group=[1, 0]) == 2
    if idist.get_rank() == 0:
        idist.sync()
    assert idist.all_reduce(1, group=[1, 0]) == 2


@on_ranks(2, limit=20)
def test_one_rank_alone_may_use_a_group_of_its_own():
    @idist.one_rank_only(1)
    def alone():
        with pytest.raises(RankDivergenceError, match=r"new_group on rank 1 waits for ranks \[0\]"):
            idist.all_reduce(1, group=[0, 1])
        return idist.all_reduce(1, group=[1])

    assert alone() == (1 if idist.get_rank() == 1 else None)


@on_ranks(3, limit=20)
def test_debug_mode_compares_the_members_of_a_list():
    agreement.enable(1.5)
    rank = idist.get_rank()
    if rank < 2:
        assert idist.all_reduce(1, group=[0, 1]) == 2
    if rank == 0:
        with pytest.raises(RankDivergenceError, match="new_group"):
            idist.all_reduce(1, group=[0, 2])
    agreement.enable(None)
    dist.barrier()


@on_ranks(2, limit=20)
def test_a_member_that_does_not_come_is_waited_for_as_long_as_the_run_says(tmp_path):
    rank = idist.get_rank()
    idist.finalize()
    place = {"init_method": f"file://{tmp_path}/store", "rank": rank, "world_size": 2}
    idist.initialize("gloo", timeout=timedelta(seconds=1.5), **place)
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"(?i)time|wait"):
            idist.all_reduce(1, group=[0, 1])
    idist.finalize()


@on_ranks(2)
def test_a_backend_that_torch_does_not_have_is_refused():
    for backend in ("nope", "cpu:gloo,cuda:nope", "cpu:nope"):
        with pytest.raises(ValueError, match=rf"backend must be one of \(.*'gloo'.*\), got '{backend}'"):
            idist.new_group([0], backend=backend)
    for backend in (None, "gloo", "cpu:gloo"):
        assert idist.all_reduce(1, group=idist.new_group([0, 1], backend=backend)) == 2
