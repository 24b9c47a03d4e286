"""Values of any kind as bytes, and bytes of any length as tensors of one length that all ranks know beforehand.

Numbers and strings have a short encoding, dense tensors are copied as they lie in memory, everything else is pickled.

A value travels as a row: its length, that of the longest value its sender sends, and its first bytes. If the longest
of all does not fit, all are sent again in full, in a second exchange whose size every rank knows by then. A rank that
cannot send its value sends a refusal instead, so that no rank waits for it and all raise its error.
"""

from __future__ import annotations

import ctypes
import pickle
import reprlib
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

CPU = torch.device("cpu")

_BOOL, _INT, _FLOAT, _TEXT, _TENSOR, _PICKLE = b"bifstp"
_INT_FORMAT, _FLOAT_FORMAT = struct.Struct("<cq"), struct.Struct("<cd")
_PLAIN = (Tensor, torch.nn.Parameter)


def encode(value: Any) -> bytes:
    """Return a value as bytes.

    Raises:
        TypeError: it cannot be pickled, or is a tensor without data.

    >>> decode(encode(16777217)), decode(encode("größer")), decode(encode({"a": [1, None]}))
    (16777217, 'größer', {'a': [1, None]})
    """
    kind = type(value)
    if kind is int and -(2**63) <= value < 2**63:
        return _INT_FORMAT.pack(b"i", value)
    if kind is float:
        return _FLOAT_FORMAT.pack(b"f", value)
    if kind is str:
        return b"s" + str(value).encode("utf-8", "surrogatepass")
    if kind is bool:
        return b"b\1" if value else b"b\0"
    if kind in _PLAIN and is_dense(value):
        return b"t" + encode_layout(value) + bytes_of(value)
    if isinstance(value, Tensor) and value.is_meta:  # it can be pickled, but not moved to another device
        raise TypeError(f"a tensor to exchange must hold values, got one on {value.device}")
    try:
        return b"p" + pickle.dumps(value)
    except Exception as error:
        raise TypeError(f"a value to exchange must be picklable, got {reprlib.repr(value)}: {error}") from error


def decode(data: bytes | memoryview) -> Any:
    """Return the value that :func:`encode` was given; a tensor is on the CPU.

    Raises:
        TypeError: it cannot be unpickled here.
    """
    kind = data[0]
    if kind == _INT:
        return _INT_FORMAT.unpack(data)[1]
    if kind == _FLOAT:
        return _FLOAT_FORMAT.unpack(data)[1]
    content = memoryview(data)[1:]
    if kind == _TEXT:
        return str(content, "utf-8", "surrogatepass")
    if kind == _BOOL:
        return content[0] == 1
    if kind == _TENSOR:
        begin = bytes(content[:4096]).index(b"\n") + 1
        dtype, shape = decode_layout(bytes(content[:begin]))
        if begin == len(content):
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(content[begin:]), dtype=dtype).view(shape)
    assert kind == _PICKLE
    try:
        return pickle.loads(content)  # from a rank of this job, which runs our code anyway
    except Exception as error:
        raise TypeError(f"a value cannot be unpickled here, though it could be pickled: {error}") from error


def is_dense(tensor: Tensor) -> bool:
    """Return True if the elements of a tensor lie in memory: it is not sparse, quantized, nested or on ``meta``.

    >>> is_dense(torch.ones(2)), is_dense(torch.eye(2).to_sparse())
    (True, False)
    """
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta and not tensor.is_nested


def encode_layout(tensor: Tensor) -> bytes:
    """Return dtype and shape as a line.

    >>> encode_layout(torch.ones(2, 3))
    b'float32 2 3\\n'
    """
    return " ".join([str(tensor.dtype).removeprefix("torch."), *map(str, tensor.shape)]).encode() + b"\n"


def decode_layout(text: bytes) -> tuple[torch.dtype, list[int]]:
    """Return the dtype and shape that :func:`encode_layout` was given.

    >>> decode_layout(b"float32 2 3\\n")
    (torch.float32, [2, 3])
    """
    name, *sizes = text.decode().split()
    return getattr(torch, name), [int(size) for size in sizes]


def bytes_of(tensor: Tensor) -> bytes:
    """Return the elements of a dense tensor in row-major order.

    >>> bytes_of(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8))
    b'\\x01\\x02\\x03\\x04'
    """
    here = tensor if tensor.is_cpu else tensor.cpu()
    if here.is_conj() or here.is_neg():
        here = here.resolve_conj().resolve_neg()
    here = here.contiguous()
    return ctypes.string_at(here.data_ptr(), here.nbytes)


# --- rows --------------------------------------------------------------------------------------------------

ROW = 512
"""Bytes of a row."""
_HEAD = struct.Struct("<qq")
ROOM = ROW - _HEAD.size
"""Bytes of a value that fit into its row."""

_REFUSAL = b"!"[0]
_ERRORS = {"TypeError": TypeError, "ValueError": ValueError}


class Buffer:
    """Bytes that a backend moves.

    Args:
        content: the bytes; on the CPU the tensor shares their memory.
        device: the device that the backend moves them from and to.
        dtype: of the tensor.

    Attributes:
        tensor: what the backend moves.
    """

    __slots__ = ("_content", "_is_here", "tensor")

    def __init__(self, content: bytearray, device: torch.device, dtype: torch.dtype = torch.uint8) -> None:
        self._content = content
        self._is_here = device == CPU
        self.tensor = torch.frombuffer(content, dtype=dtype)
        if not self._is_here:
            self.tensor = self.tensor.to(device)

    def read(self, moved: Tensor | None = None) -> memoryview:
        """Return the bytes in the tensor now, or in the one that the backend returned in its place."""
        return memoryview(self._content if self._is_here else bytes_of(self.tensor if moved is None else moved))


def refusal(error: TypeError | ValueError, rank: int) -> bytes:
    """Return what a rank sends in place of a value that it cannot send."""
    text = f"!{type(error).__name__}:rank {rank} cannot take part: {error}"
    return text.encode("utf-8", "replace")[:ROOM]


def rows_of(data: Sequence[bytes], device: torch.device) -> Buffer:
    """Return values as rows, one after the other."""
    longest = len(data[0]) if len(data) == 1 else max(map(len, data))
    rows = bytearray(ROW * len(data))
    start = 0
    for one in data:
        _HEAD.pack_into(rows, start, len(one), longest)
        start += _HEAD.size
        rows[start : start + min(len(one), ROOM)] = one[:ROOM]
        start += ROOM
    return Buffer(rows, device)


def read_rows(flat: memoryview) -> tuple[list[memoryview], list[int], int]:
    """Return the bytes of each value that fit into its row, the lengths of the values, and the greatest length.

    Raises:
        TypeError, ValueError: one of the rows is a refusal; the error of the rank that sent it.
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


def padded(data: bytes, size: int, device: torch.device) -> Buffer:
    """Return a value padded to ``size`` bytes."""
    return Buffer(bytearray(data) if len(data) == size else bytearray(data.ljust(size, b"\0")), device)


def empty(size: int, device: torch.device) -> Buffer:
    """Return a buffer to receive into."""
    return Buffer(bytearray(size), device)
