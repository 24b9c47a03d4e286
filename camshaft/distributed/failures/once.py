"""One report per machine: of the ranks that raise the same verdict, one prints it, and the others a line."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from camshaft.distributed.failures.record import PREFIX, REPORTED, default_folders

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # the module does not exist there

_PATIENCE = 2.0  # seconds for another rank to print
_PAUSE = 0.02


@contextmanager
def reporting(job: str, rank: int) -> Iterator[int | None]:
    """Yield the rank of this machine that has printed the report; ``None`` if this one is to print it, in the block.

    Nothing is lost: a rank prints the report unless another one certainly has. One that ends before leaves it to the
    next one, and if one takes long, the others do not wait for it.

    Args:
        job: name of the job; ``""`` if it is not known.
        rank: of this process.
    """
    file = _opened(job)
    if file is None:
        yield None
        return
    try:
        until, reporter, is_locked = time.monotonic() + _PATIENCE, "", False
        while not (reporter or is_locked) and time.monotonic() < until:
            is_locked = _can_lock(file)
            reporter = os.pread(file, 16, 0).decode()
            time.sleep(0.0 if is_locked else _PAUSE)
        yield int(reporter) if reporter else None
        if not reporter:
            with suppress(OSError):  # without space, the next one prints, too
                os.pwrite(file, str(rank).encode(), 0)
    finally:
        os.close(file)  # which also unlocks it


def _opened(job: str) -> int | None:
    """Open the file in which a rank of this machine notes that it has printed the report."""
    if not job or fcntl is None:
        return None
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    with suppress(OSError):
        file = os.open(default_folders()[0] / f"{PREFIX}{job}{REPORTED}", flags, 0o600)
        if os.fstat(file).st_uid == os.geteuid():
            return file
        os.close(file)
    return None


def _can_lock(file: int) -> bool:
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
