"""Bytes of any length as tensors of one length, which all ranks know beforehand.

A value travels as one row: its length, that of the longest value that its sender sends, and its first bytes. If the
longest of all does not fit, all are sent once more, whole, in a second exchange of which every rank knows the size by
then. A rank that has nothing to send, because of an error, sends a refusal: so nobody waits for it, and all learn why.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from camshaft.distributed.encoding import CPU, bytes_of

ROW = 512
"""Bytes of a row."""
_HEAD = struct.Struct("<qq")
ROOM = ROW - _HEAD.size
"""Bytes of a value that fit into its row."""

_REFUSAL = b"!"[0]
_ERRORS = {"TypeError": TypeError, "ValueError": ValueError}


class Parcel:
    """Bytes that a backend moves.

    Args:
        content: the bytes; on the CPU the tensor is this very memory.
        device: where the backend takes them from.
        dtype: as what it takes them.

    Attributes:
        tensor: what is moved.
    """

    __slots__ = ("_content", "_is_here", "tensor")

    def __init__(self, content: bytearray, device: torch.device, dtype: torch.dtype = torch.uint8) -> None:
        self._content = content
        self._is_here = device == CPU
        self.tensor = torch.frombuffer(content, dtype=dtype)
        if not self._is_here:
            self.tensor = self.tensor.to(device)

    def read(self, moved: Tensor | None = None) -> memoryview:
        """Give the bytes that are in the tensor now, or in what the backend gave in its place."""
        return memoryview(self._content if self._is_here else bytes_of(self.tensor if moved is None else moved))


def refusal(error: TypeError | ValueError, rank: int) -> bytes:
    """Write down, in place of a value, why a rank has none."""
    text = f"!{type(error).__name__}:rank {rank} takes no part in this: {error}"
    return text.encode("utf-8", "replace")[:ROOM]


def rows_of(data: Sequence[bytes], device: torch.device) -> Parcel:
    """Write values as rows, one after the other."""
    longest = len(data[0]) if len(data) == 1 else max(map(len, data))
    rows = bytearray(ROW * len(data))
    start = 0
    for one in data:
        _HEAD.pack_into(rows, start, len(one), longest)
        start += _HEAD.size
        rows[start : start + min(len(one), ROOM)] = one[:ROOM]
        start += ROOM
    return Parcel(rows, device)


def read_rows(flat: memoryview) -> tuple[list[memoryview], list[int], int]:
    """Read rows: the part of each value that is in its row, the lengths of the values, and the greatest of those.

    Raises:
        TypeError, ValueError: one of them is a refusal, of a rank that met this error.
    """
    contents, lengths, longest = [], [], 0
    for start in range(0, len(flat), ROW):
        length, of_sender = _HEAD.unpack_from(flat, start)
        begin = start + _HEAD.size
        content = flat[begin : begin + min(length, ROOM)]
        if content[0] == _REFUSAL:
            name, _, text = str(content[1:], "utf-8", "replace").partition(":")
            raise _ERRORS[name](text)
        contents.append(content)
        lengths.append(length)
        if of_sender > longest:
            longest = of_sender
    return contents, lengths, longest


def whole(data: bytes, size: int, device: torch.device) -> Parcel:
    """Give a value filled up to ``size`` bytes."""
    return Parcel(bytearray(data) if len(data) == size else bytearray(data.ljust(size, b"\0")), device)


def empty(size: int, device: torch.device) -> Parcel:
    """Give room for so many bytes."""
    return Parcel(bytearray(size), device)
