"""What Horovod is handed instead of tensors that it refuses.

It reduces five dtypes, and moves those of numpy's age. So a tensor to be moved goes as its bytes, and one to be
reduced goes in a wider dtype where it must; the way back gives what the own dtype would have given, sums of small
integers wrap around too.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WIDER = {
    torch.bool: torch.int32,
    torch.uint8: torch.int32,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.bfloat16: torch.float32,
}
_LOWEST = -(2**63)


def widened(tensor: Tensor, op: str = "SUM") -> Tensor:
    """Give a contiguous tensor as a vector that Horovod reduces: the same memory, where that is possible.

    Unsigned 64 bits go as if one of them were a sign, which makes a difference to an order only: there it is turned.

    >>> widened(torch.tensor([[True], [False]])), widened(torch.tensor(1 + 2j))
    (tensor([1, 0], dtype=torch.int32), tensor([1., 2.]))
    """
    vector = torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor.view(-1)
    if vector.dtype is torch.uint64:
        return vector.view(torch.int64) ^ _turned(op)
    return vector.to(_WIDER.get(vector.dtype, vector.dtype))


def narrowed(vector: Tensor, tensor: Tensor, op: str = "SUM") -> Tensor:
    """Put a vector that :func:`widened` gave, and Horovod reduced, back into its tensor.

    >>> narrowed(torch.tensor([300, -1], dtype=torch.int32), torch.zeros(2, dtype=torch.uint8))
    tensor([ 44, 255], dtype=torch.uint8)
    """
    if tensor.dtype is torch.uint64:
        vector = (vector ^ _turned(op)).view(torch.uint64)
    target = torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor.view(-1)
    if target.data_ptr() != vector.data_ptr():
        target.copy_(vector)
    return tensor


def _turned(op: str) -> int:
    return _LOWEST if op in ("MIN", "MAX") else 0


def rows_of_bytes(tensor: Tensor, width: int) -> Tensor:
    """Give a contiguous tensor as a matrix of bytes, so many in a row, in the same memory.

    >>> rows_of_bytes(torch.tensor([1, 256], dtype=torch.int16), 2)
    tensor([[1, 0],
            [0, 1]], dtype=torch.uint8)
    """
    return tensor.view(-1).view(torch.uint8).view(-1, width)
