"""A process group for torch.distributed that moves tensors with MPI, through mpi4py.

All calls are MPI's nonblocking ones, since those that block take a whole core and have no timeout. What is wrong with
the arguments is found before anything begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from camshaft.distributed.backends.mpi.buffers import (
    disjoint,
    joined,
    moved,
    mpi,
    name_of,
    operation,
    receivable,
    reduced,
    sendable,
    sizes,
    widened,
)
from camshaft.distributed.backends.mpi.membership import Membership, farewell_tag
from camshaft.distributed.backends.mpi.operation import Operation, Transfer

_NO_TIMEOUT = timedelta(0)
_DEFAULTS: Any = SimpleNamespace(reduceOp=dist.ReduceOp.SUM, rootRank=0, timeout=_NO_TIMEOUT)  # of torch's options

_ProcessGroup: Any = dist.ProcessGroup


class MPIGroup(_ProcessGroup):  # type: ignore[misc]  # Any: torch declares overloads that no Python group has
    """Some ranks that exchange tensors through a communicator of their own.

    Every operation begins when it is called and completes when it is waited for, so that the order in which ranks
    begin and wait is free, as with other backends. Reductions of DDP complete when they are called: they do not overlap
    with the backward pass.

    After a timeout or an error of MPI, what the ranks exchange would not fit together any more: the group refuses
    further operations.

    Args:
        comm: the communicator, which belongs to the group from now on.
        store: what the ranks share beside it.
        timeout: how long an operation may take.
    """

    supports_coalescing = supports_splitting = supports_time_estimate = False

    def __init__(self, comm: Any, store: Store, timeout: timedelta) -> None:
        super().__init__(comm.rank, comm.size)
        self.comm = comm
        self.store = store
        self.timeout = timeout
        self.membership = Membership(comm, kept=store)
        self._name = self._description = ""
        self._given_up: str | None = None
        weakref.finalize(self, self.membership.leave).atexit = False  # old versions of torch do not call shutdown

    # --- what torch asks a group ---------------------------------------------------------------------------

    def getBackendName(self) -> str:
        """Return the name under which torch knows the backend."""
        return "mpi"

    name = getBackendName

    @property
    def group_name(self) -> str:
        """The name that torch gave to the group."""
        return self._name

    pg_name = group_name

    @property
    def group_desc(self) -> str:
        """The description that torch gave to the group."""
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def get_group_store(self) -> Store:
        """Return what the ranks share beside the communicator."""
        return self.store

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long an operation may take."""
        self.timeout = timeout

    _set_default_timeout = set_timeout

    def _get_backend(self, device: torch.device) -> MPIGroup:
        return self  # it is its own backend, on any device

    def shutdown(self) -> None:
        """Leave the group: what the others wait for that needs this rank fails at once."""
        self._given_up = "it was shut down"
        self.membership.leave()

    abort = shutdown

    def give_up(self, reason: str, number: int | None) -> dist.DistBackendError:
        """Refuse further operations, tell the other ranks that there will be none, and return the error to raise."""
        self._given_up = reason
        self.membership.give_up(number)
        return dist.DistBackendError(f"rank {self.rank()} of {self.size()} over MPI: {reason}")

    # --- collectives ---------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = _DEFAULTS) -> dist.Work:
        """Reduce tensors over all ranks, in place."""

        def transfer(tensor: Tensor) -> Transfer:
            op, buffer = operation(opts.reduceOp, tensor.dtype), widened(tensor)
            return Transfer(
                lambda: self.comm.Iallreduce(mpi().IN_PLACE, reduced(buffer), op), buffer, [tensor], self._divisor(opts)
            )

        return self._collective("all_reduce", [transfer(tensor) for tensor in tensors], tensors, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any = _DEFAULTS) -> dist.Work:
        """Reduce tensors over all ranks, in place on one rank; elsewhere they stay as they are."""

        def transfer(tensor: Tensor) -> Transfer:
            op, buffer = operation(opts.reduceOp, tensor.dtype), widened(tensor)
            if self.rank() != opts.rootRank:
                return Transfer(lambda: self.comm.Ireduce(reduced(buffer), None, op, opts.rootRank))
            return Transfer(
                lambda: self.comm.Ireduce(mpi().IN_PLACE, reduced(buffer), op, opts.rootRank),
                buffer,
                [tensor],
                self._divisor(opts),
            )

        return self._collective("reduce", [transfer(tensor) for tensor in tensors], tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = _DEFAULTS) -> dist.Work:
        """Overwrite tensors by those of one rank."""

        def transfer(tensor: Tensor) -> Transfer:
            if self.rank() == opts.rootRank:
                source = sendable(tensor)
                return Transfer(lambda: self.comm.Ibcast(moved(source), opts.rootRank))
            buffer = receivable([tensor])
            return Transfer(lambda: self.comm.Ibcast(moved(buffer), opts.rootRank), buffer, [tensor])

        return self._collective("broadcast", [transfer(tensor) for tensor in tensors], tensors, opts)

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any = _DEFAULTS) -> dist.Work:
        """Fill each list with the tensor of each rank; the sizes may differ over the ranks."""

        def transfer(parts: list[Tensor], tensor: Tensor) -> Transfer:
            self._check_parts("output_tensors", parts, tensor.dtype)
            _check_size("output", parts[self.rank()].numel(), "input", tensor.numel())
            buffer, source = receivable(parts), sendable(tensor)
            return Transfer(lambda: self.comm.Iallgatherv(moved(source), moved(buffer, sizes(parts))), buffer, parts)

        transfers = [transfer(*pair) for pair in zip(outputs, tensors, strict=True)]
        return self._collective("all_gather", transfers, outputs[0] if len(outputs) == 1 else outputs, opts)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = _DEFAULTS) -> dist.Work:
        """Fill a tensor with those of all ranks."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], tensors: list[Tensor], opts: Any = _DEFAULTS
    ) -> dist.Work:
        """Fill tensors with those of all ranks; functional collectives call this."""

        def transfer(output: Tensor, tensor: Tensor) -> Transfer:
            _check_dtypes("output", [output], tensor.dtype)
            _check_size("output", output.numel(), "input times ranks", tensor.numel() * self.size())
            buffer = receivable([output])
            source = disjoint(sendable(tensor), buffer)
            return Transfer(lambda: self.comm.Iallgather(moved(source), moved(buffer)), buffer, [output])

        transfers = [transfer(*pair) for pair in zip(outputs, tensors, strict=True)]
        return self._collective("all_gather_into_tensor", transfers, outputs, opts)

    def gather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any = _DEFAULTS) -> dist.Work:
        """Fill the list on one rank with the tensor of each rank; the other ranks have no list."""
        source, parts = sendable(tensors[0]), outputs[0] if outputs else []
        if self.rank() == opts.rootRank:
            self._check_parts("gather_list", parts, source.dtype)
            buffer = receivable(parts)
            transfer = Transfer(
                lambda: self.comm.Igatherv(moved(source), moved(buffer, sizes(parts)), opts.rootRank), buffer, parts
            )
        else:
            transfer = Transfer(lambda: self.comm.Igatherv(moved(source), None, opts.rootRank))
        return self._collective("gather", [transfer], parts, opts)

    def gather_single(self, output: Tensor, tensor: Tensor, opts: Any = _DEFAULTS) -> dist.Work:
        """Fill a tensor on one rank with those of all ranks."""
        rows = list(output.chunk(self.size())) if self.rank() == opts.rootRank else []
        return self.gather([rows], [tensor], opts)

    def scatter(self, outputs: list[Tensor], tensors: list[list[Tensor]], opts: Any = _DEFAULTS) -> dist.Work:
        """Fill a tensor with this rank's one of the list on one rank; the other ranks have no list."""
        parts, buffer = tensors[0] if tensors else [], receivable(outputs)
        if self.rank() == opts.rootRank:
            self._check_parts("scatter_list", parts, buffer.dtype)
            source = joined(parts)
            transfer = Transfer(
                lambda: self.comm.Iscatterv(moved(source, sizes(parts)), moved(buffer), opts.rootRank), buffer, outputs
            )
        else:
            transfer = Transfer(lambda: self.comm.Iscatterv(None, moved(buffer), opts.rootRank), buffer, outputs)
        return self._collective("scatter", [transfer], outputs, opts)

    def reduce_scatter(self, outputs: list[Tensor], tensors: list[list[Tensor]], opts: Any = _DEFAULTS) -> dist.Work:
        """Reduce the tensors of a list over the ranks, and fill a tensor with this rank's one."""
        transfers = []
        for output, parts in zip(outputs, tensors, strict=True):
            self._check_parts("input_list", parts, output.dtype)
            transfers.append(self._reduced_parts(output, widened(joined(parts)), sizes(parts), opts))
        return self._collective("reduce_scatter", transfers, outputs, opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = _DEFAULTS) -> dist.Work:
        """Reduce a tensor over the ranks, and fill another with this rank's part."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], tensors: list[Tensor], opts: Any = _DEFAULTS
    ) -> dist.Work:
        """Reduce tensors over the ranks, and fill others with this rank's parts; functional collectives call this."""
        transfers = []
        for output, tensor in zip(outputs, tensors, strict=True):
            _check_dtypes("input", [tensor], output.dtype)
            _check_size("input", tensor.numel(), "output times ranks", output.numel() * self.size())
            transfers.append(self._reduced_parts(output, widened(tensor), [output.numel()] * self.size(), opts))
        return self._collective("reduce_scatter_tensor", transfers, outputs, opts)

    def _reduced_parts(self, output: Tensor, source: Tensor, counts: list[int], opts: Any) -> Transfer:
        op = operation(opts.reduceOp, output.dtype)
        _check_size("output", output.numel(), "this rank's part of the input", counts[self.rank()])
        buffer = receivable([output])
        buffer = buffer if source.dtype == output.dtype else torch.empty(output.shape, dtype=source.dtype)
        source = disjoint(source, buffer)
        return Transfer(
            lambda: self.comm.Ireduce_scatter(reduced(source), reduced(buffer), counts, op),
            buffer,
            [output],
            self._divisor(opts),
        )

    def alltoall(self, outputs: list[Tensor], tensors: list[Tensor], opts: Any = _DEFAULTS) -> dist.Work:
        """Send each rank one tensor, and fill others with what each rank sends."""
        self._check_parts("output_tensor_list", outputs, tensors[0].dtype)
        self._check_parts("input_tensor_list", tensors, outputs[0].dtype)
        buffer, source = receivable(outputs), joined(tensors)
        transfer = Transfer(
            lambda: self.comm.Ialltoallv(moved(source, sizes(tensors)), moved(buffer, sizes(outputs))), buffer, outputs
        )
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
        _check_dtypes("output", [output], tensor.dtype)
        incoming, outgoing = self._counts(output, receives), self._counts(tensor, sends)
        buffer = receivable([output])
        source = disjoint(sendable(tensor), buffer)
        transfer = Transfer(
            lambda: self.comm.Ialltoallv(moved(source, outgoing), moved(buffer, incoming)), buffer, [output]
        )
        return self._collective("all_to_all_single", [transfer], [output], opts)

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

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> dist.Work:
        """Begin to send a tensor to one rank; as with gloo, it is sent when that rank receives it, however short."""
        _check_tag(tag)
        source = sendable(tensors[0])
        return self._begin("send", [Transfer(lambda: self.comm.Issend(moved(source), peer, tag), peer=peer)], tensors)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> dist.Work:
        """Begin to receive a tensor from one rank."""
        return self._receive(tensors, peer, peer, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        """Begin to receive a tensor from any rank."""
        return self._receive(tensors, mpi().ANY_SOURCE, None, tag)

    def _receive(self, tensors: list[Tensor], source: int, peer: int | None, tag: int) -> dist.Work:
        _check_tag(tag)
        buffer = receivable(tensors)
        transfer = Transfer(lambda: self.comm.Irecv(moved(buffer), source, tag), buffer, tensors, peer=peer)
        return self._begin("recv", [transfer], tensors)

    # --- how they begin ------------------------------------------------------------------------------------

    def _collective(self, name: str, transfers: list[Transfer], results: list[Any], opts: Any) -> dist.Work:
        return self._begin(name, transfers, results, self.membership.count_collective(), opts.timeout)

    def _begin(
        self,
        name: str,
        transfers: list[Transfer],
        results: list[Any],
        number: int | None = None,
        timeout: timedelta = _NO_TIMEOUT,
    ) -> dist.Work:
        if self._given_up is not None:
            raise dist.DistBackendError(f"{name} is refused, the group is of no use any more: {self._given_up}")
        return Operation(self, name, transfers, results, number, timeout)

    def _divisor(self, opts: Any) -> int:
        size: int = self.size()
        return size if name_of(opts.reduceOp) == "AVG" else 1

    def _counts(self, tensor: Tensor, rows: Sequence[int]) -> list[int]:
        """Return the number of elements in the rows of each rank."""
        size, length = self.size(), tensor.shape[0]
        rows = rows or [length // size] * size
        if len(rows) != size or sum(rows) != length:
            raise ValueError(
                f"split sizes must be {size} that add up to the {length} rows of the tensor, got {list(rows)}"
            )
        width = tensor.numel() // length if length else 0
        return [count * width for count in rows]

    def _check_parts(self, name: str, tensors: Sequence[Tensor], dtype: torch.dtype) -> None:
        if len(tensors) != self.size():
            raise ValueError(f"{name} must have a tensor for each of the {self.size()} ranks, got {len(tensors)}")
        _check_dtypes(name, tensors, dtype)


def _check_dtypes(name: str, tensors: Sequence[Tensor], dtype: torch.dtype) -> None:
    for tensor in tensors:
        if tensor.dtype != dtype:
            raise ValueError(f"{name} must have the dtype of the other side, {dtype}, got {tensor.dtype}")


def _check_size(name: str, size: int, other: str, other_size: int) -> None:
    if size != other_size:
        raise ValueError(f"{name} must have as many elements as {other}, {other_size}, got {size}")


def _check_tag(tag: int) -> None:
    if not 0 <= tag < farewell_tag():
        raise ValueError(f"tag must be in [0, {farewell_tag()}), got {tag}")
