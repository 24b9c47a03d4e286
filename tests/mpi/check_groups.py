"""Groups: subgroups, timeouts, and ranks that are missing or leave."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import camshaft.distributed as idist
from camshaft.distributed.backends.mpi_group import MPIGroup
from tests.distributed.checking import check
from tests.mpi.checking import place, same

SHORT = timedelta(seconds=0.3)


@check
def the_default_group_uses_mpi_and_has_a_store_shared_by_all_ranks() -> None:
    rank, size = place()
    assert dist.get_backend() == "mpi"
    assert isinstance(dist.group.WORLD, MPIGroup)
    store = c10d._get_default_store()
    assert store.add("visitors", 1) <= size
    store.set(f"rank {rank}", str(rank))
    assert store.get(f"rank {(rank + 1) % size}") == str((rank + 1) % size).encode()


@check
def a_subgroup_reduces_over_its_members_only() -> None:
    rank, size = place()
    for members in ([0], [1, 0], list(range(size)), [size - 1, 0]):
        group = dist.new_group(members)
        if rank in members:
            tensor = torch.tensor([float(rank)])
            dist.all_reduce(tensor, group=group)
            same(tensor, torch.tensor([float(sum(members))]))
            assert dist.get_group_rank(group, rank) == sorted(members).index(rank)
            dist.broadcast(tensor, src=members[-1], group=group)
            dist.destroy_process_group(group)


@check
def groups_of_camshaft_are_made_of_a_list_of_ranks_and_are_process_groups_of_torch() -> None:
    rank, size = place()
    idist.set_local_rank(rank)  # mpirun sets no LOCAL_RANK
    if rank < 2:  # only the members create a group from a list
        assert idist.all_gather(rank, group=range(2)) == [0, 1]
    group = idist.new_group([size - 1, 0])
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, rank + 1.0)
    if rank in (0, size - 1):
        assert isinstance(group, MPIGroup)
        assert idist.all_gather(rank, group=group) == [0, size - 1]
        parallel = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
        parallel(torch.tensor([[1.0 if rank == 0 else 3.0]])).sum().backward()
        assert model.weight.grad is not None
        same(torch.stack([model.weight.detach(), model.weight.grad]).flatten(), torch.tensor([1.0, 2.0]))


@check
def groups_of_the_same_ranks_do_not_interfere() -> None:
    first, second = dist.new_group(), dist.new_group()
    one, two = torch.ones(1), torch.full((1,), 10.0)
    pairs = [(one, first), (two, second)]
    if dist.get_rank() % 2:
        pairs.reverse()
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor, group in pairs]
    for work in works:
        work.wait()
    assert two.item() == 10 * one.item() == 10 * dist.get_world_size()


@check
def a_collective_without_all_ranks_times_out_and_disables_the_group() -> None:
    group = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        assert isinstance(group, MPIGroup)
        assert group.timeout == c10d.default_pg_timeout
        group.set_timeout(SHORT)  # not earlier: it also limits how long the members may take to create the group
        for call, message in (
            (lambda: dist.all_reduce(torch.ones(1), group=group), "all_reduce, collective 1 .* timed out after 0.3 s"),
            (lambda: dist.barrier(group=group), "barrier was called on a group that is no longer usable: all_red"),
        ):
            with pytest.raises(dist.DistBackendError, match=message):
                call()


@check
def a_message_that_is_never_sent_times_out() -> None:
    group = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        work = dist.irecv(torch.ones(1), 1, group=group)
        assert work is not None
        assert not work.is_completed()
        with pytest.raises(dist.DistBackendError, match=r"recv timed out after 0.1 s"):
            work.wait(timedelta(seconds=0.1))
        assert work.is_completed()


@check
def a_forked_child_does_not_leave_on_behalf_of_its_parent() -> None:
    group = dist.new_group()
    child = os.fork()
    if child == 0:
        group.shutdown()
        os._exit(0)
    os.waitpid(child, 0)
    dist.barrier()
    dist.barrier(group=group)
    dist.barrier()


@check
def leaving_a_group_frees_its_communicator() -> None:
    """Creates more groups than an MPI library has communicators, which works only if they are freed."""
    for _ in range(2100):  # MPICH's limit is 2048
        group = dist.new_group()
        dist.destroy_process_group(group)
