"""Point-to-point messages, and asynchronous operations."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tests.distributed.checking import check
from tests.mpi.checking import place, same

LARGE = 3_000_000  # 12 MB, which MPI does not send before the receiver is ready


@check
def a_ring_of_large_messages_does_not_hang() -> None:
    rank, size = place()
    incoming = torch.empty(LARGE)
    sending = dist.isend(torch.full((LARGE,), float(rank)), (rank + 1) % size)
    dist.recv(incoming, (rank - 1) % size)
    sending.wait()
    assert bool((incoming == (rank - 1) % size).all())


@check
def a_batch_of_messages_is_exchanged() -> None:
    rank, size = place()
    incoming = torch.empty(2, 2)
    operations = [
        dist.P2POp(dist.irecv, incoming, (rank - 1) % size),
        dist.P2POp(dist.isend, torch.full((2, 2), float(rank)), (rank + 1) % size),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    same(incoming, torch.full((2, 2), float((rank - 1) % size)))


@check
def receiving_from_any_rank_returns_the_sender() -> None:
    rank, size = place()
    if rank == 0:
        for _ in range(size - 1):
            tensor = torch.empty(1)
            sender = dist.recv(tensor)
            assert tensor.item() == sender
    else:
        dist.send(torch.tensor([float(rank)]), 0)


@check
def strided_tensors_of_every_dtype_are_sent_and_received_also_if_they_need_resolving() -> None:
    rank, size = place()
    for dtype in (torch.bfloat16, torch.bool, torch.uint8, torch.int64, torch.complex128):
        outgoing = torch.ones(3, 2).to(dtype).t()
        incoming = torch.zeros(2, 6).to(dtype)[:, ::2]
        sending = dist.isend(outgoing, (rank + 1) % size)
        dist.recv(incoming, (rank - 1) % size)
        sending.wait()
        same(incoming, outgoing)
    resolved = torch.zeros(1, dtype=torch.complex64)
    # most functions of torch.distributed reject a conjugate view, but the process group accepts it
    sending = dist.group.WORLD.send([torch.tensor([1 + 2j]).conj()], (rank + 1) % size)
    dist.recv(resolved, (rank - 1) % size)
    sending.wait()
    assert resolved == 1 - 2j


@check
def an_asynchronous_operation_does_not_block_before_wait() -> None:
    """Rank 0 starts the reduction and then waits for a message that rank 1 sends before starting it."""
    rank, size = place()
    tensor, message = torch.ones(3), torch.ones(LARGE)
    if rank == 1:
        dist.send(message, 0)
    reducing = dist.all_reduce(tensor, async_op=True)
    if rank == 0:
        dist.recv(message, 1)
    reducing.wait()
    reducing.wait()
    same(tensor, torch.full((3,), float(size)))


@check
def a_completed_operation_reports_success() -> None:
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, async_op=True)
    while not work.is_completed():
        pass
    assert work.get_future().value()[0] is tensor
    assert tensor[0] == dist.get_world_size()


@check
def operations_complete_without_a_call_of_wait() -> None:
    rank, size = place()
    for index in range(200):
        dist.isend(torch.full((1000,), float(index)), (rank + 1) % size)
    for index in range(200):
        tensor = torch.empty(1000)
        dist.recv(tensor, (rank - 1) % size)
        assert bool((tensor == index).all())


@check
def a_message_of_the_wrong_size_raises() -> None:
    group = dist.new_group([0, 1])
    rank, _ = place()
    if rank == 0:
        dist.send(torch.ones(2), 1, group=group)
    elif rank == 1:
        with pytest.raises(dist.DistBackendError, match="recv got 8 bytes from rank 0, the tensor has 12"):
            dist.recv(torch.ones(3), 0, group=group)


@check
def functional_collectives_return_new_tensors() -> None:
    rank, size = place()
    world, tensor = dist.group.WORLD, torch.full((size,), float(rank))
    # older versions of torch have other names, which newer ones deprecate
    all_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
    reduce_scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
    gathered = functional.wait_tensor(all_gather(tensor, 0, world))
    same(gathered, torch.arange(float(size)).repeat_interleave(size))
    reduced = functional.wait_tensor(functional.all_reduce(tensor, "sum", world))
    same(reduced, torch.full((size,), float(sum(range(size)))))
    scattered = functional.wait_tensor(reduce_scatter(tensor, "avg", 0, world))
    same(scattered, torch.tensor([(size - 1) / 2]))
    exchanged = functional.wait_tensor(functional.all_to_all_single(tensor, None, None, world))
    same(exchanged, torch.arange(float(size)))
    sent = functional.wait_tensor(functional.broadcast(tensor, 1, world))
    same(sent, torch.ones(size))
    many = functional.all_reduce_coalesced([tensor, tensor[:1]], "max", world)
    assert [functional.wait_tensor(one).max().item() for one in many] == [size - 1, size - 1]


@check
def objects_are_communicated() -> None:
    rank, size = place()
    thing = {"rank": rank, "text": "ä" * (100 * rank), "list": [None, 1.5]}
    gathered = [None] * size
    dist.all_gather_object(gathered, thing)
    assert [item["rank"] for item in gathered] == list(range(size))
    assert gathered[rank] == thing
    things = [thing, rank]
    dist.broadcast_object_list(things, src=1)
    assert things[1] == 1
    received = [None] * size if rank == 0 else None
    dist.gather_object(rank, received, dst=0)
    assert received is None or received == list(range(size))
    mine = [None]
    dist.scatter_object_list(mine, list("abcd")[:size] if rank == 0 else None, src=0)
    assert mine == ["abcd"[rank]]
    if rank == 0:
        dist.send_object_list([thing], 1)
    elif rank == 1:
        dist.recv_object_list(things[:1], 0)
