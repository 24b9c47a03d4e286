"""A process group for torch.distributed that moves tensors with MPI, through mpi4py."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    Store,
)

from camshaft.distributed.backends.mpi import collectives as mpi
from camshaft.distributed.backends.mpi.attendance import Attendance
from camshaft.distributed.backends.mpi.work import Operation, Transfer

if TYPE_CHECKING:
    from mpi4py import MPI

_ALLREDUCE = AllreduceOptions()
_REDUCE = ReduceOptions()
_BROADCAST = BroadcastOptions()
_ALLGATHER = AllgatherOptions()
_GATHER = GatherOptions()
_SCATTER = ScatterOptions()
_REDUCE_SCATTER = ReduceScatterOptions()
_ALL_TO_ALL = AllToAllOptions()
_BARRIER = BarrierOptions()
_NO_TIMEOUT = timedelta(0)

_ProcessGroup: Any = dist.ProcessGroup


class MPIGroup(_ProcessGroup):  # type: ignore[misc]  # Any: torch declares overloads that no Python group has
    """Some ranks that exchange tensors through a communicator of their own.

    Every operation is begun when it is called and completed when somebody waits for it, so that the order in
    which ranks begin and wait is free, as with other backends. Reductions of DDP complete when they are called:
    they do not overlap with the backward pass.

    After a timeout or an error of MPI, what the ranks exchange would not fit together any more: the group
    refuses further operations.

    Args:
        comm: the communicator, which is the group's from now on.
        store: what the ranks share beside it.
        timeout: how long an operation may take.
    """

    supports_coalescing = supports_splitting = supports_time_estimate = False

    def __init__(self, comm: MPI.Intracomm, store: Store, timeout: timedelta) -> None:
        super().__init__(comm.rank, comm.size)
        self.comm = comm
        self.store = store
        self.timeout = timeout
        self.attendance = Attendance(comm, kept=store)
        self._name = self._description = ""
        self._given_up: str | None = None
        weakref.finalize(self, self.attendance.leave).atexit = False  # old versions of torch do not call shutdown

    # --- what torch asks a group ---------------------------------------------------------------------------

    def getBackendName(self) -> str:
        """Give the name under which torch knows it."""
        return "mpi"

    name = getBackendName

    @property
    def group_name(self) -> str:
        """The name that torch gave it."""
        return self._name

    pg_name = group_name

    @property
    def group_desc(self) -> str:
        """What torch says that it is for."""
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def get_group_store(self) -> Store:
        """Give what the ranks share beside the communicator."""
        return self.store

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long an operation may take."""
        self.timeout = timeout

    _set_default_timeout = set_timeout

    def _get_backend(self, device: torch.device) -> MPIGroup:
        return self  # it is its own backend, whatever the device

    def shutdown(self) -> None:
        """Leave the group: what the others wait for that needs this rank fails at once."""
        self._given_up = "it was shut down"
        self.attendance.leave()

    abort = shutdown

    def give_up(self, reason: str, number: int | None) -> dist.DistBackendError:
        """Refuse further operations, and say why; the other ranks learn that there will be none."""
        self._given_up = reason
        self.attendance.give_up(number)
        return dist.DistBackendError(f"rank {self.rank()} of {self.size()} over MPI: {reason}")

    # --- collectives ---------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: AllreduceOptions = _ALLREDUCE) -> dist.Work:
        """Reduce tensors over all ranks, in place."""
        transfers = [mpi.all_reduce(self.comm, tensor, opts.reduceOp) for tensor in tensors]
        return self._collective("all_reduce", transfers, tensors, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: ReduceOptions = _REDUCE) -> dist.Work:
        """Reduce tensors over all ranks, in place on one."""
        transfers = [mpi.reduce(self.comm, tensor, opts.reduceOp, opts.rootRank) for tensor in tensors]
        return self._collective("reduce", transfers, tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: BroadcastOptions = _BROADCAST) -> dist.Work:
        """Give every rank the tensors of one, in place."""
        transfers = [mpi.broadcast(self.comm, tensor, opts.rootRank) for tensor in tensors]
        return self._collective("broadcast", transfers, tensors, opts)

    def allgather(
        self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: AllgatherOptions = _ALLGATHER
    ) -> dist.Work:
        """Fill each list with the tensor of each rank."""
        transfers = [mpi.all_gather(self.comm, *pair) for pair in zip(outputs, tensors, strict=True)]
        return self._collective("all_gather", transfers, _only(outputs), opts)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: AllgatherOptions = _ALLGATHER
    ) -> dist.Work:
        """Fill the list of each rank with its tensors."""
        return self.allgather([list(column) for column in zip(*outputs, strict=True)], tensors, opts)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: AllgatherOptions = _ALLGATHER) -> dist.Work:
        """Fill a tensor with those of all ranks."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], tensors: list[Tensor], opts: AllgatherOptions = _ALLGATHER
    ) -> dist.Work:
        """Fill tensors with those of all ranks."""
        transfers = [mpi.all_gather_single(self.comm, *pair) for pair in zip(outputs, tensors, strict=True)]
        return self._collective("all_gather_into_tensor", transfers, outputs, opts)

    def gather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: GatherOptions = _GATHER) -> dist.Work:
        """Fill the list on one rank with the tensor of each rank; the other ranks give no list."""
        rows = outputs[0] if outputs else []
        transfers = [mpi.gather(self.comm, rows, tensors[0], opts.rootRank)]
        return self._collective("gather", transfers, rows, opts)

    def gather_single(self, output: Tensor, tensor: Tensor, opts: GatherOptions = _GATHER) -> dist.Work:
        """Fill a tensor on one rank with those of all ranks."""
        rows = list(output.chunk(self.size())) if self.rank() == opts.rootRank else []
        return self.gather([rows], [tensor], opts)

    def scatter(self, outputs: list[Tensor], tensors: list[list[Tensor]], opts: ScatterOptions = _SCATTER) -> dist.Work:
        """Fill a tensor with this rank's one of the list on one rank; the other ranks give no list."""
        transfers = [mpi.scatter(self.comm, outputs[0], tensors[0] if tensors else [], opts.rootRank)]
        return self._collective("scatter", transfers, outputs, opts)

    def reduce_scatter(
        self, outputs: list[Tensor], tensors: list[list[Tensor]], opts: ReduceScatterOptions = _REDUCE_SCATTER
    ) -> dist.Work:
        """Reduce the tensors of a list over the ranks, and fill a tensor with this rank's one."""
        pairs = zip(outputs, tensors, strict=True)
        transfers = [mpi.reduce_scatter(self.comm, *pair, opts.reduceOp) for pair in pairs]
        return self._collective("reduce_scatter", transfers, outputs, opts)

    def reduce_scatter_single(
        self, output: Tensor, tensor: Tensor, opts: ReduceScatterOptions = _REDUCE_SCATTER
    ) -> dist.Work:
        """Reduce a tensor over the ranks, and fill another with this rank's part."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], tensors: list[Tensor], opts: ReduceScatterOptions = _REDUCE_SCATTER
    ) -> dist.Work:
        """Reduce tensors over the ranks, and fill others with this rank's parts."""
        pairs = zip(outputs, tensors, strict=True)
        transfers = [mpi.reduce_scatter_single(self.comm, *pair, opts.reduceOp) for pair in pairs]
        return self._collective("reduce_scatter_tensor", transfers, outputs, opts)

    def alltoall(self, outputs: list[Tensor], tensors: list[Tensor], opts: AllToAllOptions = _ALL_TO_ALL) -> dist.Work:
        """Send each rank one tensor, and fill others with what each rank sends."""
        return self._collective("all_to_all", [mpi.all_to_all(self.comm, outputs, tensors)], outputs, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        receives: Sequence[int] = (),
        sends: Sequence[int] = (),
        opts: AllToAllOptions = _ALL_TO_ALL,
    ) -> dist.Work:
        """Send each rank its rows of a tensor, and fill another with what each rank sends."""
        transfer = mpi.all_to_all_single(self.comm, output, tensor, receives, sends)
        return self._collective("all_to_all_single", [transfer], [output], opts)

    def barrier(self, opts: BarrierOptions = _BARRIER) -> dist.Work:
        """Wait for all ranks."""
        return self._collective("barrier", [mpi.barrier(self.comm)], [], opts)

    # the names of the same in older versions of torch
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # --- messages ------------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> dist.Work:
        """Begin to send a tensor to one rank."""
        return self._begin("send", [mpi.send(self.comm, tensors[0], peer, tag)], tensors)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> dist.Work:
        """Begin to receive a tensor from one rank."""
        return self._begin("recv", [mpi.receive(self.comm, tensors[0], peer, tag)], tensors)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        """Begin to receive a tensor from whoever sends one."""
        return self._begin("recv", [mpi.receive(self.comm, tensors[0], None, tag)], tensors)

    # --- how they begin ------------------------------------------------------------------------------------

    def _collective(self, name: str, transfers: list[Transfer], results: list[Any], opts: Any) -> dist.Work:
        return self._begin(name, transfers, results, self.attendance.count_collective(), opts.timeout)

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


def _only(lists: list[list[Tensor]]) -> list[Any]:
    return lists[0] if len(lists) == 1 else lists
