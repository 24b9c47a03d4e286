"""Operations that were begun: how they are waited for, and what may go wrong meanwhile."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from camshaft.distributed.backends.mpi.attendance import Attendance

if TYPE_CHECKING:
    from mpi4py import MPI

_SPIN = 2e-4  # seconds in which we look again and again; MPI itself would do so for ever, and take a whole core
_LONGEST_NAP = 1e-3
_PATIENCE = 5.0  # seconds in which a message that was sent before its sender left must have arrived
_NOT_SET = timedelta(0)  # what torch gives for a timeout that nobody asked for is zero or less

# MPI reads and writes the memory of an operation until it is complete, also when nobody holds it any more.
_in_flight: set[Operation] = set()
_sweep_at = 64


def _nothing() -> None:
    """Have nothing to deliver."""


@dataclass(frozen=True)
class Transfer:
    """One call of MPI that is ready to be begun; its functions hold the memory that MPI works with.

    Args:
        begin: calls MPI.
        deliver: brings what has arrived to where users look for it.
        peer: the other side of a message; ``None`` in a collective and for a message from anybody.
        expected: size of the message that is received, in bytes.
    """

    begin: Callable[[], MPI.Request]
    deliver: Callable[[], None] = _nothing
    peer: int | None = None
    expected: int | None = None


class Host(Protocol):
    """What an operation knows of its group."""

    attendance: Attendance
    timeout: timedelta

    def give_up(self, reason: str, number: int | None) -> dist.DistBackendError:
        """Say that the group is of no use any more, and why; and in which collective, if it was one."""


class Operation(dist.Work):
    """Something that MPI does while we go on, until somebody waits for it.

    Args:
        group: whose it is.
        name: what users call it.
        transfers: the calls of MPI, which are begun here.
        results: the tensors that the user waits for.
        number: of the collective, counted in the group; ``None`` for a message.
        timeout: how long to wait; the group's timeout if not set.

    Raises:
        DistBackendError: MPI refuses it.
    """

    def __init__(
        self,
        group: Host,
        name: str,
        transfers: list[Transfer],
        results: list[Any],
        number: int | None,
        timeout: timedelta,
    ) -> None:
        from mpi4py import MPI

        super().__init__()
        self._group, self._name, self._number, self._timeout = group, name, number, timeout
        self._transfers, self._results = transfers, results
        self._done = False
        self._error: dist.DistBackendError | None = None
        self._status = MPI.Status()
        self._lock = threading.Lock()
        with self._lock:
            _remember(self)
            self._requests = self._begin_all(transfers)

    def wait(self, timeout: timedelta = _NOT_SET) -> bool:
        """Wait until the results are there.

        Raises:
            DistBackendError: they did not come in time or cannot come any more, or MPI failed.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            if not self._done:
                limit = next(limit for limit in (timeout, self._timeout, self._group.timeout) if limit > _NOT_SET)
                self._finish(limit.total_seconds())
        return True

    def is_completed(self) -> bool:
        """Tell whether it has ended, well or badly, without waiting."""
        if not self._lock.acquire(blocking=False):
            return False  # somebody waits for it right now
        try:
            if not self._done and self._error is None:
                self._look()
            return self._done or self._error is not None
        finally:
            self._lock.release()

    def is_success(self) -> bool:
        """Tell whether the results are there, without waiting."""
        return self.is_completed() and self._error is None

    def exception(self) -> Any:
        """Give the error with which it ended, if any."""
        return self._error

    def synchronize(self) -> None:
        """Wait until the results are there."""
        self.wait()

    def result(self) -> list[Tensor]:
        """Give the results, which must be there."""
        return self._results

    def get_future(self) -> torch.futures.Future[Any]:
        """Wait until the results are there, and give them as a future.

        DDP asks for it when it begins to reduce a bucket of gradients; nothing else moves MPI on meanwhile, so
        waiting here is what keeps it from waiting for ever.
        """
        self.wait()
        devices = {tensor.device for tensor in _tensors(self._results) if tensor.is_cuda}
        future: torch.futures.Future[Any] = torch.futures.Future(devices=list(devices))
        future.set_result(self._results)
        return future

    def source_rank(self) -> int:
        """Give the rank in the group that sent the message."""
        return self._status.Get_source()

    _source_rank = source_rank

    def _begin_all(self, transfers: list[Transfer]) -> list[MPI.Request]:
        from mpi4py import MPI

        try:
            return [transfer.begin() for transfer in transfers]
        except MPI.Exception as error:
            raise self._lost(f"failed: {error}") from error

    def _finish(self, limit: float) -> None:
        from mpi4py import MPI

        try:
            for request in self._requests:
                wait_for(request, self._status, lambda waited: self._watch(waited, limit))
        except MPI.Exception as error:
            raise self._lost(f"failed: {error}") from error
        self._settle()

    def _look(self) -> None:
        from mpi4py import MPI

        try:
            if all(request.Test(self._status) for request in self._requests):
                self._settle()
        except MPI.Exception as error:
            self._lost(f"failed: {error}")  # whoever waits for it is told

    def _settle(self) -> None:
        """Bring the results to where they belong, once, and let go of the memory."""
        self._done = True
        _in_flight.discard(self)
        transfers, self._transfers = self._transfers, []
        for transfer in transfers:
            self._check_size(transfer.expected)
            transfer.deliver()

    def _check_size(self, expected: int | None) -> None:
        from mpi4py import MPI

        if expected is not None and (got := self._status.Get_count(MPI.BYTE)) != expected:
            raise self._lost(f"got {got} bytes from rank {self.source_rank()}, the tensor has {expected}")

    def _watch(self, waited: float, limit: float) -> None:
        """Look up from waiting: is it of any use to go on?"""
        if waited > limit:
            raise self._lost(f"timed out after {limit:g} s")
        for rank, departure in self._group.attendance.departures().items():
            if self._number is not None and departure.collectives < self._number:
                raise self._lost(f"cannot complete: rank {rank} {departure}")
            if rank == self._transfers[0].peer and time.monotonic() - departure.noticed > _PATIENCE:
                raise self._lost(f"cannot complete: rank {rank} {departure}")

    def _lost(self, what: str) -> dist.DistBackendError:
        place = "" if self._number is None else f", collective {self._number} of this group,"
        self._error = self._group.give_up(f"{self._name}{place} {what}", self._number)
        return self._error


def wait_for(request: MPI.Request, status: MPI.Status | None, watch: Callable[[float], None]) -> None:
    """Wait for MPI, and give the core away meanwhile, which MPI does not.

    Args:
        request: what to wait for.
        status: filled when it is complete.
        watch: called now and then with the seconds waited; it raises to give up.
    """
    began = time.monotonic()
    while not request.Test(status):
        waited = time.monotonic() - began
        if waited < _SPIN:
            _yield_core()
        else:
            watch(waited)
            time.sleep(min(waited / 10, _LONGEST_NAP))


_yield_core: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))


def _remember(operation: Operation) -> None:
    """Keep an operation until it is complete; now and then, look for those that nobody waits for."""
    global _sweep_at
    _in_flight.add(operation)
    if len(_in_flight) >= _sweep_at:
        for known in list(_in_flight):
            known.is_completed()
        _sweep_at = max(64, 2 * len(_in_flight))


def _tensors(results: list[Any]) -> list[Tensor]:
    return [tensor for item in results for tensor in (_tensors(item) if isinstance(item, list) else [item])]
