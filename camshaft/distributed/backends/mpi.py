"""MPI, through torch.distributed: torch's own where torch was built with one, else a process group over mpi4py.

All calls are MPI's nonblocking ones, since those that block take a whole core and have no timeout. What is wrong with
the arguments is found before anything begins. Waiting ends when a rank that is needed has left, which MPI does not
notice.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d

from camshaft.distributed.backends.torch import NativeBackend
from camshaft.distributed.failures.trace import Calls
from camshaft.distributed.topology import Launch, Topology
from camshaft.text import counted

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

Tensors = list[Tensor]
Counts = list[int] | None

OPTIONS = {"device", "timeout"}
_ROOM = 1024  # bytes for the address of the store
# what the launchers of Open MPI and of MPICH and Intel MPI set, and srun if it started us itself: rank, world size, and
# local world size
_PLACES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ""),
)
_TIME_TO_END = 5.0  # seconds that a failed process gets to end by itself
_COURTESY = 1.5  # seconds that a failed process lets the others report why, before it ends them

_registered = False
_made: Counter[tuple[int, ...]] = Counter()  # groups of these ranks since the default group was made

_SPIN = 2e-4  # seconds in which we poll again and again; MPI itself would do so forever, and take a whole core
_LONGEST_NAP = 1e-3
_LOOK = 1.0  # seconds between two looks for ranks that were killed, at the end
_PATIENCE = 5.0  # seconds in which a message that was sent before its sender left must have arrived
_NOT_SET = timedelta(0)  # torch passes zero or less if no timeout was requested

# MPI reads and writes the memory of an operation until it is complete, also when no object refers to it any more.
_in_flight: set[Operation] = set()
_sweep_at = 64
_yield_core: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))
_DEFAULTS: Any = SimpleNamespace(reduceOp=dist.ReduceOp.SUM, rootRank=0, timeout=_NOT_SET)  # of torch's options
_ProcessGroup: Any = dist.ProcessGroup
# groups that still have their communicator: they receive the farewells of others
_groups: set[MPIGroup] = set()
_forgotten: set[MPIGroup] = set()  # kept, as a forked child has none of the threads that their destruction waits for


def mpi() -> Any:
    """Return ``mpi4py.MPI``, whose first import initializes MPI."""
    from mpi4py import MPI

    return MPI


# --- tensors as mpi4py takes them ------------------------------------------------------------------------------


def _reduction(op: Any, dtype: torch.dtype, size: int) -> tuple[Any, int]:
    """Return the MPI operation for a reduction of torch over so many ranks, and what to divide its result by.

    Raises:
        ValueError: MPI has none (``PREMUL_SUM``), or none for this dtype.
    """
    if WIDER.get(dtype, dtype) not in _REDUCED:
        raise ValueError(f"MPI can reduce only tensors of {', '.join(map(str, (*_REDUCED, *WIDER)))}; got {dtype}")
    allowed = ["SUM", "PRODUCT"]
    allowed += [] if dtype.is_complex else ["MIN", "MAX"]
    allowed += ["AVG"] if dtype.is_complex or dtype.is_floating_point else ["BAND", "BOR", "BXOR"]
    name = getattr(op, "op", op).name  # torch passes both ReduceOp objects and the values of its enumeration
    if name not in allowed:
        raise ValueError(f"op must be one of {', '.join(allowed)} for tensors of {dtype} over MPI, got {name}")
    return getattr(mpi(), _OPERATIONS.get(name, name)), size if name == "AVG" else 1


def _sendable(*tensors: Tensor) -> Tensor:
    """Return what MPI can read: the tensor itself if possible, else a copy on the CPU of all, one after the other."""
    if len(tensors) == 1:
        (tensor,) = tensors
        return tensor if _is_plain(tensor) else tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return torch.cat([_sendable(tensor).detach().reshape(-1) for tensor in tensors])


def _receivable(*tensors: Tensor) -> Tensor:
    """Return memory for tensors that are received one after the other: the tensor itself if MPI can write to it."""
    if len(tensors) == 1 and _is_plain(tensors[0]):
        return tensors[0]
    return torch.empty(sum(_sizes(tensors)), dtype=tensors[0].dtype)


def _widened(*tensors: Tensor) -> Tensor:
    """Return what MPI can reduce: the tensor itself if possible, else a copy."""
    dtype = tensors[0].dtype
    return _sendable(*tensors).to(WIDER.get(dtype, dtype))


def _disjoint(source: Tensor, target: Tensor | None) -> Tensor:
    """Return the source, or a copy of it where both overlap in memory, as when FSDP gathers in place.

    MPICH refuses buffers that overlap, Open MPI takes them and may send what it has just received.
    """
    if target is None:
        return source
    start, other_start = source.data_ptr(), target.data_ptr()
    overlap = start < other_start + target.nbytes and other_start < start + source.nbytes
    return source.clone() if overlap else source


def _moved(tensor: Tensor | None, counts: Sequence[int] | None = None) -> list[Any] | None:
    """Describe memory that is moved as it is, in a part of so many elements for each rank if counts are given."""
    if tensor is None:
        return None
    parts = [] if counts is None else [counts]
    return [_memory(tensor), *parts, getattr(mpi(), _MOVED[tensor.element_size()])]


def _reduced(tensor: Tensor) -> list[Any]:
    """Describe memory that is reduced."""
    return [_memory(tensor), getattr(mpi(), _REDUCED[tensor.dtype])]


def _sizes(tensors: Sequence[Tensor]) -> list[int]:
    """Return the number of elements of each tensor."""
    return [tensor.numel() for tensor in tensors]


def _memory(tensor: Tensor) -> Any:
    return mpi().buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


def _is_plain(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided:
        raise ValueError(f"tensor must be dense to be sent over MPI, got layout {tensor.layout}: call to_dense() first")
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
            parts = torch.split(self.buffer.view(-1), _sizes(self.targets))
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
        entry: of the calls of the job.

    Raises:
        DistBackendError: MPI raises an error, or this rank has left the group.
    """

    def __init__(
        self,
        group: MPIGroup,
        name: str,
        transfers: list[Transfer],
        results: list[Tensor],
        number: int | None = None,
        timeout: timedelta = _NOT_SET,
        entry: list[Any] | None = None,
    ) -> None:
        super().__init__()
        if group.given_up is not None:
            raise dist.DistBackendError(f"{name} was called on a group that is no longer usable: {group.given_up}")
        self._group, self._name, self._number, self._timeout = group, name, number, timeout
        self._entry = entry
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
            DistBackendError: they did not arrive in time or can no longer arrive, or MPI failed.
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
        devices = {tensor.device for tensor in self._results if tensor.is_cuda}
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
        if self._entry is not None:
            self._group.world.calls.end(self._entry)

    def _check(self, waited: float, limit: float) -> None:
        """Raise if the results did not arrive in time, or cannot arrive because a rank has left."""
        if self._group.is_released:
            raise self._lost("was released: the job has failed")
        if waited > limit:
            raise self._lost(f"timed out after {limit:g} s")
        for rank, (collectives, noticed) in self._group.departures().items():
            is_missing = self._number is not None and collectives < self._number
            is_silent = rank == self._transfers[0].peer and time.monotonic() - noticed > _PATIENCE
            if is_missing or is_silent:
                raise self._lost(f"cannot complete: rank {rank} left after {counted(collectives, 'collective')}")

    def _lost(self, what: str) -> dist.DistBackendError:
        if self._entry is not None:
            self._group.world.calls.end(self._entry)
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


# --- the group -------------------------------------------------------------------------------------------------


class MPIGroup(_ProcessGroup):  # type: ignore[misc]  # Any: torch declares overloads that no Python group has
    """Some ranks that exchange tensors through a communicator of their own.

    Every operation begins when it is called and completes when it is waited for, so that the order in which ranks
    begin and wait is free, as with other backends. Reductions of DDP complete when they are called: they do not overlap
    with the backward pass.

    MPI does not tell a rank that another one has ended: it would wait forever, and the other one, in ``MPI_Finalize``,
    would wait for it. So a rank that leaves the group says farewell, with the number of collectives that it took part
    in: ranks that wait can tell one that has done its part from one that will never come. After a timeout or an error
    of MPI, what the ranks exchange would not fit together any more: the rank leaves at once.

    Args:
        comm: the communicator, which belongs to the group from now on. It is freed when all ranks have left.
        store: what the ranks share beside it; rank 0 may host it, so it lives as long as the communicator.
        timeout: how long an operation may take.
        world: the default group; ``None`` if this is it.
        title: of this group in the calls of the job.
        members: the global ranks; ``None`` for all.

    Attributes:
        calls: the last collectives of the job; those of the default group count.
    """

    supports_coalescing = supports_splitting = supports_time_estimate = False

    def __init__(
        self,
        comm: Any,
        store: Store,
        timeout: timedelta,
        world: MPIGroup | None = None,
        title: str = "all",
        members: Sequence[int] | None = None,
    ) -> None:
        super().__init__(comm.rank, comm.size)
        self.world = world or self
        self.calls = Calls("mpi")
        self._title, self._members = title, range(comm.size) if members is None else members
        self.world.calls.counts[title] = 0
        self.comm = comm
        self.store = store
        self.timeout = timeout
        self.when_shut_down: Callable[[], object] = lambda: None
        self._name = ""
        self.given_up: str | None = None  # why this rank has left, if it has
        self.is_released = False
        self._collectives = 0
        self._departures: dict[int, tuple[int, float]] = {}
        self._farewells: list[tuple[Any, array[int]]] = []
        store.set(_process_key(comm.rank), json.dumps([socket.gethostname(), os.getpid()]))
        _groups.add(self)

    # --- what torch asks a group ---------------------------------------------------------------------------

    def getBackendName(self) -> str:
        """Return the name under which torch knows the backend."""
        return "mpi"

    @property
    def group_name(self) -> str:
        """The name that torch gave to the group."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long an operation may take."""
        self.timeout = timeout

    _set_default_timeout = set_timeout

    def _get_backend(self, device: object) -> MPIGroup:
        return self  # it is its own backend, on any device

    # --- leaving -------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Leave the group: what the others wait for that needs this rank fails at once."""
        self._leave("it was shut down", self._collectives)
        self.when_shut_down()

    abort = shutdown

    def release(self) -> None:
        """Make the operations that threads wait for fail, from another thread."""
        self.is_released = True

    def _get_sequence_number_for_group(self) -> int:
        """Return how many collectives this rank has begun; torch's own groups have this method, too."""
        return self._collectives

    def give_up(self, reason: str, number: int | None) -> dist.DistBackendError:
        """Leave the group after an error, and return the error to raise.

        Args:
            reason: what failed.
            number: of the collective that failed here; ``None`` for a message.
        """
        self._leave(reason, self._collectives if number is None else number - 1)
        return dist.DistBackendError(f"rank {self.rank()} of {self.size()} over MPI: {reason}")

    def departures(self) -> dict[int, tuple[int, float]]:
        """Return the ranks that have left by now, after how many collectives, and when this rank learned it."""
        status = mpi().Status()
        while (message := self.comm.Improbe(mpi().ANY_SOURCE, _farewell_tag(), status)) is not None:
            note = array("q", [0])
            message.Recv([note, mpi().INT64_T])
            self._departures[status.Get_source()] = note[0], time.monotonic()
        return self._departures

    def killed(self) -> list[int]:
        """Return the ranks of this group that have ended without leaving, as far as this rank can tell: on its host.

        The process of rank 0 serves the store. It stays there until all have left, unless it was killed.
        """
        departed = self.departures()
        missing = [rank for rank in range(self.size()) if rank != self.rank() and rank not in departed]
        keys = [_process_key(rank) for rank in missing]
        try:
            processes = self.store.multi_get(keys) if missing and self.store.check(keys) else []
        except RuntimeError:
            return [0] if self.world is self else []
        return [rank for rank, told in zip(missing, processes, strict=False) if _has_ended(*json.loads(told))]

    def is_over(self) -> bool:
        """Return whether all have left, so that no message is under way any more."""
        is_sent = self.given_up is not None and all(request.Test() for request, _ in self._farewells)
        return is_sent and len(self.departures()) == self.size() - 1

    def _leave(self, reason: str, collectives: int) -> None:
        if self.given_up is None and self in _groups:  # a forked child is not a rank, and has no groups
            note = array("q", [collectives])
            others = [rank for rank in range(self.size()) if rank != self.rank()]
            with suppress(mpi().Exception):  # which may have been the reason
                for rank in others:  # MPI may read the note later
                    self._farewells.append((self.comm.Isend([note, mpi().INT64_T], rank, _farewell_tag()), note))
        self.given_up = self.given_up or reason

    # --- collectives ---------------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any = _DEFAULTS) -> dist.Work:
        """Reduce tensors over all ranks, in place."""

        def transfer(tensor: Tensor) -> Transfer:
            (op, divisor), buffer = _reduction(opts.reduceOp, tensor.dtype, self.size()), _widened(tensor)
            begin = functools.partial(self.comm.Iallreduce, mpi().IN_PLACE, _reduced(buffer), op)
            return Transfer(begin, buffer, [tensor], divisor)

        return self._collective("all_reduce", map(transfer, tensors), tensors, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any = _DEFAULTS) -> dist.Work:
        """Reduce tensors over all ranks, in place on one rank; elsewhere they stay as they are."""
        (tensor,), is_root = tensors, self.rank() == opts.rootRank
        (op, divisor), buffer = _reduction(opts.reduceOp, tensor.dtype, self.size()), _widened(tensor)
        messages = (mpi().IN_PLACE, _reduced(buffer)) if is_root else (_reduced(buffer), None)
        begin = functools.partial(self.comm.Ireduce, *messages, op, opts.rootRank)
        transfer = Transfer(begin, buffer, tensors if is_root else [], divisor)
        return self._collective("reduce", [transfer], tensors, opts)

    def broadcast(self, tensors: Tensors, opts: Any = _DEFAULTS) -> dist.Work:
        """Overwrite tensors by those of one rank."""
        is_root = self.rank() == opts.rootRank
        buffer, targets = (_sendable(*tensors), []) if is_root else (_receivable(*tensors), tensors)
        transfer = Transfer(lambda: self.comm.Ibcast(_moved(buffer), opts.rootRank), buffer, targets)
        return self._collective("broadcast", [transfer], tensors, opts)

    def allgather(self, outputs: list[Tensors], tensors: Tensors, opts: Any = _DEFAULTS) -> dist.Work:
        """Fill the list with the tensor of each rank; the sizes may differ over the ranks."""
        (parts,) = outputs
        transfer = self._transfer(self.comm.Iallgatherv, tensors, parts, receives=_sizes(parts))
        return self._collective("all_gather", [transfer], parts, opts)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = _DEFAULTS) -> dist.Work:
        """Fill a tensor with those of all ranks."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, tensors: Tensors, opts: Any = _DEFAULTS) -> dist.Work:
        """Fill tensors with those of all ranks; functional collectives call this."""

        def transfer(output: Tensor, tensor: Tensor) -> Transfer:
            return self._transfer(self.comm.Iallgatherv, [tensor], [output], receives=self._split(output))

        return self._collective("all_gather_into_tensor", map(transfer, outputs, tensors), outputs, opts)

    def gather(self, outputs: list[Tensors], tensors: Tensors, opts: Any = _DEFAULTS) -> dist.Work:
        """Fill the list on one rank with the tensor of each rank; the other ranks have no list."""
        parts = outputs[0] if outputs else []
        transfer = self._transfer(self.comm.Igatherv, tensors, parts, opts.rootRank, receives=_sizes(parts))
        return self._collective("gather", [transfer], parts, opts)

    def scatter(self, outputs: Tensors, tensors: list[Tensors], opts: Any = _DEFAULTS) -> dist.Work:
        """Fill a tensor with this rank's one of the list on one rank; the other ranks have no list."""
        parts = tensors[0] if tensors else []
        transfer = self._transfer(self.comm.Iscatterv, parts, outputs, opts.rootRank, sends=_sizes(parts))
        return self._collective("scatter", [transfer], outputs, opts)

    def alltoall(self, outputs: Tensors, tensors: Tensors, opts: Any = _DEFAULTS) -> dist.Work:
        """Send each rank one tensor, and fill others with what each rank sends."""
        counts = {"sends": _sizes(tensors), "receives": _sizes(outputs)}
        transfer = self._transfer(self.comm.Ialltoallv, tensors, outputs, **counts)
        return self._collective("all_to_all", [transfer], outputs, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        receives: Sequence[int] = (),
        sends: Sequence[int] = (),
        opts: Any = _DEFAULTS,
    ) -> dist.Work:
        """Send each rank its rows of a tensor, and fill another with what each rank sends; by default equal parts."""
        counts = {"sends": self._split(tensor, sends), "receives": self._split(output, receives)}
        transfer = self._transfer(self.comm.Ialltoallv, [tensor], [output], **counts)
        return self._collective("all_to_all_single", [transfer], [output], opts)

    def reduce_scatter(self, outputs: Tensors, tensors: list[Tensors], opts: Any = _DEFAULTS) -> dist.Work:
        """Reduce the tensors of a list over the ranks, and fill a tensor with this rank's one."""
        (output,), (parts,) = outputs, tensors
        transfer = self._reduced_parts(output, parts, _sizes(parts), opts)
        return self._collective("reduce_scatter", [transfer], outputs, opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = _DEFAULTS) -> dist.Work:
        """Reduce a tensor over the ranks, and fill another with this rank's part."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, tensors: Tensors, opts: Any = _DEFAULTS) -> dist.Work:
        """Reduce tensors over the ranks, and fill others with this rank's parts; functional collectives call this."""

        def transfer(output: Tensor, tensor: Tensor) -> Transfer:
            return self._reduced_parts(output, [tensor], self._split(tensor), opts)

        return self._collective("reduce_scatter_tensor", map(transfer, outputs, tensors), outputs, opts)

    def barrier(self, opts: Any = _DEFAULTS) -> dist.Work:
        """Wait for all ranks."""
        return self._collective("barrier", [Transfer(self.comm.Ibarrier)], [], opts)

    # the names of the same in older versions of torch
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # --- messages ------------------------------------------------------------------------------------------

    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> dist.Work:
        """Begin to send a tensor to one rank; as with gloo, it is sent when that rank receives it, however short."""
        source = _sendable(tensors[0])
        transfer = Transfer(lambda: self.comm.Issend(_moved(source), peer, tag), peer=peer)
        return Operation(self, "send", [transfer], tensors)

    def recv(self, tensors: Tensors, peer: int | None, tag: int = 0) -> dist.Work:
        """Begin to receive a tensor from one rank, or from any."""
        source, buffer = mpi().ANY_SOURCE if peer is None else peer, _receivable(*tensors)
        transfer = Transfer(lambda: self.comm.Irecv(_moved(buffer), source, tag), buffer, tensors, peer=peer)
        return Operation(self, "recv", [transfer], tensors)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        """Begin to receive a tensor from any rank."""
        return self.recv(tensors, None, tag)

    # --- how they begin ------------------------------------------------------------------------------------

    def _collective(self, name: str, transfers: Iterable[Transfer], results: Tensors, opts: Any) -> dist.Work:
        prepared = list(transfers)  # may find something wrong with the arguments
        self._collectives += 1
        entry = self.world.calls.begin(self._title, self._members, name, results)
        return Operation(self, name, prepared, results, self._collectives, opts.timeout, entry)

    def _transfer(
        self,
        call: Callable[..., Any],
        tensors: Tensors,
        outputs: Tensors,
        *root: int,
        sends: Counts = None,
        receives: Counts = None,
    ) -> Transfer:
        """Prepare a call that sends tensors, one after the other, and fills others.

        Args:
            call: takes what is sent, what is received, and the root.
            tensors: none if this rank sends nothing.
            outputs: none if this rank receives nothing.
            root: the only rank that sends, or receives, if there is one.
            sends: how many elements are for each rank; ``None`` if all get the same tensor.
            receives: how many elements come from each rank; ``None`` if they come from one.
        """
        self._check_parts(tensors, outputs, sends, receives)
        buffer = _receivable(*outputs) if outputs else None
        source = _disjoint(_sendable(*tensors), buffer) if tensors else None
        return Transfer(lambda: call(_moved(source, sends), _moved(buffer, receives), *root), buffer, outputs)

    def _reduced_parts(self, output: Tensor, tensors: Tensors, counts: list[int], opts: Any) -> Transfer:
        self._check_parts(tensors, [output], counts, None)
        op, divisor = _reduction(opts.reduceOp, output.dtype, self.size())
        source, buffer = _widened(*tensors), _receivable(output)
        buffer = buffer if source.dtype == output.dtype else torch.empty(output.shape, dtype=source.dtype)
        source = _disjoint(source, buffer)
        return Transfer(
            lambda: self.comm.Ireduce_scatter(_reduced(source), _reduced(buffer), counts, op), buffer, [output], divisor
        )

    def _split(self, tensor: Tensor, rows: Sequence[int] = ()) -> list[int]:
        """Return the number of elements in the rows of each rank; by default all have as many."""
        rows = rows or [len(tensor) // self.size()] * self.size()
        return [count * tensor[:1].numel() for count in rows]

    def _check_parts(self, tensors: Tensors, outputs: Tensors, sends: Counts, receives: Counts) -> None:
        """Refuse parts that do not fit: what a rank sends to itself must be what it receives from itself."""
        own = []
        for side, counts in ((tensors, sends), (outputs, receives)):
            total = sum(_sizes(side))
            if side and counts is not None and (len(counts) != self.size() or sum(counts) != total):
                raise ValueError(
                    f"tensors of {total} elements must be split into {self.size()} parts, one for each rank, which add "
                    f"up to {total}, got parts of {counts}"
                )
            own += [f"{total if counts is None else counts[self.rank()]} of {tensor.dtype}" for tensor in side[:1]]
        if len(set(own)) > 1:
            raise ValueError(
                f"this rank's part of the input must have the elements of its output, {own[1]}, got {own[0]}"
            )


def free_unused() -> None:
    """Free the communicators of groups that all ranks have left."""
    for group in list(_groups):
        if group.is_over():
            _groups.discard(group)
            group.comm.Free()


def forget_all() -> None:
    """Do not wait for other ranks at exit: a forked child is none of them, or this process is about to end them too."""
    _forgotten.update(_groups)
    _groups.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget_all)


@atexit.register
def leave_all() -> None:
    """Leave all groups before this process ends, and wait until all ranks have left them.

    ``MPI_Finalize`` would wait as well, but take a whole core, and what was kept for others would be gone by then. It
    would wait forever for a rank that was killed, so then this process ends without it.
    """
    if not _groups or mpi().Is_finalized():
        return
    groups = list(_groups)
    for group in groups:
        group.shutdown()
    look_at = time.monotonic() + _LOOK
    while _groups:
        free_unused()
        time.sleep(0.01)
        if _groups and time.monotonic() > look_at:
            look_at += _LOOK
            if killed := sorted({rank for group in groups if group in _groups for rank in group.killed()}):
                text = f"camshaft: MPI cannot be finalized, as the processes of ranks {killed} were killed; exiting\n"
                os.write(2, text.encode())
                sys.stdout.flush()
                os._exit(1)


def _process_key(rank: int) -> str:
    return f"process/{rank}"


def _has_ended(host: str, pid: int) -> bool:
    """Return whether a process has certainly ended: it was one of this host."""
    if host != socket.gethostname() or sys.platform == "win32":  # where os.kill would interrupt the process
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # of another user
        return False
    with suppress(OSError):  # not on Linux
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"  # a launcher may not look
    return False


@functools.cache
def _farewell_tag() -> int:
    """Return the tag of farewells: the highest that MPI has, which messages of users must not carry."""
    tag: int | None = mpi().COMM_WORLD.Get_attr(mpi().TAG_UB)
    assert tag is not None, "MPI attaches it to the world communicator"
    return tag


# --- the start of a run, and its end -----------------------------------------------------------------------------


def create(
    name: str,
    launch: Launch | None,
    local_rank: int | None = None,
    timeout: timedelta | None = None,
    device: Any = None,
) -> NativeBackend:
    """Start a run over MPI; all processes that mpirun started call this.

    Args:
        name: ``"mpi"``.
        launch: ignored, as MPI knows the ranks.
        local_rank: ignored, as the ranks exchange their hosts.
        timeout: how long an operation may take; torch's default if ``None``.
        device: where tensors are moved from and to; the CPU if ``None``.

    Raises:
        ModuleNotFoundError: mpi4py or an MPI library is missing.
        RuntimeError: a default process group exists, or the processes were started by another MPI's launcher.
    """
    initialize_mpi(timeout)
    try:
        hosts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(hosts, socket.gethostname())
        topology = Topology.from_hosts(dist.get_rank(), hosts)
        return NativeBackend(topology, torch.device("cpu" if device is None else device))
    except BaseException:
        dist.destroy_process_group()
        raise


def initialize_mpi(timeout: timedelta | None = None) -> None:
    """Create a default process group over MPI; all processes that mpirun started call this.

    From here to the end of the group, an uncaught error ends all processes of the job.

    Args:
        timeout: how long an operation may take; torch's default if ``None``.

    Raises:
        ModuleNotFoundError: mpi4py or an MPI library is missing.
        RuntimeError: a default process group already exists, or the processes were started by the launcher of
            another MPI library.
        DistBackendError: not all processes joined in time. If some have not even initialized MPI, which waits for
            them without returning to Python, this process is ended instead, with a message.
    """
    if dist.is_initialized():
        raise RuntimeError("a default process group already exists: destroy it first")
    with _limited(timeout or c10d.default_pg_timeout):
        register_mpi()
    if not _registered:  # torch's own
        dist.init_process_group("mpi", timeout=timeout)
        return
    guard = JobGuard()
    dist.init_process_group("mpi", timeout=timeout)
    world = dist.group.WORLD
    assert isinstance(world, MPIGroup)
    # torch has no store for this backend; code that looks up the default one finds ours
    c10d._world.pg_map[world] = (dist.get_backend(world), world.store)
    world.when_shut_down = guard.stop


@contextmanager
def _limited(timeout: timedelta) -> Iterator[None]:
    """End this process if the block, which may initialize MPI, takes longer than a time."""
    rank, size, local_size = next((names for names in _PLACES if names[1] in os.environ), ("", "", ""))
    if "mpi4py.MPI" in sys.modules or dist.is_mpi_available() or os.environ.get(size, "1") == "1":
        yield
        return
    arguments = str(timeout.total_seconds()), rank, os.environ[size], os.environ.get(local_size, "0")
    # in a session of its own, as it ends with this process anyway
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("mpi_start.py")), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as process:
        try:
            yield
        finally:
            process.kill()


def register_mpi() -> None:
    """Register the ``mpi`` backend with a torch that was built without MPI.

    This initializes MPI, as any import of mpi4py does, until the process ends. Does nothing if torch already has a
    backend of that name.

    Raises:
        ModuleNotFoundError: mpi4py or an MPI library is missing.
        RuntimeError: the processes were started by the launcher of another MPI library.
    """
    global _registered
    if _registered or dist.is_mpi_available():
        return
    try:
        world_size = mpi().COMM_WORLD.size
    except (ImportError, RuntimeError) as error:  # mpi4py raises the latter when it finds no MPI library
        raise ModuleNotFoundError(
            "backend 'mpi' needs mpi4py and an MPI library: pip install 'camshaft[mpi]'"
        ) from error
    check_launcher(os.environ, world_size)
    if torch.__version__ >= "2.14":  # compared as versions, not as text
        dist.Backend.register_backend(
            "mpi",
            lambda options, _: create_group(options.global_ranks_in_group, options.timeout),
            extended_api=True,
            devices=["cpu", "cuda"],
        )
    else:
        _replace_built_in()
    _registered = True


def check_launcher(environ: Mapping[str, str], world_size: int) -> None:
    """Reject a start as many jobs of one process, as when mpirun and mpi4py belong to different MPI libraries.

    Raises:
        RuntimeError: the launcher started several processes, MPI sees one.

    >>> check_launcher({"PMI_SIZE": "2"}, world_size=2)
    """
    name = next((name for _, name, _ in _PLACES if name in environ), None)
    if world_size == 1 and name is not None and environ[name] != "1":
        raise RuntimeError(
            f"MPI sees 1 process, but the launcher started {environ[name]} ({name}): start with the mpirun of the "
            "MPI library that mpi4py uses (python -m mpi4py --mpi-library), or under Slurm with srun --mpi=pmi2 "
            "(MPICH) or --mpi=pmix (Open MPI)"
        )


def create_group(ranks: Sequence[int], timeout: timedelta) -> MPIGroup:
    """Create a process group; only its members call this, for the default group all ranks.

    Args:
        ranks: global ranks, in the order of their rank in the group; none for the default group.
        timeout: how long an operation may take.

    Raises:
        DistBackendError: not all members joined within ``timeout``.
        RuntimeError: the default group is not over MPI.
    """
    free_unused()
    if not ranks:
        _made.clear()
        host_store = _connect(timeout)
        _wait_for_members(PrefixStore("world", host_store), mpi().COMM_WORLD.size, timeout)
        return MPIGroup(mpi().COMM_WORLD.Dup(), host_store, timeout)
    world = dist.group.WORLD
    if not isinstance(world, MPIGroup):
        raise RuntimeError(
            f"a group over MPI requires the default group to be over MPI, got backend {dist.get_backend()!r}"
        )
    _made[tuple(ranks)] += 1  # the same on all members
    store = PrefixStore(f"{list(ranks)}/{_made[tuple(ranks)]}", world.store)
    _wait_for_members(store, len(ranks), timeout)
    everybody = world.comm.Get_group()
    members = everybody.Incl(list(ranks))
    try:
        title = f"{_made[tuple(ranks)]}: {list(ranks)}"
        return MPIGroup(world.comm.Create_group(members), store, timeout, world, title, ranks)
    finally:
        members.Free()
        everybody.Free()


def _connect(timeout: timedelta) -> TCPStore:
    """Open a store on rank 0 and connect all ranks to it; MPI broadcasts its address.

    ``MASTER_ADDR`` names the host of rank 0 where its own name does not reach it.

    Raises:
        DistBackendError: rank 0 did not join within ``timeout``.
        DistNetworkError: the host of rank 0 cannot be reached.
    """
    world, here, seconds = mpi().COMM_WORLD, mpi().Get_processor_name(), timeout.total_seconds()
    buffer = bytearray(_ROOM)
    if world.rank == 0:
        store = TCPStore("localhost", 0, world.size, True, timeout, wait_for_workers=False)
        buffer = bytearray(f"{here} {store.port}".encode().ljust(_ROOM))

    def check(waited: float) -> None:
        if waited > seconds:
            raise dist.DistBackendError(
                f"creating a group over MPI timed out after {seconds:g} s: not all ranks joined"
            )

    wait_for(world.Ibcast([buffer, mpi().BYTE], 0), None, check)
    if world.rank == 0:
        return store
    first, port = buffer.decode().split()
    host = os.environ.get("MASTER_ADDR") or ("localhost" if first == here else first)
    return TCPStore(host, int(port), world.size, False, timeout, wait_for_workers=False)


def _wait_for_members(store: Store, size: int, timeout: timedelta) -> None:
    """Wait until all are here, asleep: MPI would take a whole core for it, and has no timeout."""
    if store.add("present", 1) == size:
        store.set("complete", "yes")
    try:
        store.wait(["complete"], timeout)
    except RuntimeError as error:
        present = store.add("present", 0)
        raise dist.DistBackendError(
            f"creating a group over MPI timed out after {timeout.total_seconds():g} s: {present} of {size} ranks joined"
        ) from error


def _replace_built_in() -> None:
    """Replace the MPI group of torch, which the name always stands for before torch 2.14.

    Torch passes the ranks to it but no timeout, which is recorded on its way.
    """
    make_group = c10d._new_process_group_helper
    recorded = SimpleNamespace(timeout=c10d.default_pg_timeout)

    @functools.wraps(make_group)
    def make_group_and_record(*args: Any, **kwargs: Any) -> Any:
        recorded.timeout = kwargs.get("timeout") or c10d.default_pg_timeout
        return make_group(*args, **kwargs)

    vars(c10d).update(
        _MPI_AVAILABLE=True,
        ProcessGroupMPI=SimpleNamespace(create=lambda ranks: create_group(ranks, recorded.timeout)),
        _new_process_group_helper=make_group_and_record,
    )


class JobGuard:
    """Ends all processes of the job with this one, if an uncaught error ends it.

    A process that leaves while others still count on it waits for them in ``MPI_Finalize``, and they wait for it. So
    such an error ends the job, after its traceback is written and the exit handlers of the program have run. A process
    that ends without an error leaves its groups, so that those that wait for it learn that it will not join them.
    """

    def __init__(self) -> None:
        self._process: int | None = os.getpid()
        self._previous, sys.excepthook = sys.excepthook, self._on_error

    def stop(self) -> None:
        """Stop guarding; during an error, only after that error has ended the process.

        So an error that leaves a ``with`` block which finalizes still ends the job.
        """
        if sys.exc_info()[0] is None:
            if sys.excepthook == self._on_error:
                sys.excepthook = self._previous
            self._process = None  # torch has put a hook before ours, and still calls it

    def _on_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._previous(kind, error, trace)
        if os.getpid() == self._process:  # not in a forked child
            from mpi4py.run import set_abort_status

            forget_all()
            code = 130 if issubclass(kind, KeyboardInterrupt) else 1
            set_abort_status(code)  # the job ends when Python exits, or soon if a thread or an exit handler hangs
            watchdog = threading.Timer(_TIME_TO_END, mpi().COMM_WORLD.Abort, (code,))
            watchdog.daemon = True
            watchdog.start()
            if mpi().COMM_WORLD.size > 1:
                time.sleep(_COURTESY)
