"""Numbers, strings and objects as tensors, so that backends need to move tensors only.

A value travels as one row of bytes of fixed length: its kind, its length, and its first bytes. What is
longer follows in a second exchange, of which all ranks know the size by then. So a number, a short string or a
small object takes one exchange, and nothing takes more than two.
"""

from __future__ import annotations

import ctypes
import pickle
import struct
from typing import Any

import torch
from torch import Tensor

_HEAD = struct.Struct("<qq")
ROW = 512
"""Bytes of a row."""
_ROOM = ROW - _HEAD.size


def encode(value: Any) -> bytes:
    """Write a value as bytes, its kind first.

    Raises:
        TypeError: it cannot be pickled.

    >>> decode(encode(16777217)), decode(encode("größer")), decode(encode({"a": [1, None]}))
    (16777217, 'größer', {'a': [1, None]})
    """
    if type(value) is bool:
        return b"b" + struct.pack("<?", value)
    if type(value) is int and -(2**63) <= value < 2**63:
        return b"i" + struct.pack("<q", value)
    if type(value) is float:
        return b"f" + struct.pack("<d", value)
    if type(value) is str:
        return b"s" + value.encode("utf-8", "surrogatepass")
    try:
        return b"p" + pickle.dumps(value)
    except Exception as error:
        raise TypeError(f"a value to exchange must be picklable, got {value!r}: {error}") from error


def decode(data: bytes) -> Any:
    """Read a value that :func:`encode` wrote."""
    kind, content = data[:1], data[1:]
    if kind == b"b":
        return struct.unpack("<?", content)[0]
    if kind == b"i":
        return struct.unpack("<q", content)[0]
    if kind == b"f":
        return struct.unpack("<d", content)[0]
    if kind == b"s":
        return content.decode("utf-8", "surrogatepass")
    return pickle.loads(content)  # from a rank of this job, which runs our code anyway


def rows_of(data: list[bytes], device: torch.device) -> Tensor:
    """Write values as rows, of shape ``(len(data), ROW)``; each also tells the length of the longest of them."""
    longest = max(map(len, data))
    rows = bytearray(b"".join((_HEAD.pack(len(one), longest) + one[:_ROOM]).ljust(ROW, b"\0") for one in data))
    return torch.frombuffer(rows, dtype=torch.uint8).view(len(data), ROW).to(device)


def read_rows(rows: Tensor) -> tuple[list[bytes], list[int], int]:
    """Read rows: the part of each value that is in its row, the bytes that follow, and the longest of those."""
    contents, rests, longest_rest = [], [], 0
    for row in to_bytes(rows.reshape(-1, ROW)):
        length, longest = _HEAD.unpack_from(row)
        contents.append(row[_HEAD.size : _HEAD.size + length])
        rests.append(max(0, length - _ROOM))
        longest_rest = max(longest_rest, longest - _ROOM)
    return contents, rests, longest_rest


def rest_of(data: bytes, size: int, device: torch.device) -> Tensor:
    """Give what did not fit into the row of a value, filled up to ``size`` bytes."""
    return torch.frombuffer(bytearray(data[_ROOM:].ljust(size, b"\0")), dtype=torch.uint8).to(device)


def to_bytes(rows: Tensor) -> list[bytes]:
    """Give the bytes of each row of a matrix."""
    here = rows.cpu().contiguous()
    size = here.shape[1]
    flat = ctypes.string_at(here.data_ptr(), here.numel())
    return [flat[start : start + size] for start in range(0, len(flat), size)]
