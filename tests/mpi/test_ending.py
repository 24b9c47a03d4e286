"""How jobs start and end: no rank waits for a rank that will never arrive, and no report is cut."""

from __future__ import annotations

import re

import pytest

from camshaft.distributed.backends.mpi import check_launcher
from tests.mpi.checking import mpirun

IMPORTS = """
import atexit, os, sys, threading, time
from datetime import timedelta
import torch
import torch.distributed as dist
import camshaft.distributed as idist
from camshaft.distributed.backends import mpi
"""
BEGIN = f"""{IMPORTS}
idist.initialize("mpi", timeout=timedelta(seconds=900))
mpi._REPORTING = 900.0  # ranks may be slow to learn of an error
rank = idist.get_rank()
idist.barrier()
"""
RAISES = """
if rank == 1:
    raise LookupError("the cause")
"""
REDUCES = "dist.all_reduce(torch.ones(1))"
IS_BUSY = "mpi._REPORTING = 0.5; "  # how long it reports is not what is tested

# what ranks do after they have met; the errors that are reported
FAILING = {
    "others communicate": (RAISES + REDUCES, ["LookupError: the cause", "rank 1 failed first: LookupError"]),
    "others are busy": (IS_BUSY + RAISES + "time.sleep(9000)", ["LookupError: the cause"]),
    "it is leaving the job": (
        f"{IS_BUSY}\ntry:\n    assert rank == 0, 'the cause'\n    time.sleep(9000)\nfinally:\n    idist.finalize()",
        ["AssertionError: the cause"],
    ),
    "a thread of it does not end": (
        f"mpi._REPORTING = 20.0; mpi._ENDING = 0.5\n"
        f"if rank: threading.Thread(target=time.sleep, args=(9000,)).start(){RAISES}{REDUCES}",
        ["LookupError: the cause", "rank 1 failed first: LookupError"],
    ),
    "in a second run": (
        f"idist.finalize()\nidist.initialize('mpi'){RAISES}{REDUCES}",
        ["LookupError: the cause", "rank 1 failed first: LookupError"],
    ),
    "its exit handlers take a while": (
        f"atexit.register(lambda: (time.sleep(1.5 - rank), print(f'end of {{rank}}'))){RAISES}{REDUCES}",
        ["LookupError: the cause", "rank 1 failed first: LookupError", "end of 0", "end of 1"],
    ),
    "the other one is at its end": (RAISES, ["LookupError: the cause"]),
    "a message is not received": (
        "idist.isend(torch.ones(1 << 20), 1) if rank == 0 else None\nidist.finalize()",
        ["RuntimeError: a message to rank 1 was not received: ", "send cannot complete: rank 1 has left"],
    ),
    "a short message is not received": (
        "idist.isend('short', 1) if rank == 0 else None\nidist.finalize()",
        ["RuntimeError: a message to rank 1 was not received: ", "send cannot complete: rank 1 has left"],
    ),
    "a message is not sent": ("if rank == 0: idist.recv(1)", ["recv cannot complete: rank 1 has left"]),
    "it exits": ("if rank == 1: sys.exit(3)\n" + REDUCES, ["rank 1 has exited"]),
    "it returns": ("if rank == 0: " + REDUCES, ["rank 1 has exited"]),
    "a group lacks a member": (
        f"{IS_BUSY}\nif rank == 0: dist.new_group([0, 1], timeout=timedelta(seconds=0.3))\ntime.sleep(9000)",
        ["DistBackendError: creating a group over MPI timed out after 0.3 s: 1 of 2 ranks joined"],
    ),
}


@pytest.mark.jobs
def test_one_process_is_a_job_of_one() -> None:
    run = mpirun(1, "-c", f"{BEGIN}\nprint(idist.get_world_size(), idist.all_reduce(3))")
    assert (run.returncode, run.stdout.split()[-2:]) == (0, ["1", "3"]), run.stdout


@pytest.mark.jobs
@pytest.mark.parametrize("case", FAILING)
def test_a_failing_rank_ends_the_job_and_all_ranks_report_it(case: str) -> None:
    program, errors = FAILING[case]
    run = mpirun(2, "-c", BEGIN + program)
    assert run.returncode != 0, run.stdout
    for error in errors:
        assert error in run.stdout, run.stdout


ENDING = {
    "one by one": ("time.sleep(0.5 * rank); print(f'end of {rank}')", 0, "end of 1"),
    "with an exit code": ("sys.exit(3 * rank)", 3, ""),
    "with an error after the job": (
        "for _ in range(2):\n    idist.finalize()\n    idist.initialize('mpi')\nidist.finalize()\n"
        "if rank == 0:\n    raise LookupError('after all')\ntime.sleep(0.5)\nprint('undisturbed')",
        1,
        "undisturbed",
    ),
    "while others use the store of rank 0": (
        "dist.new_group([1])\nif rank == 1:\n    time.sleep(0.5)\n    mpi.create_group([1], timedelta(seconds=60))\n"
        "    print('has created a group')\nelse:\n    dist.destroy_process_group()",
        0,
        "has created a group",
    ),
}


@pytest.mark.jobs
@pytest.mark.parametrize("case", ENDING)
def test_ranks_that_do_not_fail_end_together(case: str) -> None:
    program, code, text = ENDING[case]
    run = mpirun(2, "-c", BEGIN + program)
    assert run.returncode == code, run.stdout
    assert text in run.stdout, run.stdout


@pytest.mark.parametrize(
    ("end", "how"), [("idist.finalize()", "has left the run without an error"), ("pass", "has exited: it returned")]
)
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.jobs
def test_in_debug_mode_a_rank_that_waits_for_one_that_has_ended_learns_how(who: int, end: str, how: str) -> None:
    program = f"if rank == {who}:\n    {end}\n    sys.exit()\ntry:\n    idist.all_reduce(torch.ones(1))\n"
    program += "except RuntimeError as error:\n    print(error)"
    run = mpirun(2, "-c", BEGIN.replace('"mpi", ', '"mpi", debug=True, ') + program)
    assert f"rank {who} {how}" in run.stdout, run.stdout
    assert "in all_reduce" in run.stdout
    assert run.returncode == 0


LATE = "creating a group over MPI timed out after 10 s: (1 of 2|not all) ranks joined"
ABSENT = {
    "rank 1 never initializes": (f"if MPI.COMM_WORLD.rank: time.sleep(9000)\n{IS_BUSY}\n", "", 1),
    "all end": ("if MPI.COMM_WORLD.rank: sys.exit()\n", "except RuntimeError as error: print(error)", 0),
}


@pytest.mark.jobs
@pytest.mark.parametrize("case", ABSENT)
def test_ranks_do_not_wait_for_one_that_never_initializes(case: str) -> None:
    absent, handler, code = ABSENT[case]
    joins = "idist.initialize('mpi', timeout=timedelta(seconds=10))\n"
    program = IMPORTS + "from mpi4py import MPI\n" + absent + (f"try: {joins}{handler}" if handler else joins)
    run = mpirun(2, "-c", program)
    assert run.returncode == code, run.stdout
    assert re.search(LATE, run.stdout), run.stdout


@pytest.mark.parametrize(
    ("variables", "world_size", "is_right"),
    [
        *(({name: "4"}, 1, False) for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")),
        *(({name: "2"}, 2, True) for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")),
        ({"PMI_SIZE": "1"}, 1, True),
        ({}, 1, True),
    ],
)
def test_the_launcher_of_another_mpi_library_is_refused(
    variables: dict[str, str], world_size: int, is_right: bool
) -> None:
    if is_right:
        check_launcher(variables, world_size)
        return
    (name,) = variables
    with pytest.raises(RuntimeError, match=rf"MPI sees 1 process, but the launcher started 4 \({name}\): start with"):
        check_launcher(variables, world_size)
