"""XLA: one process for each device, or one process for all of them (SPMD)."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from camshaft.distributed.backend import Backend, Group, check_ddp_options
from camshaft.distributed.backends.xla_wrappers import device_loader, distributed_optimizer
from camshaft.distributed.topology import Launch, Topology

_REDUCTIONS = {"SUM": "sum", "PRODUCT": "mul", "MIN": "min", "MAX": "max"}
_BITWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"AND": torch.bitwise_and, "OR": torch.bitwise_or}
_REDUCED_AS = {torch.bool: torch.int32, torch.bfloat16: torch.float32}  # what XLA does not reduce on every device
logger = logging.getLogger("camshaft.distributed.utils")


class XlaBackend(Backend):
    """The devices that the runtime of XLA joined, one of them for this process.

    XLA runs programs, which record operations until a value is read. Each collective is a program of its own, so
    that all ranks run the same one whatever else they compute; which rank does what is data.

    Args:
        topology: where this process stands.
        device: the XLA device of this process.
    """

    name = "xla-tpu"
    model_name = "xla-dist"
    has_ended = False
    """Whether the run of this process has ended; the runtime lives on, and must not be adopted then."""

    def __init__(self, topology: Topology, device: torch.device) -> None:
        import torch_xla
        import torch_xla.core.xla_model as xla_model

        self.topology = topology
        self.device = device
        self._xla: Any = torch_xla
        self._model: Any = xla_model

    def all_reduce(self, tensor: Tensor, op: str, group: Group | None) -> Tensor:
        """Reduce in place."""
        if len(self.members(group)) > 1 and tensor.numel():
            with self._program():
                reduced = self._reduced(tensor, op, group)
            tensor.copy_(reduced)
        return tensor

    def all_gather(self, tensor: Tensor, group: Group | None) -> Tensor:
        """Gather into one tensor."""
        if len(self.members(group)) == 1 or not tensor.numel():
            return tensor.expand(len(self.members(group)), *tensor.shape).clone()
        with self._program():
            return self._gathered(tensor, group)

    def broadcast(self, tensor: Tensor, src: int, group: Group | None) -> Tensor:
        """Broadcast in place."""
        self._spread([tensor], src, group)
        return tensor

    def barrier(self, group: Group | None) -> None:
        """Wait until a sum over the ranks is there."""
        if len(self.members(group)) > 1:
            self.all_reduce(torch.ones(1, dtype=torch.int32, device=self.device), "SUM", group).cpu()

    def scatter(self, tensors: Tensor | None, out: Tensor, src: int, group: Group | None) -> Tensor:
        """Broadcast all rows, and take this rank's."""
        rows = out.new_zeros((len(self.members(group)), *out.shape)) if tensors is None else tensors.clone()
        self._spread([rows], src, group)
        return out.copy_(self._own(rows, group))

    def reduce_scatter(self, tensors: Tensor, op: str, group: Group | None) -> Tensor:
        """Reduce all rows, and take this rank's."""
        return self._own(self.all_reduce(tensors.clone(), op, group), group)

    def all_to_all(self, tensor: Tensor, sends: list[int], receives: list[int], group: Group | None) -> Tensor:
        """Exchange parts, padded to the longest on any rank, as XLA supports only parts of one length."""
        size = len(self.members(group))
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
        """Whether no process group of torch has been made since, which the user means then."""
        return dist.distributed_c10d.GroupMember.WORLD is None or dist.get_backend() == "xla"

    def close(self) -> None:
        """End the run; the runtime lives as long as the process."""
        XlaBackend.has_ended = True

    def wrap_model(self, model: nn.Module, sync_bn: bool, **options: Any) -> nn.Module:
        """Broadcast the parameters and buffers of rank 0; arguments of torch's wrapper have no meaning here."""
        check_ddp_options(options)
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
        """Average the gradients in each step."""
        return distributed_optimizer(optimizer)

    def wrap_loader(self, loader: Iterable[Any]) -> Any:
        """Move batches to the device ahead of time."""
        return loader if self.topology.world_size == 1 else device_loader(loader, self.device)

    @contextmanager
    def _program(self) -> Iterator[None]:
        """Make one program of the block."""
        with torch.no_grad():
            self._xla.sync()
            yield
            self._xla.sync()

    def _reduced(self, tensor: Tensor, op: str, group: Group | None) -> Tensor:
        if op in _BITWISE:  # XLA has them on few devices
            return functools.reduce(_BITWISE[op], self._gathered(tensor, group).unbind())
        wide = tensor.to(_REDUCED_AS.get(tensor.dtype, tensor.dtype))
        reduced: Tensor = self._model.all_reduce(_REDUCTIONS[op], wide, groups=self._parts(group))
        return reduced

    def _gathered(self, tensor: Tensor, group: Group | None) -> Tensor:
        size, flat, parts = len(self.members(group)), tensor.reshape(-1), self._parts(group)
        if parts is None or len(set(map(len, parts))) == 1:
            rows = self._model.all_gather(flat, groups=parts, pin_layout=False)  # a vector has one layout only
        else:
            mine = self._data([place == self.members(group).index(self.topology.rank) for place in range(size)])
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
        if len(self.members(group)) == 1 or not tensors:
            return
        with self._program():
            here = self._data([self.topology.rank == src])
            sent = [self._reduced(_only(here, tensor.reshape(-1)), "SUM", group) for tensor in tensors]
        for tensor, one in zip(tensors, sent, strict=True):
            tensor.copy_(one.view(tensor.shape))

    def _own(self, rows: Tensor, group: Group | None) -> Tensor:
        return rows.index_select(0, self._data([self.members(group).index(self.topology.rank)])).squeeze(0)

    def _data(self, values: list[Any]) -> Tensor:
        """Move numbers to the device as data, so that the program is the same whatever they are."""
        return torch.tensor(values).to(self.device)

    def _parts(self, group: Group | None) -> list[list[int]] | None:
        """Partition all ranks, as XLA requires, into the group and parts of the same size, or of one rank each."""
        if group is None:
            return None
        ranks = sorted(group[0])
        others = [rank for rank in range(self.topology.world_size) if rank not in ranks]
        step = 1 if len(others) % len(ranks) else len(ranks)
        return [ranks, *(others[start : start + step] for start in range(0, len(others), step))]


def _only(mask: Tensor, values: Tensor) -> Tensor:
    """Return the values where the mask is true, and zeros elsewhere."""
    values = values.to(_REDUCED_AS.get(values.dtype, values.dtype))
    return torch.where(mask, values, torch.zeros_like(values))


class XlaSpmdBackend(XlaBackend):
    """One process, whose device stands for all devices of a mesh with the axis ``"data"``."""

    def __init__(self) -> None:
        import torch_xla
        import torch_xla.distributed.spmd as spmd

        super().__init__(Topology(), torch_xla.device())
        self.mesh: Any = spmd.get_1d_mesh("data")

    def wrap_model(self, model: nn.Module, sync_bn: bool, **options: Any) -> nn.Module:
        """Replicate the parameters and buffers on all devices; batch norm sees the whole batch anyway."""
        from torch_xla.distributed.spmd import mark_sharding

        for tensor in (*model.parameters(), *model.buffers()):
            mark_sharding(tensor, self.mesh, (None,) * tensor.dim())
        return model

    def wrap_loader(self, loader: Iterable[Any]) -> Any:
        """Shard each batch over the devices."""
        return device_loader(loader, self.device, input_sharding=BatchSharding(self.mesh))


class BatchSharding:
    """Shards the tensors of a batch over the devices of a mesh, along the first dimension where possible.

    A batch that cannot be divided evenly, such as the last one, is replicated, and all devices compute the same.

    Args:
        mesh: with the one axis ``"data"``.

    Attributes:
        minibatch: whether each process has only a part of the batch.
    """

    minibatch = False

    def __init__(self, mesh: Any) -> None:
        self._mesh = mesh

    def xla_spec(self, tensor: Tensor) -> Any:
        """Return the sharding of one tensor, ``None`` to replicate it; called by the loader of torch_xla."""
        from torch_xla.distributed.spmd import ShardingSpec

        if tensor.dim() == 0 or len(tensor) % self._mesh.size():
            return None
        axes = ("data", *(None,) * (tensor.dim() - 1))
        return ShardingSpec(self._mesh, axes).xla_spec(tensor)


# --- starting a run, and adopting one --------------------------------------------------------------------------


def create(
    name: str, launch: Launch | None, local_rank: int | None = None, spmd: bool = False, **options: Any
) -> XlaBackend:
    """Start a run on XLA; all processes call this.

    Args:
        name: ``"xla-tpu"``.
        launch: how this process was started, ``None`` if no launcher started it.
        local_rank: ignored, as the runtime knows it.
        spmd: one process for all devices of this machine, instead of one for each.
        options: none.

    Raises:
        TypeError: an option is not known.
        RuntimeError: the runtime was started in another way, or does not know the processes of the launcher.
    """
    if options:
        raise TypeError(f"initialize knows only spmd for {name!r}, got {sorted(options)}")
    import torch_xla.core.xla_model as xla_model
    import torch_xla.runtime as runtime

    was_running = _is_running()
    if spmd or runtime.is_spmd():
        backend: XlaBackend = _start_spmd(runtime)
    else:
        if launch is not None and launch.topology.world_size > 1 and not was_running:
            from torch_xla._internal import pjrt

            pjrt.initialize_multiprocess(launch.topology.local_rank, launch.topology.local_world_size)
        backend = _of_this_process(runtime)
    if launch is not None and backend.topology.world_size == 1 < launch.topology.world_size:
        raise RuntimeError(
            f"{launch.launcher} started {launch.topology.world_size} processes, which XLA does not join on devices of "
            f"type {runtime.device_type()!r}: take backend 'gloo' on CPUs, or start one process, which spmd=True lets "
            "use several devices"
        )
    if not was_running:
        xla_model.set_rng_state(torch.initial_seed())  # as torch was seeded before the device existed
    backend.barrier(None)
    XlaBackend.has_ended = False
    return backend


def adopt(infer: object) -> XlaBackend | None:
    """Adopt the runtime of XLA if it runs, without any communication; that its library is imported means nothing."""
    if XlaBackend.has_ended or not _is_running():
        return None
    import torch_xla.runtime as runtime

    return XlaSpmdBackend() if runtime.is_spmd() else _of_this_process(runtime)


def _is_running() -> bool:
    library: Any = getattr(sys.modules["torch_xla"], "_XLAC", None)  # None while it is being imported
    return library is not None and library._xla_runtime_is_initialized()


def _start_spmd(runtime: Any) -> XlaSpmdBackend:
    if not runtime.is_spmd():
        if _is_running():
            raise RuntimeError(
                "spmd=True comes too late, as the runtime of XLA runs already: initialize before the first tensor is "
                "put on an XLA device"
            )
        runtime.use_spmd()
    if runtime.process_count() > 1:
        raise RuntimeError(f"spmd=True is for a single process, got one of {runtime.process_count()}")
    backend = XlaSpmdBackend()
    logger.info("SPMD over %d %s devices", runtime.global_runtime_device_count(), runtime.device_type())
    return backend


def _of_this_process(runtime: Any) -> XlaBackend:
    import torch_xla

    topology = topology_of(runtime)
    if topology.world_size > 1 and runtime.addressable_device_count() > 1:
        raise RuntimeError(
            f"a process for each device is needed, and this one has {runtime.addressable_device_count()}: use "
            "initialize('xla-tpu', spmd=True)"
        )
    return XlaBackend(topology, torch_xla.device())


def topology_of(runtime: Any) -> Topology:
    """Return the topology that the runtime reports."""
    if runtime.world_size() == 1:
        return Topology()
    local_size = runtime.local_device_count()
    return Topology(
        rank=runtime.global_ordinal(),
        world_size=runtime.world_size(),
        local_rank=runtime.local_ordinal(),
        local_world_size=local_size,
        node_rank=runtime.host_index(),
        num_nodes=runtime.world_size() // local_size,
    )
