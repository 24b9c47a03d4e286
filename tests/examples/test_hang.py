"""The example with deliberate bugs ends with the reports that it promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from examples import hang
from tests.limits import HANG

pytestmark = pytest.mark.jobs
SCRIPT = Path(hang.__file__)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        cwd=SCRIPT.parent.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=HANG, text=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("bug", "error", "code"),
    [
        ("different", "the ranks call different things", "idist.barrier()\n    else"),
        ("terminate", "RankDivergenceError: rank 1 stopped alone", "trainer.terminate()"),
    ],
)
def test_a_bug_is_reported_with_its_line(bug: str, error: str, code: str) -> None:
    number = SCRIPT.read_text().partition(code)[0].count("\n") + 1
    done = run("--bug", bug, "--backend", "gloo", "--nproc_per_node", "2")
    assert done.returncode == 1, done.stdout
    assert error in done.stdout
    assert f"hang.py:{number}" in done.stdout


def test_the_list_explains_every_bug() -> None:
    shown = run("--list").stdout.splitlines()
    assert [line.split()[0] for line in shown] == list(hang.BUGS)
    assert all(len(line.split()) > 5 for line in shown)
