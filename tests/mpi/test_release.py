"""Release of threads that wait over MPI for ranks that never arrive."""

from __future__ import annotations

import pytest

from tests.mpi.checking import mpirun

pytestmark = pytest.mark.jobs

PROGRAM = """
import sys, threading, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import camshaft.distributed as idist
from camshaft.distributed.job import current

idist.initialize("mpi")
model, group = DistributedDataParallel(torch.nn.Linear(2, 1)), idist.new_group([0, 1])
backend, clone = current(), current().store().clone()
last = dist.get_world_size() - 1
began = time.monotonic()

def backward():
    model(torch.ones(3, 2)).sum().backward()

WAITS = {
    "collective": lambda: idist.all_reduce(torch.ones(3)),
    "barrier": dist.barrier,
    "message": lambda: dist.recv(torch.ones(3), last),
    "backward": backward,
    "subgroup": lambda: dist.all_reduce(torch.ones(3), group=group),
    "group": lambda: idist.new_group([0, last]),
}

if dist.get_rank() == last:
    clone.get("done")
else:
    def release():
        global began
        began = time.monotonic()
        backend.release()

    threading.Timer(0.3, release).start()
    try:
        WAITS[sys.argv[1]]()
    except RuntimeError as error:
        print(f"rank {dist.get_rank()} raised after {time.monotonic() - began:.3f} s: {error}", flush=True)
    if clone.add("released", 1) == last:
        clone.set("done", "yes")
"""


@pytest.mark.parametrize("wait", ["collective", "barrier", "message", "backward", "subgroup", "group"])
def test_ranks_that_wait_over_mpi_are_released(wait: str) -> None:
    run = mpirun(2, "-c", PROGRAM, wait)
    assert run.returncode == 0, run.stdout
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("rank 0 raised")]
    assert wait == "group" or "was released" in line, run.stdout


def test_all_ranks_that_wait_over_mpi_are_released() -> None:
    run = mpirun(3, "-c", PROGRAM, "collective")
    assert run.returncode == 0, run.stdout
    assert all(f"rank {rank} raised" in run.stdout for rank in (0, 1))
