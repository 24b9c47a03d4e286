"""Copies of a state that may be written while the training goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, UntypedStorage


class Staging:
    """Copies states to host memory, which it uses again for the next copy.

    Copies from a GPU go to pinned memory and are only begun: the device makes them before it goes on to what
    changes the state. Tensors that share memory share it in the copy too.

    >>> weight = torch.ones(2)
    >>> copied, finish = Staging().copy({"weight": weight, "step": 3})
    >>> weight.zero_()
    tensor([0., 0.])
    >>> copied
    {'weight': tensor([1., 1.]), 'step': 3}
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def copy(self, state: Any) -> tuple[Any, Callable[[], None]]:
        """Begin to copy a state; the last copy is no longer valid.

        Returns:
            The copy, and a function that waits until all of it has arrived, in any thread.
        """
        storages: dict[tuple[torch.device, int, int], UntypedStorage] = {}
        copies: dict[int, Any] = {}
        for tensor in _tensors(state):
            if id(tensor) not in copies and _is_plain(tensor):
                copies[id(tensor)] = self._copied(tensor, storages)
        del self._buffers[len(storages) :]
        arrivals = [_mark(index) for index in {device.index for device, *_ in storages if device.type == "cuda"}]

        def finish() -> None:
            for arrival in arrivals:
                arrival.synchronize()

        return copy.deepcopy(state, copies), finish

    def _copied(self, tensor: Tensor, storages: dict[tuple[torch.device, int, int], UntypedStorage]) -> Tensor:
        if tensor.device.type not in ("cpu", "cuda"):
            return tensor.detach().cpu()
        storage = tensor.untyped_storage()
        # the size too: arrays of NumPy that overlap begin at one address, and make storages of their own
        place = (storage.device, storage.data_ptr(), storage.nbytes())
        if place not in storages:
            storages[place] = self._buffer(len(storages), storage)
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(storages[place], tensor.storage_offset(), tensor.shape, tensor.stride())

    def _buffer(self, number: int, storage: UntypedStorage) -> UntypedStorage:
        """Give memory of exactly this size, since all of a storage is saved, with a copy of the content."""
        is_pinned = storage.device.type == "cuda"
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        if number == len(self._buffers):
            self._buffers.append(torch.empty(0, dtype=torch.uint8))
        buffer = self._buffers[number]
        if buffer.numel() != source.numel() or buffer.is_pinned() != is_pinned:
            buffer = self._buffers[number] = torch.empty_like(source, device="cpu", pin_memory=is_pinned)
        buffer.copy_(source, non_blocking=is_pinned)
        return buffer.untyped_storage()


def _tensors(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, Mapping):
        for one in state.values():
            yield from _tensors(one)
    elif isinstance(state, (list, tuple)):
        for one in state:
            yield from _tensors(one)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is nothing but a view of memory; others know how to copy themselves."""
    is_dense = tensor.layout is torch.strided and not tensor.is_quantized
    return type(tensor) in (Tensor, torch.nn.Parameter) and is_dense and not tensor.is_meta and tensor.numel() > 0


def _mark(device: int | None) -> Any:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types for it
    event.record(torch.cuda.current_stream(device))
    return event
