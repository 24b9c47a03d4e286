"""Operations under way: the memory that MPI works with, and waiting that takes no whole core.

Waiting ends when a rank that is needed has left, which MPI does not notice.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from camshaft.distributed.backends.mpi.process_group import MPIGroup

# MPI does not add these up (Open MPI adds the bits of two bfloat16 as integers): they are reduced as wider ones.
# A bool becomes an int32, so that a SUM over more than 255 ranks is still true.
WIDER = {
    torch.bool: torch.int32,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}
_REDUCED = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint8: "UINT8_T",
    torch.uint16: "UINT16_T",
    torch.uint32: "UINT32_T",
    torch.uint64: "UINT64_T",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
}
# by the size of an element: some MPI libraries count no further than 2**31, so elements are counted, not bytes
_MOVED = {1: "BYTE", 2: "INT16_T", 4: "INT32_T", 8: "INT64_T", 16: "C_DOUBLE_COMPLEX"}
_OPERATIONS = {"AVG": "SUM", "PRODUCT": "PROD"}  # the others have one name in torch and in MPI

_SPIN = 2e-4  # seconds in which we poll again and again; MPI itself would do so forever, and take a whole core
_LONGEST_NAP = 1e-3
_PATIENCE = 5.0  # seconds in which a message that was sent before its sender left must have arrived
NOT_SET = timedelta(0)  # torch passes zero or less if no timeout was requested

# MPI reads and writes the memory of an operation until it is complete, also when no object refers to it any more.
_in_flight: set[Operation] = set()
_sweep_at = 64
_yield_core: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))


def mpi() -> Any:
    """Return ``mpi4py.MPI``, whose first import initializes MPI."""
    from mpi4py import MPI

    return MPI


# --- tensors as mpi4py takes them ------------------------------------------------------------------------------


def operation(op: Any, dtype: torch.dtype, size: int) -> tuple[Any, int]:
    """Return the MPI operation for a reduction of torch over so many ranks, and what to divide its result by.

    Raises:
        ValueError: MPI has none (``PREMUL_SUM``), or none for this dtype.
    """
    if WIDER.get(dtype, dtype) not in _REDUCED:
        raise ValueError(f"MPI reduces tensors of {', '.join(map(str, (*_REDUCED, *WIDER)))}; got {dtype}")
    allowed = ["SUM", "PRODUCT"]
    allowed += [] if dtype.is_complex else ["MIN", "MAX"]
    allowed += ["AVG"] if dtype.is_complex or dtype.is_floating_point else ["BAND", "BOR", "BXOR"]
    name = getattr(op, "op", op).name  # torch passes both ReduceOp objects and the values of its enumeration
    if name not in allowed:
        raise ValueError(f"op must be one of {', '.join(allowed)} for tensors of {dtype} over MPI, got {name}")
    return getattr(mpi(), _OPERATIONS.get(name, name)), size if name == "AVG" else 1


def sendable(*tensors: Tensor) -> Tensor:
    """Return what MPI can read: the tensor itself if possible, else a copy on the CPU of all, one after the other."""
    if len(tensors) == 1:
        (tensor,) = tensors
        return tensor if _is_plain(tensor) else tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return torch.cat([sendable(tensor).detach().reshape(-1) for tensor in tensors])


def receivable(*tensors: Tensor) -> Tensor:
    """Return memory for tensors that are received one after the other: the tensor itself if MPI can write to it."""
    if len(tensors) == 1 and _is_plain(tensors[0]):
        return tensors[0]
    return torch.empty(sum(sizes(tensors)), dtype=tensors[0].dtype)


def widened(*tensors: Tensor) -> Tensor:
    """Return what MPI can reduce: the tensor itself if possible, else a copy."""
    dtype = tensors[0].dtype
    return sendable(*tensors).to(WIDER.get(dtype, dtype))


def disjoint(source: Tensor, target: Tensor | None) -> Tensor:
    """Return the source, or a copy of it where both overlap in memory, as when FSDP gathers in place.

    MPICH refuses buffers that overlap, Open MPI takes them and may send what it has just received.
    """
    if target is None:
        return source
    start, other_start = source.data_ptr(), target.data_ptr()
    overlap = start < other_start + target.nbytes and other_start < start + source.nbytes
    return source.clone() if overlap else source


def moved(tensor: Tensor | None, counts: Sequence[int] | None = None) -> list[Any] | None:
    """Describe memory that is moved as it is, in a part of so many elements for each rank if counts are given."""
    if tensor is None:
        return None
    parts = [] if counts is None else [counts]
    return [_memory(tensor), *parts, getattr(mpi(), _MOVED[tensor.element_size()])]


def reduced(tensor: Tensor) -> list[Any]:
    """Describe memory that is reduced."""
    return [_memory(tensor), getattr(mpi(), _REDUCED[tensor.dtype])]


def sizes(tensors: Sequence[Tensor]) -> list[int]:
    """Return the number of elements of each tensor."""
    return [tensor.numel() for tensor in tensors]


def _memory(tensor: Tensor) -> Any:
    return mpi().buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


def _is_plain(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided:
        raise ValueError(f"tensor must be dense to travel over MPI, got layout {tensor.layout}: call to_dense() first")
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


# --- operations ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transfer:
    """One call of MPI that is ready to begin.

    Args:
        begin: calls MPI, and holds the memory that MPI reads.
        buffer: the memory that MPI writes to, or reduces.
        targets: the tensors that the result is for, one after the other; none if this rank receives nothing.
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
        if self.buffer is None or not self.targets:
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

    def wait(self, timeout: timedelta = NOT_SET) -> bool:
        """Wait until the results are there.

        Raises:
            DistBackendError: they did not come in time or cannot come any more, or MPI failed.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            if not self._done:
                limit = next(limit for limit in (timeout, self._timeout, self._group.timeout) if limit > NOT_SET)
                self._calling_mpi(lambda: self._wait_for_all(limit.total_seconds()))
                self._deliver()
        return True

    def is_completed(self) -> bool:
        """Return whether it has ended, with or without an error, which whoever waits for it gets."""
        if not self._lock.acquire(blocking=False):
            return False  # another thread is waiting for it
        try:
            with suppress(dist.DistBackendError):
                is_open = not self._done and self._error is None
                if is_open and self._calling_mpi(lambda: all(one.Test(self._status) for one in self._requests)):
                    self._deliver()
            return self._done or self._error is not None
        finally:
            self._lock.release()

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

    def _source_rank(self) -> int:
        """Return the rank in the group that sent the message; torch asks for it."""
        rank: int = self._status.Get_source()
        return rank

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
                    raise self._lost(f"got {got} bytes from rank {self._source_rank()}, the tensor has {expected}")
            transfer.deliver()

    def _check(self, waited: float, limit: float) -> None:
        """Raise if the results did not arrive in time, or cannot arrive because a rank has left."""
        if waited > limit:
            raise self._lost(f"timed out after {limit:g} s")
        for rank, (collectives, noticed) in self._group.departures().items():
            is_missing = self._number is not None and collectives < self._number
            is_silent = rank == self._transfers[0].peer and time.monotonic() - noticed > _PATIENCE
            if is_missing or is_silent:
                raise self._lost(f"cannot complete: rank {rank} left after {collectives} collectives")

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
