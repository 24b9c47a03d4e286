"""The topology and the exit of ranks under horovodrun."""

from __future__ import annotations

import sys

import pytest

from tests.horovod.checking import horovodrun, run

TWO_HOSTS = "localhost:2,127.0.0.1:2"
UNEVEN = "localhost:1,127.0.0.1:2"  # rank 2 is the only one with local rank 1


def lines(way: str, *places: tuple[int, int, int, int, int, int]) -> list[str]:
    """Return the line that each rank is expected to print."""
    fields = ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes")
    numbers = [", ".join(f"{name}={number}" for name, number in zip(fields, place, strict=True)) for place in places]
    return [f"{way}: {one}: horovod horovod-dist cpu" for one in numbers]


def found(output: str) -> list[str]:
    """Return the lines that the ranks printed, in rank order."""
    return sorted(line[line.index(start) :] for line in output.splitlines() for start in STARTS if start in line)


STARTS = ("adopted: ", "initialized: ")


def test_ranks_on_two_nodes_know_their_place() -> None:
    code, output = horovodrun(4, "-m", "tests.horovod.place", "adopted", hosts=TWO_HOSTS)
    assert found(output) == lines("adopted", *((rank, 4, rank % 2, 2, rank // 2, 2) for rank in range(4))), output
    assert code == 0, output


@pytest.mark.parametrize("way", ["initialized", "adopted"])
def test_nodes_can_have_different_numbers_of_ranks(way: str) -> None:
    """Horovod reports only the nodes that have this local rank; an adopted job does not ask the other ranks."""
    code, output = horovodrun(3, "-m", "tests.horovod.place", way, hosts=UNEVEN)
    if way == "initialized":
        assert found(output) == lines(way, (0, 3, 0, 1, 0, 2), (1, 3, 0, 2, 1, 2), (2, 3, 1, 2, 1, 2)), output
    else:
        wanted = lines(way, (0, 3, 0, 1, 0, 2), (1, 3, 0, 2, 1, 2), (2, 3, 1, 2, 0, 1))
        assert found(output) == [f"{line} assuming node_rank, num_nodes" for line in wanted], output
    assert code == 0, output


def test_without_a_launcher_there_is_one_rank() -> None:
    code, output = run([sys.executable, "-W", "error", "-m", "tests.horovod.place", "adopted", "initialized"])
    alone = (0, 1, 0, 1, 0, 1)
    assert found(output) == lines("adopted", alone) + lines("initialized", alone), output
    assert code == 0, output


def test_processes_of_another_launcher_are_refused() -> None:
    program = "import camshaft.distributed as idist; idist.initialize('horovod')"
    code, output = run([sys.executable, "-c", program], RANK="0", WORLD_SIZE="2", LOCAL_RANK="0")
    assert code == 1
    assert (
        "RuntimeError: environment started 2 processes, but Horovod joined only this one: start them with horo"
        in output
    )


FAILING = """
import os, sys, time
import camshaft.distributed as idist
idist.initialize("horovod")
idist.barrier()
if idist.get_rank() == 1:
    HOW
idist.all_reduce(1)
"""


@pytest.mark.parametrize("how", ["raise LookupError('the cause')", "os.kill(os.getpid(), 9)"])
def test_a_failing_rank_ends_the_job(how: str) -> None:
    code, output = horovodrun(2, "-c", FAILING.replace("HOW", how))
    assert code == 1, output
    assert ("LookupError: the cause" in output) == ("raise" in how)


LATE = """
import time
from datetime import timedelta
import torch
import camshaft.distributed as idist
from camshaft.distributed import job
idist.initialize("horovod", timeout=timedelta(seconds=5))
backend = job.current()
seconds, backend._seconds = backend._seconds, 900.0  # until they have met
weight = torch.nn.Parameter(torch.ones(1))
optimizer = idist.auto_optim(torch.optim.SGD([weight], lr=0.1))
idist.barrier()
backend._seconds = seconds
if idist.get_rank() == 1:
    time.sleep(9000)
HOW
"""


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("idist.all_gather(1)", "camshaft.all_gather on rank 0 timed out after 5 s"),
        ("idist.barrier()", "camshaft.barrier on rank 0 timed out after 5 s"),
        ("weight.sum().backward(); optimizer.step()", "the exchange of gradients on rank 0 timed out after 5 s"),
    ],
)
def test_a_missing_rank_times_out(how: str, message: str) -> None:
    code, output = horovodrun(2, "-c", LATE.replace("HOW", how))
    assert code == 1, output
    assert f"RuntimeError: {message}: another rank did not take part" in output


def test_importing_changes_no_environment_variable() -> None:
    program = """
import os
before = dict(os.environ)
import camshaft.distributed as idist
assert "horovod" in idist.available_backends() and idist.has_hvd_support
assert idist.get_rank() == 0 and "horovod" not in __import__("sys").modules
assert before == dict(os.environ)
print("unchanged")
"""
    assert run([sys.executable, "-c", program]) == (0, "unchanged\n")
