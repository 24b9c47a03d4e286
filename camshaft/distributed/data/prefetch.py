"""Batches on the GPU before they are asked for."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from camshaft.distributed.context import current
from camshaft.distributed.data.lookahead import LookingAhead, WithState
from camshaft.tree import apply_to_type
from camshaft.types import DeviceLike, Stateful

Loader = TypeVar("Loader", bound=Iterable[Any])


def prefetch_to_device(loader: Loader, device: DeviceLike | None = None) -> Loader:
    """Copy each batch to the GPU while the step of the one before runs.

    One batch is kept ahead. It is copied from pinned memory (``pin_memory=True`` of the loader saves a copy on the
    host) on a stream of its own, for which the consumer's waits without holding up the host. Tensors that are on the
    CPU are copied, in mappings and sequences however deeply nested; all else stays as it is.

    Args:
        loader: gives batches; a ``DataLoader``, say.
        device: where to; ``None`` is :func:`camshaft.distributed.device`.

    Returns:
        What has all that the loader has, its length too; where the device is no CUDA device, the loader itself.

    >>> prefetch_to_device([torch.ones(2)], device="cpu")
    [tensor([1., 1.])]
    """
    place = current().device if device is None else torch.device(device)
    if place.type != "cuda":
        return loader
    kind = StatefulPrefetching if isinstance(loader, Stateful) else Prefetching
    return cast(Loader, kind(loader, place))


class Prefetching(LookingAhead):
    """A loader whose batches are on the GPU; see :func:`prefetch_to_device`.

    Args:
        loader: gives batches.
        device: where to.
        cuda: makes and knows streams.
    """

    def __init__(self, loader: Iterable[Any], device: torch.device, cuda: Any = torch.cuda) -> None:
        super().__init__(loader)
        self._device = device
        self._cuda = cuda

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # raises what the loader raises

    def __iter__(self) -> Iterator[Any]:
        self._reached = None
        copies = Copies(self._device, self._cuda)
        batches = self._read()
        ahead = _next(batches, copies)
        while ahead is not None:
            if isinstance(ahead, Exception):
                try:
                    raise ahead
                finally:
                    del ahead  # it knows this frame: together they would outlast the loader's workers
            copy, state = ahead
            ahead = _next(batches, copies)
            self._reached = state
            yield copy.received()
        self._reached = None


class StatefulPrefetching(WithState, Prefetching):
    """The same, of a loader that has a state."""


class Copies:
    """Copies batches on a stream of its own."""

    def __init__(self, device: torch.device, cuda: Any) -> None:
        self._device = device
        self._cuda = cuda
        self._stream = cuda.Stream(device)

    def begin(self, batch: Any) -> Copy:
        """Begin to copy; nobody waits for it."""
        tensors: list[Tensor] = []

        def copied(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.device.type != "cpu" or leaf.layout != torch.strided:
                return leaf
            pinned = leaf if leaf.is_pinned() else leaf.pin_memory()
            tensors.append(pinned.to(self._device, non_blocking=True))
            return tensors[-1]

        with self._cuda.stream(self._stream):
            moved = apply_to_type(batch, Leaf, copied)
        return Copy(moved, tensors, self._stream.record_event(), lambda: self._cuda.current_stream(self._device))


class Copy:
    """A batch on its way.

    Args:
        batch: with tensors whose content may still come.
        tensors: those.
        arrival: an event: all of it is there.
        current_stream: gives that of the consumer.
    """

    def __init__(self, batch: Any, tensors: list[Tensor], arrival: Any, current_stream: Any) -> None:
        self._batch = batch
        self._tensors = tensors
        self._arrival = arrival
        self._current_stream = current_stream

    def received(self) -> Any:
        """Let the stream of the consumer wait, and the memory stay while that stream uses it; keep nothing here."""
        stream = self._current_stream()
        stream.wait_event(self._arrival)
        for tensor in self._tensors:
            tensor.record_stream(stream)
        batch = self._batch
        del self._batch, self._tensors
        return batch


class Leaf(ABC):  # noqa: B024  # asked with isinstance alone
    """Whatever a batch is not divided into further."""

    @classmethod
    def __subclasshook__(cls, kind: type) -> bool:
        return not issubclass(kind, (Mapping, Sequence)) or issubclass(kind, (str, bytes, PackedSequence))


def _next(batches: Iterator[tuple[Any, Any]], copies: Copies) -> tuple[Copy, Any] | Exception | None:
    """Read a batch and begin to copy it; an error waits until the batches before it are through."""
    try:
        batch, state = next(batches)
        return copies.begin(batch), state
    except StopIteration:
        return None
    except Exception as error:
        return error
