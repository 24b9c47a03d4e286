"""Getting values to where a backend works on them, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from camshaft.distributed.backend import Backend, Group
from camshaft.distributed.calls import Call
from camshaft.distributed.exchange import broadcast_value


def brought(backend: Backend, tensor: Tensor) -> Tensor:
    """Give a tensor in the place and layout that the backend works on, without its graph."""
    return tensor.detach().to(backend.device).contiguous()


def in_place(backend: Backend, tensor: Tensor, operate: Any) -> Tensor:
    """Operate on the tensor itself where that is possible, else on a copy whose result goes back."""
    here = brought(backend, tensor)
    result: Tensor = operate(here)
    if result.data_ptr() == tensor.data_ptr() and result.device == tensor.device:
        return tensor
    if result.device == tensor.device or backend.device.type == tensor.device.type:
        with torch.no_grad():
            return tensor.copy_(result.view(tensor.shape))
    return result.to(tensor.device)


def reduced_number(backend: Backend, number: Any, op: str, group: Group | None) -> Any:
    """Reduce a number as a tensor of its own kind."""
    whole = not isinstance(number, (float, complex)) and number == int(number)
    dtype = torch.complex128 if isinstance(number, complex) else torch.int64 if whole else torch.float64
    return backend.all_reduce(torch.tensor([number], dtype=dtype, device=backend.device), op, group).item()


def prepared(backend: Backend, tensor: Any, src: int, group: Group | None) -> Any:
    """Tell the ranks what kind of value comes, and give each a place for it."""
    here = backend.topology.rank == src
    layout = (tensor.shape, tensor.dtype) if isinstance(tensor, Tensor) else None
    layout = broadcast_value(backend, layout, src, group)
    if here or layout is None:
        return tensor if here else None
    return torch.empty(*layout[:1], dtype=layout[1], device=backend.device)


def portable(value: Any) -> Any:
    """Give a value that can be pickled on its own: a tensor without its graph and device."""
    return value.detach().cpu() if isinstance(value, Tensor) else value


def check_shapes(tensor: Tensor, shapes: Sequence[Sequence[int]], call: Call) -> None:
    """Refuse shapes that do not hold this rank's own at its place."""
    call.check_count("shapes", shapes)
    mine = tuple(shapes[call.place])
    if mine != tuple(tensor.shape):
        raise ValueError(f"shapes must hold this rank's shape {tuple(tensor.shape)} at {call.place}, got {mine}")
