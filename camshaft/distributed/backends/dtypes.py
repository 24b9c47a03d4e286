"""Dtypes that a communication library does not support: tensors are moved as bytes and reduced in another dtype.

The result is the one that the tensor's own dtype would give: integers wrap around, and a sum of bools is true if any of
them is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_SIGN_BIT = -(2**63)

WIDER = {
    torch.bool: torch.int32,  # sums of bytes would leave a 2 in a bool, or wrap around to false
    torch.int8: torch.int32,
    torch.uint8: torch.int32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
    torch.bfloat16: torch.float32,
}
"""What tensors of a dtype are reduced as by a library that does not reduce the dtype itself."""

FLOAT8 = frozenset(getattr(torch, name) for name in dir(torch) if name.startswith("float8_"))
"""Floating point dtypes of eight bits, which are moved but not reduced, except by nccl on some GPUs."""


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as bytes, with one more dimension for the bytes of an element.

    >>> as_bytes(torch.tensor([1, 256], dtype=torch.int16))
    tensor([[1, 0],
            [0, 1]], dtype=torch.uint8)
    """
    return tensor.unsqueeze(-1).view(torch.uint8)


def from_bytes(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor whose memory :func:`as_bytes` returned."""
    return tensor.view(dtype).squeeze(-1)


def reduced_wider(tensor: Tensor, op: str, reduce: Callable[[Tensor, str], Tensor]) -> Tensor:
    """Reduce a tensor in the dtype that :data:`WIDER` has for its own.

    Args:
        tensor: overwritten if the result has its shape.
        op: the name of the reduction.
        reduce: reduces a tensor of the wider dtype and returns the result.

    >>> reduced_wider(torch.tensor([True, False]), "SUM", lambda wide, op: wide * 2)
    tensor([ True, False])
    """
    if tensor.dtype is torch.uint64:  # as signed integers, which differ in their order only: flip the sign for it
        flip = _SIGN_BIT if op in ("MIN", "MAX") else 0
        result = (reduce(tensor.view(torch.int64) ^ flip, op) ^ flip).view(torch.uint64)
    else:
        result = reduce(tensor.to(WIDER[tensor.dtype]), op).to(tensor.dtype)
    return tensor.copy_(result) if result.shape == tensor.shape else result


def check_reducible(tensor: Tensor, op: str) -> None:
    """Refuse a reduction for which a library would raise an error of its own, or return something else.

    Raises:
        TypeError: the dtype has too few bits to be added up, or is complex and has no order.
    """
    if tensor.dtype in FLOAT8:
        raise TypeError(
            f"tensor must be of a dtype that can be reduced with op={op!r}: floating point of 16 bits or more, "
            f"integer, bool or complex, got {tensor.dtype}: convert it first, for example to torch.float16"
        )
    if tensor.is_complex() and op in ("PRODUCT", "MIN", "MAX"):
        raise TypeError(f"op {op!r} is not supported for complex numbers, got a tensor of {tensor.dtype}")
