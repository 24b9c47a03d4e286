"""Exchange values of any kind on top of a backend that moves tensors.

A value that cannot be sent is found out before anything is sent, and a refusal is sent in its place: all ranks raise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from camshaft.distributed.backend import Backend, Group
from camshaft.distributed.values.serialization import (
    ROOM,
    ROW,
    Buffer,
    bytes_of,
    decode,
    decode_layout,
    empty,
    encode,
    encode_layout,
    is_dense,
    padded,
    read_rows,
    refusal,
    rows_of,
)
from camshaft.errors import annotate

Wrong = TypeError | ValueError | None
"""Why this rank cannot take part; all ranks raise it."""
_LAYOUT = ord("T")  # a tensor's dtype and shape; its content follows

# --- tensors -----------------------------------------------------------------------------------------------


def brought(backend: Backend, tensor: Tensor) -> Tensor:
    """Return a tensor on the device and in the layout that the backend works on, without its graph.

    Raises:
        TypeError: it is sparse, quantized, nested or on ``meta``.
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
    """Operate on the tensor itself if possible, else on a copy whose result is copied back.

    Raises:
        TypeError: as for :func:`brought`.
        ValueError: several elements share memory.
    """
    here = brought(backend, tensor)
    if here is not tensor and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        raise ValueError(
            "tensor must have its own memory for each element, got one that was expanded to "
            f"{tuple(tensor.shape)}: make it contiguous first"
        )
    result = operate(here, *arguments)
    if result is tensor:
        return tensor
    if result.data_ptr() != tensor.data_ptr() or result.device != tensor.device:
        with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
            tensor.copy_(result)
    return tensor


# --- values ------------------------------------------------------------------------------------------------


def all_gather_values(backend: Backend, value: Any, group: Group | None, wrong: Wrong = None) -> list[Any]:
    """Return the values of all ranks, each with its own type."""
    data, wrong = _encoded(backend, [value], wrong)
    contents, lengths, longest = _gathered_rows(backend, data, group, wrong)
    if longest > ROOM:
        flat = _gathered(backend, padded(data[0], longest, backend.carrier), longest, group)
        contents = _cut(flat, longest, lengths)
    return _decoded(backend, contents, group)


def gather_values(backend: Backend, value: Any, dst: int, group: Group | None) -> list[Any] | None:
    """Return the values of all ranks on rank ``dst``; an error is raised on all ranks."""
    data, wrong = _encoded(backend, [value])
    contents, lengths, longest = _gathered_rows(backend, data, group, wrong)
    here = backend.topology.rank == dst
    if longest > ROOM:
        stacked = backend.gather(padded(data[0], longest, backend.carrier).tensor, dst, group)
        contents = _cut(memoryview(bytes_of(stacked)), longest, lengths) if here else []
    return _decoded(backend, contents, group) if here else None


def broadcast_value(backend: Backend, value: Any, src: int, group: Group | None, wrong: Wrong = None) -> Any:
    """Return the value of rank ``src``, on that rank the very object."""
    here = backend.topology.rank == src
    data = []
    if here and isinstance(value, Tensor) and is_dense(value) and value.nbytes > ROOM // 2:
        data = [b"T" + encode_layout(value)]
    elif here:
        data, wrong = _encoded(backend, [value], wrong)
    row = rows_of(data, backend.carrier) if here else empty(ROW, backend.carrier)
    (content,), (length,), _ = _read(row.read(backend.broadcast(row.tensor, src, group)), wrong)
    if content[0] == _LAYOUT:
        if here:
            backend.broadcast(brought(backend, value), src, group)
            return value
        dtype, shape = decode_layout(bytes(content[1:]))
        return backend.broadcast(torch.empty(shape, dtype=dtype, device=backend.device), src, group)
    if length > ROOM:
        rest = padded(data[0], length, backend.carrier) if here else empty(length, backend.carrier)
        content = rest.read(backend.broadcast(rest.tensor, src, group))
    return value if here else _placed(decode(content), backend)


def scatter_values(backend: Backend, values: Sequence[Any], src: int, group: Group | None, wrong: Wrong = None) -> Any:
    """Return this rank's of the values that rank ``src`` has, in the order of the ranks in the group."""
    here = backend.topology.rank == src
    data, wrong = _encoded(backend, values, wrong) if here else ([], None)
    rows = rows_of(data, backend.carrier).tensor.view(-1, ROW) if here else None
    row = empty(ROW, backend.carrier)
    (content,), (length,), longest = _read(row.read(backend.scatter(rows, row.tensor, src, group)), wrong)
    if longest > ROOM:
        stacked = torch.stack([padded(one, longest, backend.carrier).tensor for one in data]) if here else None
        own = empty(longest, backend.carrier)
        content = own.read(backend.scatter(stacked, own.tensor, src, group))[:length]
    return _placed(decode(content), backend)


def all_to_all_values(backend: Backend, values: Sequence[Any], group: Group | None, wrong: Wrong = None) -> list[Any]:
    """Send the k-th value to the k-th rank, and return the values meant for this rank."""
    data, wrong = _encoded(backend, values, wrong)
    ones = [1] * len(data)
    rows = backend.all_to_all(rows_of(data, backend.carrier).tensor.view(-1, ROW), ones, ones, group)
    contents, lengths, longest = _read(memoryview(bytes_of(rows)), wrong)
    if longest > ROOM:
        joined = b"".join(data)
        sent = padded(joined, len(joined), backend.carrier).tensor
        flat = memoryview(bytes_of(backend.all_to_all(sent, [len(one) for one in data], lengths, group)))
        contents = [flat[end - length : end] for end, length in zip(accumulate(lengths), lengths, strict=True)]
    return [_placed(one, backend) for one in _decoded(backend, contents, group)]


def _encoded(backend: Backend, values: Sequence[Any], wrong: Wrong = None) -> tuple[list[bytes], Wrong]:
    """Return the values as bytes; if one cannot be encoded, a refusal for each, and why."""
    if wrong is None:
        try:
            return [encode(value) for value in values], None
        except TypeError as error:
            wrong = error
    return [refusal(wrong, backend.topology.rank)] * len(values), wrong


def _gathered(backend: Backend, sent: Buffer, length: int, group: Group | None) -> memoryview:
    """Return the bytes of all ranks, one after the other; each sends ``length`` bytes."""
    received = empty(len(backend.members(group)) * length, backend.carrier)
    backend.all_gather_into(received.tensor, sent.tensor, group)
    return received.read()


def _gathered_rows(
    backend: Backend, data: list[bytes], group: Group | None, wrong: Wrong
) -> tuple[list[memoryview], list[int], int]:
    return _read(_gathered(backend, rows_of(data, backend.carrier), ROW, group), wrong)


def _read(rows: memoryview, wrong: Wrong) -> tuple[list[memoryview], list[int], int]:
    """Read rows, unless something is wrong on this rank."""
    if wrong is not None:
        raise wrong
    return read_rows(rows)


def _cut(flat: memoryview, size: int, lengths: Sequence[int]) -> list[memoryview]:
    return [flat[size * place : size * place + length] for place, length in enumerate(lengths)]


def _decoded(backend: Backend, contents: Sequence[memoryview], group: Group | None) -> list[Any]:
    values: list[Any] = []
    try:
        for content in contents:
            values.append(decode(content))
    except TypeError as error:
        annotate(error, f"the value is that of rank {backend.members(group)[len(values)]}")
        raise
    return values


def _placed(value: Any, backend: Backend) -> Any:
    return value.to(backend.device) if isinstance(value, Tensor) else value
