"""Waiting for what Horovod does in the background.

Horovod itself waits for ever, and keeps a core busy with it.
"""

from __future__ import annotations

import time
from typing import Any

_PAUSE = 1e-4  # seconds, of an exchange that takes Horovod ten times as long


def wait(hvd: Any, handle: Any, what: str, seconds: float) -> Any:
    """Wait for an operation, and give its result; see :func:`await_end`."""
    await_end(hvd, handle, what, seconds)
    return hvd.synchronize(handle)


def await_end(hvd: Any, handle: Any, what: str, seconds: float) -> None:
    """Wait for the end of an operation.

    Args:
        hvd: ``horovod.torch``.
        handle: the operation.
        what: its name for the message.
        seconds: the longest time.

    Raises:
        RuntimeError: it takes longer.
    """
    begin = time.monotonic()
    while not hvd.poll(handle):
        if time.monotonic() - begin > seconds:
            raise RuntimeError(
                f"{what} on rank {hvd.rank()} timed out after {seconds:g} s: another rank has not come to it; "
                "initialize('horovod', timeout=...) sets the time"
            )
        time.sleep(_PAUSE)
