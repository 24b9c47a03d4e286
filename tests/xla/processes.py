"""Run tests in new processes: a process can start the XLA runtime once, in one mode, and cannot stop it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from tests.limits import HANG


def call_alone(function: Callable[[], object], *command: str, **variables: str) -> str:
    """Call a module-level function in a new process and return the output.

    Args:
        function: an exception in it fails the test.
        command: the command that starts Python, for example a launcher followed by the interpreter.
        variables: environment variables to add.
    """
    code = f"from {function.__module__} import {function.__name__} as function; function()"
    completed = run(*(command or (sys.executable,)), "-c", code, **variables)
    assert completed.returncode == 0, completed.stdout
    return completed.stdout


def run(*command: str, **variables: str) -> Any:
    """Run a command with stderr redirected to stdout."""
    return subprocess.run(
        command,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG,
        check=False,
    )
