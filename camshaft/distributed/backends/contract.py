"""The interface between collectives and the library that moves the data."""

from __future__ import annotations

import inspect
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NoReturn, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import Store

from camshaft.arguments import check_known
from camshaft.distributed.topology import Topology


class Work(Protocol):
    """A transfer under way."""

    def wait(self) -> Any:
        """Wait until it has completed."""

    def is_completed(self) -> bool:
        """Return True if it has completed."""


Group: TypeAlias = Any
"""A group as the backend represents it, which users also hold: a torch process group, a Horovod process set, a list."""


def accelerator() -> torch.device | None:
    """Return the kind of accelerator that this process can use, without an index, or ``None``."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def check_ddp_options(options: Iterable[str]) -> None:
    """Reject arguments unknown to ``DistributedDataParallel``, on backends that ignore the known ones."""
    known = {*inspect.signature(nn.parallel.DistributedDataParallel).parameters} - {"module"}
    check_known(options, known, "auto_model")


def check_no_closure(closure: object, backend: str, world_size: int) -> None:
    """Refuse a closure of an optimizer, whose gradients a backend does not reduce.

    Raises:
        NotImplementedError: there is one, and there are other ranks.
    """
    if closure is not None and world_size > 1:
        raise NotImplementedError(
            f"backend {backend!r} does not support step(closure): use gloo, nccl (on GPUs) or mpi"
        )


@contextmanager
def variable_set(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for the block: some libraries read an option from nowhere else."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class Resource:
    """What a process keeps for a job and releases with it."""

    def finish(self) -> None:
        """Wait for what is in progress, at the end of a job that did not fail."""

    def close(self) -> None:
        """Release the resource without waiting for other ranks."""


R = TypeVar("R", bound=Resource)


class Job:
    """The state that this process keeps for one job, whatever its backend.

    Attributes:
        groups: the groups created from lists of ranks.
        mesh: the mesh of the job, if the user has created one.
        compares_collectives: whether the debug mode is on.
        number: of the job in this process, for keys in a store that may outlive it; 0 until the job has started.
        resources: what this process keeps for the job, by kind; see :meth:`resource` and :meth:`find`.
        process: id of the process that has joined the job; those that it forks have not. ``None`` where a forked
            process was the first to ask.
        verdict: returns the error that every collective raises, once a rank has failed or the ranks have diverged.
    """

    def __init__(self) -> None:
        self.number = 0
        self.groups: dict[tuple[int, ...], Group] = {}
        self.mesh: Any = None
        self.compares_collectives = False
        self.verdict: Callable[[], RuntimeError] | None = None
        self._names: Counter[str] = Counter()
        self.resources: dict[type[Resource], Any] = {}
        self.process: int | None = os.getpid()

    @property
    def is_ours(self) -> bool:
        """Whether this process is a rank of the job."""
        return self.process == os.getpid()

    def unique_name(self, name: str) -> str:
        """Return a prefix for keys in the store; the n-th call with a name returns the same one on all ranks."""
        self._names[name] += 1
        return f"camshaft/{self.number}/{name}/{self._names[name]}"

    def resource(self, kind: type[R], *args: Any) -> R:
        """Return the job's only resource of a kind, created from the arguments on first use."""
        if kind not in self.resources:
            self.resources.setdefault(kind, kind(*args))  # another thread may have been faster
        found: R = self.resources[kind]
        return found

    def find(self, kind: type[R]) -> R | None:
        """Return the resource of a kind, if there is one; there is none in a forked process, which is not a rank."""
        return self.resources.get(kind) if self.is_ours else None

    def finish(self) -> None:
        """Wait for what is in progress."""
        for resource in tuple(self.resources.values()):
            resource.finish()

    def close(self) -> None:
        """Release all resources; in a forked child, which is not a rank, only forget them."""
        resources, self.resources, self.compares_collectives = self.resources, {}, False
        self.mesh = None
        if self.is_ours:
            for resource in resources.values():
                resource.close()


class Backend(ABC):
    """Moves tensors between ranks. Implementations translate; they do not decide.

    A ``group`` is ``None`` for all ranks, or a group that :meth:`ranks_of` recognizes, with this rank as a member. Rank
    arguments are global ranks. Tensors are dense, contiguous and on :attr:`device`.

    Attributes:
        name: what ``initialize`` calls it; ``None`` for the single process.
        model_name: the kind of run, as ``model_name()`` returns it.
        topology: the place of this process in the job.
        device: where tensors are moved from and to.
        reductions: names of the reductions that it supports.
        has_meshes: whether it supports device meshes.
        instead_of_sync_bn: what the error for synchronized batch norm recommends, if the backend lacks it.
        assumed: the numbers of :attr:`topology` that are guesses. Ranks may guess differently, so a query for one of
            them raises.
        errors: what its library raises where the cause may be the failure of another rank, other than torch's errors.
        calls: the last collectives, a ``Calls`` of ``failures.trace``, where torch does not record them.
        adds_calls: whether ``camshaft.distributed`` adds its collectives there, as nobody else does.
    """

    name: str | None
    model_name: str
    topology: Topology
    device: torch.device
    assumed: tuple[str, ...] = ()
    reductions: tuple[str, ...] = ("SUM", "PRODUCT", "MIN", "MAX", "AND", "OR")
    has_meshes: bool = False
    errors: tuple[type[BaseException], ...] = ()
    calls: Any = None
    adds_calls: bool = False
    instead_of_sync_bn: str = "; backend 'nccl' synchronizes batch norm"

    @cached_property
    def job(self) -> Job:
        """The state of the job that this backend carries; backends leave it alone."""
        return Job()

    @cached_property
    def carrier(self) -> torch.device:
        """The device for numbers and bytes: the CPU, if the backend also moves tensors from there."""
        return self.device

    def messages_at(self, group: Group | None) -> torch.device:
        """Return the device for what one rank sends to another."""
        return self.carrier

    def bring(self, tensor: Tensor) -> Tensor:
        """Return a tensor on a device that the backend works on."""
        return tensor.to(self.device)

    # --- tensors -------------------------------------------------------------------------------------------

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: str, group: Group | None) -> Tensor:
        """Reduce over the ranks, in place, and return the tensor."""

    @abstractmethod
    def all_gather(self, tensor: Tensor, group: Group | None) -> Tensor:
        """Return the tensors of the ranks, of shape ``(ranks, *shape)``."""

    def all_gather_into(self, out: Tensor, tensor: Tensor, group: Group | None) -> None:
        """Fill a tensor with those of the ranks, of at least one dimension, concatenated along the first."""
        out.copy_(self.all_gather(tensor, group).view(out.shape))

    @abstractmethod
    def broadcast(self, tensor: Tensor, src: int, group: Group | None) -> Tensor:
        """Overwrite the tensor on every rank by that of one, and return it."""

    @abstractmethod
    def barrier(self, group: Group | None) -> None:
        """Wait for all ranks."""

    def reduce(self, tensor: Tensor, dst: int, op: str, group: Group | None) -> Tensor:
        """Reduce over the ranks, possibly in place; only the result on rank ``dst`` is defined."""
        return self.all_reduce(tensor, op, group)

    def gather(self, tensor: Tensor, dst: int, group: Group | None) -> Tensor:
        """Return the tensors of the ranks, stacked; only the result on rank ``dst`` is defined."""
        return self.all_gather(tensor, group)

    def scatter(self, tensors: Tensor | None, out: Tensor, src: int, group: Group | None) -> Tensor:
        """Fill ``out`` with this rank's row of the tensors, of shape ``(ranks, *shape)``, that ``src`` holds."""
        rows = out.new_empty((len(self.members(group)), *out.shape)) if tensors is None else tensors
        return out.copy_(self.own_row(self.broadcast(rows, src, group), group))

    def reduce_scatter(self, tensors: Tensor, op: str, group: Group | None) -> Tensor:
        """Reduce tensors of shape ``(ranks, *shape)`` over the ranks, and return this rank's row."""
        return self.own_row(self.all_reduce(tensors.clone(), op, group), group)

    def own_row(self, tensors: Tensor, group: Group | None) -> Tensor:
        """Return this rank's row of tensors of shape ``(ranks, *shape)``."""
        return tensors[self.members(group).index(self.topology.rank)]

    def all_to_all(self, tensor: Tensor, sends: list[int], receives: list[int], group: Group | None) -> Tensor:
        """Send ``sends[k]`` rows to the k-th rank, and return the ``receives[k]`` rows from each, concatenated."""
        self.lack("all_to_all")

    def send(self, tensor: Tensor, dst: int, tag: int, group: Group | None) -> Work:
        """Begin to send a tensor to one rank."""
        self.lack("send", "gloo or mpi")

    def receive(self, tensor: Tensor, src: int, tag: int, group: Group | None) -> Work:
        """Begin to fill a tensor with what one rank sends."""
        self.lack("recv", "gloo or mpi")

    # --- groups and lifetime -------------------------------------------------------------------------------

    @abstractmethod
    def new_group(self, ranks: list[int], **options: Any) -> Group:
        """Create a group, which is returned to the user unchanged; all ranks call this."""

    @abstractmethod
    def ranks_of(self, group: Any) -> Sequence[int] | None:
        """Return the global ranks of a group, in the order of its members; ``None`` if it is not a group.

        Returns an empty sequence for a group whose ranks this rank, as it is not a member, does not know.
        """

    @cached_property
    def everyone(self) -> Sequence[int]:
        """All ranks."""
        return range(self.topology.world_size)

    def members(self, group: Group | None) -> Sequence[int]:
        """Return the global ranks of a group; of ``None``, all ranks."""
        return self.everyone if group is None else self.ranks_of(group) or ()

    @property
    def members_make_groups(self) -> bool:
        """Whether :meth:`group_of_members` is supported; else all ranks create a group, with :meth:`new_group`."""
        return False

    def group_of_members(self, ranks: list[int]) -> Group:
        """Create a group without the other ranks; only its members call this, with the same ranks, once."""
        self.lack("groups created by their members only")

    def new_mesh(self, axes: Mapping[str, int]) -> Any:
        """Create a mesh of all ranks with axes of these sizes, the last of which varies fastest; all ranks call this.

        With ``cp``, it also has the flattened axis ``dp_shard_cp`` of ``dp_shard`` and ``cp``, for sharding models.
        """
        self.lack("device meshes")

    def enter(self) -> None:  # noqa: B027  # most have nothing to do
        """Prepare for the end of this process, which has joined the job."""

    def is_alive(self) -> bool:
        """Return True if an adopted run still exists."""
        return True

    def store(self) -> Store | None:
        """Return a store that all ranks reach, for coordination off the device, or ``None``.

        A thread that waits in this object, by ``get`` of a key that is not there yet, blocks the coordination of this
        rank too: clone it, or use ``check`` first.
        """
        return None

    def release(self) -> None:  # noqa: B027  # Horovod and XLA have no such call
        """Make the operations in progress on this rank fail with an error, from another thread.

        The job cannot be used any more. By default nothing happens: a single process waits for nobody, Horovod itself
        raises when a process of the job has ended, and XLA cannot be interrupted.
        """

    def close(self) -> None:  # noqa: B027  # a single process has nothing to end
        """End the run."""

    # --- what users wrap -----------------------------------------------------------------------------------

    def wrap_model(self, model: nn.Module, sync_bn: bool, **options: Any) -> nn.Module:
        """Return a model that trains together with those of the other ranks; it is already on :attr:`device`.

        By default, it gets the parameters and buffers of rank 0, and arguments of torch's wrapper have no meaning.
        """
        check_ddp_options(options)
        if self.topology.world_size > 1:
            if sync_bn:
                raise ValueError(f"sync_bn must be False on {self.name!r}{self.instead_of_sync_bn}")
            self.broadcast_model(model)
        return model

    def broadcast_model(self, model: nn.Module) -> None:
        """Overwrite the parameters and buffers of a model, in any layout and on any device, with those of rank 0.

        Tensors on the meta device, which have no data, and distributed tensors are left unchanged.
        """
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_meta or hasattr(tensor, "device_mesh"):
                continue
            own = tensor.detach()
            whole = self.broadcast(self.bring(own).contiguous(), 0, None)
            if whole.data_ptr() != own.data_ptr():
                once = tuple(slice(1) if stride == 0 else slice(None) for stride in own.stride())  # of an expanded one
                own[once].copy_(whole[once])

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, **options: Any) -> torch.optim.Optimizer:
        """Return an optimizer that steps together with those of the other ranks."""
        return optimizer

    def wrap_loader(self, loader: Iterable[Any]) -> Any:
        """Return a loader that moves batches to this rank's device, where the backend has its own way to do so."""
        return loader

    def lack(self, capability: str, others: str = "gloo, nccl (on GPUs) or mpi") -> NoReturn:
        """Raise the error for what the backend does not support."""
        raise NotImplementedError(f"backend {self.name!r} does not support {capability}: use {others}")
