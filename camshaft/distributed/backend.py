"""The contract between collectives and whatever moves the data."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import count
from typing import Any, NoReturn, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import Store

from camshaft.distributed.topology import Topology


class Work(Protocol):
    """A transfer that was begun."""

    def wait(self) -> Any:
        """Wait for its end."""

    def is_completed(self) -> bool:
        """Whether it has ended."""


Group: TypeAlias = Any
"""A group in the backend's own terms, which users also hold: a torch process group, a Horovod process set, a list."""


def accelerator() -> torch.device | None:
    """Return the kind of accelerator that this process can use, without an index, or ``None``."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


class Resource:
    """What a process keeps for a job and releases with it."""

    def finish(self) -> None:
        """Wait for what is in progress, at the end of a job that did not fail."""

    def close(self) -> None:
        """Release the resource without waiting for other ranks."""


R = TypeVar("R", bound=Resource)
_job_numbers = count(1)


class Job:
    """The state that this process keeps for one job, whatever its backend.

    Attributes:
        groups: the groups created from lists of ranks.
        compares_collectives: whether the debug mode is on.
    """

    def __init__(self) -> None:
        self.groups: dict[tuple[int, ...], Group] = {}
        self.compares_collectives = False
        self._names: Counter[str] = Counter()
        self._resources: dict[type[Resource], Any] = {}
        self._process = os.getpid()

    @cached_property
    def number(self) -> int:
        """The number of the job in this process, for keys in a store that may outlive it."""
        return next(_job_numbers)

    def unique_name(self, name: str) -> str:
        """Return a prefix for keys in the store; the n-th call with a name returns the same one on all ranks."""
        self._names[name] += 1
        return f"camshaft/{self.number}/{name}/{self._names[name]}"

    def resource(self, kind: type[R], *args: Any) -> R:
        """Return the job's only resource of a kind, created from the arguments on first use."""
        if kind not in self._resources:
            self._resources[kind] = kind(*args)
        found: R = self._resources[kind]
        return found

    def has(self, kind: type[Resource]) -> bool:
        """Return True if the job has a resource of a kind."""
        return kind in self._resources

    def release(self, kind: type[Resource]) -> None:
        """Close the resource of a kind, if there is one."""
        if kind in self._resources:
            self._resources.pop(kind).close()

    def finish(self) -> None:
        """Wait for what is in progress."""
        for resource in tuple(self._resources.values()):
            resource.finish()

    def close(self) -> None:
        """Release all resources; in a forked child, which is not a rank, only forget them."""
        resources, self._resources, self.compares_collectives = self._resources, {}, False
        if os.getpid() == self._process:
            for resource in resources.values():
                resource.close()


class Backend(ABC):
    """Moves tensors between ranks. Implementations translate; they do not decide.

    A ``group`` is ``None`` for all ranks, or a group that :meth:`ranks_of` knows and this rank is a member of. Ranks in
    arguments are global ones. Tensors are dense, contiguous and on :attr:`device`.

    Attributes:
        name: what ``initialize`` calls it; ``None`` for the single process.
        model_name: the kind of run that users are told.
        topology: where this process stands.
        device: where tensors are moved from and to.
        reductions: names of the reductions that it knows.
        assumed: the numbers of :attr:`topology` that nothing tells this rank. Ranks may assume different ones, so a
            query for one of them raises.
    """

    name: str | None
    model_name: str
    topology: Topology
    device: torch.device
    assumed: tuple[str, ...] = ()
    reductions: tuple[str, ...] = ("SUM", "PRODUCT", "MIN", "MAX", "AND", "OR")

    @cached_property
    def job(self) -> Job:
        """The state of the job that this backend carries; backends leave it alone."""
        return Job()

    @property
    def carrier(self) -> torch.device:
        """Where numbers and bytes are put to travel: not on the device, if the backend also takes them from the CPU."""
        return self.device

    def messages_at(self, group: Group | None) -> torch.device:
        """Where what one rank sends to another is put to travel."""
        return self.carrier

    def bring(self, tensor: Tensor) -> Tensor:
        """Give a tensor in a place that the backend works on."""
        return tensor.to(self.device)

    # --- tensors -------------------------------------------------------------------------------------------

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: str, group: Group | None) -> Tensor:
        """Reduce over the ranks, in place, and give the tensor."""

    @abstractmethod
    def all_gather(self, tensor: Tensor, group: Group | None) -> Tensor:
        """Stack the tensors of the ranks, of shape ``(ranks, *shape)``."""

    def all_gather_into(self, out: Tensor, tensor: Tensor, group: Group | None) -> None:
        """Fill a tensor with those of the ranks, of at least one dimension, joined along the first."""
        out.copy_(self.all_gather(tensor, group).view(out.shape))

    @abstractmethod
    def broadcast(self, tensor: Tensor, src: int, group: Group | None) -> Tensor:
        """Give every rank the tensor of one, in place."""

    @abstractmethod
    def barrier(self, group: Group | None) -> None:
        """Wait for all ranks."""

    def reduce(self, tensor: Tensor, dst: int, op: str, group: Group | None) -> Tensor:
        """Reduce over the ranks; only the result on rank ``dst`` means something."""
        return self.all_reduce(tensor, op, group)

    def gather(self, tensor: Tensor, dst: int, group: Group | None) -> Tensor:
        """Stack the tensors of the ranks; only the result on rank ``dst`` means something."""
        return self.all_gather(tensor, group)

    def scatter(self, tensors: Tensor | None, out: Tensor, src: int, group: Group | None) -> Tensor:
        """Fill ``out`` with this rank's row of the tensors, of shape ``(ranks, *shape)``, that ``src`` holds."""
        self.lack("scatter")

    def reduce_scatter(self, tensors: Tensor, op: str, group: Group | None) -> Tensor:
        """Reduce tensors of shape ``(ranks, *shape)`` over the ranks, and give this rank its row."""
        self.lack("reduce_scatter")

    def all_to_all(self, tensor: Tensor, sends: list[int], receives: list[int], group: Group | None) -> Tensor:
        """Send ``sends[k]`` leading entries to the k-th rank, and give the ``receives[k]`` from each, joined."""
        self.lack("all_to_all")

    def send(self, tensor: Tensor, dst: int, tag: int, group: Group | None) -> Work:
        """Begin to send a tensor to one rank."""
        self.lack("send", "gloo and mpi")

    def receive(self, tensor: Tensor, src: int, tag: int, group: Group | None) -> Work:
        """Begin to fill a tensor with what one rank sends."""
        self.lack("recv", "gloo and mpi")

    # --- groups and life -----------------------------------------------------------------------------------

    @abstractmethod
    def new_group(self, ranks: list[int], **options: Any) -> Group:
        """Make a group, which users get as it is; every rank calls this."""

    @abstractmethod
    def ranks_of(self, group: Any) -> Sequence[int] | None:
        """Return the global ranks of a group, in the order of its members; ``None`` if it is not a group.

        Returns an empty sequence for a group whose ranks this rank, as it is not a member, does not know.
        """

    def members(self, group: Group | None) -> Sequence[int]:
        """Return the global ranks of a group; of ``None``, all ranks."""
        return range(self.topology.world_size) if group is None else self.ranks_of(group) or ()

    @property
    def members_make_groups(self) -> bool:
        """Whether :meth:`group_of_members` is there; if not, all ranks must make a group, by :meth:`new_group`."""
        return False

    def group_of_members(self, ranks: list[int]) -> Group:
        """Make a group; only its members wait for each other, and all name it by the same ranks, once."""
        self.lack("groups that their members make alone")

    def is_alive(self) -> bool:
        """Whether what was adopted is still there."""
        return True

    def store(self) -> Store | None:
        """Give a store that all ranks reach, for agreements off the device, or ``None``.

        Whoever waits in this object, by ``get`` of a key that is not there yet, keeps the agreements of this rank
        waiting too: open another client, or use ``check`` first.
        """
        return None

    def left(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return how each rank that has left the run left it, as far as this is known."""
        return {}

    def close(self) -> None:  # noqa: B027  # most have something to end, one process has not
        """End what ``initialize`` began."""

    # --- what users wrap -----------------------------------------------------------------------------------

    def wrap_model(self, model: nn.Module, sync_bn: bool, **options: Any) -> nn.Module:
        """Make a model, already on :attr:`device`, train together with the other ranks'."""
        return model

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, **options: Any) -> torch.optim.Optimizer:
        """Make an optimizer step together with the other ranks'."""
        return optimizer

    def wrap_loader(self, loader: Iterable[Any]) -> Any:
        """Make a loader deliver to this rank's device, where the backend has a way of its own."""
        return loader

    def lack(self, capability: str, others: str = "gloo, nccl (on GPUs) and mpi") -> NoReturn:
        """Refuse what the backend cannot do."""
        raise NotImplementedError(f"backend {self.name!r} has no {capability}; {others} have it")
