"""A process group for torch.distributed that moves tensors with MPI, through mpi4py.

All calls are MPI's nonblocking ones, since those that block take a whole core and have no timeout. What is wrong with
the arguments is found before anything begins.
"""

from __future__ import annotations

import atexit
import functools
import os
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from camshaft.distributed.backends.mpi.operation import (
    NOT_SET,
    Operation,
    Transfer,
    disjoint,
    moved,
    mpi,
    operation,
    receivable,
    reduced,
    sendable,
    sizes,
    widened,
)

_DEFAULTS: Any = SimpleNamespace(reduceOp=dist.ReduceOp.SUM, rootRank=0, timeout=NOT_SET)  # of torch's options
_ProcessGroup: Any = dist.ProcessGroup
# groups that still have their communicator: they receive the farewells of others
_groups: set[MPIGroup] = set()


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
    """

    supports_coalescing = supports_splitting = supports_time_estimate = False

    def __init__(self, comm: Any, store: Store, timeout: timedelta) -> None:
        super().__init__(comm.rank, comm.size)
        self.comm = comm
        self.store = store
        self.timeout = timeout
        self.when_shut_down: Callable[[], object] = lambda: None
        self._name = self._description = ""
        self._given_up: str | None = None
        self._collectives = 0
        self._departures: dict[int, tuple[int, float]] = {}
        self._farewells: list[tuple[Any, array[int]]] = []
        _groups.add(self)

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

    def _get_backend(self, device: object) -> MPIGroup:
        return self  # it is its own backend, on any device

    # --- leaving -------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Leave the group: what the others wait for that needs this rank fails at once."""
        self._leave("it was shut down", self._collectives)
        self.when_shut_down()

    abort = shutdown

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

    def is_over(self) -> bool:
        """Return whether all have left, so that no message is under way any more."""
        is_sent = self._given_up is not None and all(request.Test() for request, _ in self._farewells)
        return is_sent and len(self.departures()) == self.size() - 1

    def _leave(self, reason: str, collectives: int) -> None:
        if self._given_up is None and self in _groups:  # a forked child is not a rank, and has no groups
            note = array("q", [collectives])
            others = [rank for rank in range(self.size()) if rank != self.rank()]
            with suppress(mpi().Exception):  # which may have been the reason
                for rank in others:  # MPI may read the note later
                    self._farewells.append((self.comm.Isend([note, mpi().INT64_T], rank, _farewell_tag()), note))
        self._given_up = self._given_up or reason

    # --- collectives ---------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = _DEFAULTS) -> dist.Work:
        """Reduce tensors over all ranks, in place."""

        def transfer(tensor: Tensor) -> Transfer:
            (op, divisor), buffer = operation(opts.reduceOp, tensor.dtype, self.size()), widened(tensor)
            begin = functools.partial(self.comm.Iallreduce, mpi().IN_PLACE, reduced(buffer), op)
            return Transfer(begin, buffer, [tensor], divisor)

        return self._collective("all_reduce", map(transfer, tensors), tensors, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any = _DEFAULTS) -> dist.Work:
        """Reduce tensors over all ranks, in place on one rank; elsewhere they stay as they are."""
        is_root = self.rank() == opts.rootRank

        def transfer(tensor: Tensor) -> Transfer:
            (op, divisor), buffer = operation(opts.reduceOp, tensor.dtype, self.size()), widened(tensor)
            messages = (mpi().IN_PLACE, reduced(buffer)) if is_root else (reduced(buffer), None)
            begin = functools.partial(self.comm.Ireduce, *messages, op, opts.rootRank)
            return Transfer(begin, buffer, [tensor] if is_root else [], divisor)

        return self._collective("reduce", map(transfer, tensors), tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = _DEFAULTS) -> dist.Work:
        """Overwrite tensors by those of one rank."""
        is_root = self.rank() == opts.rootRank

        def transfer(tensor: Tensor) -> Transfer:
            buffer, targets = (sendable(tensor), []) if is_root else (receivable(tensor), [tensor])
            return Transfer(lambda: self.comm.Ibcast(moved(buffer), opts.rootRank), buffer, targets)

        return self._collective("broadcast", map(transfer, tensors), tensors, opts)

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any = _DEFAULTS) -> dist.Work:
        """Fill each list with the tensor of each rank; the sizes may differ over the ranks."""

        def transfer(parts: list[Tensor], tensor: Tensor) -> Transfer:
            return self._transfer(self.comm.Iallgatherv, [tensor], parts, receives=sizes(parts))

        transfers = map(transfer, outputs, tensors)
        return self._collective("all_gather", transfers, outputs[0] if len(outputs) == 1 else outputs, opts)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = _DEFAULTS) -> dist.Work:
        """Fill a tensor with those of all ranks."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], tensors: list[Tensor], opts: Any = _DEFAULTS
    ) -> dist.Work:
        """Fill tensors with those of all ranks; functional collectives call this."""

        def transfer(output: Tensor, tensor: Tensor) -> Transfer:
            return self._transfer(self.comm.Iallgatherv, [tensor], [output], receives=self._split(output))

        return self._collective("all_gather_into_tensor", map(transfer, outputs, tensors), outputs, opts)

    def gather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any = _DEFAULTS) -> dist.Work:
        """Fill the list on one rank with the tensor of each rank; the other ranks have no list."""
        parts = outputs[0] if outputs else []
        transfer = self._transfer(self.comm.Igatherv, tensors, parts, opts.rootRank, receives=sizes(parts))
        return self._collective("gather", [transfer], parts, opts)

    def scatter(self, outputs: list[Tensor], tensors: list[list[Tensor]], opts: Any = _DEFAULTS) -> dist.Work:
        """Fill a tensor with this rank's one of the list on one rank; the other ranks have no list."""
        parts = tensors[0] if tensors else []
        transfer = self._transfer(self.comm.Iscatterv, parts, outputs, opts.rootRank, sends=sizes(parts))
        return self._collective("scatter", [transfer], outputs, opts)

    def alltoall(self, outputs: list[Tensor], tensors: list[Tensor], opts: Any = _DEFAULTS) -> dist.Work:
        """Send each rank one tensor, and fill others with what each rank sends."""
        counts = {"sends": sizes(tensors), "receives": sizes(outputs)}
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

    def reduce_scatter(self, outputs: list[Tensor], tensors: list[list[Tensor]], opts: Any = _DEFAULTS) -> dist.Work:
        """Reduce the tensors of a list over the ranks, and fill a tensor with this rank's one."""

        def transfer(output: Tensor, parts: list[Tensor]) -> Transfer:
            return self._reduced_parts(output, parts, sizes(parts), opts)

        return self._collective("reduce_scatter", map(transfer, outputs, tensors), outputs, opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = _DEFAULTS) -> dist.Work:
        """Reduce a tensor over the ranks, and fill another with this rank's part."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], tensors: list[Tensor], opts: Any = _DEFAULTS
    ) -> dist.Work:
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

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> dist.Work:
        """Begin to send a tensor to one rank; as with gloo, it is sent when that rank receives it, however short."""
        source = sendable(tensors[0])
        return self._begin("send", [Transfer(lambda: self.comm.Issend(moved(source), peer, tag), peer=peer)], tensors)

    def recv(self, tensors: list[Tensor], peer: int | None, tag: int = 0) -> dist.Work:
        """Begin to receive a tensor from one rank, or from any."""
        source, buffer = mpi().ANY_SOURCE if peer is None else peer, receivable(*tensors)
        transfer = Transfer(lambda: self.comm.Irecv(moved(buffer), source, tag), buffer, tensors, peer=peer)
        return self._begin("recv", [transfer], tensors)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        """Begin to receive a tensor from any rank."""
        return self.recv(tensors, None, tag)

    # --- how they begin ------------------------------------------------------------------------------------

    def _collective(self, name: str, transfers: Iterable[Transfer], results: list[Any], opts: Any) -> dist.Work:
        prepared = list(transfers)  # may find something wrong with the arguments
        self._collectives += 1
        return self._begin(name, prepared, results, self._collectives, opts.timeout)

    def _begin(
        self,
        name: str,
        transfers: list[Transfer],
        results: list[Any],
        number: int | None = None,
        timeout: timedelta = NOT_SET,
    ) -> dist.Work:
        if self._given_up is not None:
            raise dist.DistBackendError(f"{name} is refused, the group is of no use any more: {self._given_up}")
        return Operation(self, name, transfers, results, number, timeout)

    def _transfer(
        self,
        call: Callable[..., Any],
        tensors: list[Tensor],
        outputs: list[Tensor],
        *root: int,
        sends: list[int] | None = None,
        receives: list[int] | None = None,
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
        buffer = receivable(*outputs) if outputs else None
        source = disjoint(sendable(*tensors), buffer) if tensors else None
        return Transfer(lambda: call(moved(source, sends), moved(buffer, receives), *root), buffer, outputs)

    def _reduced_parts(self, output: Tensor, tensors: list[Tensor], counts: list[int], opts: Any) -> Transfer:
        self._check_parts(tensors, [output], counts, None)
        op, divisor = operation(opts.reduceOp, output.dtype, self.size())
        source, buffer = widened(*tensors), receivable(output)
        buffer = buffer if source.dtype == output.dtype else torch.empty(output.shape, dtype=source.dtype)
        source = disjoint(source, buffer)
        return Transfer(
            lambda: self.comm.Ireduce_scatter(reduced(source), reduced(buffer), counts, op), buffer, [output], divisor
        )

    def _split(self, tensor: Tensor, rows: Sequence[int] = ()) -> list[int]:
        """Return the number of elements in the rows of each rank; by default all have as many."""
        rows = rows or [len(tensor) // self.size()] * self.size()
        return [count * tensor[:1].numel() for count in rows]

    def _check_parts(
        self, tensors: list[Tensor], outputs: list[Tensor], sends: list[int] | None, receives: list[int] | None
    ) -> None:
        """Refuse parts that do not fit: what a rank sends to itself must be what it receives from itself."""
        own = []
        for side, counts in ((tensors, sends), (outputs, receives)):
            total = sum(sizes(side))
            if side and counts is not None and (len(counts) != self.size() or sum(counts) != total):
                raise ValueError(
                    f"tensors of {total} elements must have {self.size()} parts, one for each rank, that add up to "
                    f"them, got parts of {counts}"
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
    _groups.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget_all)


@atexit.register
def leave_all() -> None:
    """Leave all groups before this process ends, and wait until all ranks have left them.

    ``MPI_Finalize`` would wait as well, but take a whole core, and what was kept for others would be gone by then.
    """
    if not _groups or mpi().Is_finalized():
        return
    for group in list(_groups):
        group.shutdown()
    while _groups:
        free_unused()
        time.sleep(0.01)


@functools.cache
def _farewell_tag() -> int:
    """Return the tag of farewells: the highest that MPI has, which messages of users must not carry."""
    tag: int | None = mpi().COMM_WORLD.Get_attr(mpi().TAG_UB)
    assert tag is not None, "MPI attaches it to the world communicator"
    return tag
