"""Run the checks of this folder on two real ranks; all of them share one horovodrun."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.horovod.checking import horovodrun

# read, not imported: the test process must not import Horovod
FILES = sorted(Path(__file__).parent.glob("check_*.py"))
NAMES = [name for file in FILES for name in re.findall(r"^@check\ndef (\w+)", file.read_text(), re.MULTILINE)]


@pytest.fixture(scope="module")
def ran() -> tuple[int, str]:
    return horovodrun(2, "-m", "tests.horovod.run_checks")


@pytest.mark.parametrize("name", NAMES)
def test_all_ranks_pass(ran: tuple[int, str], name: str) -> None:
    assert f"passed {name}\n" in ran[1], ran[1][-6000:]


def test_the_job_exits_with_0(ran: tuple[int, str]) -> None:
    assert ran[0] == 0, ran[1][-6000:]
