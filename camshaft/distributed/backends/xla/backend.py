"""Collectives over XLA: one process for each device, each of which runs the same programs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from camshaft.distributed.backend import Backend, Group
from camshaft.distributed.backends.xla.loader import moving_loader
from camshaft.distributed.backends.xla.optimizer import stepping_together
from camshaft.distributed.topology import Topology

_REDUCTIONS = {"SUM": "sum", "PRODUCT": "mul", "MIN": "min", "MAX": "max"}
_BITWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"AND": torch.bitwise_and, "OR": torch.bitwise_or}
_OF_TORCH = frozenset(inspect.signature(nn.parallel.DistributedDataParallel).parameters) - {"module"}
_WIDER = {torch.bool: torch.int32, torch.bfloat16: torch.float32}  # what XLA does not reduce on every device


class XlaBackend(Backend):
    """The devices that the runtime of XLA joined, this process at one of them.

    What XLA runs are programs, made of what was asked for until somebody looks at a value. Each collective is a program
    of its own, so that it is the same one on all ranks whatever else they compute; which rank does what is data.

    Args:
        topology: where this process stands.
        device: the XLA device of this process.
        shutdown: called when the run ends.
    """

    name = "xla-tpu"
    model_name = "xla-dist"

    def __init__(self, topology: Topology, device: torch.device, shutdown: Callable[[], None] | None = None) -> None:
        import torch_xla
        import torch_xla.core.xla_model as xla_model

        self.topology = topology
        self.device = device
        self._shutdown = shutdown
        self._xla: Any = torch_xla
        self._model: Any = xla_model

    def all_reduce(self, tensor: Tensor, op: str, group: Group | None) -> Tensor:
        """Reduce in place."""
        if self._size(group) > 1 and tensor.numel():
            _check(tensor, op)
            with self._program():
                reduced = self._reduced(tensor, op, group)
            tensor.copy_(reduced)
        return tensor

    def all_gather(self, tensor: Tensor, group: Group | None) -> Tensor:
        """Gather into one tensor."""
        if self._size(group) == 1 or not tensor.numel():
            return tensor.expand(self._size(group), *tensor.shape).clone()
        with self._program():
            return self._gathered(tensor, group)

    def broadcast(self, tensor: Tensor, src: int, group: Group | None) -> Tensor:
        """Broadcast in place."""
        self._spread([tensor], src, group)
        return tensor

    def barrier(self, group: Group | None) -> None:
        """Wait until a sum over the ranks is there."""
        if self._size(group) > 1:
            self.all_reduce(torch.ones(1, dtype=torch.int32, device=self.device), "SUM", group).cpu()

    def scatter(self, tensors: Tensor | None, out: Tensor, src: int, group: Group | None) -> Tensor:
        """Broadcast all rows, and take this rank's."""
        rows = out.new_zeros((self._size(group), *out.shape)) if tensors is None else tensors.clone()
        self._spread([rows], src, group)
        return out.copy_(self._own(rows, group))

    def reduce_scatter(self, tensors: Tensor, op: str, group: Group | None) -> Tensor:
        """Reduce all rows, and take this rank's."""
        return self._own(self.all_reduce(tensors.clone(), op, group), group)

    def all_to_all(self, tensor: Tensor, sends: list[int], receives: list[int], group: Group | None) -> Tensor:
        """Exchange parts, filled up to the longest on any rank, as XLA knows parts of one length only."""
        size = self._size(group)
        if size == 1:
            return tensor.clone()
        longest = self.all_reduce(self._data([max(*sends, *receives)]), "MAX", group).item()
        rows = tensor.new_zeros((size, int(longest), *tensor.shape[1:]))
        for row, part in zip(rows, torch.split(tensor, sends), strict=True):
            row[: len(part)] = part
        exchanged = self._exchanged(rows, group)
        return torch.cat([row[:length] for row, length in zip(exchanged, receives, strict=True)])

    def new_group(self, ranks: list[int], **options: Any) -> Group:
        """Return a list that holds the list of the ranks."""
        if options:
            raise TypeError(f"new_group knows no options on {self.name!r}, got {sorted(options)}")
        return [ranks]

    def ranks_of(self, group: Any) -> Sequence[int] | None:
        """Return the ranks in ``[ranks]``."""
        if not isinstance(group, list) or len(group) != 1 or not isinstance(group[0], list) or not group[0]:
            return None
        all_ranks = range(self.topology.world_size)
        is_of_ranks = all(type(rank) is int and rank in all_ranks for rank in group[0])
        return sorted(group[0]) if is_of_ranks and len(set(group[0])) == len(group[0]) else None

    def is_alive(self) -> bool:
        """Whether no process group of torch has come up since, which is what the user means then."""
        return dist.distributed_c10d.GroupMember.WORLD is None or dist.get_backend() == "xla"

    def close(self) -> None:
        """Let go of the runtime, which lives as long as the process."""
        if self._shutdown is not None:
            self._shutdown()

    def wrap_model(self, model: nn.Module, sync_bn: bool, **options: Any) -> nn.Module:
        """Give all ranks the parameters and buffers of rank 0; arguments of torch's wrapper have no meaning here."""
        if unknown := sorted(set(options) - _OF_TORCH):
            raise TypeError(f"{unknown} are not known to auto_model, but {sorted(_OF_TORCH)} are")
        if self.topology.world_size == 1:
            return model
        if sync_bn:
            raise ValueError(
                "sync_bn must be False on 'xla-tpu' with a process for each device; backend 'nccl' has it, and so has "
                "initialize('xla-tpu', spmd=True), where batch norm sees the whole batch"
            )
        self._spread([tensor.detach() for tensor in (*model.parameters(), *model.buffers())], 0)
        return model

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, **options: Any) -> torch.optim.Optimizer:
        """Make steps average the gradients."""
        return stepping_together(optimizer)

    def wrap_loader(self, loader: Iterable[Any]) -> Any:
        """Let batches be moved to the device ahead of time."""
        return loader if self.topology.world_size == 1 else moving_loader(loader, self.device)

    @contextmanager
    def _program(self) -> Iterator[None]:
        """Make a program of its own of what follows."""
        with torch.no_grad():
            self._xla.sync()
            yield
            self._xla.sync()

    def _reduced(self, tensor: Tensor, op: str, group: Group | None) -> Tensor:
        if op in _BITWISE:  # XLA has them on few devices
            return functools.reduce(_BITWISE[op], self._gathered(tensor, group).unbind())
        wide = tensor.to(_WIDER.get(tensor.dtype, tensor.dtype))
        reduced: Tensor = self._model.all_reduce(_REDUCTIONS[op], wide, groups=self._parts(group))
        return reduced

    def _gathered(self, tensor: Tensor, group: Group | None) -> Tensor:
        size, flat, parts = self._size(group), tensor.reshape(-1), self._parts(group)
        if parts is None or len(set(map(len, parts))) == 1:
            rows = self._model.all_gather(flat, groups=parts, pin_layout=False)  # a vector has one layout only
        else:
            mine = self._data([place == self._place(group) for place in range(size)])
            rows = self._reduced(_only(mine.view(-1, 1), flat), "SUM", group).to(tensor.dtype)
        gathered: Tensor = rows.view(size, *tensor.shape)
        return gathered

    def _exchanged(self, rows: Tensor, group: Group | None) -> Tensor:
        if group is not None or not rows.numel():
            return self._own(self.all_gather(rows, group).transpose(0, 1), group)
        with self._program():
            exchanged: Tensor = self._model.all_to_all(rows.flatten(1), 0, 0, len(rows))
        return exchanged.view(rows.shape)

    def _spread(self, tensors: list[Tensor], src: int, group: Group | None = None) -> None:
        """Overwrite tensors by those of one rank."""
        tensors = [tensor for tensor in tensors if tensor.numel()]
        if self._size(group) == 1 or not tensors:
            return
        with self._program():
            here = self._data([self.topology.rank == src])
            sent = [self._reduced(_only(here, tensor.reshape(-1)), "SUM", group) for tensor in tensors]
        for tensor, one in zip(tensors, sent, strict=True):
            tensor.copy_(one.view(tensor.shape))

    def _own(self, rows: Tensor, group: Group | None) -> Tensor:
        return rows.index_select(0, self._data([self._place(group)])).squeeze(0)

    def _data(self, values: list[Any]) -> Tensor:
        """Bring numbers to the device as data, so that the program is the same one whatever they are."""
        return torch.tensor(values).to(self.device)

    def _size(self, group: Group | None) -> int:
        return self.topology.world_size if group is None else len(group[0])

    def _place(self, group: Group | None) -> int:
        return self.topology.rank if group is None else sorted(group[0]).index(self.topology.rank)

    def _parts(self, group: Group | None) -> list[list[int]] | None:
        """Partition all ranks, as XLA demands, into the group and parts of the same size, or of one rank each."""
        if group is None:
            return None
        ranks = sorted(group[0])
        others = [rank for rank in range(self.topology.world_size) if rank not in ranks]
        step = 1 if len(others) % len(ranks) else len(ranks)
        return [ranks, *(others[start : start + step] for start in range(0, len(others), step))]


def _check(tensor: Tensor, op: str) -> None:
    """Refuse what XLA would stumble over when the program runs, and then in each later one too."""
    if op in _BITWISE and (tensor.is_floating_point() or tensor.is_complex()):
        raise TypeError(f"op {op!r} is for whole numbers and bools, got a tensor of {tensor.dtype}")


def _only(mask: Tensor, values: Tensor) -> Tensor:
    """Give the values where the mask says so, and zeros elsewhere, whatever is there."""
    values = values.to(_WIDER.get(values.dtype, values.dtype))
    return torch.where(mask, values, torch.zeros_like(values))
