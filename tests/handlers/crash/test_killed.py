"""What a process that is killed while it saves leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_kills(folder: Path, kills: int, mode: str) -> list[str]:
    program = Path(__file__).with_name("kill_loop.py")
    result = subprocess.run(
        [sys.executable, str(program), str(folder), str(kills), mode],
        env={**os.environ, "PYTHONPATH": str(program.parents[3])},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.parametrize("mode", ["waiting", "background"])
def test_whenever_a_process_is_killed_one_goes_on_from_what_was_reported_saved(tmp_path, mode):
    assert len(run_kills(tmp_path, 4, mode)) == 4


@pytest.mark.jobs
@pytest.mark.parametrize("mode", ["waiting", "background"])
@pytest.mark.parametrize("part", range(4))
def test_the_same_two_hundred_times(tmp_path, mode, part):
    assert len(run_kills(tmp_path, 50 + part, mode)) == 50 + part  # the number seeds the moments too
