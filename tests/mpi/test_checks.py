"""Run the checks of this folder on real ranks; all of them share one mpirun."""

from __future__ import annotations

import re
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.mpi.checking import mpirun

# read, not imported: the test process must not import the torch modules that the checks use
FILES = sorted(Path(__file__).parent.glob("check_*.py"))
NAMES = [name for file in FILES for name in re.findall(r"^@check\ndef (\w+)", file.read_text(), re.MULTILINE)]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.jobs)], ids=["2_ranks", "4_ranks"])
def run(request: pytest.FixtureRequest) -> CompletedProcess[str]:
    return mpirun(request.param, "-m", "tests.mpi.run_checks")


@pytest.mark.parametrize("name", NAMES)
def test_all_ranks_pass(run: CompletedProcess[str], name: str) -> None:
    assert f"passed {name}\n" in run.stdout, run.stdout[-6000:]


def test_the_job_exits_with_0(run: CompletedProcess[str]) -> None:
    assert run.returncode == 0, run.stdout[-6000:]
