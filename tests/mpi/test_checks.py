"""Run the checks of this folder on real ranks; all of them share one mpirun."""

from __future__ import annotations

import re
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.mpi.checking import mpirun

pytestmark = pytest.mark.timeout(140)  # MPI ranks poll while they wait, which is slow on a busy machine

# read, not imported: the test process must not import the torch modules that the checks use
FILES = sorted(Path(__file__).parent.glob("check_*.py"))
NAMES = [name for file in FILES for name in re.findall(r"^@check\ndef (\w+)", file.read_text(), re.MULTILINE)]


@pytest.fixture(
    scope="module",
    params=[(2, 130), pytest.param((4, 160), marks=[pytest.mark.jobs, pytest.mark.timeout(170)])],
    ids=["2_ranks", "4_ranks"],
)
def run(request: pytest.FixtureRequest) -> CompletedProcess[str]:
    ranks, seconds = request.param
    return mpirun(ranks, "-m", "tests.mpi.run_checks", seconds=seconds)


@pytest.mark.parametrize("name", NAMES)
def test_all_ranks_pass(run: CompletedProcess[str], name: str) -> None:
    assert f"passed {name}\n" in run.stdout, run.stdout[-6000:]


def test_the_job_exits_with_0(run: CompletedProcess[str]) -> None:
    assert run.returncode == 0, run.stdout[-6000:]
