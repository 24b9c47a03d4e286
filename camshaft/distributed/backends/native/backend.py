"""torch.distributed: gloo, nccl, and whatever torch registers for other devices."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import Store

from camshaft.distributed.backend import Backend, Group, Work
from camshaft.distributed.backends.native.dtypes import FLOAT8, NOT_MOVED, NOT_REDUCED, as_bytes, reduced_in_another
from camshaft.distributed.backends.native.grouping import (
    can_make_among_members,
    connected,
    end_groups,
    make_among_members,
    register,
)
from camshaft.distributed.backends.native.meeting import Attendance
from camshaft.distributed.backends.native.network import gloo_on
from camshaft.distributed.backends.native.sending import Sending, Watcher
from camshaft.distributed.topology import Topology

_CPU = torch.device("cpu")
_NO_MEMBER = dist.GroupMember.NON_GROUP_MEMBER
_torch_world = dist.distributed_c10d._world  # whose default_pg is dist.group.WORLD, found in half the time
_REDUCTIONS = {
    "SUM": dist.ReduceOp.SUM,
    "PRODUCT": dist.ReduceOp.PRODUCT,
    "MIN": dist.ReduceOp.MIN,
    "MAX": dist.ReduceOp.MAX,
    "AND": dist.ReduceOp.BAND,
    "OR": dist.ReduceOp.BOR,
}
# The first name is the one that newer torch asks for, the second the only one that older torch has.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class NativeBackend(Backend):
    """The default process group of torch.distributed.

    Args:
        topology: where this process stands.
        device: where tensors are moved from and to.
        interface: the network interface that gloo must be told, if it must.
        timeout: how long an operation of a group may take; torch's default if ``None``.
        assumed: the numbers of ``topology`` that nothing tells.
        attendance: which ranks have left the run, where this is known.
    """

    model_name = "native-dist"

    def __init__(
        self,
        topology: Topology,
        device: torch.device,
        interface: str | None = None,
        timeout: timedelta | None = None,
        attendance: Attendance | None = None,
        assumed: tuple[str, ...] = (),
    ) -> None:
        self.name = dist.get_backend()
        self.topology = topology
        self.assumed = assumed
        self.device = device
        self._world = dist.group.WORLD
        register(self._world)
        self._carrier = _CPU if "cpu:" in dist.get_backend_config() else device
        self._not_reduced = NOT_REDUCED - FLOAT8 if "nccl" in dist.get_backend_config() else NOT_REDUCED
        if "nccl" in dist.get_backend_config() and device.type == "cuda":
            self.reductions = tuple(op for op in _REDUCTIONS if op not in ("AND", "OR"))  # nccl has none of bits
        self._interface = interface
        self._timeout = timeout
        self._attendance = attendance
        self._ranks: WeakKeyDictionary[Any, tuple[dict[int, int], tuple[int, ...]]] = WeakKeyDictionary()
        self._watchers: defaultdict[int, Watcher] = defaultdict(Watcher)

    @property
    def carrier(self) -> torch.device:
        """The CPU, also on a machine with GPUs, if the process group works there."""
        return self._carrier

    def messages_at(self, group: Group | None) -> torch.device:
        """The CPU: nccl tells no messages apart, and two ranks that send to each other would wait for ever."""
        if "cpu:" not in dist.get_backend_config(group):
            self.lack("send and recv", "gloo and mpi, also in a group, new_group(ranks, backend='gloo'),")
        return _CPU

    def all_reduce(self, tensor: Tensor, op: str, group: Group | None) -> Tensor:
        """Reduce in place."""
        if tensor.dtype in self._not_reduced:
            return reduced_in_another(tensor, op, lambda other, op: self.all_reduce(other, op, group))
        if op != "SUM" and tensor.is_complex():
            self._check_complex(tensor, op)
            root = 0 if group is None else dist.get_global_rank(group, 0)
            return self.broadcast(self.reduce(tensor, root, op, group), root, group)  # as torch refuses this op here
        dist.all_reduce(tensor, _REDUCTIONS[op], group)
        return tensor

    def all_gather(self, tensor: Tensor, group: Group | None) -> Tensor:
        """Gather into one tensor."""
        sent = as_bytes(tensor) if tensor.dtype in NOT_MOVED else tensor
        out = sent.new_empty((dist.get_world_size(group), *sent.shape))
        _all_gather_single(out.view(-1), sent.view(-1), group)
        return out if sent is tensor else out.view(tensor.dtype).squeeze(-1)

    def all_gather_into(self, out: Tensor, tensor: Tensor, group: Group | None) -> None:
        """Gather into one tensor that is there."""
        if tensor.dtype in NOT_MOVED:
            out, tensor = as_bytes(out), as_bytes(tensor)
        _all_gather_single(out, tensor, group)

    def broadcast(self, tensor: Tensor, src: int, group: Group | None) -> Tensor:
        """Broadcast in place."""
        dist.broadcast(as_bytes(tensor) if tensor.dtype in NOT_MOVED else tensor, src, group)
        return tensor

    def barrier(self, group: Group | None) -> None:
        """Wait for the others; nccl is told the device, so that it need not guess."""
        device_ids = [self.device.index] if self.name == "nccl" and self.device.index is not None else None
        dist.barrier(group, device_ids=device_ids)

    def reduce(self, tensor: Tensor, dst: int, op: str, group: Group | None) -> Tensor:
        """Reduce in place."""
        if tensor.dtype in self._not_reduced:
            return reduced_in_another(tensor, op, lambda other, op: self.reduce(other, dst, op, group))
        if op != "SUM":
            self._check_complex(tensor, op)
        dist.reduce(tensor, dst, _REDUCTIONS[op], group)
        return tensor

    def gather(self, tensor: Tensor, dst: int, group: Group | None) -> Tensor:
        """Gather into the rows of one tensor."""
        sent = as_bytes(tensor) if tensor.dtype in NOT_MOVED else tensor
        if self.topology.rank != dst:
            dist.gather(sent, None, dst, group)
            return tensor
        out = sent.new_empty((dist.get_world_size(group), *sent.shape))
        dist.gather(sent, list(out.unbind()), dst, group)
        return out if sent is tensor else out.view(tensor.dtype).squeeze(-1)

    def scatter(self, tensors: Tensor | None, out: Tensor, src: int, group: Group | None) -> Tensor:
        """Scatter the rows of one tensor."""
        received = as_bytes(out) if out.dtype in NOT_MOVED else out
        rows = None if tensors is None else list((tensors if received is out else as_bytes(tensors)).unbind())
        dist.scatter(received, rows, src, group)
        return out

    def reduce_scatter(self, tensors: Tensor, op: str, group: Group | None) -> Tensor:
        """Reduce and scatter the rows of one tensor."""
        if tensors.dtype in self._not_reduced:
            return reduced_in_another(tensors, op, lambda other, op: self.reduce_scatter(other, op, group))
        if op != "SUM":
            self._check_complex(tensors, op)
        out = torch.empty_like(tensors[0])
        _reduce_scatter_single(out.view(-1), tensors.view(-1), _REDUCTIONS[op], group)
        return out

    def all_to_all(self, tensor: Tensor, sends: list[int], receives: list[int], group: Group | None) -> Tensor:
        """Exchange the parts of one tensor."""
        sent = as_bytes(tensor) if tensor.dtype in NOT_MOVED else tensor
        out = sent.new_empty((sum(receives), *sent.shape[1:]))
        dist.all_to_all_single(out, sent, receives, sends, group)
        return out if sent is tensor else out.view(tensor.dtype).squeeze(-1)

    def send(self, tensor: Tensor, dst: int, tag: int, group: Group | None) -> Work:
        """Begin to send."""
        work = _begun(dist.isend(tensor, dst, group, tag))
        return work if self.name == "mpi" else Sending(work, self._watchers[dst])

    def receive(self, tensor: Tensor, src: int, tag: int, group: Group | None) -> Work:
        """Begin to receive."""
        return _begun(dist.irecv(tensor, src, group, tag))

    def new_group(self, ranks: list[int], **options: Any) -> Group:
        """Make a process group."""
        with gloo_on(self._interface):
            return connected(dist.new_group(ranks, **{"timeout": self._timeout, **options}))

    @property
    def members_make_groups(self) -> bool:
        """True, but for communicators that are parts of the one of all ranks."""
        return can_make_among_members()

    def group_of_members(self, ranks: list[int]) -> Group:
        """Make a process group without the other ranks."""
        with gloo_on(self._interface):
            return make_among_members(ranks, self._timeout)

    def ranks_of(self, group: Any) -> Sequence[int] | None:
        """Return the ranks of a process group that exists; none for what torch returns to ranks outside of it."""
        if isinstance(group, dist.ProcessGroup):
            ranks = _torch_world.pg_group_ranks.get(group)  # a dictionary in the order of the members
            if ranks is None:  # destroyed, or of no run
                return None
            known = self._ranks.get(group)
            if known is None or known[0] is not ranks:
                self._ranks[group] = known = ranks, tuple(ranks)
            return known[1]
        return () if isinstance(group, type(_NO_MEMBER)) and group == _NO_MEMBER else None

    def is_alive(self) -> bool:
        """Whether the process group is still the default one."""
        return _torch_world.default_pg is self._world

    def store(self) -> Store | None:
        """Give the store that the process group was made with."""
        store: Store = dist.distributed_c10d._get_default_store()
        return store

    def left(self, ranks: Sequence[int]) -> dict[int, str]:
        """Look into the store of the run."""
        return {} if self._attendance is None else self._attendance.left(ranks)

    def close(self) -> None:
        """Destroy the process groups; the other ranks learn before that this one has left."""
        if self._attendance is not None:
            self._attendance.leave(sys.exc_info()[1])
        if dist.is_initialized():
            end_groups()

    def wrap_model(self, model: nn.Module, sync_bn: bool, **options: Any) -> nn.Module:
        """Wrap in ``DistributedDataParallel``."""
        if self.topology.world_size == 1 or _is_wrapped(model):
            return model
        if sync_bn:
            _check_synchronizable(model, self.device)
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]  # torch's
        if not any(parameter.requires_grad for parameter in model.parameters()):
            for tensor in (*model.parameters(), *model.buffers()):  # nothing to reduce, so torch does not wrap it
                _take_from_first(tensor.detach())
            return model
        if self.device.type != "cpu":
            if "device_ids" in options:
                raise ValueError(f"device_ids is chosen by auto_model, got {options['device_ids']!r}")
            options["device_ids"] = [self.device.index]
        return nn.parallel.DistributedDataParallel(model, **options)

    def _check_complex(self, tensor: Tensor, op: str) -> None:
        """Refuse what torch would refuse in words of its own, or would not."""
        if tensor.is_complex() and not (op == "PRODUCT" and self.name == "mpi"):
            raise TypeError(f"op {op!r} is not for complex numbers on {self.name}, got a tensor of {tensor.dtype}")


def _take_from_first(tensor: Tensor) -> None:
    """Overwrite a tensor by that of rank 0, whatever its layout; gloo looks at none and writes past an expanded one."""
    whole = tensor.contiguous()
    dist.broadcast(whole, 0)
    if whole.data_ptr() != tensor.data_ptr():
        once = tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())
        tensor[once].copy_(whole[once])


def _check_synchronizable(model: nn.Module, device: torch.device) -> None:
    if device.type == "cpu" and any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in model.modules()):
        raise ValueError("sync_bn must be False on the CPU, got True: torch has synchronized batch norm on GPUs only")


def _is_wrapped(model: nn.Module) -> bool:
    """Tell whether a model, compiled or not, reduces its gradients already; FSDP is imported only by its users."""
    inner = getattr(model, "_orig_mod", model)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharded = () if fsdp is None else (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)
    return isinstance(inner, (nn.parallel.DistributedDataParallel, *sharded))


def _begun(work: Any) -> Work:
    assert work is not None, "this rank is a member of the group"
    begun: Work = work
    return begun
