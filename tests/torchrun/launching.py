"""Start torchrun as users do, and kill it with all of its processes."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.guards import content, is_running
from tests.limits import HANG

ROOT = Path(__file__).resolve().parents[2]


class Launched:
    """Run a launcher within the ``with`` block, and kill all of its processes at the end.

    Args:
        arguments: arguments of Python.
        program: Python, or a launcher that starts it.
        variables: environment variables to add to those of this process.
    """

    def __init__(self, *arguments: str, program: Sequence[str] = (sys.executable,), **variables: str) -> None:
        self._arguments = [*program, "-W", "ignore::FutureWarning", *arguments]
        self._mark = f"CAMSHAFT_TEST={uuid.uuid4().hex}"
        mark = dict([self._mark.split("=")])
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **mark, **variables}

    def __enter__(self) -> Launched:
        self._file = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            self._arguments, cwd=ROOT, env=self._environment, stdout=self._file, stderr=subprocess.STDOUT
        )
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.wait()
        while workers := self.workers():
            for pid in workers:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        self._file.close()

    def workers(self) -> list[int]:
        """Return the running workers, which have their own sessions and may have lost their parent."""
        marked = [
            int(path.parent.name)
            for path in Path("/proc").glob("[0-9]*/environ")
            if self._mark in content(path).split("\0")
        ]
        return [pid for pid in marked if is_running(pid) and pid != self.process.pid]

    @property
    def output(self) -> str:
        """The output so far."""
        size = os.fstat(self._file.fileno()).st_size
        return os.pread(self._file.fileno(), size, 0).decode(errors="replace")

    def poll(self) -> int | None:
        """Return the exit code of the launcher, ``None`` as long as it runs."""
        return self.process.poll()

    def wait(self) -> int:
        """Wait for the launcher and return its exit code; fail with its output after a timeout."""
        try:
            return self.process.wait(HANG)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {HANG} s; its output is\n{self.output}") from None


def torchrun(*arguments: str, **variables: str) -> Launched:
    """Return ``torchrun`` with these arguments, to be started by ``with``."""
    return Launched("-m", "torch.distributed.run", *arguments, **variables)


def lines(*outputs: str) -> list[dict[str, Any]]:
    """Return the JSON lines in the outputs, in rank order."""
    records = [json.loads(line) for output in outputs for line in output.splitlines() if line.startswith("{")]
    return sorted(records, key=lambda line: line["rank"])


def free_port() -> int:
    """Return a free port, from below those that a system gives to whoever asks for any port meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as found, suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port
