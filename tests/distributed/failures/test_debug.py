"""Debug mode: a rank that calls something else makes all ranks raise, with a table of the calls."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

import camshaft.distributed as idist
from camshaft.distributed.failures import debug
from camshaft.distributed.job import current
from camshaft.errors import RankDivergenceError
from tests.ranks import await_watchers, hurried, on_ranks


def enable():
    """Turn the comparison on, anew for each part of a test."""
    dist.barrier()
    debug.enable(current())
    dist.barrier()


def rows_of(call):
    """Return the rows, by rank, of the table that a call raises."""
    with pytest.raises(RankDivergenceError) as caught:
        call()
    return re.findall(r"^rank \d+ +(.+)", str(caught.value).partition("\n")[2], re.MULTILINE)


def by_rank(*calls):
    return calls[idist.get_rank()]()


def gather(shapes):
    return idist.all_gather_tensors_with_shapes(torch.ones(2), shapes)


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
        (lambda: idist.all_reduce(1, "MIN"), lambda: idist.all_reduce(1, "MAX"), (" MIN ", " MAX ")),
        (lambda: idist.broadcast(1, src=0), lambda: idist.broadcast(1, src=1), (" 0 ", " 1 ")),
        (lambda: idist.gather(1, dst=0), lambda: idist.gather(1, dst=1), (" 0 ", " 1 ")),
        (lambda: idist.broadcast("a"), lambda: idist.broadcast(tensor), ("broadcast ", "torch.float32 [2]")),
        (lambda: idist.new_group([0]), lambda: idist.new_group([1]), (" [0] ", " [1] ")),
        (take_turns, idist.barrier, ("one_rank_first ", "barrier ")),
        (lambda: gather([(2,), (2,)]), lambda: gather([(3,), (2,)]), ("[(2,), (2,)]", "[(3,), (2,)]")),
    ):
        rows = rows_of(lambda one=one, other=other: by_rank(one, other))
        assert all(text in row for text, row in zip(shown, rows, strict=True)), rows
        assert all("test_debug.py:" in row for row in rows), rows


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


@on_ranks(2)
def test_a_rank_that_does_not_arrive_in_time_is_named():
    enable()
    if idist.get_rank() == 0:
        match = r"timed out after \d+ s waiting for ranks \[1\] in all_reduce(.|\n)*rank 1 +no call yet"
        with hurried(), pytest.raises(RankDivergenceError, match=match):
            idist.all_reduce(1)
    dist.barrier()


@on_ranks(2)
def test_wrong_arguments_on_one_rank_raise_there_before_calls_are_compared():
    enable()
    sparse, wrong = torch.eye(2).to_sparse(), [(2,), (3,)]
    for call in (
        lambda: idist.broadcast(torch.ones(2), src=5),
        lambda: idist.broadcast(None),
        lambda: idist.scatter([1, 2], src=2),
        lambda: idist.reduce_scatter(torch.ones(3)),
        lambda: idist.all_reduce(sparse),
        lambda: idist.all_gather_tensors_with_shapes(torch.ones(2), wrong),
    ):
        if idist.get_rank() == 1:
            with pytest.raises((TypeError, ValueError)):
                call()
        assert idist.all_reduce(1) == 2  # and all are in step


@on_ranks(2)
def test_the_store_does_not_grow():
    enable()
    await_watchers()  # each has keys of its own
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


def test_the_argument_precedes_the_environment(monkeypatch):
    for text, enables in (("", False), ("0", False), ("false", False), ("1", True)):
        monkeypatch.setenv("CAMSHAFT_DEBUG", text)
        for debug_argument, expected in ((None, enables), (not enables, not enables)):
            idist.initialize("gloo", debug=debug_argument)
            assert current().job.compares_collectives is expected
            idist.finalize()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # is adopted
    try:
        assert idist.get_rank() == 0
        assert current().job.compares_collectives
    finally:
        dist.destroy_process_group()
    assert idist.backend() is None
    assert not current().job.compares_collectives
