"""Getting tensors to where a backend works on them, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from camshaft.distributed.backend import Backend
from camshaft.distributed.encoding import is_dense


def brought(backend: Backend, tensor: Tensor) -> Tensor:
    """Give a tensor in the place and layout that the backend works on, without its graph.

    Raises:
        TypeError: it is sparse, quantized, nested or without content.
    """
    if not is_dense(tensor):
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise TypeError(f"tensor must be dense and hold values, got a {kind} one on {tensor.device}")
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.device != backend.device:
        tensor = backend.bring(tensor)
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def in_place(backend: Backend, tensor: Tensor, operate: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Operate on the tensor itself where that is possible, else on a copy whose result goes back into it.

    Raises:
        TypeError: as for :func:`brought`.
        ValueError: several elements share a place in memory.
    """
    here = brought(backend, tensor)
    if here is tensor:
        result = operate(tensor, *arguments)
        if result is tensor:
            return tensor
    else:
        _check_place(tensor)
        result = operate(here, *arguments)
    if result.data_ptr() != tensor.data_ptr() or result.device != tensor.device:
        with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
            tensor.copy_(result)
    return tensor


def joined(stacked: Tensor, tensor: Tensor) -> Tensor:
    """Join stacked tensors along their first dimension, if they have one, on the device that one of them came from."""
    if stacked.device != tensor.device:
        stacked = stacked.to(tensor.device)
    return stacked.flatten(0, 1) if tensor.dim() else stacked


def _check_place(tensor: Tensor) -> None:
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise ValueError(
            f"tensor must have a place in memory for each element, got one that was expanded to {tuple(tensor.shape)}: "
            "make it contiguous first"
        )
