"""How jobs start and end: no rank waits for a rank that will never arrive."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from camshaft.distributed.backends import mpi
from camshaft.distributed.backends.mpi import MPIGroup, check_launcher
from tests.mpi.checking import mpirun

pytestmark = pytest.mark.jobs

BEGIN = """
import os, sys, threading, time
from datetime import timedelta
import torch
import torch.distributed as dist
from camshaft.distributed.backends.mpi import initialize_mpi, register_mpi

initialize_mpi(timedelta(seconds=900))
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
time.sleep(9000)
"""

RAISE_AND_FINALIZE = """
try:
    if rank == 1:
        raise LookupError("the cause")
    time.sleep(9000)
finally:
    dist.destroy_process_group()
"""

RAISE_BESIDE_A_THREAD_THAT_DOES_NOT_END = """
if rank == 1:
    threading.Thread(target=time.sleep, args=(9000,)).start()
    raise LookupError("the cause")
dist.all_reduce(torch.ones(1))
"""

RAISE_IN_A_SECOND_GROUP = """
dist.destroy_process_group()
initialize_mpi(timedelta(seconds=900))
if rank == 1:
    raise LookupError("the cause")
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.parametrize(
    "program",
    [
        RAISE_OR_REDUCE,
        RAISE_WHILE_OTHERS_ARE_BUSY,
        RAISE_AND_FINALIZE,
        RAISE_BESIDE_A_THREAD_THAT_DOES_NOT_END,
        RAISE_IN_A_SECOND_GROUP,
    ],
)
def test_an_error_on_one_rank_ends_the_job_and_is_printed(program: str) -> None:
    run = mpirun(2, "-c", BEGIN + program)
    assert run.returncode == 1, run.stdout
    assert "LookupError: the cause" in run.stdout


@pytest.mark.parametrize("code", [0, 3])
def test_ranks_that_wait_for_a_rank_that_exited_report_it(code: int) -> None:
    run = mpirun(2, "-c", f"{BEGIN}\nif rank == 1: sys.exit({code})\ndist.all_reduce(torch.ones(1))")
    assert run.returncode != 0
    assert "all_reduce, collective 2 of this group, cannot complete: rank 1 left after 1 collective" in run.stdout


def test_the_job_exits_with_the_exit_code_of_the_rank() -> None:
    run = mpirun(2, "-c", f"{BEGIN}\nsys.exit(3 * rank)")
    assert run.returncode == 3, run.stdout


def test_ranks_can_exit_at_different_times_without_destroying_the_group() -> None:
    run = mpirun(2, "-c", f"{BEGIN}\ntime.sleep(0.5 * rank)\nprint('end of', rank)")
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


def test_an_error_after_the_group_is_destroyed_ends_only_that_process() -> None:
    run = mpirun(2, "-c", BEGIN + RAISE_AFTER_ALL)
    assert run.returncode == 1
    assert "LookupError: after all" in run.stdout
    assert "undisturbed" in run.stdout


NEW_GROUP_AFTER_RANK_0_HAS_LEFT = """
dist.new_group([1], timeout=timedelta(seconds=5))
if rank == 1:
    while not dist.group.WORLD.departures():
        time.sleep(0.01)
    time.sleep(0.5)  # until rank 0 has exited
    mpi.create_group([1], timedelta(seconds=5))
    print("rank 1 has created a group")
dist.destroy_process_group()
"""


def test_the_store_outlives_rank_0_while_others_need_it() -> None:
    begin = BEGIN + "from camshaft.distributed.backends import mpi\n"
    run = mpirun(2, "-c", begin + NEW_GROUP_AFTER_RANK_0_HAS_LEFT)
    assert run.returncode == 0, run.stdout
    assert "rank 1 has created a group" in run.stdout


RAISE_WHEN_RANK_0_HAS_LEFT = """
if rank == 1:
    while not dist.group.WORLD.departures():
        time.sleep(0.01)
    raise LookupError("the cause")
dist.destroy_process_group()
"""


def test_an_error_ends_the_job_while_rank_0_waits_for_the_others_to_leave() -> None:
    run = mpirun(2, "-c", BEGIN + RAISE_WHEN_RANK_0_HAS_LEFT)
    assert run.returncode == 1, run.stdout
    assert "LookupError: the cause" in run.stdout


WITHOUT_GUARD = """
import time
import torch, torch.distributed as dist
from camshaft.distributed.backends.mpi import register_mpi

register_mpi()
dist.init_process_group("mpi")
if dist.get_rank() == 1:
    raise LookupError("the cause")
dist.barrier()
"""


def test_a_rank_that_leaves_is_reported_after_init_process_group() -> None:
    run = mpirun(2, "-c", WITHOUT_GUARD)
    assert run.returncode == 1, run.stdout
    assert "LookupError: the cause" in run.stdout
    assert "barrier, collective 1 of this group, cannot complete: rank 1 left after 0 collectives" in run.stdout


UNRECEIVED_AT_THE_END = """
import time, torch
import camshaft.distributed as idist

if __name__ == "__main__":
    with idist.Parallel("mpi"):
        if idist.get_rank() == 0:
            idist.isend({value}, 1)
"""


@pytest.mark.parametrize("value", ["'short'", "torch.ones(1 << 20)"])
def test_an_unreceived_message_raises_on_the_sender(value: str) -> None:
    run = mpirun(2, "-W", "default", "-c", UNRECEIVED_AT_THE_END.format(value=value))
    assert run.returncode == 1, run.stdout
    assert "RuntimeError: a message to rank 1 was not received: " in run.stdout
    assert "send cannot complete: rank 1 left" in run.stdout


ABSENT = """
dist.new_group([0, 1])
if rank == 0:
    dist.new_group([0, 1], timeout=timedelta(seconds=0.3))
time.sleep(9000)
"""


def test_a_group_without_all_its_members_times_out() -> None:
    run = mpirun(2, "-c", BEGIN + ABSENT)
    assert run.returncode == 1
    assert "DistBackendError: creating a group over MPI timed out after 0.3 s: 1 of 2 ranks joined" in run.stdout


def test_a_rank_that_never_initializes_times_out_on_the_others() -> None:
    late = "import time; from mpi4py import MPI; MPI.COMM_WORLD.rank and time.sleep(9000)\n"
    program = late + BEGIN.replace("seconds=900", "seconds=1")
    run = mpirun(2, "-c", program)
    assert run.returncode == 1
    assert "creating a group over MPI timed out after 1 s" in run.stdout


def test_one_process_without_mpirun_is_a_group_of_one() -> None:
    run = mpirun(1, "-c", f"{BEGIN}\nassert dist.get_world_size() == 1\nregister_mpi()\nprint('done')")
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


NEVER_ARRIVES = """
import os, sys, time
from datetime import timedelta
from pathlib import Path

rank = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))
if rank == "1":
    time.sleep(9000)
import camshaft.distributed as idist
Path(sys.argv[1], rank).touch()
while len(os.listdir(sys.argv[1])) < 2:
    time.sleep(0.01)
idist.initialize("mpi", timeout=timedelta(seconds=5))
"""


def test_a_rank_that_never_initializes_mpi_ends_the_others_which_name_it(tmp_path: Path) -> None:
    run = mpirun(3, "-c", NEVER_ARRIVES, str(tmp_path))
    assert run.returncode != 0
    assert re.search("rank [02] timed out after 5 s waiting for all ranks to start MPI; missing: 1$", run.stdout, re.M)


STARTS_LATE = """
import os, sys, time

errors = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
    while "missing: 1" not in open(sys.argv[1]).read():
        time.sleep(0.01)
else:
    os.dup2(errors, 2)  # what it reports
import camshaft.distributed as idist
idist.initialize("mpi")
total = idist.all_reduce(1)
idist.one_rank_only()(print)("all came:", total)
"""


def test_a_rank_that_waits_for_a_late_one_reports_it(tmp_path: Path) -> None:
    run = mpirun(2, "-c", STARTS_LATE, str(tmp_path / "errors"))
    assert run.returncode == 0, run.stdout
    reported = (tmp_path / "errors").read_text()
    assert "rank 0 is waiting up to 1800 s for all ranks to start MPI; missing: 1" in reported
    assert "all came: 2" in run.stdout


class Group:
    """What is left of a group of two ranks at the end of one, which the other has not left."""

    killed = MPIGroup.killed

    def __init__(self, store: object) -> None:
        self.store, self.world, self.looks = store, self, 0

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 2

    def departures(self) -> dict[int, object]:
        self.looks += 1
        return {}

    def shutdown(self) -> None:
        """It has left."""


@pytest.mark.parametrize("state", ["ended", "a zombie", "the store is lost", "alive", "on another host", "unknown"])
def test_a_rank_waits_at_its_end_unless_the_other_was_killed(
    state: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where the launcher leaves the others alone, as srun does."""
    process = subprocess.Popen([sys.executable, "-c", "" if state in ("ended", "a zombie") else "input()"], stdin=-1)
    store = dist.HashStore()
    if state != "unknown":
        host = "elsewhere" if state == "on another host" else socket.gethostname()
        store.set("process/0", json.dumps([host, process.pid]))
    group = Group(mock.Mock(**{"check.side_effect": dist.DistNetworkError()}) if "store" in state else store)
    groups = {group}
    monkeypatch.setattr(mpi, "_groups", groups)
    monkeypatch.setattr(mpi, "mpi", lambda: mock.Mock(**{"Is_finalized.return_value": False}))
    monkeypatch.setattr(mpi, "_LOOK", 0.0)
    monkeypatch.setattr(mpi, "free_unused", lambda: groups.clear() if group.looks == 3 else None)
    monkeypatch.setattr(os, "_exit", sys.exit)
    is_killed = state in ("ended", "a zombie", "the store is lost")
    with process:
        if state == "ended":
            process.wait()
        elif state == "a zombie":
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(SystemExit, match="1") if is_killed else nullcontext():
            mpi.leave_all()
        process.communicate()
    assert ("the processes of ranks [0] were killed; exiting" in capfd.readouterr().err) == is_killed
    assert group.looks == (1 if is_killed else 3)
