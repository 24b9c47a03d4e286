"""Collectives over Horovod.

Every operation is named. Horovod numbers those without a name in each process by itself; after ranks came to
:func:`horovod.torch.join` with different numbers of them, the next one would wait for ever. A name is used anew by the
next operation of its kind, which is begun when this one has ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from camshaft.distributed.backend import Backend, Group
from camshaft.distributed.backends.horovod.model import broadcast_model, check_options, with_sync_batch_norm
from camshaft.distributed.backends.horovod.optimizer import distributed_optimizer
from camshaft.distributed.backends.horovod.types import narrowed, rows_of_bytes, widened
from camshaft.distributed.backends.horovod.waiting import wait
from camshaft.distributed.topology import Topology

_NAMES = {"SUM": "Sum", "AVERAGE": "Average", "ADASUM": "Adasum", "MIN": "Min", "MAX": "Max", "PRODUCT": "Product"}
_FOR_COMPLEX = ("SUM", "AVERAGE", "ADASUM")


class HorovodBackend(Backend):
    """All processes that Horovod joined.

    Args:
        hvd: ``horovod.torch``, initialized.
        topology: where this process stands.
        device: where tensors are moved from and to.
        seconds: how long an operation may take.
    """

    name = "horovod"
    model_name = "horovod-dist"
    reductions = tuple(_NAMES)
    has_ended = False
    """Whether a run of this process was ended."""

    def __init__(self, hvd: Any, topology: Topology, device: torch.device, seconds: float) -> None:
        self.topology = topology
        self.device = device
        self._hvd = hvd
        self._seconds = seconds
        self._wrapped = itertools.count()

    def all_reduce(self, tensor: Tensor, op: str, group: Group | None) -> Tensor:
        """Reduce in place, or in a wider dtype and back."""
        self._check_reduction(tensor, op)
        mean_of_integers = op == "AVERAGE" and not (tensor.is_floating_point() or tensor.is_complex())
        kind = "Sum" if mean_of_integers else _NAMES[op]  # Horovod would take them for float64 when it divides
        vector = self._wait(
            self._hvd.allreduce_async_,
            widened(tensor, op),
            op=getattr(self._hvd, kind),
            name=f"camshaft.all_reduce.{op}",
            process_set=self._set(group),
        )
        if mean_of_integers:
            vector = vector.div_(self._size(group), rounding_mode="trunc")
        return narrowed(vector, tensor, op)

    def all_gather(self, tensor: Tensor, group: Group | None) -> Tensor:
        """Gather the bytes."""
        shape = (self._size(group), *tensor.shape)
        if tensor.numel() == 0:
            return tensor.new_empty(shape)
        row = rows_of_bytes(tensor, tensor.nbytes)
        rows = self._wait(self._hvd.allgather_async, row, name="camshaft.all_gather", process_set=self._set(group))
        return _read(rows, tensor, shape)

    def broadcast(self, tensor: Tensor, src: int, group: Group | None) -> Tensor:
        """Broadcast the bytes in place."""
        if tensor.numel() > 0:
            row = rows_of_bytes(tensor, tensor.nbytes)
            name = f"camshaft.broadcast.{src}"
            self._wait(self._hvd.broadcast_async_, row, src, name=name, process_set=self._set(group))
        return tensor

    def barrier(self, group: Group | None) -> None:
        """Reduce a number; Horovod's own barrier cannot be waited for with a limit."""
        self._wait(
            self._hvd.allreduce_async_,
            torch.zeros(1),
            op=self._hvd.Sum,
            name="camshaft.barrier",
            process_set=self._set(group),
        )

    def scatter(self, tensors: Tensor | None, out: Tensor, src: int, group: Group | None) -> Tensor:
        """Send from one rank to all, as an exchange in which the others send nothing."""
        sends = [int(tensors is not None)] * self._size(group)
        receives = [int(rank == src) for rank in self._ranks(group)]
        rows = out.new_empty((0, *out.shape)) if tensors is None else tensors
        return out.copy_(self.all_to_all(rows, sends, receives, group)[0])

    def reduce_scatter(self, tensors: Tensor, op: str, group: Group | None) -> Tensor:
        """Reduce all, and take this rank's row; Horovod's own knows fewer reductions."""
        return self.all_reduce(tensors.clone(), op, group)[self._ranks(group).index(self.topology.rank)]

    def all_to_all(self, tensor: Tensor, sends: list[int], receives: list[int], group: Group | None) -> Tensor:
        """Exchange the bytes."""
        shape = (sum(receives), *tensor.shape[1:])
        width = tensor.shape[1:].numel() * tensor.element_size()
        if width == 0:
            return tensor.new_empty(shape)
        rows, _ = self._wait(
            self._hvd.alltoall_async,
            rows_of_bytes(tensor, width),
            torch.tensor(sends, dtype=torch.int32),
            name="camshaft.all_to_all",
            process_set=self._set(group),
        )
        return _read(rows, tensor, shape)

    def new_group(self, ranks: list[int], **options: Any) -> Group:
        """Make a process set, or find the one that these ranks have: Horovod refuses a second."""
        if options:
            raise TypeError(f"new_group takes no further arguments on backend 'horovod', got {sorted(options)}")
        ranks = sorted(ranks)
        known = self._hvd.mpi_ops._basics._get_process_set_ids_and_ranks()
        for number, members in known.items():
            if members == ranks:
                return _process_set(self._hvd, ranks, number)
        try:
            return self._hvd.add_process_set(ranks)
        except ValueError as error:
            raise RuntimeError(
                "Horovod was initialized without process sets, which groups are made of: let "
                "camshaft.distributed.initialize('horovod') do it, or call hvd.init(process_sets='dynamic')"
            ) from error

    def ranks_of(self, group: Any) -> Sequence[int] | None:
        """Return the ranks of a process set that Horovod was told of."""
        if not isinstance(group, self._hvd.ProcessSet) or group.process_set_id is None:
            return None
        return tuple(group.ranks)

    def is_alive(self) -> bool:
        """Whether Horovod is still initialized, with the same ranks: an elastic run changes them."""
        hvd = self._hvd
        place = self.topology
        return bool(hvd.is_initialized()) and (hvd.rank(), hvd.size()) == (place.rank, place.world_size)

    def close(self) -> None:
        """Shut Horovod down; ranks that still wait for this one get an error."""
        self._hvd.shutdown()
        HorovodBackend.has_ended = True

    def wrap_model(self, model: nn.Module, sync_bn: bool, **options: Any) -> nn.Module:
        """Give all ranks the parameters and buffers of rank 0."""
        check_options(options)
        if self.topology.world_size == 1:
            return model
        if sync_bn:
            model = with_sync_batch_norm(self._hvd, model, self.device)
        broadcast_model(self._hvd, model, f"camshaft.model.{next(self._wrapped)}", self._seconds)
        return model

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, **options: Any) -> torch.optim.Optimizer:
        """Make a ``DistributedOptimizer`` with the state of rank 0."""
        prefix = f"camshaft.optimizer.{next(self._wrapped)}"
        return distributed_optimizer(self._hvd, optimizer, prefix, self._seconds, **options)

    def _wait(self, begin: Any, *args: Any, name: str, **kwargs: Any) -> Any:
        return wait(self._hvd, begin(*args, name=name, **kwargs), name, self._seconds)

    def _set(self, group: Group | None) -> Any:
        return self._hvd.global_process_set if group is None else group

    def _ranks(self, group: Group | None) -> Sequence[int]:
        return range(self.topology.world_size) if group is None else tuple(group.ranks)

    def _size(self, group: Group | None) -> int:
        return self.topology.world_size if group is None else len(group.ranks)

    def _check_reduction(self, tensor: Tensor, op: str) -> None:
        if op == "ADASUM" and not self._hvd.mpi_enabled():
            raise NotImplementedError(
                "backend 'horovod' has no ADASUM over gloo: build Horovod with MPI (HOROVOD_WITH_MPI=1) and start with "
                "mpirun, or take 'AVERAGE'"
            )
        if tensor.is_complex() and op not in _FOR_COMPLEX:
            raise ValueError(f"op must be one of {_FOR_COMPLEX} for complex numbers, got {op!r}")


def _read(rows: Tensor, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    return rows.view(-1).view(like.dtype).view(shape)


def _process_set(hvd: Any, ranks: list[int], number: int) -> Any:
    """Give a process set that exists, which somebody may have made without us."""
    if number == 0:
        return hvd.global_process_set
    found = hvd.ProcessSet(ranks)
    found.process_set_id = number
    return found
