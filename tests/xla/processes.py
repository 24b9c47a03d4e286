"""Processes of their own for tests: the runtime of XLA begins once in a process, in one way, and does not end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

LIMIT = 100.0  # seconds


def call_alone(function: Callable[[], object], *command: str, **variables: str) -> str:
    """Call a function from the top of a module in a new process, and give what that wrote.

    Args:
        function: the test fails if it raises there.
        command: what starts Python, such as a launcher; its own name comes last.
        variables: added to the environment.
    """
    code = f"from {function.__module__} import {function.__name__} as function; function()"
    completed = run(*(command or (sys.executable,)), "-c", code, **variables)
    assert completed.returncode == 0, completed.stdout
    return completed.stdout


def run(*command: str, **variables: str) -> Any:
    """Run a command, with what it writes to both of its outputs in one."""
    return subprocess.run(
        command,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
        check=False,
    )
