"""Limits on time, which are for hangs only: tests wait for what they need to see, however long that takes.

Beside twenty busy processes per core, tests take twenty times as long as alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

HANG = 900.0  # seconds that a test waits at most; pyproject.toml lets pytest end it a little later
FOREVER = 10 * HANG  # seconds that code sleeps which must be interrupted
SOON = 60.0  # seconds for what is about to happen, such as the end of a thread that was told to end
TIMEOUT = timedelta(seconds=HANG)  # of collectives that must succeed


def wait_until(condition: Callable[[], object], report: Callable[[], object] = lambda: "") -> None:
    """Wait until a condition holds; if it never does, fail with a report."""
    deadline = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < deadline, report() or "it never happened"
        time.sleep(0.01)
