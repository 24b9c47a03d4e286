"""Messages between real ranks: whatever is sent arrives as it was, in any order and number, and nothing piles up."""

from __future__ import annotations

import random
import threading
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import camshaft.distributed as idist
from camshaft.distributed.collectives import point_to_point
from camshaft.distributed.collectives.values import bytes_of
from camshaft.distributed.failures.alone import only
from camshaft.distributed.job import current
from camshaft.errors import RankDivergenceError
from tests.guards import outlasting
from tests.limits import HANG
from tests.ranks import on_ranks
from tests.threads import run_on_threads

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8)
DTYPES = (*FLOATS, *WHOLE, torch.complex128, torch.complex64, torch.bool)


def same(got, wanted):
    assert (got.dtype, got.shape, bytes_of(got)) == (wanted.dtype, wanted.shape, bytes_of(wanted.detach()))


def transfers():
    return current().job.resource(point_to_point.Transfers)


def exchanged(value, other=None, **options):
    """Send a value to the other of two ranks, or to a given one, which sends the same, and return what it sent."""
    with_all, other = other is None, 1 - idist.get_rank() if other is None else other
    idist.isend(value, other, **options)
    got = idist.recv(other, **options)
    if with_all:
        idist.barrier()  # what was sent has been received when the ranks end
    return got


# --- what arrives ------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_tensors_of_every_dtype_and_layout_arrive_as_they_are():
    image = torch.arange(2 * 3 * 4 * 4.0).view(2, 3, 4, 4)
    numbers = torch.tensor([1 + 2j, 3 - 1j])
    layouts = [
        image.contiguous(memory_format=torch.channels_last),
        image[:, 1:, ::2, 3],
        torch.empty(3, 0, 2, dtype=torch.int16),
        torch.zeros((1,) * 40),
        numbers.conj(),
        numbers.conj().imag,
        torch.nn.Parameter(torch.ones(2)),
    ]
    for tensor in (*(torch.tensor([[0, 1], [2, 3]]).to(dtype) for dtype in DTYPES), *layouts):
        got = exchanged(tensor)
        assert type(got) is torch.Tensor
        assert not got.requires_grad
        same(got, tensor)
    assert exchanged(torch.eye(3).to_sparse()).to_dense().equal(torch.eye(3))
    nested = exchanged(torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged))
    assert [part.tolist() for part in nested.unbind()] == [[1, 1], [0, 0, 0]]


NUMBERS = st.integers() | st.floats(allow_nan=False) | st.booleans() | st.complex_numbers(allow_nan=False)
TEXTS = st.text(st.characters()) | st.binary()
VALUES = st.recursive(
    st.none() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(TEXTS, inner) | st.frozensets(TEXTS),
    max_leaves=5,
)
LENGTHS = st.integers(480, 530) | st.integers(0, 5000)  # around what fits into the first row, and others


def round_trip(values):
    """Send values from one thread to another, and give what came."""
    rank = idist.get_rank()
    if rank == 0:
        for value in values:
            idist.isend(value, 1)
        return None
    return [idist.recv(0) for _ in values]


@settings(deadline=None, max_examples=60)
@given(st.lists(VALUES | LENGTHS.map("ü".__mul__) | LENGTHS.map(bytes), max_size=4))
def test_values_of_any_kind_and_length_arrive_as_they_are(values):
    _, got = run_on_threads(2, round_trip, values)
    assert got == values
    assert list(map(type, got)) == list(map(type, values))


class Unreadable:
    """A value that cannot be decoded."""

    def __reduce__(self):
        return int, ("no number",)


@on_ranks(2)
def test_what_cannot_be_received_raises_on_every_wait_and_changes_nothing():
    other, out = 1 - idist.get_rank(), torch.zeros(2, 3)
    for value, into, error, message in (
        (torch.ones(3, 2), out, ValueError, r"out must be of shape \(3, 2\) and torch.float32, as rank . sent it"),
        (torch.ones(2, 3, dtype=torch.int64), out, ValueError, "out must be of shape .* and torch.int64"),
        ("text", out, ValueError, "out must be None, as rank . sent a value of type str"),
        (Unreadable(), None, TypeError, "cannot be unpickled here(.|\n)*no number"),
    ):
        idist.isend(value, other)
        coming = idist.irecv(other, out=into)
        for _ in range(2):
            with pytest.raises(error, match=message) as caught:
                coming.wait()
            assert caught.value.__notes__ == [f"in irecv on rank {1 - other}, from rank {other}, tag 0"]
    assert not out.any()
    assert not transfers().awaited
    with pytest.raises(TypeError, match=r"out must be a tensor or None, got \[0\]"):
        idist.irecv(other, out=[0])
    assert exchanged("the last") == "the last"


# --- many at once ------------------------------------------------------------------------------------------------


@on_ranks(3)
def test_large_messages_to_all_may_be_waited_for_before_any_is_received():
    rank, others = idist.get_rank(), [other for other in range(3) if other != idist.get_rank()]
    for other in others:
        for tag in (0, 7):
            idist.isend(torch.full((1 << 20,), rank + 10.0 * tag), other, tag=tag).wait()
    for other in reversed(others):
        for tag in (7, 0):
            assert idist.recv(other, tag=tag).aminmax() == (other + 10 * tag, other + 10 * tag)
    idist.barrier()


@on_ranks(2)
def test_hundreds_in_flight_both_ways_may_be_waited_for_in_any_order():
    rank, count = idist.get_rank(), 200
    values = [
        number if number % 3 else "ü" * number if number % 2 else torch.full((number,), 1) for number in range(count)
    ]
    coming = [idist.irecv(1 - rank, tag=number % 5) for number in range(count)]
    for number, value in enumerate(values):
        idist.isend(value, 1 - rank, tag=number % 5)
    for number in random.Random(rank).sample(range(count), count):
        got, wanted = coming[number].wait(), values[number]
        assert torch.equal(got, wanted) if isinstance(wanted, torch.Tensor) else got == wanted
    idist.barrier()


@on_ranks(2)
def test_send_does_not_wait_during_irecv_however_much_is_received_here():
    other = 1 - idist.get_rank()
    for value in (torch.ones(1 << 20), "ü" * 1000, 3):
        coming = [idist.irecv(other, tag=tag) for tag in range(3)]
        for tag in (2, 0, 1):
            idist.send(value, other, tag=tag)
        for one in coming:
            got = one.wait()
            assert torch.equal(got, value) if isinstance(value, torch.Tensor) else got == value
    assert 2 * 40 << 20 > point_to_point._MOST_IN_FLIGHT
    coming = [idist.irecv(other) for _ in range(2)]
    for _ in coming:
        idist.send(torch.ones(10 << 20), other)  # of 40 MiB
    assert [one.wait().shape for one in coming] == [(10 << 20,)] * 2
    idist.barrier()


@on_ranks(2)
def test_send_does_not_run_ahead_of_the_receiver():
    other = 1 - idist.get_rank()
    if idist.get_rank() == 0:
        stop = idist.irecv(other, tag=1)
        for number in range(40):
            idist.send(torch.full((1 << 20,), number), other)  # of 4 MiB
            assert len(transfers()._ahead[other]) <= 16
        assert stop.wait() == "stop"
    else:
        time.sleep(0.5)
        for number in range(40):
            assert idist.recv(other)[-1] == number
        idist.send("stop", other, tag=1)
    idist.barrier()


@on_ranks(2)
def test_send_waits_again_when_no_irecv_is_in_progress():
    other = 1 - idist.get_rank()
    if idist.get_rank() == 0:
        dropped, coming = idist.irecv(other, tag=1), idist.irecv(other, tag=2)
        idist.send("does not wait", other)
        assert len(transfers()._ahead[other]) == 1
        assert coming.wait() == "received"
        del dropped
        assert not transfers().awaited
        assert len(transfers().dropped) == 1  # its buffer, which the message arrives in
        idist.send("waits", other)
        assert len(transfers()._ahead[other]) == 1
        assert idist.recv(other, tag=1) == "second"
    else:
        idist.send("received", other, tag=2)
        assert [idist.recv(other), idist.recv(other)] == ["does not wait", "waits"]
        idist.send("first", other, tag=1)
        idist.send("second", other, tag=1)
    idist.barrier()


# --- who may talk to whom ----------------------------------------------------------------------------------------


@on_ranks(3)
def test_groups_keep_their_messages_apart_and_name_global_ranks():
    rank = idist.get_rank()
    group, handle = idist.new_group([2, 0]), dist.new_group([0, 2])
    if rank == 0:
        for text, where in (("world", None), ("group", group), ("handle", handle)):
            idist.isend(text, 2, group=where)
        idist.send("listed", 2, group=[0, 2])
        with pytest.raises(ValueError, match=r"dst must be another rank of the group, one of \[2\], got 1"):
            idist.send(1, 1, group=group)
    elif rank == 2:
        for text, where in (("handle", handle), ("group", group), ("listed", [0, 2]), ("world", None)):
            assert idist.recv(0, group=where) == text  # a list names the same group
    else:
        for named in (group, handle, [0, 2]):
            with pytest.raises(RankDivergenceError, match=r"irecv was called on rank 1, which is not in its group"):
                idist.irecv(0, group=named)
    idist.barrier()


@on_ranks(3)
def test_messages_to_ranks_outside_of_the_block_raise():
    rank = idist.get_rank()

    @idist.one_rank_only(rank=1)
    def alone():
        for call in (lambda: idist.isend(1, 0), lambda: idist.send(1, 0), lambda: idist.irecv(2)):
            with pytest.raises(RankDivergenceError, match=r"on rank 1 waits for ranks \[.\], which do not run .*alone"):
                call()

    alone()
    if rank != 1:
        with only([0, 2], "what the even ranks do", "here"):
            assert exchanged("both are here", 2 - rank) == "both are here"
            with pytest.raises(RankDivergenceError, match="what the even ranks do"):
                idist.send(1, 1)
    idist.barrier()


def test_errors_say_which_message():
    for call, where in (
        (lambda: idist.send(1, 7), "in send on rank 0, to rank 7, tag 0"),
        (lambda: idist.isend(lambda: 1, 1, tag=3), "in isend on rank 0, to rank 1, tag 3"),
        (lambda: idist.recv(1, tag="a"), "in recv on rank 0, from rank 1, tag a"),
        (lambda: idist.irecv(1, out=3), "in irecv on rank 0, from rank 1, tag 0"),
    ):

        def call_alone(call=call):
            if idist.get_rank() == 0:
                with pytest.raises((TypeError, ValueError)) as caught:
                    call()
                return caught.value.__notes__

        assert run_on_threads(2, call_alone) == [[where], None]


@on_ranks(2)
def test_errors_of_a_rank_that_is_left_alone_say_which_message():
    if idist.get_rank() == 0:
        dist.barrier()
        dist.destroy_process_group()
        begin_again()
        return
    dist.barrier()
    for call, where in (
        (lambda: idist.recv(0, tag=4), "in recv on rank 1, from rank 0, tag 4"),
        (lambda: idist.send("x", 0, tag=5), "in send on rank 1, to rank 0, tag 5"),
    ):
        with pytest.raises(RuntimeError) as caught:  # of gloo: the other has gone
            call()
        assert where in caught.value.__notes__
    assert not transfers().awaited


# --- the end, and memory -----------------------------------------------------------------------------------------


@on_ranks(2)
def test_finalize_waits_for_messages_that_are_still_to_be_received_and_reports_those_that_were_not(tmp_path):
    if idist.get_rank() == 0:
        idist.isend(torch.ones(1 << 20), 1)
        idist.isend("late", 1)
    else:
        time.sleep(0.3)
        assert idist.recv(0).sum() == 1 << 20
        assert idist.recv(0) == "late"
    rank = idist.get_rank()
    idist.finalize()
    idist.initialize("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=2)
    if rank == 0:
        idist.isend(torch.ones(3), 1)
        idist.barrier()
        with pytest.raises(RuntimeError, match="a message to rank 1 was not received"):
            idist.finalize()
    else:
        idist.irecv(0, tag=5)  # nothing comes here either
        idist.barrier()
        idist.finalize()
    assert (idist.backend(), dist.is_initialized()) == (None, False)
    begin_again()


def begin_again():
    """Leave a process group to whoever destroys that of the test."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=5))


@on_ranks(2)
def test_buffers_of_completed_sends_are_released():
    rank = idist.get_rank()
    for _ in range(12):
        for number in range(20):
            if rank == 0:
                idist.isend(torch.zeros(50_000) if number % 2 else "x" * 2000, 1)
            else:
                idist.recv(0)
        idist.barrier()
        if rank == 0:  # all have arrived, but the thread that notices it may not have run yet
            assert not outlasting(lambda: not all(transfer[0].is_completed() for _, transfer in transfers()._sent))
    if rank == 0:
        assert len(transfers()._sent) < 150  # of 480 transfers
        transfers().finish()
        assert not outlasting(lambda: threading.active_count() > 3)  # this thread, the watcher's, and the board's
    else:
        assert not transfers().awaited


class Work:
    """A transfer whose end the test decides on; as with gloo, only one may wait for it."""

    def __init__(self, error=None):
        self.end, self.error, self.waits, self.looks = threading.Event(), error, 0, 0

    def wait(self):
        self.waits += 1
        assert self.end.wait(HANG)
        if self.error:
            raise self.error

    def is_completed(self):
        self.looks += 1
        return self.end.is_set()


def test_completed_sends_are_found_in_a_few_looks_each():
    kept, works = point_to_point.Transfers(), [Work() for _ in range(2000)]
    for number, work in enumerate(works):
        if number >= 100:
            work.end.set()
        kept.keep(1, [(work, torch.empty(1))])
    assert len(kept._sent) < 250  # of which 100 are in flight
    assert sum(work.looks for work in works) <= 2 * len(works)
    for work in works:
        work.end.set()
    kept.finish()
    assert [work.waits for work in works] == [1] * len(works)


def test_a_failed_send_is_reported_by_a_later_one_or_at_the_end():
    for later in (lambda kept: kept.keep(3, [(Work(), torch.empty(1))]), lambda kept: kept.finish()):
        kept, failed = point_to_point.Transfers(), Work(OSError("connection closed"))
        kept.keep(3, [(failed, torch.empty(1))])
        failed.end.set()
        with pytest.raises(RuntimeError, match="a message to rank 3 was not received: connection closed"):
            later(kept)


@on_ranks(2)
def test_messages_in_a_group_of_another_backend():
    config, other = dist.get_backend_config, 1 - idist.get_rank()
    group = idist.new_group([0, 1], backend="gloo")
    with mock.patch.object(dist, "get_backend_config", lambda group=None: config(group) if group else "cuda:nccl"):
        for call in (lambda: idist.send(1, other), lambda: idist.isend(1, other), lambda: idist.irecv(other)):
            with pytest.raises(NotImplementedError, match="does not support send and recv: .* pass group=new_group"):
                call()
        assert exchanged("text", group=group) == "text"
