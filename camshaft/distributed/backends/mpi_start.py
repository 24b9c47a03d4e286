"""Ends a process that waits in ``MPI_Init`` for too long: it holds the GIL meanwhile, so nothing in it can.

A process starts ``python -I -S mpi_start.py SECONDS VARIABLE SIZE LOCAL_SIZE`` before ``MPI_Init``, and ends it after
that. Which ranks of this node have come so far is read from ``/proc``: those that have started this program as well.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from pathlib import Path

_SILENCE = 10.0  # seconds after which it reports that a rank waits
_COURTESY = 1.0  # seconds in which the first of the ranks that wait reports the error of all


def main(seconds: float, variable: str, size: int, local_size: int) -> None:
    """Report the ranks that are missing and, when the time is over, end the parent.

    Args:
        seconds: how long the parent may wait.
        variable: the environment variable that holds the rank.
        size: number of ranks.
        local_size: number of ranks on this node, 0 if it is unknown.
    """
    parent, rank = os.getppid(), int(os.environ[variable])

    def sleep(seconds: float) -> None:
        if select.select([0], [], [], seconds)[0]:  # the end of the input: the parent has ended
            sys.exit()

    def report(what: str) -> None:
        present, missing = _attendance(variable, range(size) if local_size == size else ())
        if rank != min(present, default=rank):
            sleep(_COURTESY)
        named = f"missing: {', '.join(map(str, missing))}" if missing else "those of this node have come"
        os.write(2, f"camshaft: rank {rank} {what} for all ranks to start MPI; {named}\n".encode())

    if seconds > _SILENCE:
        sleep(_SILENCE)
        report(f"is waiting up to {seconds:g} s")
        sleep(seconds - _SILENCE)
    else:
        sleep(seconds)
    report(f"timed out after {seconds:g} s waiting")
    os.kill(parent, signal.SIGKILL)


def _attendance(variable: str, known: range | tuple[()]) -> tuple[list[int], list[int]]:
    """Return which ranks of this node have started this program, and which ones have not."""
    launcher = _launcher(os.getpid(), variable)
    present: set[int] = set()
    others = set(known)
    for pid in (int(path.name) for path in Path("/proc").glob("[0-9]*")):
        rank = _environment(pid).get(variable)
        if rank is not None and _launcher(pid, variable) == launcher:
            (present if os.fsencode(__file__) in _read(pid, "cmdline").split(b"\0") else others).add(int(rank))
    return sorted(present), sorted(others - present)


def _launcher(pid: int, variable: str) -> int:
    """Return the closest ancestor of a process that does not have the variable: it started the ranks."""
    while pid > 1 and variable in _environment(pid):
        pid = int(_read(pid, "stat").rpartition(b")")[2].split()[1] or 0)
    return pid


def _environment(pid: int) -> dict[str, str]:
    pairs = (pair.partition("=") for pair in _read(pid, "environ").decode(errors="replace").split("\0"))
    return {name: value for name, _, value in pairs}


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # it has ended, or is another user's
        return b""


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
