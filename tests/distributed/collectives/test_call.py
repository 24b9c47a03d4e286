"""Groups are those of torch; a list of ranks names one that its members make, in any order, waiting for nobody else."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import camshaft.distributed as idist
from camshaft.distributed.failures import debug
from camshaft.distributed.job import current
from camshaft.errors import RankDivergenceError
from tests.limits import TIMEOUT, wait_until
from tests.ranks import hurried, on_ranks


@on_ranks(3)
def test_only_members_need_to_pass_a_list_of_ranks_which_are_independent_of_other_groups():
    """The names that torch gives to groups of members count the groups of a rank."""
    rank = idist.get_rank()
    if rank > 0:
        assert idist.all_gather(rank, group=(2, 1)) == [1, 2]
    else:
        assert idist.all_reduce(5, group=[1, 2]) == 5  # who is not in it makes nothing and gets the argument back
        assert idist.all_gather("x", group=[0]) == ["x"]
    for ranks in ([0, 1], [1, 2], [0, 2]):
        if rank in ranks:
            assert idist.all_reduce(1, group=ranks) == 2
    assert idist.all_reduce(1, group=[2, 0, 1]) == 3
    group = idist.new_group([0, 2])  # all ranks still agree on the groups that all of them make
    assert idist.all_reduce(1, group=group) == (1 if rank == 1 else 2)
    assert idist.all_reduce(rank, group=dist.new_group([1, 2])) == (0 if rank == 0 else 3)


@on_ranks(2)
def test_a_list_of_ranks_creates_one_group_which_sync_leaves_and_its_end_renews():
    before = len(dist.distributed_c10d._world.pg_map)
    group = idist.new_group([0, 1])
    for ranks in ([1], [1], [0, 1], [1, 0]):
        idist.all_reduce(1, group=ranks)
        idist.all_gather("mine", group=ranks)
        if idist.get_rank() == 0:
            idist.sync()
    assert len(dist.distributed_c10d._world.pg_map) <= before + 2
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match="group must be None, a list of ranks, or an existing group from new_group"):
        idist.all_reduce(1, group=group)
    assert idist.all_reduce(1, group=[1, 0]) == 2
    for backend in (None, "gloo", "cpu:gloo"):
        assert idist.all_reduce(1, group=idist.new_group([0, 1], backend=backend)) == 2


@on_ranks(2)
def test_one_rank_only_may_use_a_group_of_that_rank():
    @idist.one_rank_only(1)
    def alone():
        with pytest.raises(RankDivergenceError, match=r"new_group on rank 1 waits for ranks \[0\]"):
            idist.all_reduce(1, group=[0, 1])
        return idist.all_reduce(1, group=[1])

    assert alone() == (1 if idist.get_rank() == 1 else None)


@on_ranks(3)
def test_debug_mode_compares_the_members_of_a_list_of_ranks():
    debug.enable(current())
    rank = idist.get_rank()
    if rank < 2:
        assert idist.all_reduce(1, group=[0, 1]) == 2
    if rank == 0:
        with hurried(), pytest.raises(RankDivergenceError, match=r"waiting for ranks \[2\] in new_group"):
            idist.all_reduce(1, group=[0, 2])
    current().job.compares_collectives = False
    dist.barrier()


@on_ranks(2)
def test_creating_a_group_times_out(tmp_path):
    rank, is_over = idist.get_rank(), tmp_path / "is over"
    idist.finalize()
    place = {"init_method": f"file://{tmp_path}/store", "rank": rank, "world_size": 2}
    idist.initialize("gloo", timeout=TIMEOUT, **place)  # in which the ranks must meet
    if rank == 0:
        assert current()._timeout == TIMEOUT
        current()._timeout = timedelta(seconds=1)
        with pytest.raises(RuntimeError, match=r"(?i)time|wait"):
            idist.all_reduce(1, group=[0, 1])
        is_over.touch()
    wait_until(is_over.exists)
    idist.finalize()


@on_ranks(3)
def test_torch_accepts_groups_from_new_group():
    rank = idist.get_rank()
    group = idist.new_group([2, 0])
    tensor = torch.tensor([rank + 1.0])
    if rank == 1:
        assert group == dist.GroupMember.NON_GROUP_MEMBER
        with pytest.warns(UserWarning, match="does not belong to"):
            dist.all_reduce(tensor, group=group)
        assert tensor.item() == 2
        with pytest.raises(RankDivergenceError, match=r"rank 1, which is not in its group\nin reduce on rank 1$"):
            idist.reduce(1, 0, group=group)
        return
    assert isinstance(group, dist.ProcessGroup)
    assert (group.size(), group.rank()) == (2, rank // 2)
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == 4
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, rank + 1.0)
    parallel = nn.parallel.DistributedDataParallel(model, process_group=group)
    parallel(torch.tensor([[rank + 1.0]])).sum().backward()
    assert (model.weight.item(), model.weight.grad.item()) == (1, 2)  # rank 0's weight, and the mean of 1 and 3


def use_everywhere(group, ranks):
    """Pass a group to every function that takes one, on its members."""
    rank = idist.get_rank()
    first, last = ranks[0], ranks[-1]
    idist.barrier(group=group)
    assert idist.all_reduce(torch.tensor([1.0]), group=group).item() == len(ranks)
    assert idist.all_reduce(1, "MAX", group=group) == 1
    assert idist.all_reduce(torch.tensor([1j]), group=group).item() == len(ranks) * 1j
    assert idist.all_gather(rank, group=group) == ranks
    assert idist.all_gather(torch.tensor(rank), group=group).tolist() == ranks
    shapes = [(1,)] * len(ranks)
    assert torch.cat(idist.all_gather_tensors_with_shapes(torch.tensor([rank]), shapes, group=group)).tolist() == ranks
    assert idist.broadcast(f"of {rank}", last, group=group) == f"of {last}"
    assert idist.reduce(1, first, group=group) == (len(ranks) if rank == first else None)
    assert idist.gather(rank, first, group=group) == (ranks if rank == first else None)
    assert idist.scatter(ranks if rank == last else None, last, group=group) == rank
    assert idist.reduce_scatter(torch.ones(len(ranks), 1), group=group).item() == len(ranks)
    assert idist.all_to_all([rank] * len(ranks), group=group) == ranks
    if rank == first:
        idist.send("hello", last, group=group)
    if rank == last:
        assert idist.recv(first, group=group) == "hello"


@on_ranks(3)
def test_groups_of_torch_are_accepted_everywhere():
    rank = idist.get_rank()
    some = dist.new_group([2, 0])
    mesh = init_device_mesh("cpu", (3,))
    for compares in (False, True):
        if compares:
            debug.enable(current())
        for group, ranks in ((some, [0, 2]), (dist.group.WORLD, [0, 1, 2]), (mesh.get_group(), [0, 1, 2])):
            if rank in ranks:
                use_everywhere(group, ranks)
            else:
                assert idist.all_gather(rank, group=group) == rank
    current().job.compares_collectives = False
    dist.barrier()
