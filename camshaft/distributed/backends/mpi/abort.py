"""A rank that ends ends the others too: MPI would let them, and itself, wait for ever.

A process that leaves while others still count on it waits for them in ``MPI_Finalize``, and they wait for it. So an
error that nobody catches ends the job, once its traceback is written and the program has put its things in order.
A process that ends without an error leaves its groups, so that those that wait for it learn that it will not come.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from types import TracebackType

import torch.distributed as dist

from camshaft.distributed.backends.mpi.attendance import forget_all

_PATIENCE = 5.0  # seconds that a failed process gets to end by itself
_COURTESY = 1.0  # seconds in which one that failed because another one left lets that one say why


class JobGuard:
    """Watches how this process ends, from now until it is told to stop."""

    def __init__(self) -> None:
        self._process: int | None = os.getpid()
        self._error: BaseException | None = None
        self._previous, sys.excepthook = sys.excepthook, self._on_error
        atexit.register(self._on_exit)

    def stop(self) -> None:
        """Stop to watch; in the middle of an error, only once that error has ended the process.

        So an error that leaves a ``with`` block which finalises is still one that ends the job.
        """
        if sys.exc_info()[0] is None:
            if sys.excepthook == self._on_error:
                sys.excepthook = self._previous
            atexit.unregister(self._on_exit)
            self._process = None  # torch has put a hook before ours, and still calls it

    def _on_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._previous(kind, error, trace)
        if os.getpid() == self._process:  # not in a child that was forked
            self._error = error
            _abort_at_exit(_exit_code(kind))

    def _on_exit(self) -> None:
        if self._error is None or os.getpid() != self._process:
            return
        if isinstance(self._error, dist.DistBackendError):
            time.sleep(_COURTESY)
        forget_all()


def _exit_code(kind: type[BaseException]) -> int:
    return 130 if issubclass(kind, KeyboardInterrupt) else 1


def _abort_at_exit(code: int) -> None:
    """Let Python end, and the job with it; soon, even if a thread or an exit handler of the program does not."""
    from mpi4py import MPI
    from mpi4py.run import set_abort_status

    set_abort_status(code)
    watchdog = threading.Timer(_PATIENCE, MPI.COMM_WORLD.Abort, (code,))
    watchdog.daemon = True
    watchdog.start()
