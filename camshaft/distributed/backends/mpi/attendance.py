"""Who of a group is still there: a rank that leaves says so, and those that would wait for it learn it.

MPI does not tell a rank that another one has ended: it waits for ever, and the other one, in ``MPI_Finalize``, waits
for it.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

_present: dict[Attendance, bool] = {}  # to take an entry out of a dict is one step, also for the garbage collector
_left: dict[Attendance, bool] = {}  # those whose communicator the farewells of others still need


@dataclass(frozen=True)
class Departure:
    """That a rank has left.

    Args:
        collectives: in how many collectives of the group it took part.
        noticed: when we learned it, on the monotonic clock.
    """

    collectives: int
    noticed: float


class Attendance:
    """The farewells of a communicator's ranks.

    A farewell carries the number of collectives that its sender took part in, so that one who waits can tell a rank
    that has done its part and left from one that will never come.

    Args:
        comm: the communicator; farewells travel on it, with a tag of their own. It is freed when everybody has left.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.when_left: Callable[[], object] = _nothing  # called when this rank has left
        self._comm = comm
        self._collectives = 0
        self._departures: dict[int, Departure] = {}
        self._sent: list[tuple[MPI.Request, array[int]]] = []
        self._process = os.getpid()
        _present[self] = True

    def count_collective(self) -> int:
        """Number a collective that this rank begins; all ranks begin them in the same order."""
        self._collectives += 1
        return self._collectives

    def departures(self) -> dict[int, Departure]:
        """Give the ranks of the group that have left by now."""
        from mpi4py import MPI

        status = MPI.Status()
        while (message := self._comm.Improbe(MPI.ANY_SOURCE, farewell_tag(), status)) is not None:
            note = array("q", [0])
            message.Recv([note, 1, MPI.INT64_T])
            self._departures[status.Get_source()] = Departure(note[0], time.monotonic())
        return self._departures

    def leave(self) -> None:
        """Tell the others that this rank takes part in nothing more; does nothing the second time."""
        if os.getpid() == self._process and _present.pop(self, False):  # a child that was forked is no rank
            self._say_farewell()
            _left[self] = True
            free_unused()
            self.when_left()

    def _say_farewell(self) -> None:
        from mpi4py import MPI

        note = array("q", [self._collectives])
        for rank in range(self._comm.size):
            if rank != self._comm.rank:
                request = self._comm.Isend([note, 1, MPI.INT64_T], rank, farewell_tag())
                self._sent.append((request, note))  # MPI may read the note later

    def is_over(self) -> bool:
        """Tell whether everybody has left, so that no message is on its way any more."""
        is_told = all(request.Test() for request, _ in self._sent)
        return is_told and len(self.departures()) == self._comm.size - 1

    def free(self) -> None:
        """Free the communicator."""
        self._comm.Free()


def _nothing() -> None:
    """Have nothing to do."""


def free_unused() -> None:
    """Free the communicators that everybody has left."""
    for attendance in list(_left):
        if attendance in _left and attendance.is_over() and _left.pop(attendance, False):
            attendance.free()


def leave_all() -> None:
    """Leave all groups, as this process is about to end, and wait until everybody has left them.

    ``MPI_Finalize`` would wait as well, but take a whole core.
    """
    leaving = list(_present)
    for attendance in leaving:
        attendance.leave()
    while any(attendance in _left for attendance in leaving):
        time.sleep(0.01)
        free_unused()


@cache
def farewell_tag() -> int:
    """Give the tag of farewells: the highest that MPI has, which users' messages must not carry."""
    from mpi4py import MPI

    tag: int | None = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
    assert tag is not None, "MPI attaches it to the world communicator"
    return tag
