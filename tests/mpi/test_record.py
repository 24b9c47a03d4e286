"""What is sent over MPI is recorded, whoever calls it, and correct programs differ in nothing there."""

from __future__ import annotations

import pytest

from tests.mpi.checking import mpirun

pytestmark = pytest.mark.jobs

BEGIN = """
import time
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
import camshaft.distributed as idist
from camshaft.distributed import failures
from camshaft.distributed.failures import verdicts, watcher
from camshaft.distributed.job import current

watcher._LEARNING = 900.0  # ranks may be slow to say what they have called
idist.initialize("mpi")
rank, size = dist.get_rank(), dist.get_world_size()

def seen():
    own = current().job.find(failures.Watcher)
    own._is_asked = lambda local, now: True  # as if another rank waited
    while True:
        found = [one for one in failures.inspect() if one.job == own.board.job]
        if [len(one.status.get("calls", ())) for one in found] == size * [64]:
            return found
        time.sleep(0.1)
"""

CORRECT = """
model = idist.auto_model(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)))
group = dist.new_group(list(range(size)))
last = dist.new_group([size - 1, 0])

# a rank without data takes part in the reductions of the others
uneven = DistributedDataParallel(torch.nn.Linear(3, 1))
with Join([uneven]):
    for _ in range(3 + rank):
        uneven(torch.ones(4, 3)).sum().backward()

for _ in range(3):
    model(torch.ones(4, 3)).sum().backward()
    works = [dist.all_reduce(torch.ones(2), async_op=True), dist.broadcast(torch.ones(3), 1, async_op=True)]
    idist.all_reduce(1.0)
    idist.all_gather(["rank"] * rank)  # of other sizes
    works[1].wait()
    dist.all_reduce(torch.ones(2, rank + 1, 1).reshape(-1)[:2].view(2 - rank % 2, -1), op=dist.ReduceOp.MAX)
    dist.all_gather([torch.empty(1 + k) for k in range(size)], torch.ones(1 + rank))
    counts = [1 + (rank + k) % 2 for k in range(size)]
    dist.all_to_all_single(torch.empty(sum(counts)), torch.ones(sum(counts)), counts, counts)
    dist.broadcast_object_list(["text", rank] if rank == 0 else [None, None], 0)
    dist.all_gather_object([None] * size, "rank" * rank)
    dist.all_reduce(torch.ones(2), group=group)
    if rank in (0, size - 1):
        dist.all_reduce(torch.ones(2), group=last)
        dist.broadcast(torch.ones(2), size - 1, group=last)
    if rank == 0:
        dist.barrier()
    else:
        idist.barrier()

dist.barrier()
snapshots = seen()
assert sorted(one.rank for one in snapshots) == list(range(size)), snapshots
verdict = verdicts.verdict(snapshots, time.monotonic() + 10)
assert verdict is None, verdict
dist.barrier()
idist.finalize()
"""


def test_correct_programs_differ_in_nothing() -> None:
    run = mpirun(3, "-c", BEGIN + CORRECT)
    assert run.returncode == 0, run.stdout


SKIPPED = """
from camshaft.exceptions import RankDivergenceError

model = DistributedDataParallel(torch.nn.Linear(3, 2))
try:
    for step in range(5):
        loss = model(torch.ones(4, 3)).sum()
        if step != 2 or rank != 1:
            loss.backward()
    idist.barrier()
    print("trained to the end")
except RankDivergenceError as error:
    print(error, flush=True)
"""


def test_a_step_that_one_rank_skips_is_found_without_an_engine() -> None:
    run = mpirun(2, "-c", BEGIN + SKIPPED)
    assert "the ranks call different things" in run.stdout, run.stdout
    assert "rank 0  backward (gradient reduction)" in run.stdout
    assert "rank 1  barrier" in run.stdout
