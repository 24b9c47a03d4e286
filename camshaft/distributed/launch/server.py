"""Imported by the fork server, which then ends with the process that started it, and not by a signal.

A signal to a whole process group, such as one that announces a preemption, would end it before the processes that it
has forked, whose exit codes nobody would know. These get the default actions of the signals again.
"""

from __future__ import annotations

import os
import signal
import sys

_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)]


def _outlive(number: int, frame: object) -> None:
    """Do nothing."""


def _restore() -> None:
    for number in _SIGNALS:
        if signal.getsignal(number) is _outlive:
            signal.signal(number, signal.SIG_DFL)


if any("multiprocessing.forkserver" in argument for argument in sys.orig_argv):
    for number in _SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _outlive)
    os.register_at_fork(after_in_child=_restore)
