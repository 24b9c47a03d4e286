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
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from camshaft.arguments import check_known
from camshaft.distributed.backends.contract import Backend, Group, check_no_closure
from camshaft.distributed.failures.trace import Calls
from camshaft.distributed.topology import Launch, Topology

OPTIONS = {"spmd"}
_REDUCTIONS = {"SUM": "sum", "PRODUCT": "mul", "MIN": "min", "MAX": "max"}
_BITWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"AND": torch.bitwise_and, "OR": torch.bitwise_or}
_REDUCED_AS = {torch.bool: torch.int32, torch.bfloat16: torch.float32}  # what XLA does not reduce on every device
logger = logging.getLogger("camshaft.distributed.utils")


def _xla() -> Any:
    """Return ``torch_xla`` with the parts of it that are used here."""
    import torch_xla
    import torch_xla.core.xla_model
    import torch_xla.distributed.parallel_loader
    import torch_xla.distributed.spmd
    import torch_xla.runtime

    return torch_xla


class XlaBackend(Backend):
    """The devices that the runtime of XLA joined, one of them for this process.

    XLA runs programs, which record operations until a value is read. Each collective is a program of its own, so
    that all ranks run the same one whatever else they compute; which rank does what is data.

    Args:
        topology: the place of this process in the job.
        device: the XLA device of this process.
    """

    name = "xla-tpu"
    model_name = "xla-dist"
    instead_of_sync_bn = (
        " with a process for each device; backend 'nccl' supports it, and so does "
        "initialize('xla-tpu', spmd=True), where batch norm uses the whole batch"
    )
    adds_calls = True
    has_ended = False
    """Whether the run of this process has ended; the runtime lives on, and must not be adopted then."""

    def __init__(self, topology: Topology, device: torch.device) -> None:
        self.topology = topology
        self.device = device
        self._xla = _xla()
        self._model = self._xla.core.xla_model
        self.calls = Calls()

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

    def all_to_all(self, tensor: Tensor, sends: list[int], receives: list[int], group: Group | None) -> Tensor:
        """Exchange parts, padded to the longest on any rank, as XLA supports only parts of one length."""
        size = len(self.members(group))
        if size == 1:
            return tensor.clone()
        longest = self.all_reduce(self._data([max(*sends, *receives)]), "MAX", group).item()
        rows = tensor.new_zeros((size, int(longest), *tensor.shape[1:]))
        for row, part in zip(rows, torch.split(tensor, sends), strict=True):
            row[: len(part)] = part
        exchanged = self.own_row(self.all_gather(rows, group).transpose(0, 1), group)
        return torch.cat([row[:length] for row, length in zip(exchanged, receives, strict=True)])

    def new_group(self, ranks: list[int], **options: Any) -> Group:
        """Return a list that holds the list of the ranks."""
        check_known(options, (), "new_group on backend 'xla-tpu'")
        return [ranks]

    def ranks_of(self, group: Any) -> Sequence[int] | None:
        """Return the ranks in ``[ranks]``."""
        if not isinstance(group, list) or len(group) != 1 or not isinstance(group[0], list) or not group[0]:
            return None
        all_ranks = range(self.topology.world_size)
        is_of_ranks = all(type(rank) is int and rank in all_ranks for rank in group[0])
        return sorted(group[0]) if is_of_ranks and len(set(group[0])) == len(group[0]) else None

    def is_alive(self) -> bool:
        """Return True unless a process group of torch was created since, which then takes precedence."""
        return dist.distributed_c10d.GroupMember.WORLD is None or dist.get_backend() == "xla"

    def close(self) -> None:
        """End the run; the runtime lives as long as the process."""
        XlaBackend.has_ended = True

    def broadcast_model(self, model: nn.Module) -> None:
        """Broadcast the parameters and buffers in one program."""
        self._spread([tensor.detach() for tensor in (*model.parameters(), *model.buffers())], 0)

    def wrap_optimizer(self, optimizer: Optimizer, **options: Any) -> Optimizer:
        """Average the gradients in each step."""
        return distributed_optimizer(optimizer)

    def wrap_loader(self, loader: Iterable[Any]) -> Any:
        """Move batches to the device ahead of time."""
        return loader if self.topology.world_size == 1 else device_loader(loader, self.device)

    @contextmanager
    def _program(self) -> Iterator[None]:
        """Run the block as one program."""
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
        flat = tensor.reshape(-1)
        if group is None:
            rows = self._model.all_gather(flat, pin_layout=False)  # a vector has one layout only
        else:  # XLA gathers in groups of one size only
            mine = self._data([member == self.topology.rank for member in self.members(group)])
            rows = self._reduced(_only(mine.view(-1, 1), flat), "SUM", group).to(tensor.dtype)
        gathered: Tensor = rows.view(-1, *tensor.shape)
        return gathered

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

    def own_row(self, tensors: Tensor, group: Group | None) -> Tensor:
        """Select the row by its number as data."""
        return tensors.index_select(0, self._data([self.members(group).index(self.topology.rank)])).squeeze(0)

    def _data(self, values: list[Any]) -> Tensor:
        """Move numbers to the device as data, so that the program is the same whatever they are."""
        return torch.tensor(values).to(self.device)

    def _parts(self, group: Group | None) -> list[list[int]] | None:
        """Partition all ranks, as XLA requires, into the group and every other rank by itself."""
        if group is None:
            return None
        ranks = sorted(group[0])
        return [ranks, *([rank] for rank in range(self.topology.world_size) if rank not in ranks)]


def _only(mask: Tensor, values: Tensor) -> Tensor:
    """Return the values where the mask is true, and zeros elsewhere."""
    values = values.to(_REDUCED_AS.get(values.dtype, values.dtype))
    return torch.where(mask, values, torch.zeros_like(values))


class XlaSpmdBackend(XlaBackend):
    """One process, whose device stands for all devices of a mesh with the axis ``"data"``."""

    def __init__(self) -> None:
        super().__init__(Topology(), _xla().device())
        self.mesh: Any = _xla().distributed.spmd.get_1d_mesh("data")

    def wrap_model(self, model: nn.Module, sync_bn: bool, **options: Any) -> nn.Module:
        """Replicate the parameters and buffers on all devices; batch norm uses the whole batch anyway."""
        for tensor in (*model.parameters(), *model.buffers()):
            self._xla.distributed.spmd.mark_sharding(tensor, self.mesh, (None,) * tensor.dim())
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
        if tensor.dim() == 0 or len(tensor) % self._mesh.size():
            return None
        axes = ("data", *(None,) * (tensor.dim() - 1))
        return _xla().distributed.spmd.ShardingSpec(self._mesh, axes).xla_spec(tensor)


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
        TypeError: an option is unknown.
        RuntimeError: the runtime was started in another way, or does not know the processes of the launcher.
    """
    check_known(options, OPTIONS, f"backend {name!r}")
    runtime, was_running = _xla().runtime, _is_running()
    if spmd or runtime.is_spmd():
        backend: XlaBackend = _start_spmd(runtime)
    else:
        if launch is not None and launch.topology.world_size > 1 and not was_running:
            from torch_xla._internal import pjrt

            pjrt.initialize_multiprocess(launch.topology.local_rank, launch.topology.local_world_size)
        backend = _of_this_process(runtime)
    if launch is not None and backend.topology.world_size == 1 < launch.topology.world_size:
        raise RuntimeError(
            f"{launch.launcher} started {launch.topology.world_size} processes, which XLA does not connect on devices "
            f"of type {runtime.device_type()!r}: use backend 'gloo' on CPUs, or a single process with spmd=True"
        )
    if not was_running:
        _xla().core.xla_model.set_rng_state(torch.initial_seed())  # as torch was seeded before the device existed
    backend.barrier(None)
    XlaBackend.has_ended = False
    return backend


def adopt(infer: object) -> XlaBackend | None:
    """Adopt the runtime of XLA if it runs, without any communication; an imported library alone does not count."""
    if XlaBackend.has_ended or not _is_running():
        return None
    runtime = _xla().runtime
    return XlaSpmdBackend() if runtime.is_spmd() else _of_this_process(runtime)


def _is_running() -> bool:
    library: Any = getattr(sys.modules["torch_xla"], "_XLAC", None)  # None while it is being imported
    return library is not None and library._xla_runtime_is_initialized()


def _start_spmd(runtime: Any) -> XlaSpmdBackend:
    if not runtime.is_spmd():
        if _is_running():
            raise RuntimeError(
                "spmd=True must be set before the runtime of XLA starts, and it is running already: initialize before "
                "the first tensor is created on an XLA device"
            )
        runtime.use_spmd()
    if runtime.process_count() > 1:
        raise RuntimeError(f"spmd=True requires a single process, got {runtime.process_count()} processes")
    backend = XlaSpmdBackend()
    logger.info("SPMD over %d %s devices", runtime.global_runtime_device_count(), runtime.device_type())
    return backend


def _of_this_process(runtime: Any) -> XlaBackend:
    topology = topology_of(runtime)
    if topology.world_size > 1 and runtime.addressable_device_count() > 1:
        raise RuntimeError(
            f"XLA needs one process per device, and this process has {runtime.addressable_device_count()} devices: use "
            "initialize('xla-tpu', spmd=True)"
        )
    return XlaBackend(topology, _xla().device())


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


# --- loaders and optimizers ------------------------------------------------------------------------------------


def device_loader(loader: Iterable[Any], device: Any, **options: Any) -> Any:
    """Move the batches of a loader to the device while the one before is computed with.

    Args:
        loader: a loader of batches on the CPU; its ``dataset``, ``sampler`` and ``batch_sampler`` are kept.
        device: where the batches go.
        options: for ``torch_xla.distributed.parallel_loader.ParallelLoader``.
    """
    parallel_loader: Any = _xla().distributed.parallel_loader

    class Mover(parallel_loader.ParallelLoader):  # type: ignore[misc]  # torch_xla has no types
        """Keeps the types of tuples."""

        def send_cpu_data_to_device(self, batches: list[Any], device: Any) -> Any:
            leaves, structure = tree_flatten(batches)
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            moved = iter(_xla().core.xla_model.send_cpu_data_to_device(tensors, device, self._input_sharding))
            return tree_unflatten([next(moved) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)

    class MovingLoader(parallel_loader.MpDeviceLoader):  # type: ignore[misc]  # torch_xla has no types
        """Raises what the loader raises, and ends its threads when the iteration stops early."""

        def __iter__(self) -> Iterator[Any]:
            mover = Mover(_guarded(self._loader), [self._device], **self._parallel_loader_kwargs)
            try:
                for batch in mover.per_device_loader(self._device):
                    if isinstance(batch, Exception):
                        raise batch
                    yield batch
            finally:
                mover.close()

    made = MovingLoader(loader, device, **options)
    for name in ("dataset", "sampler", "batch_sampler", "is_skipped_forward"):
        if hasattr(loader, name):
            setattr(made, name, getattr(loader, name))
    return made


def _guarded(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield an error of a loader as its last batch: in the thread that reads it, one would only end the epoch."""
    try:
        yield from loader
    except Exception as error:
        yield error


def distributed_optimizer(optimizer: Optimizer) -> Optimizer:
    """Make an object of the optimizer's class whose steps average the gradients of all devices, and start at once.

    Everything else is shared: reading or changing one of the two reads or changes both.

    Args:
        optimizer: becomes the attribute ``wrapped_optimizer`` of the new one.
    """
    if hasattr(optimizer, "wrapped_optimizer"):
        return optimizer
    kind = type(optimizer)
    wrapping = type(kind.__name__, (_Distributed, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    made: Optimizer = object.__new__(wrapping)
    vars(made)["wrapped_optimizer"] = optimizer
    return made


class _Distributed:
    """A base that precedes the class of the optimizer. Its objects have no state besides the optimizer they wrap."""

    wrapped_optimizer: Optimizer

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients over all devices, step, and start the device."""
        check_no_closure(closure, "xla-tpu", _xla().runtime.world_size())
        if not vars(self).get("skips"):
            self.synchronize()
        loss = self.wrapped_optimizer.step(closure)
        _xla().sync()
        return loss

    def synchronize(self) -> None:
        """Average the gradients over all devices, for example to clip them; doing so twice does no harm."""
        _xla().core.xla_model.reduce_gradients(self.wrapped_optimizer)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Step with the gradients as they are in this block."""
        vars(self)["skips"] = True
        try:
            yield
        finally:
            del vars(self)["skips"]

    def reduce_as_gradients(self, tensor: Tensor) -> Tensor:
        """Return the mean of a tensor over all devices."""
        xla = _xla()
        mean: Tensor = xla.core.xla_model.all_reduce("sum", tensor, scale=1 / xla.runtime.world_size())
        return mean

    def __getattr__(self, name: str) -> Any:
        if name == "wrapped_optimizer":  # before it is there
            raise AttributeError(name)
        return getattr(self.wrapped_optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # schedulers replace this method by one that counts; the wrapped optimizer keeps its own
        if name == "step":
            vars(self)[name] = value
        else:
            setattr(self.wrapped_optimizer, name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.wrapped_optimizer.__setstate__(state)

    def __reduce__(self) -> Any:
        return distributed_optimizer, (self.wrapped_optimizer,)
