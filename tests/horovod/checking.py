"""Checks that every rank runs, and how horovodrun is started on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 170.0  # seconds for what takes a sixth of that where the cores are free
CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Add a function to the checks that `run_checks.py` runs."""
    CHECKS[function.__name__] = function
    return function


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of a process that finds this clone and uses one core."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **variables}


def horovodrun(ranks: int, *arguments: str, hosts: str | None = None, seconds: float = LIMIT) -> tuple[int, str]:
    """Run Python with these arguments on so many ranks; give the exit code and what they wrote.

    With hosts ``localhost:2,127.0.0.1:2`` Horovod takes this machine for two.
    """
    launcher = [str(Path(sys.executable).parent / "horovodrun"), "-np", str(ranks)]
    if hosts is not None:
        launcher += ["-H", hosts]
    return run([*launcher, sys.executable, "-W", "error", *arguments], seconds=seconds)


def run(command: list[str], seconds: float = LIMIT, **variables: str) -> tuple[int, str]:
    """Run a command with all that it starts, within the time."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(**variables),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = 124
        finally:
            with suppress(ProcessLookupError):  # Horovod ends the others with it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return code, output.read()
