"""A backend that exchanges tensors between threads of this process; see threads.py."""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from camshaft.distributed.backends.contract import Backend
from camshaft.distributed.topology import Topology

REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "AND": torch.bitwise_and,
    "OR": torch.bitwise_or,
}


class ReleasedError(RuntimeError):
    """Raised if other ranks do not arrive."""


class Mailbox:
    """Values that ranks leave for each other.

    Args:
        limit: the time limit in seconds.
    """

    def __init__(self, limit: float) -> None:
        self._deadline = time.monotonic() + limit
        self._changed = threading.Condition()
        self._values: defaultdict[Any, dict[int, Any]] = defaultdict(dict)
        self._taken: Counter[Any] = Counter()
        self._over: str | None = None

    def end(self, reason: str) -> None:
        """Release all waiting ranks."""
        with self._changed:
            self._over = self._over or reason
            self._changed.notify_all()

    def put(self, key: Any, rank: int, value: Any, size: int = 1) -> None:
        """Store the value of one rank; ``size`` values are needed."""
        with self._changed:
            self._values[key][rank] = value
            if len(self._values[key]) == size:
                self._changed.notify_all()

    def has(self, key: Any, size: int = 1) -> bool:
        """Return whether ``size`` values have been stored."""
        return len(self._values.get(key, ())) == size

    def take(self, key: Any, size: int = 1) -> dict[int, Any]:
        """Wait for ``size`` values, which as many ranks take."""
        with self._changed:
            self._wait_until(lambda: self.has(key, size), key)
            self._taken[key] += 1
            if self._taken[key] < size:
                return self._values[key]
            del self._taken[key]
            self._changed.notify_all()
            return self._values.pop(key)

    def wait_until_taken(self, key: Any) -> None:
        """Wait until a value has been taken."""
        with self._changed:
            self._wait_until(lambda: not self.has(key), key)

    def _wait_until(self, condition: Callable[[], bool], key: Any) -> None:
        while not condition():
            if not self._over and time.monotonic() > self._deadline:
                self.end(f"timed out waiting for the other ranks in {key}")
            if self._over:
                raise ReleasedError(self._over)
            self._changed.wait(max(0.0, self._deadline - time.monotonic()))


@dataclass(frozen=True)
class Group:
    """A group of ranks.

    Args:
        ranks: the global ranks.
        handle: distinguishes the group from others of the same ranks.
    """

    ranks: Sequence[int]
    handle: str


class ThreadBackend(Backend):
    """The backend of one rank, which is a thread of this process.

    Args:
        topology: the place of the rank.
        mailbox: shared by all ranks.
    """

    name = "threads"
    model_name = "threads"
    device = torch.device("cpu")
    reductions = tuple(REDUCTIONS)

    def __init__(self, topology: Topology, mailbox: Mailbox) -> None:
        self.topology = topology
        self.mailbox = mailbox
        self._world = Group(range(topology.world_size), handle="world")
        self._numbers: Counter[Any] = Counter()

    def _exchange(self, what: str, value: Any, group: Group | None) -> list[Any]:
        """Exchange this rank's value with the rest of the group; all ranks must call it in the same order."""
        group, rank = group or self._world, self.topology.rank
        assert rank in group.ranks, f"rank {rank} takes part in {what} of {group}"
        key, size = (group.handle, self._number(group.handle)), len(group.ranks)
        self.mailbox.put(key, rank, (what, value), size)
        brought = self.mailbox.take(key, size)
        done = {other: brought[other][0] for other in group.ranks}
        assert set(done.values()) == {what}, f"the calls of the ranks differ: {done}"
        return [brought[other][1] for other in group.ranks]

    def _number(self, series: Any) -> int:
        """Return the next number in a series of this rank."""
        self._numbers[series] += 1
        return self._numbers[series]

    def _reduced(self, what: str, tensor: Tensor, op: str, group: Group | None) -> Tensor:
        rows = self._exchange(f"{what} {op} of {described(tensor)}", tensor.clone(), group)
        result: Tensor = functools.reduce(REDUCTIONS[op], rows)
        return result

    def _place(self, group: Group | None) -> int:
        return (group or self._world).ranks.index(self.topology.rank)

    def all_reduce(self, tensor: Tensor, op: str, group: Group | None) -> Tensor:
        return tensor.copy_(self._reduced("all_reduce", tensor, op, group))

    def all_gather(self, tensor: Tensor, group: Group | None) -> Tensor:
        return torch.stack(self._exchange(f"all_gather of {described(tensor)}", tensor.clone(), group))

    def broadcast(self, tensor: Tensor, src: int, group: Group | None) -> Tensor:
        rows = self._exchange(f"broadcast from {src} of {described(tensor)}", tensor.clone(), group)
        return tensor.copy_(rows[(group or self._world).ranks.index(src)])

    def barrier(self, group: Group | None) -> None:
        self._exchange("barrier", None, group)

    def reduce(self, tensor: Tensor, dst: int, op: str, group: Group | None) -> Tensor:
        reduced = self._reduced(f"reduce to {dst}", tensor, op, group)
        return tensor.copy_(reduced) if self.topology.rank == dst else tensor

    def gather(self, tensor: Tensor, dst: int, group: Group | None) -> Tensor:
        rows = self._exchange(f"gather to {dst} of {described(tensor)}", tensor.clone(), group)
        return torch.stack(rows) if self.topology.rank == dst else tensor

    def scatter(self, tensors: Tensor | None, out: Tensor, src: int, group: Group | None) -> Tensor:
        held = None if tensors is None else tensors.clone()
        rows = self._exchange(f"scatter from {src} of {described(out)}", held, group)
        return out.copy_(rows[(group or self._world).ranks.index(src)][self._place(group)])

    def reduce_scatter(self, tensors: Tensor, op: str, group: Group | None) -> Tensor:
        return self._reduced("reduce_scatter", tensors, op, group)[self._place(group)]

    def all_to_all(self, tensor: Tensor, sends: list[int], receives: list[int], group: Group | None) -> Tensor:
        parts = self._exchange("all_to_all", torch.split(tensor.clone(), sends), group)
        mine = [part[self._place(group)] for part in parts]
        assert list(map(len, mine)) == receives, f"{receives} are expected, {list(map(len, mine))} were sent"
        return torch.cat(mine)

    def send(self, tensor: Tensor, dst: int, tag: int, group: Group | None) -> Sent:
        channel = ((group or self._world).handle, self.topology.rank, dst, tag)
        key = (channel, self._number(channel))
        self.mailbox.put(key, self.topology.rank, tensor)
        return Sent(self.mailbox, key)

    def receive(self, tensor: Tensor, src: int, tag: int, group: Group | None) -> Arriving:
        channel = ((group or self._world).handle, src, self.topology.rank, tag)
        return Arriving(self.mailbox, (channel, self._number(channel)), tensor)

    def new_group(self, ranks: list[int], **options: Any) -> Group:
        self._exchange(f"new_group of {ranks}", None, None)
        return Group(ranks, handle=f"group {self._number('groups')}")

    def ranks_of(self, group: Any) -> Sequence[int] | None:
        return group.ranks if isinstance(group, Group) else None

    def wrap_model(self, model: nn.Module, sync_bn: bool, **options: Any) -> nn.Module:
        """Broadcast the weights of rank 0, and average the gradients over all ranks."""
        if sync_bn:
            self.lack("synchronized batch norm")
        for tensor in (*model.parameters(), *model.buffers()):
            self.broadcast(tensor.detach(), 0, None)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._average)  # type: ignore[no-untyped-call]  # torch's
        return model

    def _average(self, parameter: Tensor) -> None:
        assert parameter.grad is not None, "the hook must be called after the gradient was accumulated"
        self.all_reduce(parameter.grad, "SUM", None).div_(self.topology.world_size)


class Sent:
    """The handle of a sent message."""

    def __init__(self, mailbox: Mailbox, key: Any) -> None:
        self._mailbox, self._key = mailbox, key

    def wait(self) -> None:
        """Wait until the message has been taken."""
        self._mailbox.wait_until_taken(self._key)

    def is_completed(self) -> bool:
        """Return whether the message has been taken."""
        return not self._mailbox.has(self._key)


class Arriving:
    """The handle of a message to receive; messages arrive in the order of the requests."""

    def __init__(self, mailbox: Mailbox, key: Any, tensor: Tensor) -> None:
        self._mailbox, self._key, self._tensor = mailbox, key, tensor

    def wait(self) -> None:
        """Wait for the message and fill the tensor."""
        (came,) = self._mailbox.take(self._key).values()
        assert described(came) == described(self._tensor), f"{described(self._tensor)} expected, {described(came)} sent"
        self._tensor.copy_(came)

    def is_completed(self) -> bool:
        """Return whether the message has arrived."""
        return self._mailbox.has(self._key)


def described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
