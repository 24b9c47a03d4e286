"""A process group over mpi4py, for a torch that was built without MPI.

All calls are MPI's nonblocking ones, since those that block take a whole core and have no timeout. What is wrong with
the arguments is found before anything begins.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from camshaft.distributed.failures.trace import Calls

# MPI does not add these up (Open MPI adds the bits of two bfloat16 as integers): they are reduced as wider ones.
# A bool becomes an int32, so that a SUM over more than 255 ranks is still true.
WIDER = {
    torch.bool: torch.int32,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}
# by the size of an element: some MPI libraries count no further than 2**31, so elements are counted, not bytes
_MOVED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_OPERATIONS = {"AVG": "SUM", "PRODUCT": "PROD"}  # the others have one name in torch and in MPI

Tensors = list[Tensor]
Counts = list[int] | None

_SPIN = 2e-4  # seconds in which we poll again and again; MPI itself would do so forever, and take a whole core
_LONGEST_NAP = 1e-3
_LOOK = 1.0  # seconds between two looks whether the rank of a message has left
_NOT_SET = timedelta(0)  # torch passes zero or less if no timeout was requested

# MPI reads and writes the memory of an operation until it is complete, also when no object refers to it any more.
_in_flight: set[Operation] = set()
_sweep_at = 64
_yield_core: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))
_DEFAULTS: Any = SimpleNamespace(reduceOp=dist.ReduceOp.SUM, rootRank=0, timeout=_NOT_SET)  # of torch's options
_ProcessGroup: Any = dist.ProcessGroup


def mpi() -> Any:
    """Return ``mpi4py.MPI``, whose first import initializes MPI."""
    from mpi4py import MPI

    return MPI


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


# --- tensors as mpi4py takes them ------------------------------------------------------------------------------


def _reduction(op: Any, dtype: torch.dtype, size: int) -> tuple[Any, int]:
    """Return the MPI operation for a reduction of torch over so many ranks, and what to divide its result by.

    Raises:
        ValueError: MPI has none (``PREMUL_SUM``), or none for this dtype.
    """
    if dtype.is_floating_point and dtype.itemsize == 1:
        raise ValueError(f"MPI can reduce only tensors of dtypes of 16 bits or more, integers, and bools; got {dtype}")
    allowed = ["SUM", "PRODUCT"]
    allowed += [] if dtype.is_complex else ["MIN", "MAX"]
    allowed += ["AVG"] if dtype.is_complex or dtype.is_floating_point else ["BAND", "BOR", "BXOR"]
    name = getattr(op, "op", op).name  # torch passes both ReduceOp objects and the values of its enumeration
    if name not in allowed:
        raise ValueError(f"op must be one of {', '.join(allowed)} for tensors of {dtype} over MPI, got {name}")
    return getattr(mpi(), _OPERATIONS.get(name, name)), size if name == "AVG" else 1


def _sendable(*tensors: Tensor) -> Tensor:
    """Return what MPI can read: the tensor itself if possible, else a copy on the CPU of all, one after the other."""
    if len(tensors) > 1:
        return torch.cat([_sendable(tensor).reshape(-1) for tensor in tensors])
    tensor = tensors[0].detach()
    return tensor if _is_plain(tensor) else tensor.resolve_conj().resolve_neg().cpu().contiguous()


def _receivable(*tensors: Tensor) -> Tensor:
    """Return memory for tensors that are received one after the other: the tensor itself if MPI can write to it."""
    if len(tensors) == 1 and _is_plain(tensors[0]):
        return tensors[0].detach()
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


def _moved(tensor: Tensor | None, counts: Counts = None) -> Any:
    """Return what is moved as it is, in a part of so many elements for each rank if counts are given.

    mpi4py takes tensors of the dtypes that MPI knows.
    """
    moved = None if tensor is None else tensor.view(_MOVED[tensor.element_size()])
    return moved if counts is None else [moved, counts]


def _sizes(tensors: Sequence[Tensor]) -> list[int]:
    """Return the number of elements of each tensor."""
    return [tensor.numel() for tensor in tensors]


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
    """

    begin: Callable[[], Any]
    buffer: Tensor | None = None
    targets: Sequence[Tensor] = ()
    divisor: int = 1

    @torch.no_grad()  # a target may be a leaf that requires gradients
    def deliver(self) -> None:
        """Copy the result to the tensors that it is for."""
        if self.buffer is None or not self.targets:
            return
        if self.divisor > 1:
            self.buffer.div_(self.divisor)
        if self.buffer.data_ptr() != self.targets[0].data_ptr():
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
        entry: of a collective, in the calls of the job; ``None`` for a message.
        timeout: how long to wait; the group's timeout if not set.
        peer: the other rank of a message; ``None`` for any rank.

    Raises:
        DistBackendError: MPI raises an error, or the group cannot be used any more.
    """

    def __init__(
        self,
        group: MPIGroup,
        name: str,
        transfers: list[Transfer],
        results: list[Tensor],
        entry: list[Any] | None = None,
        timeout: timedelta = _NOT_SET,
        peer: int | None = None,
    ) -> None:
        super().__init__()
        if group.given_up is not None:
            raise dist.DistBackendError(f"{name} was called on a group that is no longer usable: {group.given_up}")
        self._group, self._name, self._entry, self._timeout = group, name, entry, timeout
        self._transfers, self._results, self._peer = transfers, results, peer
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
            DistBackendError: they did not arrive in time, the job has failed, or MPI has.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            if not self._done:
                limit = next(limit for limit in (timeout, self._timeout, self._group.timeout) if limit > _NOT_SET)
                check = self._checking(limit.total_seconds())
                for request in self._requests:
                    self._calling_mpi(functools.partial(wait_for, request, self._status, check))
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

    def _checking(self, limit: float) -> Callable[[float], None]:
        """Return a function of the seconds waited, which raises if the results cannot arrive, or not in time."""
        looked_at, has_left = 0.0, False

        def check(waited: float) -> None:
            nonlocal looked_at, has_left
            if self._group.is_released:
                raise self._lost("was released: the job has failed")
            if waited > limit:
                raise self._lost(f"timed out after {limit:g} s")
            if self._peer is not None and waited > looked_at + _LOOK:
                if has_left:  # since the last look: what it sent has arrived
                    raise self._lost(f"cannot complete: rank {self._peer} has left")
                looked_at, has_left = waited, self._group.has_left(self._peer)

        return check

    def _calling_mpi(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except mpi().Exception as error:
            raise self._lost(f"failed: {error}") from error

    def _deliver(self) -> None:
        """Deliver the results, once, and release the memory."""
        self._done = True
        _in_flight.discard(self)
        transfers, self._transfers = self._transfers, []
        for transfer in transfers:
            if self._entry is None and transfer.buffer is not None:  # a message that was received
                got, expected = self._status.Get_count(mpi().BYTE), transfer.buffer.nbytes
                if got != expected:
                    raise self._lost(f"got {got} bytes from rank {self._source_rank()}, the tensor has {expected}")
            transfer.deliver()
        self._end_entry()

    def _end_entry(self) -> None:
        if self._entry is not None:
            self._group.world.calls.end(self._entry)

    def _lost(self, what: str) -> dist.DistBackendError:
        """Abandon the group, whose ranks no longer agree on what they exchange, and return the error to raise."""
        self._end_entry()
        group = self._group
        place = "" if self._entry is None else f", collective {self._entry[1]} of this group,"
        reason = f"{self._name}{place} {what}"
        group.given_up = group.given_up or reason
        self._error = dist.DistBackendError(f"rank {group.rank()} of {group.size()} over MPI: {reason}")
        return self._error


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

    Args:
        comm: the communicator, which belongs to the group from now on.
        store: what the ranks share beside it.
        timeout: how long an operation may take.
        world: the default group; ``None`` if this is it.
        title: of this group in the calls of the job.
        members: the global ranks; ``None`` for all.

    Attributes:
        calls: the last collectives of the job; those of the default group count.
        given_up: why the group cannot be used any more, if so.
        is_released: whether the job has failed, so that nobody waits any longer.
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
        self.world.calls.counts[title] = 0
        self._title, self._members = title, range(comm.size) if members is None else members
        self.comm, self._process = comm, os.getpid()
        self.store = store
        self.timeout = timeout
        self.when_shut_down: Callable[[], object] = lambda: None
        self._name = ""
        self.given_up: str | None = None
        self.is_released = False

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

    def _get_sequence_number_for_group(self) -> int:
        """Return how many collectives this rank has begun; torch's own groups have this method, too."""
        return self.world.calls.counts[self._title]

    def shutdown(self) -> None:
        """Leave the group, and tell the others if this is the default one and nothing is on its way any more.

        Its communicator is freed, unless an operation has failed, of which something may still arrive.
        """
        if os.getpid() == self._process:  # a forked child is not a rank
            with suppress(RuntimeError):
                if self.world is self and all(one.is_completed() for one in tuple(_in_flight)):
                    self.store.set(_left(self.rank()), "")
            if self.given_up is None:
                self.comm.Free()  # what is in flight completes
        self.given_up = self.given_up or "it was shut down"
        self.when_shut_down()

    def has_left(self, rank: int) -> bool:
        """Return whether a rank of this group has left the default one."""
        try:
            return bool(self.world._own_store.check([_left(self._members[rank])]))
        except RuntimeError:  # rank 0 has been killed
            return False

    @functools.cached_property
    def _own_store(self) -> Any:
        """A connection that no thread waits in."""
        return self.store.clone()  # type: ignore[attr-defined]  # torch's stubs

    def release(self) -> None:
        """Make the operations that threads wait for fail, from another thread."""
        self.is_released = True

    abort = release

    # --- collectives ---------------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any = _DEFAULTS) -> dist.Work:
        """Reduce tensors over all ranks, in place."""

        def transfer(tensor: Tensor) -> Transfer:
            (op, divisor), buffer = _reduction(opts.reduceOp, tensor.dtype, self.size()), _widened(tensor)
            begin = functools.partial(self.comm.Iallreduce, mpi().IN_PLACE, buffer, op)
            return Transfer(begin, buffer, [tensor], divisor)

        return self._collective("all_reduce", map(transfer, tensors), tensors, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any = _DEFAULTS) -> dist.Work:
        """Reduce tensors over all ranks, in place on one rank; elsewhere they stay as they are."""
        (tensor,), is_root = tensors, self.rank() == opts.rootRank
        (op, divisor), buffer = _reduction(opts.reduceOp, tensor.dtype, self.size()), _widened(tensor)
        messages = (mpi().IN_PLACE, buffer) if is_root else (buffer, None)
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
        transfer = Transfer(lambda: self.comm.Issend(_moved(source), peer, tag))
        return Operation(self, "send", [transfer], tensors, peer=peer)

    def recv(self, tensors: Tensors, peer: int | None, tag: int = 0) -> dist.Work:
        """Begin to receive a tensor from one rank, or from any."""
        source, buffer = mpi().ANY_SOURCE if peer is None else peer, _receivable(*tensors)
        transfer = Transfer(lambda: self.comm.Irecv(_moved(buffer), source, tag), buffer, tensors)
        return Operation(self, "recv", [transfer], tensors, peer=peer)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        """Begin to receive a tensor from any rank."""
        return self.recv(tensors, None, tag)

    # --- how they begin ------------------------------------------------------------------------------------

    def _collective(self, name: str, transfers: Iterable[Transfer], results: Tensors, opts: Any) -> dist.Work:
        prepared = list(transfers)  # may find something wrong with the arguments
        entry = self.world.calls.begin(self._title, self._members, name, results)
        return Operation(self, name, prepared, results, entry, opts.timeout)

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
        return Transfer(lambda: self.comm.Ireduce_scatter(source, buffer, counts, op), buffer, [output], divisor)

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


def _left(rank: int) -> str:
    return f"left/{rank}"
