"""One rank sends, another receives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import camshaft.distributed as idist
from camshaft.errors import RankDivergenceError
from tests.distributed.check_gathers import VALUES
from tests.distributed.check_reductions import DTYPES, awkward, of_rank
from tests.distributed.checking import check, equal, here, place, same


def passed_on(value: Any, **options: Any) -> Any:
    """Send a value to the next rank of a ring and receive one from the one before."""
    rank, size = place()
    sending = idist.isend(value, (rank + 1) % size, **options)
    got = idist.recv((rank - 1) % size, **options)
    sending.wait()
    return got


@check
def tensors_of_every_dtype_go_round() -> None:
    rank, size = place()
    if size == 1:
        return
    for dtype in DTYPES:
        got = passed_on(here(of_rank(rank, dtype)))
        assert got.device == idist.device()
        same(got, of_rank((rank - 1) % size, dtype))
    for tensor in (torch.tensor(1.5), torch.empty(0, 3), torch.full((1, 2, 1, 3), 7).mT, torch.rand(99_999) * 0 + 1):
        same(passed_on(here(tensor)), tensor)
    for tensor in awkward(1.5):
        got = passed_on(tensor)
        assert not got.requires_grad
        same(got, torch.full((2, 3), 1.5))


@check
def values_of_every_kind_go_round() -> None:
    rank, size = place()
    if size == 1:
        return
    for value in VALUES:
        equal(passed_on((rank, value)), ((rank - 1) % size, value))
        equal(passed_on(value), value)
    got = passed_on({"weights": torch.full((2,), rank)})
    same(got["weights"], torch.full((2,), (rank - 1) % size))


@check
def send_and_recv_talk_between_each_pair_of_ranks() -> None:
    rank, size = place()
    for src in range(size):
        for dst in range(size):
            for value in (f"{src} to {dst}", src * size + dst, "ü" * 1000):
                if rank == src != dst:
                    idist.send(value, dst)
                if rank == dst != src:
                    equal(idist.recv(src), value)


@check
def messages_of_one_pair_arrive_in_their_order_told_apart_by_tags_and_as_they_were_when_they_were_sent() -> None:
    rank, size = place()
    if size > 1 and rank == 0:
        for number in range(20):
            idist.isend("x" * 100 * number, 1)
        for tag in (5, 16383):
            idist.isend(f"under {tag} " * 200, 1, tag=tag)
        tensor = here(torch.ones(50_000))
        idist.isend(tensor, 1)
        tensor.zero_()
        idist.isend("the last", 1).wait()
    if rank == 1:
        for tag in (16383, 5):
            equal(idist.recv(0, tag=tag), f"under {tag} " * 200)
        for number in range(20):
            equal(idist.recv(0), "x" * 100 * number)
        same(idist.recv(0), torch.ones(50_000))
        equal(idist.recv(0), "the last")


@check
def irecv_may_begin_before_anything_is_sent_and_end_in_any_order() -> None:
    rank, size = place()
    others = [other for other in range(size) if other != rank]
    coming = {(other, tag): idist.irecv(other, tag) for other in others for tag in (1, 2)}
    idist.barrier()
    for other in others:
        idist.isend(here(torch.full((3,), rank)), other, 1)
        idist.isend("ü" * 1000 * rank, other, 2)
    for other in reversed(others):
        equal(coming[other, 2].wait(), "ü" * 1000 * other)
        same(coming[other, 1].wait(), torch.full((3,), other))
        assert coming[other, 1].wait() is coming[other, 1].wait()
    idist.barrier()


@check
def recv_fills_a_tensor_that_fits() -> None:
    rank, size = place()
    if size == 1:
        return
    strided = torch.zeros(2, 6)[:, ::2]
    for out in (here(torch.zeros(2, 3)), torch.zeros(3, 2).t(), strided, torch.zeros(2, 3, requires_grad=True)):
        sending = idist.isend(torch.full((2, 3), float(rank)), (rank + 1) % size)
        assert idist.recv((rank - 1) % size, out=out) is out
        same(out, torch.full((2, 3), float((rank - 1) % size)))
        sending.wait()
    for wrong in (torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float64)):
        with pytest.raises(ValueError, match="out must be of shape"):
            idist.isend(torch.ones(2, 3), (rank + 1) % size)
            idist.recv((rank - 1) % size, out=wrong)


@check
def members_of_a_group_send_by_global_ranks() -> None:
    rank, size = place()
    if size == 1:
        return
    group = idist.new_group([size - 1, 0])
    if rank == 0:
        idist.send("to the last", size - 1, group=group)
        equal(idist.recv(size - 1, group=group), "ü" * 1000)
    elif rank == size - 1:
        equal(idist.recv(0, group=group), "to the last")
        idist.send("ü" * 1000, 0, group=group)
    else:
        with pytest.raises(RankDivergenceError, match="not in its group"):
            idist.send(1, 0, group=group)


@check
def no_message_goes_to_oneself_or_to_nobody_or_under_an_impossible_tag() -> None:
    rank, size = place()
    others: tuple[Any, ...] = (rank, size, -1, None, 0.5, "1", [1])
    for other in others:
        with pytest.raises(ValueError, match="dst must be another rank"):
            idist.send(1, other)
        with pytest.raises(ValueError, match="src must be another rank"):
            idist.recv(other)
    for tag in (-1, 16384, 0.5, None, "a"):
        with pytest.raises(ValueError, match="tag must be an integer in"):
            idist.isend(1, (rank + 1) % size, tag=tag)  # type: ignore[arg-type]  # what is refused
        with pytest.raises(ValueError, match="tag must be an integer in"):
            idist.irecv((rank + 1) % size, tag=tag)  # type: ignore[arg-type]  # what is refused
    if size > 1:
        with pytest.raises(TypeError, match="picklable"):
            idist.send(lambda: 1, (rank + 1) % size)
