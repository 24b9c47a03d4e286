from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

import camshaft.distributed as idist
from tests import ranks
from tests.limits import FOREVER
from tests.ranks import on_ranks, run_on_ranks


def total(value: int, *, factor: int = 1):
    tensor = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(tensor)
    return dist.get_rank(), tensor * factor


def fail_alone():
    if dist.get_rank() == 1:
        raise ZeroDivisionError("on one rank")
    dist.barrier()


def hang():
    if dist.get_rank() == 1:
        dist.send(torch.ones(1), dst=0)
        time.sleep(FOREVER)
    dist.recv(torch.empty(1), src=1)  # what follows finds the other rank in here, however late it was


def die():
    if dist.get_rank() == 1:
        os._exit(3)


class LateStore(Store):
    """A store that delays the addresses of the other ranks."""

    def __init__(self, store):
        super().__init__()
        self._store = store

    def set(self, key, value):
        self._store.set(key, value)

    def get(self, key):
        time.sleep(0.5)
        return self._store.get(key)

    def add(self, key, value):
        return self._store.add(key, value)

    def check(self, keys):
        return self._store.check(keys)

    def wait(self, keys, *timeout):
        self._store.wait(keys, *timeout)

    def has_extended_api(self):
        return False


class Late:
    """An argument that, once unpickled, makes a rank connect late to the others."""

    def __init__(self, rank):
        self.rank = rank

    def __reduce__(self):
        return connect_late, (self.rank,)


def connect_late(late):
    """Patch this process, and return the argument of the test."""
    init_process_group = dist.init_process_group

    def init_late(*args, store, rank, **kwargs):
        if rank == late:
            store = connect_late.store = LateStore(store)  # keep a reference, because torch keeps only the C++ part
        init_process_group(*args, store=store, rank=rank, **kwargs)

    dist.init_process_group = init_late
    return late


def leave_at_once(late):
    return dist.get_rank()


def leave_a_new_group_at_once(late):
    rank = dist.get_rank()
    idist.new_group([0, 1])
    idist.finalize()
    return rank


def leave_a_list_of_ranks_at_once(late):
    rank = dist.get_rank()
    idist.broadcast(late, src=1 - late, group=[0, 1])
    idist.finalize()
    return rank


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("leave", [leave_at_once, leave_a_new_group_at_once, leave_a_list_of_ranks_at_once])
def test_a_rank_that_leaves_at_once_does_not_break_a_rank_that_connects_late(leave, late):
    assert run_on_ranks(2, leave, Late(late)) == [0, 1]


def test_results_are_returned_in_rank_order():
    assert run_on_ranks(3, total, 1, factor=2) == [(0, 12), (1, 12), (2, 12)]


@on_ranks(2)
@pytest.mark.parametrize("value", [5])
def test_a_decorated_test_runs_on_every_rank(value):
    assert total(value)[1] == 11
    assert dist.get_world_size() == 2


@pytest.mark.parametrize(
    ("function", "reported"),
    [
        (fail_alone, ["rank 0: Traceback", "dist.barrier()", "rank 1: Traceback", "on one rank"]),
        (hang, ["rank 0: passed", "rank 1: timed out", "in hang"]),
        (die, ["rank 1: ended with exit code 3"]),
    ],
)
def test_a_failing_or_hanging_rank_fails_the_test_with_the_traceback_of_every_rank(monkeypatch, function, reported):
    if function is hang:  # the limit is over once only the rank that hangs is left
        wait = ranks.wait
        monkeypatch.setattr(ranks, "wait", lambda left, seconds: wait(left, seconds if len(left) > 1 else 0))
    with pytest.raises(pytest.fail.Exception) as failure:
        run_on_ranks(2, function)
    assert [text for text in reported if text not in str(failure.value)] == []
