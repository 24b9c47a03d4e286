from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import on_ranks, run_on_ranks


def total(value: int, *, factor: int = 1):
    tensor = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(tensor)
    return dist.get_rank(), tensor * factor


def fail_alone():
    if dist.get_rank() == 1:
        raise ZeroDivisionError("on one rank")
    dist.barrier()


def stand_still():
    if dist.get_rank() == 1:
        time.sleep(600)


def die():
    if dist.get_rank() == 1:
        os._exit(3)


def test_every_rank_returns_its_result_in_the_order_of_the_ranks():
    assert run_on_ranks(3, total, 1, factor=2) == [(0, 12), (1, 12), (2, 12)]


@on_ranks(2)
@pytest.mark.parametrize("value", [5])
def test_a_decorated_test_runs_on_every_rank(value):
    assert total(value)[1] == 11
    assert dist.get_world_size() == 2


@pytest.mark.parametrize(
    ("function", "limit", "reported"),
    [
        (fail_alone, 30, ["rank 0: Traceback", "dist.barrier()", "rank 1: Traceback", "on one rank"]),
        (stand_still, 2, ["rank 0: passed", "rank 1: did not come to its end", "in stand_still"]),
        (die, 30, ["rank 1: ended with exit code 3"]),
    ],
)
def test_a_rank_that_fails_or_stands_still_fails_the_test_with_the_traceback_of_every_rank(function, limit, reported):
    with pytest.raises(pytest.fail.Exception) as failure:
        run_on_ranks(2, function, limit=limit)
    assert [text for text in reported if text not in str(failure.value)] == []
