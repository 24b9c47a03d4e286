"""Debug mode: a rank that calls something else, or never arrives, makes all ranks raise, with a table of the calls."""

from __future__ import annotations

import math
import os
import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import camshaft.distributed as idist
from camshaft.distributed.coordination import collective_check
from camshaft.distributed.run import current
from camshaft.errors import RankDivergenceError
from tests.ranks import on_ranks

FOR_EVER = math.inf
LATE = 2.0


def enable(seconds=FOR_EVER):
    """Turn the comparison on, anew for each part of a test."""
    dist.barrier()
    collective_check.enable(current(), seconds)
    dist.barrier()


def rows_of(call):
    """Return the rows, by rank, of the table that a call raises."""
    with pytest.raises(RankDivergenceError) as caught:
        call()
    return re.findall(r"^rank \d+ +(.+)", str(caught.value).partition("\n")[2], re.MULTILINE)


def by_rank(*calls):
    return calls[idist.get_rank()]()


def take_turns():
    with idist.one_rank_first(rank=1):
        pass


@on_ranks(2)
def test_equal_calls_pass():
    enable()
    rank = idist.get_rank()
    for _ in range(3):
        assert idist.all_reduce(1) == 2
        assert idist.all_gather(1 if rank else "one") == ["one", 1]
        assert idist.all_gather([rank] * 1000)[1] == [1] * 1000
        assert idist.all_reduce(torch.ones(2, requires_grad=True)).tolist() == [2.0, 2.0]
        assert idist.broadcast(torch.ones(3) if rank == 0 else None, safe_mode=True).tolist() == [1.0] * 3
        assert idist.scatter(["a", "b"] if rank == 1 else None, src=1) == "ab"[rank]
        assert len(idist.all_to_all([torch.ones(rank + 1), rank])) == 2
        shapes = [(1, 2), (2, 1)]
        assert [one.shape for one in idist.all_gather_tensors_with_shapes(torch.ones(shapes[rank]), shapes)] == shapes
        assert [idist.all_reduce(5, group=[one]) for one in (0, 1)] == [5, 5]
        assert idist.all_reduce(1, group=idist.new_group([1, 0])) == 2
        take_turns()
        idist.one_rank_only(with_barrier=True)(lambda: None)()
        idist.barrier()


@on_ranks(2)
def test_different_calls_raise_on_all_ranks():
    enable()
    tensor = torch.ones(2)
    for one, other, shown in (
        (idist.barrier, lambda: idist.all_reduce(1), ("barrier ", "all_reduce ")),
        (lambda: idist.all_reduce(tensor), lambda: idist.all_reduce(torch.ones(3)), (" [2] ", " [3] ")),
        (lambda: idist.all_gather(tensor), lambda: idist.all_gather(tensor.int()), ("float32", "int32")),
        (lambda: idist.all_reduce(tensor), lambda: idist.all_reduce(tensor.to_sparse()), ("torch", "sparse_coo")),
        (lambda: idist.all_reduce(1, "MIN"), lambda: idist.all_reduce(1, "MAX"), (" MIN ", " MAX ")),
        (lambda: idist.broadcast(1, src=0), lambda: idist.broadcast(1, src=1), (" 0 ", " 1 ")),
        (lambda: idist.gather(1, dst=0), lambda: idist.gather(1, dst=1), (" 0 ", " 1 ")),
        (lambda: idist.broadcast("a"), lambda: idist.broadcast(tensor), ("broadcast ", "torch.float32 [2]")),
        (lambda: idist.new_group([0]), lambda: idist.new_group([1]), (" [0] ", " [1] ")),
        (take_turns, idist.barrier, ("one_rank_first ", "barrier ")),
    ):
        rows = rows_of(lambda one=one, other=other: by_rank(one, other))
        assert all(text in row for text, row in zip(shown, rows, strict=True)), rows
        assert all("test_collective_check.py:" in row for row in rows), rows


@on_ranks(2)
def test_a_rank_that_has_ended_is_not_waited_for():
    enable()
    idist.barrier()
    if idist.get_rank() == 1:
        collective_check.disable(current())
    else:
        rows = rows_of(lambda: idist.all_reduce(1))
        assert "all_reduce" in rows[0]
        assert rows[1].startswith("has ended, last in barrier ")


@on_ranks(3)
def test_a_difference_is_reported_before_the_last_rank_arrives():
    enable()
    store = dist.distributed_c10d._get_default_store()
    rank = idist.get_rank()
    if rank == 2:
        store.wait(["0 has raised", "1 has raised"])
    rows = rows_of(lambda: by_rank(idist.barrier, lambda: idist.all_reduce(1), idist.barrier))
    store.set(f"{rank} has raised", "")
    assert ("barrier ", "all_reduce ") == (rows[0][:8], rows[1][:11])
    assert rows[2].startswith("no call yet ") if rank < 2 else rows[2].startswith("barrier ")


@on_ranks(3)
def test_a_rank_that_ended_before_its_first_call_is_shown_to_all():
    enable()
    if idist.get_rank() == 2:
        collective_check.disable(current())
    else:
        rows = rows_of(lambda: idist.all_reduce(1))
        assert rows[idist.get_rank()].startswith("all_reduce ")
        assert rows[2].startswith("has ended ")


@on_ranks(2)
def test_a_forked_child_does_not_end_its_rank():
    enable()
    child = os.fork()
    if child == 0:
        current().job.close()
        os._exit(0)
    os.waitpid(child, 0)
    dist.barrier()
    if idist.get_rank() == 1:
        time.sleep(1.5)  # the other looks meanwhile
    idist.barrier()


@pytest.mark.parametrize("limits", [(LATE, FOR_EVER), (FOR_EVER, LATE)])
@on_ranks(2)
def test_a_rank_that_never_arrives_times_out(limits):
    seconds, timeout = limits
    enable(seconds)
    if timeout < FOR_EVER:
        dist.distributed_c10d._get_default_store().set_timeout(timedelta(seconds=timeout))  # as that of the run is
    idist.barrier()
    if idist.get_rank() == 0:
        began = time.monotonic()
        rows = rows_of(lambda: idist.all_reduce(1))
        assert time.monotonic() - began >= LATE
        assert "last in barrier" in rows[1]
    dist.barrier()
    if idist.get_rank() == 1:  # and nobody is there when it comes after all
        with pytest.raises(RankDivergenceError, match="rank 0 +timed out in all_reduce"):
            idist.all_reduce(1)


@on_ranks(2)
def test_shapes_are_checked_first_and_then_compared():
    enable()
    shapes = [(2,), (2,)]
    if idist.get_rank() == 1:
        with pytest.raises(ValueError, match=r"shapes must hold this rank's shape \(2,\) at 1, got \(3,\)"):
            idist.all_gather_tensors_with_shapes(torch.ones(2), [(2,), (3,)])
    assert len(idist.all_gather_tensors_with_shapes(torch.ones(2), shapes)) == 2  # and all are in step
    rows = rows_of(
        lambda: by_rank(
            lambda: idist.all_gather_tensors_with_shapes(torch.ones(2), [(2,), (2,)]),
            lambda: idist.all_gather_tensors_with_shapes(torch.ones(2), [(3,), (2,)]),
        )
    )
    assert "[(2,), (2,)]" in rows[0]
    assert "[(3,), (2,)]" in rows[1]


@on_ranks(2)
def test_one_rank_first_waits_beyond_the_patience():
    enable(0.2)
    with idist.one_rank_first():
        if idist.get_rank() == 0:
            time.sleep(1.5)

    @idist.one_rank_only(rank=1, with_barrier=True)
    def slow():
        time.sleep(1.5)

    slow()


@on_ranks(2)
def test_the_store_does_not_grow():
    enable()
    store = dist.distributed_c10d._get_default_store()
    idist.barrier()
    idist.barrier(group=[0, 1])
    dist.barrier()
    before = store.num_keys()
    dist.barrier()
    for _ in range(20):
        idist.all_reduce(1)
        idist.all_gather("x", group=[0, 1])
    dist.barrier()
    assert store.num_keys() <= before + 4  # what each rank says in each of the groups, and has just said before


@on_ranks(2)
def test_keys_of_an_earlier_check_are_not_read():
    for call in (idist.barrier, lambda: idist.all_reduce(1), lambda: idist.all_gather("x")):
        enable()
        call()


def test_the_environment_enables_it_for_a_group_that_is_adopted(monkeypatch):
    monkeypatch.setenv("CAMSHAFT_DEBUG", "1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert idist.get_rank() == 0
        assert current().job.compares_collectives
    finally:
        dist.destroy_process_group()
    assert idist.backend() is None
    assert not current().job.compares_collectives


@pytest.mark.parametrize(
    ("text", "wanted", "seconds"),
    [
        ("", None, None), ("0", None, None), ("false", None, None), ("1", None, math.inf),
        ("yes", None, math.inf), ("60", None, 60.0), ("2.5", None, 2.5), ("", True, math.inf), ("60", True, 60.0),
        ("60", False, None),
    ],
)  # fmt: skip
def test_the_environment_may_set_how_long_to_wait(monkeypatch, text, wanted, seconds):
    monkeypatch.setenv("CAMSHAFT_DEBUG", text)
    enabled = []
    monkeypatch.setattr(collective_check, "enable", lambda backend, patience: enabled.append(patience))
    collective_check.enable_if(wanted, current())
    assert enabled == ([] if seconds is None else [seconds])
