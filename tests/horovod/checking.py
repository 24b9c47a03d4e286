"""Start horovodrun on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from tests.limits import HANG

ROOT = Path(__file__).resolve().parents[2]


def environment(**variables: str) -> dict[str, str]:
    """Return environment variables for a process that imports this checkout and uses one core."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {
        **os.environ,
        "HOROVOD_GLOO_TIMEOUT_SECONDS": f"{HANG:.0f}",  # instead of 30, which ranks on a busy machine may need to start
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": paths,
        "PYTHONUNBUFFERED": "1",
        **variables,
    }


def horovodrun(ranks: int, *arguments: str, hosts: str | None = None) -> tuple[int, str]:
    """Run Python with these arguments under horovodrun and return the exit code and the output.

    With ``hosts="localhost:2,127.0.0.1:2"``, Horovod treats this machine as two.
    """
    launcher = [str(Path(sys.executable).parent / "horovodrun"), "-np", str(ranks)]
    launcher += ["--disable-cache"]  # a file in the home folder, which two jobs that start must not write at once
    if hosts is not None:
        launcher += ["-H", hosts]
    return run([*launcher, sys.executable, "-W", "error", *arguments])


def run(command: list[str], **variables: str) -> tuple[int, str]:
    """Run a command, then kill it and everything it started when the time is up."""
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
            code = process.wait(HANG)
        except subprocess.TimeoutExpired:
            code = 124
        finally:
            with suppress(ProcessLookupError):  # nothing is left to kill
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return code, output.read()
