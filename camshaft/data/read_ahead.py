"""Batches that are read before they are consumed: to end a pass on all ranks together, and to copy them to the GPU."""

from __future__ import annotations

import copy
import warnings
from abc import ABC
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from camshaft.distributed.agreement.ends import BatchCount, BatchCounts
from camshaft.distributed.job import current
from camshaft.errors import level_of_caller
from camshaft.text import counted
from camshaft.tree import apply_to_type
from camshaft.types import DeviceLike, Stateful

Loader = TypeVar("Loader", bound=Iterable[Any])
_FEW = 3  # batches that a rank may have left at the end of a pass without a warning


# --- ending together -----------------------------------------------------------------------------------------------


def end_together(batches: Iterator[Any], window: int = 8) -> Iterator[Any]:
    """Yield batches, and end on all ranks at the step at which the first of them has no more.

    The ranks read ahead, and agree once per window of batches how many of it all of them have: in the store of the job,
    or, on backends without one, by a collective. If a rank fails to load a batch, all raise at that step.

    Args:
        batches: preferably in host memory. If there are several such iterators, all ranks read them in the same order.
        window: how many batches are read ahead and kept in memory; the same on all ranks.

    >>> list(end_together(iter([1, 2, 3])))
    [1, 2, 3]
    """
    backend = current()
    if backend.topology.world_size == 1:
        yield from batches
        return
    counts, rank = BatchCounts.of(backend, window), backend.topology.rank
    ahead: deque[Any] = deque()
    end: Exception | None = None  # a StopIteration, or what happened
    given, common = 0, window
    try:
        end = _fill(ahead, batches, window)
        counts.report(_count(ahead, end))
        while common == window:
            reports = counts.collect()
            common = min(one.count for one in reports)
            if common < window:
                counts.leave()
            for left in reversed(range(common)):
                batch = ahead.popleft()
                if common == window:
                    end = end or _fill(ahead, batches, window)
                    if left == 0:  # a step before it is needed, so that no rank waits
                        counts.report(_count(ahead, end))
                yield batch
            given += common
        counts.wait_for_readers()
        failed = [number for number, one in enumerate(reports) if one.error is not None and one.count == common]
        if rank in failed:
            assert end is not None, "this rank has reported it"
            raise end
        if failed:
            raise RuntimeError(f"rank {failed[0]} failed to load batch {given + 1}: {reports[failed[0]].error}")
        left_over = [one.count - common for one in reports]  # as far as they were read ahead
        if (most := max(left_over)) > _FEW and rank == left_over.index(most):
            warnings.warn(
                f"a pass over the stream ended after {counted(given, 'batch')} of each rank, as rank "
                f"{left_over.index(0)} has no more: rank {rank} has at least {most} left, which are dropped; "
                "distribute the data evenly",
                stacklevel=level_of_caller(),
            )
    finally:
        counts.leave()
        end = None  # its traceback refers to this frame, and both would outlast the workers


def _fill(ahead: deque[Any], batches: Iterator[Any], window: int) -> Exception | None:
    """Read until there is a window of batches; return what has ended them, if they have."""
    try:
        while len(ahead) < window:
            ahead.append(next(batches))
    except Exception as error:
        return error
    return None


def _count(ahead: deque[Any], end: Exception | None) -> BatchCount:
    has_failed = end is not None and not isinstance(end, StopIteration)
    return BatchCount(len(ahead), f"{type(end).__name__}: {end}" if has_failed else None)


# --- copying to the GPU --------------------------------------------------------------------------------------------


def prefetch_to_device(loader: Loader, device: DeviceLike | None = None) -> Loader:
    """Copy each batch to the GPU while the step before it runs.

    One batch is kept ahead. It is copied from pinned memory (``pin_memory=True`` of the loader saves a copy on the
    host) on a stream of its own, for which the consumer's stream waits without blocking the host. Tensors on the CPU
    are copied, in mappings and sequences however deeply nested; everything else stays as it is.

    Args:
        loader: yields batches, such as a ``DataLoader``.
        device: the device to copy to; ``None`` is :func:`camshaft.distributed.device`.

    Returns:
        An iterable with all attributes of the loader, and its length; the loader itself if the device is not a CUDA
        device.

    >>> prefetch_to_device([torch.ones(2)], device="cpu")
    [tensor([1., 1.])]
    """
    place = current().device if device is None else torch.device(device)
    if place.type != "cuda":
        return loader
    kind = _StatefulPrefetcher if isinstance(loader, Stateful) else _Prefetcher
    return cast(Loader, kind(loader, place))


class _Prefetcher:
    """A loader whose batches are on the GPU; see :func:`prefetch_to_device`."""

    def __init__(self, loader: Any, device: torch.device) -> None:
        self._loader, self._device = loader, device
        self._reached: Mapping[str, Any] | None = None  # the loader's state after the batch that was yielded last

    def __getattr__(self, name: str) -> Any:
        if name == "_loader" or name.startswith("__"):  # copying asks before there is a loader
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._reached = None
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # in torch
        ahead: list[Any] = []
        for batch in self._loader:
            following = self._copied(batch, stream)
            if ahead:
                yield self._received(*ahead.pop())  # bound to no name here, which would keep it alive
            ahead.append(following)
        if ahead:
            yield self._received(*ahead.pop())
        self._reached = None

    def _copied(self, batch: Any, stream: torch.cuda.Stream) -> tuple[Any, list[Tensor], Any, Mapping[str, Any] | None]:
        """Start to copy; return the batch, its copied tensors, the event of their arrival, and the loader's state."""
        tensors: list[Tensor] = []

        def copied(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.device.type != "cpu" or leaf.layout != torch.strided:
                return leaf
            pinned = leaf if leaf.is_pinned() else leaf.pin_memory()
            tensors.append(pinned.to(self._device, non_blocking=True))
            return tensors[-1]

        with torch.cuda.stream(stream):
            moved = apply_to_type(batch, _Leaf, copied)
        state = copy.deepcopy(self._loader.state_dict()) if isinstance(self, _StatefulPrefetcher) else None
        return moved, tensors, stream.record_event(), state

    def _received(self, batch: Any, tensors: list[Tensor], arrival: Any, state: Mapping[str, Any] | None) -> Any:
        """Make the consumer's stream wait for the copy, and keep the memory while that stream uses it."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(arrival)
        for tensor in tensors:
            tensor.record_stream(stream)
        self._reached = state
        return batch


class _StatefulPrefetcher(_Prefetcher):
    """A prefetcher with the state of its loader, after the batches it has yielded rather than read ahead."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state of the loader after the batch that was yielded last."""
        state: Mapping[str, Any] = self._loader.state_dict() if self._reached is None else self._reached
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a state."""
        self._reached = None
        self._loader.load_state_dict(state_dict)


class _Leaf(ABC):  # noqa: B024  # for isinstance alone
    """Whatever in a batch is not a container."""

    @classmethod
    def __subclasshook__(cls, kind: type) -> bool:
        return not issubclass(kind, (Mapping, Sequence)) or issubclass(kind, (str, bytes, PackedSequence))
