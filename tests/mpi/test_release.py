"""Release of threads that wait over MPI for ranks that never arrive."""

from __future__ import annotations

import re

import pytest

from tests.mpi.checking import mpirun

pytestmark = pytest.mark.jobs

WAITS = ("collective", "barrier", "message", "backward", "subgroup", "group")
PROGRAM = """
import sys, threading
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import camshaft.distributed as idist
from camshaft.distributed.job import current

def wait_and_be_released(what):
    idist.initialize("mpi")
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    model, group = DistributedDataParallel(torch.nn.Linear(2, 1)), idist.new_group(range(last + 1))
    backend, clone = current(), current().store().clone()
    waits = {
        "collective": lambda: idist.all_reduce(torch.ones(3)),
        "barrier": dist.barrier,
        "message": lambda: dist.recv(torch.ones(3), last),
        "backward": lambda: model(torch.ones(3, 2)).sum().backward(),
        "subgroup": lambda: dist.all_reduce(torch.ones(3), group=group),
        "group": lambda: idist.new_group([0, 1, last]),
    }
    if rank == last:
        clone.get("done")
    else:
        has_waited = threading.Event()
        def release():
            while not has_waited.wait(0.3):  # again, if it had not begun to wait for a new group
                backend.release()
        releasing = threading.Thread(target=release)
        releasing.start()
        try:
            waits[what]()
        except RuntimeError as error:
            print(f"rank {rank} raised in {what}: {error}", flush=True)
        has_waited.set()
        releasing.join()
        if clone.add("released", 1) == last:
            clone.set("done", "yes")
    if rank == 0:  # it hosts the store
        clone.get("over")
    elif clone.add("through", 1) == last:
        clone.set("over", "yes")
    idist.finalize()

for what in sys.argv[1:]:
    wait_and_be_released(what)
"""


def test_all_ranks_that_wait_over_mpi_are_released() -> None:
    run = mpirun(3, "-c", PROGRAM, *WAITS)
    assert run.returncode == 0, run.stdout
    for what in WAITS:
        how = "" if what == "group" else "(was released|rank . left)"  # a rank leaves when it is released
        assert len(set(re.findall(f"rank (.) raised in {what}: .*?{how}", run.stdout))) == 2, run.stdout
