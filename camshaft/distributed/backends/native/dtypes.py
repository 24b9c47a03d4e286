"""Dtypes that gloo and nccl do not know: tensors are moved as bytes, and reduced in another dtype.

The result is that which their own would have. Whole numbers wrap around as always, since the sum of the wider ones is
cut off. A sum of bools says whether one is true, as over MPI and Horovod: gloo would add them as bytes, and leave a 2
in a bool.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
_LOWEST = -(2**63)

FLOAT8 = frozenset(getattr(torch, name) for name in dir(torch) if name.startswith("float8_"))
"""What nccl alone reduces, on some GPUs."""

NOT_MOVED = frozenset({torch.uint64, *_WIDER, *FLOAT8, torch.complex32, torch.complex64, torch.complex128})
"""Dtypes for :func:`as_bytes`; the complex ones are not gathered on one rank."""
NOT_REDUCED = frozenset({torch.bool, torch.uint64, *_WIDER, *FLOAT8})
"""Dtypes for :func:`reduced_in_another`."""


def reduced_in_another(tensor: Tensor, op: str, reduce: Callable[[Tensor, str], Tensor]) -> Tensor:
    """Reduce in another dtype.

    Args:
        tensor: of a dtype of :data:`NOT_REDUCED`, overwritten if the result has its shape.
        op: name of the reduction.
        reduce: takes a tensor of another dtype and the name of a reduction, and gives the result.

    Raises:
        TypeError: eight bits are too few for a sum; no other dtype would give the same.

    >>> reduced_in_another(torch.tensor([True, False]), "SUM", lambda other, op: other.add_(1).clamp_(max=1))
    tensor([True, True])
    """
    dtype = tensor.dtype
    if dtype in FLOAT8:
        raise TypeError(
            f"tensor must be of a dtype that can be reduced with op={op!r}: a floating point one of 16 bits or more, a "
            f"whole number, bool or complex, got {dtype}: convert it first, to torch.float16 say"
        )
    if dtype is torch.bool:
        result = reduce(tensor.view(torch.uint8), "MAX" if op == "SUM" else op).view(torch.bool)
    elif dtype is torch.uint64:
        result = _as_int64(tensor, op, reduce)
    else:
        result = reduce(tensor.to(_WIDER[dtype]), op).to(dtype)
    return tensor.copy_(result) if result.shape == tensor.shape else result


def as_bytes(tensor: Tensor) -> Tensor:
    """Give the memory of a contiguous tensor as bytes, those of an element along one more dimension.

    >>> as_bytes(torch.tensor([1, 256], dtype=torch.int16))
    tensor([[1, 0],
            [0, 1]], dtype=torch.uint8)
    """
    return tensor.unsqueeze(-1).view(torch.uint8)


def _as_int64(tensor: Tensor, op: str, reduce: Callable[[Tensor, str], Tensor]) -> Tensor:
    """Reduce 64 bits as if one of them were a sign, which makes a difference to an order only: there it is turned."""
    signed = tensor.view(torch.int64)
    turned = _LOWEST if op in ("MIN", "MAX") else 0
    return (reduce(signed ^ turned, op) ^ turned).view(torch.uint64)
