"""Values of any kind as bytes: their kind first, then their content.

Numbers and strings have a short form of their own, dense tensors travel as they lie in memory, all else is pickled.
"""

from __future__ import annotations

import ctypes
import pickle
import reprlib
import struct
from typing import Any

import torch
from torch import Tensor

CPU = torch.device("cpu")

_BOOL, _INT, _FLOAT, _TEXT, _TENSOR, _PICKLE = b"bifstp"
_WHOLE, _REAL = struct.Struct("<cq"), struct.Struct("<cd")
_PLAIN = (Tensor, torch.nn.Parameter)


def encode(value: Any) -> bytes:
    """Write a value as bytes.

    Raises:
        TypeError: it cannot be pickled, or is a tensor without content.

    >>> decode(encode(16777217)), decode(encode("größer")), decode(encode({"a": [1, None]}))
    (16777217, 'größer', {'a': [1, None]})
    """
    kind = type(value)
    if kind is int and -(2**63) <= value < 2**63:
        return _WHOLE.pack(b"i", value)
    if kind is float:
        return _REAL.pack(b"f", value)
    if kind is str:
        return b"s" + str(value).encode("utf-8", "surrogatepass")
    if kind is bool:
        return b"b\1" if value else b"b\0"
    if kind in _PLAIN and is_dense(value):
        return b"t" + layout_of(value) + bytes_of(value)
    if isinstance(value, Tensor) and value.is_meta:  # it can be pickled, but put on no other device
        raise TypeError(f"a tensor to exchange must hold values, got one on {value.device}")
    try:
        return b"p" + pickle.dumps(value)
    except Exception as error:
        raise TypeError(f"a value to exchange must be picklable, got {reprlib.repr(value)}: {error}") from error


def decode(data: bytes | memoryview) -> Any:
    """Read a value that :func:`encode` wrote; a tensor is on the CPU.

    Raises:
        TypeError: it cannot be unpickled here.
    """
    kind = data[0]
    if kind == _INT:
        return _WHOLE.unpack(data)[1]
    if kind == _FLOAT:
        return _REAL.unpack(data)[1]
    content = memoryview(data)[1:]
    if kind == _TEXT:
        return str(content, "utf-8", "surrogatepass")
    if kind == _BOOL:
        return content[0] == 1
    if kind == _TENSOR:
        return _read_tensor(content)
    assert kind == _PICKLE
    try:
        return pickle.loads(content)  # from a rank of this job, which runs our code anyway
    except Exception as error:
        raise TypeError(f"a value cannot be unpickled here, though it could be pickled: {error}") from error


def is_dense(tensor: Tensor) -> bool:
    """Say whether a tensor is elements side by side in memory, as opposed to sparse, quantized, meta or nested.

    >>> is_dense(torch.ones(2)), is_dense(torch.eye(2).to_sparse())
    (True, False)
    """
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta and not tensor.is_nested


def layout_of(tensor: Tensor) -> bytes:
    """Write down dtype and shape.

    >>> layout_of(torch.ones(2, 3))
    b'float32 2 3\\n'
    """
    return " ".join([str(tensor.dtype).removeprefix("torch."), *map(str, tensor.shape)]).encode() + b"\n"


def read_layout(text: bytes) -> tuple[torch.dtype, list[int]]:
    """Read what :func:`layout_of` wrote.

    >>> read_layout(b"float32 2 3\\n")
    (torch.float32, [2, 3])
    """
    name, *sizes = text.decode().split()
    return getattr(torch, name), [int(size) for size in sizes]


def bytes_of(tensor: Tensor) -> bytes:
    """Give the bytes of a dense tensor, row by row.

    >>> bytes_of(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8))
    b'\\x01\\x02\\x03\\x04'
    """
    here = tensor if tensor.is_cpu else tensor.cpu()
    if here.is_conj() or here.is_neg():
        here = here.resolve_conj().resolve_neg()
    here = here.contiguous()
    return ctypes.string_at(here.data_ptr(), here.nbytes)


def to_bytes(rows: Tensor) -> list[bytes]:
    """Give the bytes of each row of a matrix."""
    return [bytes_of(row) for row in rows.unbind()]


def _read_tensor(content: memoryview) -> Tensor:
    begin = bytes(content[:4096]).index(b"\n") + 1
    dtype, shape = read_layout(bytes(content[:begin]))
    if begin == len(content):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content[begin:]), dtype=dtype).view(shape)
