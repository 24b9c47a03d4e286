"""What a process that is killed while it saves leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

KILLS = 10


def test_whenever_a_process_is_killed_the_newest_checkpoint_is_there_and_loads(tmp_path):
    program = Path(__file__).with_name("kill_loop.py")
    root = str(program.parents[2])
    result = subprocess.run(
        [sys.executable, str(program), str(tmp_path), str(KILLS)],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == KILLS
