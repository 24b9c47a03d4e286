from __future__ import annotations

import math
import threading
from types import SimpleNamespace

import pytest
import torch

import camshaft.distributed as idist
from tests import thread_backend, threads
from tests.limits import HANG
from tests.threads import on_threads, run_on_threads


def total(value: int, *, factor: int = 1) -> tuple[int, int]:
    return idist.get_rank(), idist.all_reduce(value + idist.get_rank()) * factor


def fail_alone() -> None:
    if idist.get_rank() == 1:
        raise ZeroDivisionError("on one rank")
    idist.barrier()


def do_different_things() -> None:
    idist.barrier() if idist.get_rank() == 0 else idist.all_reduce(torch.ones(1))


def disagree_on_shapes() -> None:
    idist.all_reduce(torch.ones(2 + idist.get_rank()))


def test_results_are_returned_in_rank_order() -> None:
    assert run_on_threads(3, total, 1, factor=2) == [(0, 12), (1, 12), (2, 12)]
    assert idist.get_world_size() == 1


@on_threads(2)
@pytest.mark.parametrize("value", [5])
def test_a_decorated_test_runs_on_every_rank(value: int) -> None:
    assert total(value)[1] == 11
    assert idist.get_world_size() == 2


@on_threads(4, nodes=2)
def test_ranks_can_be_on_several_nodes() -> None:
    place = idist.get_rank(), idist.get_node_rank(), idist.get_local_rank(), idist.get_nproc_per_node()
    assert idist.all_gather(place) == [(0, 0, 0, 2), (1, 0, 1, 2), (2, 1, 0, 2), (3, 1, 1, 2)]


@pytest.mark.parametrize(
    ("function", "reported"),
    [
        (fail_alone, ["rank 0: Traceback", "idist.barrier()", "rank 1: Traceback", "on one rank"]),
        (do_different_things, ["the calls of the ranks differ: {0: 'barrier', 1: 'all_reduce SUM of float32[1]'}"]),
        (disagree_on_shapes, ["{0: 'all_reduce SUM of float32[2]', 1: 'all_reduce SUM of float32[3]'}"]),
    ],
)
def test_a_failing_rank_fails_the_test_with_the_traceback_of_every_rank(function, reported) -> None:  # type: ignore[no-untyped-def]  # a row of the table
    with pytest.raises(pytest.fail.Exception) as failure:
        run_on_threads(2, function)
    assert [text for text in reported if text not in str(failure.value)] == []


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the time limit of a test be over once only one rank is left."""

    def monotonic() -> float:
        return math.inf if sum(type(thread) is threads.Rank for thread in threading.enumerate()) == 1 else 0.0

    monkeypatch.setattr(thread_backend, "time", SimpleNamespace(monotonic=monotonic))


@pytest.mark.usefixtures("impatient")
def test_a_rank_that_waits_for_one_that_has_ended_is_reported() -> None:
    both = threading.Barrier(2)

    def wait_alone() -> None:
        both.wait()
        if idist.get_rank() == 0:
            idist.barrier()

    with pytest.raises(pytest.fail.Exception) as failure:
        run_on_threads(2, wait_alone, limit=0.1)
    for text in ("rank 0: Traceback", "in wait_alone", "timed out waiting for the other ranks", "rank 1: passed"):
        assert text in str(failure.value)


@pytest.mark.usefixtures("impatient")
def test_a_hanging_rank_is_reported_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "GRACE", 0.0)
    hangs, free = threading.Event(), threading.Event()

    def hang() -> None:
        if idist.get_rank() == 1:
            hangs.set()
            free.wait()
        else:
            hangs.wait(HANG)

    with pytest.raises(pytest.fail.Exception) as failure:
        run_on_threads(2, hang, limit=0.1)
    free.set()
    for text in ("rank 0: passed", "rank 1: timed out", "in hang"):
        assert text in str(failure.value)


@pytest.mark.usefixtures("impatient")
def test_waiting_for_a_message_ends_with_the_test() -> None:
    def receive() -> None:
        if idist.get_rank() == 1:
            idist.recv(0)

    with pytest.raises(pytest.fail.Exception, match="timed out waiting for the other ranks"):
        run_on_threads(2, receive, limit=0.1)
