"""The cores of this machine that each of its processes computes with.

torch uses all of them by default. Several processes that do so compete, and are many times slower than with one thread.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch

VARIABLE = "OMP_NUM_THREADS"
_OF_THE_USER = (VARIABLE, "MKL_NUM_THREADS")


def available() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share(processes: int, cores: int) -> int | None:
    """Return with how many threads each process should compute.

    Args:
        processes: their number on this machine.
        cores: those that they divide among themselves, of which this one may use only some.

    Returns:
        At least 1; ``None`` if the user has set the number in the environment.
    """
    if any(name in os.environ for name in _OF_THE_USER):
        return None
    return max(1, min(available(), cores // processes))


def limit(threads: int | None) -> None:
    """Make torch compute with no more threads, unless the user has chosen their number."""
    if threads is not None and threads < (present := torch.get_num_threads()) and _is_default(present):
        torch.set_num_threads(threads)


def _is_default(threads: int) -> bool:
    """Return whether torch chooses this number by itself: that of the cores, with MKL without the virtual ones."""
    siblings = 1
    with suppress(OSError):  # not on Linux
        siblings += Path("/sys/devices/system/cpu/smt/active").read_text().strip() == "1"
    return threads * siblings in (known := (available(), os.cpu_count())) or threads in known
