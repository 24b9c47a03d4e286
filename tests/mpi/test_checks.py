"""The checks of this folder, on real ranks: one start of mpirun serves them all."""

from __future__ import annotations

import re
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.mpi.checking import mpirun

pytestmark = pytest.mark.timeout(88)  # ranks that wait take all that a busy machine has left

# read, not imported: what the checks import of torch has no place in the process of the tests
FILES = sorted(Path(__file__).parent.glob("check_*.py"))
NAMES = [name for file in FILES for name in re.findall(r"^@check\ndef (\w+)", file.read_text(), re.MULTILINE)]


@pytest.fixture(
    scope="module",
    params=[(2, 80), pytest.param((4, 160), marks=[pytest.mark.jobs, pytest.mark.timeout(170)])],
    ids=["2_ranks", "4_ranks"],
)
def run(request: pytest.FixtureRequest) -> CompletedProcess[str]:
    ranks, seconds = request.param
    return mpirun(ranks, "-m", "tests.mpi.run_checks", seconds=seconds)


@pytest.mark.parametrize("name", NAMES)
def test_all_ranks_pass(run: CompletedProcess[str], name: str) -> None:
    assert f"passed {name}\n" in run.stdout, run.stdout[-6000:]


def test_the_job_ends_well(run: CompletedProcess[str]) -> None:
    assert run.returncode == 0, run.stdout[-6000:]
