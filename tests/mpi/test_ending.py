"""How a job begins and ends: no rank waits for one that will not come."""

from __future__ import annotations

import pytest

from camshaft.distributed.backends.mpi.rendezvous import check_launcher
from tests.mpi.checking import mpirun

pytestmark = pytest.mark.jobs

BEGIN = """
import os, sys, threading, time
from datetime import timedelta
import torch
import torch.distributed as dist
from camshaft.distributed.backends.mpi.register import initialize_mpi, register_mpi

initialize_mpi(timedelta(seconds=40))
rank = dist.get_rank()
dist.barrier()
"""

RAISE_OR_REDUCE = """
if rank == 1:
    raise LookupError("the cause")
dist.all_reduce(torch.ones(1))
"""

RAISE_WHILE_OTHERS_ARE_BUSY = """
if rank == 1:
    raise LookupError("the cause")
time.sleep(40)
"""

RAISE_AND_FINALISE = """
try:
    if rank == 1:
        raise LookupError("the cause")
    time.sleep(40)
finally:
    dist.destroy_process_group()
"""

RAISE_BESIDE_A_THREAD_THAT_DOES_NOT_END = """
if rank == 1:
    threading.Thread(target=time.sleep, args=(40,)).start()
    raise LookupError("the cause")
dist.all_reduce(torch.ones(1))
"""

RAISE_IN_A_SECOND_GROUP = """
dist.destroy_process_group()
initialize_mpi(timedelta(seconds=40))
if rank == 1:
    raise LookupError("the cause")
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.parametrize(
    "program",
    [
        RAISE_OR_REDUCE,
        RAISE_WHILE_OTHERS_ARE_BUSY,
        RAISE_AND_FINALISE,
        RAISE_BESIDE_A_THREAD_THAT_DOES_NOT_END,
        RAISE_IN_A_SECOND_GROUP,
    ],
)
def test_an_error_of_one_rank_ends_the_job_and_is_shown(program: str) -> None:
    """Within the 20 seconds that `mpirun` gets; the ranks would wait for twice as long."""
    run = mpirun(2, "-c", BEGIN + program, seconds=20)
    assert run.returncode == 1, run.stdout
    assert "LookupError: the cause" in run.stdout


@pytest.mark.parametrize("code", [0, 3])
def test_a_rank_that_exits_is_named_by_those_that_wait_for_it(code: int) -> None:
    run = mpirun(2, "-c", f"{BEGIN}\nif rank == 1: sys.exit({code})\ndist.all_reduce(torch.ones(1))", seconds=20)
    assert run.returncode != 0
    assert "all_reduce, collective 2 of this group, cannot complete: rank 1 left after 1 collectives" in run.stdout


def test_the_exit_code_of_a_rank_is_that_of_the_job() -> None:
    run = mpirun(2, "-c", f"{BEGIN}\nsys.exit(3 * rank)", seconds=20)
    assert run.returncode == 3, run.stdout


def test_ranks_may_end_at_different_times_and_without_destroying_the_group() -> None:
    run = mpirun(2, "-c", f"{BEGIN}\ntime.sleep(0.5 * rank)\nprint('end of', rank)", seconds=20)
    assert run.returncode == 0, run.stdout
    assert "end of 1" in run.stdout


RAISE_AFTER_ALL = """
for _ in range(2):
    dist.destroy_process_group()
    initialize_mpi()
    dist.barrier()
dist.destroy_process_group()
if rank == 0:
    raise LookupError("after all")
time.sleep(0.5)
print("undisturbed")
"""


def test_after_the_group_is_destroyed_an_error_is_an_error_of_one_process() -> None:
    run = mpirun(2, "-c", BEGIN + RAISE_AFTER_ALL, seconds=20)
    assert run.returncode == 1
    assert "LookupError: after all" in run.stdout
    assert "undisturbed" in run.stdout


ABSENT = """
dist.new_group([0, 1])
if rank == 0:
    dist.new_group([0, 1], timeout=timedelta(seconds=0.3))
time.sleep(40)
"""


def test_a_group_that_a_member_does_not_come_to_is_an_error() -> None:
    run = mpirun(2, "-c", BEGIN + ABSENT, seconds=20)
    assert run.returncode == 1
    assert "DistBackendError: 1 of 2 ranks came to make a group over MPI within 0.3 s" in run.stdout


def test_a_rank_that_never_begins_is_an_error_of_the_others() -> None:
    late = "import time; from mpi4py import MPI; MPI.COMM_WORLD.rank and time.sleep(40)\n"
    program = late + BEGIN.replace("seconds=40", "seconds=1")
    run = mpirun(2, "-c", program, seconds=20)
    assert run.returncode == 1
    assert "ranks came to make a group over MPI within 1 s" in run.stdout


def test_one_process_without_mpirun_is_a_group_of_one() -> None:
    run = mpirun(1, "-c", f"{BEGIN}\nassert dist.get_world_size() == 1\nregister_mpi()\nprint('done')", seconds=20)
    assert run.returncode == 0, run.stdout
    assert "done" in run.stdout


@pytest.mark.parametrize("name", ["PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_the_launcher_of_another_mpi_library_is_refused(name: str) -> None:
    with pytest.raises(RuntimeError, match=rf"MPI sees 1 process, but the launcher started 4 \({name}\): start with"):
        check_launcher({name: "4"}, world_size=1)


@pytest.mark.parametrize(
    ("environ", "world_size"),
    [({}, 1), ({"PMI_SIZE": "1"}, 1), ({"PMI_SIZE": "2"}, 2), ({"OMPI_COMM_WORLD_SIZE": "2"}, 2)],
)
def test_the_right_launcher_is_accepted(environ: dict[str, str], world_size: int) -> None:
    check_launcher(environ, world_size)
