"""Processes that end with the one that started them, however that ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from multiprocessing.connection import wait
from typing import Any

GRACE = 5.0
"""Seconds that a process has to end by itself when it is asked to."""

_LOOK = 1.0  # seconds between two looks whether the parent is still there


def end_with_parent(sentinel: Any) -> None:
    """Let this process end when the one that started it is gone.

    Args:
        sentinel: what becomes readable then: the sentinel of ``multiprocessing.parent_process()``, or the reading end
            of a pipe whose writing end only the other process holds.
    """
    threading.Thread(target=_watch, args=(sentinel, os.getppid()), name="camshaft-parent-watchdog", daemon=True).start()


def _watch(sentinel: Any, parent: int) -> None:
    # A process forked later holds what the sentinel of an earlier one tells by, so the parent is looked for too.
    while not wait([sentinel], _LOOK) and os.getppid() == parent:
        pass
    os.kill(os.getpid(), signal.SIGTERM)  # handlers of the user's may save something
    time.sleep(GRACE)
    os._exit(1)  # the main thread does not come back to Python, from a collective say
