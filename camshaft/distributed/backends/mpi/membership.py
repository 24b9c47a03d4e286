"""A rank's membership in a group: a rank that leaves says farewell, so that those that would wait for it learn it.

MPI does not tell a rank that another one has ended: it would wait forever, and the other one, in ``MPI_Finalize``,
would wait for it. What the members of a group still need of one that has left, such as the store that rank 0 hosts,
lives on until all have left.
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
from typing import Any

from camshaft.distributed.backends.mpi.buffers import mpi

_present: dict[Membership, bool] = {}  # taking an entry out of a dict is atomic, also for the garbage collector
_left: dict[Membership, bool] = {}  # those whose communicator the farewells of others still need


@dataclass(frozen=True)
class Departure:
    """A rank takes part in nothing more.

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


class Membership:
    """This rank's membership in the group of a communicator, and the farewells of the other ranks.

    A farewell carries the number of collectives that its sender took part in, so that a rank that waits can tell a rank
    that has done its part and left from one that will never come. One that gives up says so at once, and leaves later.

    Args:
        comm: the communicator; farewells travel on it, with a tag of their own. It is freed when all have left.
        kept: what must live until then.
    """

    def __init__(self, comm: Any, kept: object = None) -> None:
        self.when_left: Callable[[], object] = lambda: None  # called when this rank has left
        self._comm = comm
        self._kept = kept
        self._collectives = 0
        self._departures: dict[int, Departure] = {}
        self._has_given_up = False
        self._sent: list[tuple[Any, array[int]]] = []
        self._process = os.getpid()
        _present[self] = True

    def count_collective(self) -> int:
        """Return the number of a collective that this rank begins; all ranks begin them in the same order."""
        self._collectives += 1
        return self._collectives

    def departures(self) -> dict[int, Departure]:
        """Return the ranks of the group that have left, or given up, by now."""
        status = mpi().Status()
        while (message := self._comm.Improbe(mpi().ANY_SOURCE, farewell_tag(), status)) is not None:
            note = array("q", [0, 0])
            message.Recv([note, 2, mpi().INT64_T])
            rank, (collectives, has_left) = status.Get_source(), note
            if rank in self._departures:
                self._departures[rank] = replace(self._departures[rank], has_left=True)
            else:
                self._departures[rank] = Departure(collectives, bool(has_left), time.monotonic())
        return self._departures

    def give_up(self, number: int | None) -> None:
        """Announce that this rank starts no more operations.

        Args:
            number: of the collective that failed here; ``None`` for a message.
        """
        if not self._has_given_up and self in _present:
            self._has_given_up = True
            with suppress(mpi().Exception):  # which may have been the reason
                self._say_farewell(self._collectives if number is None else number - 1, has_left=False)

    @property
    def is_mine(self) -> bool:
        """Whether this process is the rank; a forked child is not."""
        return os.getpid() == self._process

    def leave(self) -> None:
        """Announce that this rank takes part in no more operations; a second call does nothing."""
        if self.is_mine and _present.pop(self, False):
            self._say_farewell(self._collectives, has_left=True)
            _left[self] = True
            free_unused()
            self.when_left()

    def _say_farewell(self, collectives: int, has_left: bool) -> None:
        note = array("q", [collectives, has_left])
        for rank in range(self._comm.size):
            if rank != self._comm.rank:
                request = self._comm.Isend([note, 2, mpi().INT64_T], rank, farewell_tag())
                self._sent.append((request, note))  # MPI may read the note later

    def is_over(self) -> bool:
        """Return whether all have left, so that no message is under way any more."""
        is_sent = all(request.Test() for request, _ in self._sent)
        return is_sent and sum(departure.has_left for departure in self.departures().values()) == self._comm.size - 1

    def free(self) -> None:
        """Free the communicator when all have left, and warn of a message that was not received."""
        status = mpi().Status()
        has_message = self._comm.Iprobe(status=status)
        self._comm.Free()
        if has_message:
            warnings.warn(f"a message from rank {status.Get_source()} of a group was never received", stacklevel=2)


def free_unused() -> None:
    """Free the communicators that all ranks have left."""
    for membership in list(_left):
        if membership in _left and membership.is_over() and _left.pop(membership, False):
            membership.free()


def forget_all() -> None:
    """Do not wait for other ranks at exit, because this process is about to end them, too."""
    _present.clear()
    _left.clear()


@atexit.register
def leave_all() -> None:
    """Leave all groups before this process ends, and wait until all ranks have left them.

    ``MPI_Finalize`` would wait as well, but take a whole core, and what was kept for others would be gone by then.
    """
    if not (_present or _left) or mpi().Is_finalized():
        return
    for membership in list(_present):
        membership.leave()
    while any(membership.is_mine for membership in list(_left)):
        free_unused()
        time.sleep(0.01)


@cache
def farewell_tag() -> int:
    """Return the tag of farewells: the highest that MPI has, which messages of users must not carry."""
    tag: int | None = mpi().COMM_WORLD.Get_attr(mpi().TAG_UB)
    assert tag is not None, "MPI attaches it to the world communicator"
    return tag
