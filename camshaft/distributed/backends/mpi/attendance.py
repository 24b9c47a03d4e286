"""Who of a group is still there: a rank that leaves says so, and those that would wait for it learn it.

MPI does not tell a rank that another one has ended: it waits for ever, and the other one, in ``MPI_Finalize``, waits
for it. What the members of a group still need of one that has left, as the store that rank 0 serves, lives on until
all have left.
"""

from __future__ import annotations

import atexit
import os
import time
import warnings
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

_present: dict[Attendance, bool] = {}  # to take an entry out of a dict is one step, also for the garbage collector
_left: dict[Attendance, bool] = {}  # those whose communicator the farewells of others still need


@dataclass(frozen=True)
class Departure:
    """That a rank takes part in nothing more.

    Args:
        collectives: in how many collectives of the group it took part.
        has_left: it has left the group; else it has given up there, but may still wait for what has begun.
        noticed: when we learned it, on the monotonic clock.
    """

    collectives: int
    has_left: bool
    noticed: float

    def __str__(self) -> str:
        return f"{'left' if self.has_left else 'gave up'} after {self.collectives} collectives"


class Attendance:
    """The farewells of a communicator's ranks.

    A farewell carries the number of collectives that its sender took part in, so that one who waits can tell a rank
    that has done its part and left from one that will never come. One who gives up says so at once, and leaves later.

    Args:
        comm: the communicator; farewells travel on it, with a tag of their own. It is freed when everybody has left.
        kept: what is not to go away before.
    """

    def __init__(self, comm: MPI.Intracomm, kept: object = None) -> None:
        self.when_left: Callable[[], object] = _nothing  # called when this rank has left
        self._comm = comm
        self._kept = kept
        self._collectives = 0
        self._departures: dict[int, Departure] = {}
        self._has_given_up = False
        self._sent: list[tuple[MPI.Request, array[int]]] = []
        self._process = os.getpid()
        _present[self] = True

    def count_collective(self) -> int:
        """Number a collective that this rank begins; all ranks begin them in the same order."""
        self._collectives += 1
        return self._collectives

    def departures(self) -> dict[int, Departure]:
        """Give the ranks of the group that have left, or given up, by now."""
        from mpi4py import MPI

        status = MPI.Status()
        while (message := self._comm.Improbe(MPI.ANY_SOURCE, farewell_tag(), status)) is not None:
            note = array("q", [0, 0])
            message.Recv([note, 2, MPI.INT64_T])
            rank, (collectives, has_left) = status.Get_source(), note
            if rank in self._departures:
                self._departures[rank] = replace(self._departures[rank], has_left=True)
            else:
                self._departures[rank] = Departure(collectives, bool(has_left), time.monotonic())
        return self._departures

    def give_up(self, number: int | None) -> None:
        """Tell the others that this rank begins nothing more, as soon as that is so.

        Args:
            number: of the collective that failed here; ``None`` for a message.
        """
        from mpi4py import MPI

        if self._has_given_up or self not in _present:
            return
        self._has_given_up = True
        with suppress(MPI.Exception):  # which may have been the reason
            self._say_farewell(self._collectives if number is None else number - 1, has_left=False)

    @property
    def is_mine(self) -> bool:
        """Whether this process is the rank; a child that was forked is none."""
        return os.getpid() == self._process

    def leave(self) -> None:
        """Tell the others that this rank takes part in nothing more; does nothing the second time."""
        if self.is_mine and _present.pop(self, False):
            self._say_farewell(self._collectives, has_left=True)
            _left[self] = True
            free_unused()
            self.when_left()

    def _say_farewell(self, collectives: int, has_left: bool) -> None:
        from mpi4py import MPI

        note = array("q", [collectives, has_left])
        for rank in range(self._comm.size):
            if rank != self._comm.rank:
                request = self._comm.Isend([note, 2, MPI.INT64_T], rank, farewell_tag())
                self._sent.append((request, note))  # MPI may read the note later

    def is_over(self) -> bool:
        """Tell whether everybody has left, so that no message is on its way any more."""
        is_told = all(request.Test() for request, _ in self._sent)
        return is_told and sum(departure.has_left for departure in self.departures().values()) == self._comm.size - 1

    def free(self) -> None:
        """Free the communicator; nobody sends there any more, and a message that lies there still is told."""
        from mpi4py import MPI

        status = MPI.Status()
        is_left = self._comm.Iprobe(status=status)
        self._comm.Free()
        if is_left:
            warnings.warn(f"a message from rank {status.Get_source()} of a group was never received", stacklevel=2)


def _nothing() -> None:
    """Have nothing to do."""


def free_unused() -> None:
    """Free the communicators that everybody has left."""
    for attendance in list(_left):
        if attendance in _left and attendance.is_over() and _left.pop(attendance, False):
            attendance.free()


def forget_all() -> None:
    """Wait for nobody at the end of this process, as it is going to end all the others too."""
    _present.clear()
    _left.clear()


@atexit.register
def leave_all() -> None:
    """Leave all groups, as this process is about to end, and wait until everybody has left them.

    ``MPI_Finalize`` would wait as well, but take a whole core, and what was kept for others would be gone by then.
    """
    if not (_present or _left) or _is_over():
        return
    for attendance in list(_present):
        attendance.leave()
    while any(attendance.is_mine for attendance in list(_left)):
        free_unused()
        time.sleep(0.01)


def _is_over() -> bool:
    """Tell whether the program has ended MPI by itself."""
    from mpi4py import MPI

    return MPI.Is_finalized()


@cache
def farewell_tag() -> int:
    """Give the tag of farewells: the highest that MPI has, which users' messages must not carry."""
    from mpi4py import MPI

    tag: int | None = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
    assert tag is not None, "MPI attaches it to the world communicator"
    return tag
