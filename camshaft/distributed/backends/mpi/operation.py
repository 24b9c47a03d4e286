"""Operations under way: waiting for them, without taking a whole core, and without waiting for ranks that have left."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from camshaft.distributed.backends.mpi.buffers import mpi, sizes

if TYPE_CHECKING:
    from camshaft.distributed.backends.mpi.process_group import MPIGroup

_SPIN = 2e-4  # seconds in which we poll again and again; MPI itself would do so forever, and take a whole core
_LONGEST_NAP = 1e-3
_PATIENCE = 5.0  # seconds in which a message that was sent before its sender left must have arrived
_NOT_SET = timedelta(0)  # torch passes zero or less if no timeout was requested

# MPI reads and writes the memory of an operation until it is complete, also when no object refers to it any more.
_in_flight: set[Operation] = set()
_sweep_at = 64


@dataclass(frozen=True)
class Transfer:
    """One call of MPI that is ready to begin.

    Args:
        begin: calls MPI, and holds the memory that MPI works with.
        buffer: receives the result; ``None`` if this rank receives nothing.
        targets: the tensors that the result is for, one after the other.
        divisor: what the result is divided by.
        peer: the other rank of a message; ``None`` in a collective and for a message from any rank.
    """

    begin: Callable[[], Any]
    buffer: Tensor | None = None
    targets: Sequence[Tensor] = ()
    divisor: int = 1
    peer: int | None = None

    @torch.no_grad()  # a target may be a leaf that requires gradients
    def deliver(self) -> None:
        """Copy the result to the tensors that it is for."""
        if self.buffer is None:
            return
        if self.divisor > 1:
            self.buffer.div_(self.divisor)
        if self.buffer is not self.targets[0]:
            parts = torch.split(self.buffer.view(-1), sizes(self.targets))
            for part, tensor in zip(parts, self.targets, strict=True):
                tensor.copy_(part.view(tensor.shape))


class Operation(dist.Work):
    """Calls of MPI that are under way until they are waited for.

    Args:
        group: the group that they are of.
        name: what users call the operation.
        transfers: the calls of MPI, which begin here.
        results: the tensors that the user waits for.
        number: of the collective, counted in the group; ``None`` for a message.
        timeout: how long to wait; the group's timeout if not set.

    Raises:
        DistBackendError: MPI refuses them.
    """

    def __init__(
        self,
        group: MPIGroup,
        name: str,
        transfers: list[Transfer],
        results: list[Any],
        number: int | None,
        timeout: timedelta,
    ) -> None:
        super().__init__()
        self._group, self._name, self._number, self._timeout = group, name, number, timeout
        self._transfers, self._results = transfers, results
        self._done = False
        self._error: dist.DistBackendError | None = None
        self._status = mpi().Status()
        self._lock = threading.Lock()
        with self._lock:
            _remember(self)
            self._requests = self._calling_mpi(lambda: [transfer.begin() for transfer in transfers])

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
                self._calling_mpi(lambda: self._wait_for_all(limit.total_seconds()))
                self._deliver()
        return True

    def is_completed(self) -> bool:
        """Return whether it has ended, with or without an error."""
        if not self._lock.acquire(blocking=False):
            return False  # another thread is waiting for it
        try:
            if not self._done and self._error is None:
                try:
                    if self._calling_mpi(lambda: all(request.Test(self._status) for request in self._requests)):
                        self._deliver()
                except dist.DistBackendError:
                    pass  # whoever waits for it gets the error
            return self._done or self._error is not None
        finally:
            self._lock.release()

    def is_success(self) -> bool:
        """Return whether the results are there."""
        return self.is_completed() and self._error is None

    def exception(self) -> Any:
        """Return the error with which it ended, if any."""
        return self._error

    def synchronize(self) -> None:
        """Wait until the results are there."""
        self.wait()

    def result(self) -> list[Tensor]:
        """Return the results, which must be there."""
        return self._results

    def get_future(self) -> torch.futures.Future[Any]:
        """Wait until the results are there, and return them as a future.

        DDP asks for it when it begins to reduce a bucket of gradients; nothing else makes MPI progress meanwhile, so
        without waiting here, DDP would wait forever.
        """
        self.wait()
        devices = {tensor.device for tensor in _tensors(self._results) if tensor.is_cuda}
        future: torch.futures.Future[Any] = torch.futures.Future(devices=list(devices))
        future.set_result(self._results)
        return future

    def source_rank(self) -> int:
        """Return the rank in the group that sent the message."""
        rank: int = self._status.Get_source()
        return rank

    _source_rank = source_rank

    def _calling_mpi(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except mpi().Exception as error:
            raise self._lost(f"failed: {error}") from error

    def _wait_for_all(self, limit: float) -> None:
        for request in self._requests:
            wait_for(request, self._status, lambda waited: self._check(waited, limit))

    def _deliver(self) -> None:
        """Deliver the results, once, and release the memory."""
        self._done = True
        _in_flight.discard(self)
        transfers, self._transfers = self._transfers, []
        for transfer in transfers:
            if self._number is None and transfer.buffer is not None:  # a message that was received
                got, expected = self._status.Get_count(mpi().BYTE), transfer.buffer.nbytes
                if got != expected:
                    raise self._lost(f"got {got} bytes from rank {self.source_rank()}, the tensor has {expected}")
            transfer.deliver()

    def _check(self, waited: float, limit: float) -> None:
        """Raise if the results did not arrive in time, or cannot arrive because a rank has left."""
        if waited > limit:
            raise self._lost(f"timed out after {limit:g} s")
        for rank, departure in self._group.membership.departures().items():
            is_missing = self._number is not None and departure.collectives < self._number
            is_silent = rank == self._transfers[0].peer and time.monotonic() - departure.noticed > _PATIENCE
            if is_missing or is_silent:
                raise self._lost(f"cannot complete: rank {rank} {departure}")

    def _lost(self, what: str) -> dist.DistBackendError:
        place = "" if self._number is None else f", collective {self._number} of this group,"
        self._error = self._group.give_up(f"{self._name}{place} {what}", self._number)
        return self._error


def wait_for(request: Any, status: Any, check: Callable[[float], None]) -> None:
    """Wait for MPI, and yield the core meanwhile, which MPI does not.

    Args:
        request: what to wait for.
        status: filled when it is complete, or ``None``.
        check: called now and then with the seconds waited; raises to give up.
    """
    began = time.monotonic()
    while not request.Test(status):
        waited = time.monotonic() - began
        if waited < _SPIN:
            _yield_core()
        else:
            check(waited)
            time.sleep(min(waited / 10, _LONGEST_NAP))


_yield_core: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))


def _remember(operation: Operation) -> None:
    """Keep an operation until it is complete; now and then, poll those that no thread waits for."""
    global _sweep_at
    _in_flight.add(operation)
    if len(_in_flight) >= _sweep_at:
        for known in list(_in_flight):
            known.is_completed()
        _sweep_at = max(64, 2 * len(_in_flight))


def _tensors(results: list[Any]) -> list[Tensor]:
    return [tensor for item in results for tensor in (_tensors(item) if isinstance(item, list) else [item])]
