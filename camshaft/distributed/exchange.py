"""Exchanges of values of any kind, on top of a backend that moves tensors.

Whatever is wrong with a value is found out before anything is sent, and sent in place of it: all ranks raise then.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from camshaft.distributed.backend import Backend, Group
from camshaft.distributed.encoding import bytes_of, decode, encode, is_dense, layout_of, read_layout
from camshaft.distributed.placement import brought
from camshaft.distributed.rows import ROOM, ROW, Parcel, empty, read_rows, refusal, rows_of, whole
from camshaft.errors import annotate

Wrong = TypeError | ValueError | None
_LAYOUT = ord("T")  # a tensor's dtype and shape; its content follows


def all_gather_values(backend: Backend, value: Any, group: Group | None, wrong: Wrong = None) -> list[Any]:
    """Give every rank the values of all, each with its own type, or say what is wrong with this rank's."""
    data, wrong = _encoded(backend, [value], wrong)
    contents, lengths, longest = _gathered_rows(backend, rows_of(data, backend.carrier), group, wrong)
    if longest > ROOM:
        flat = _gathered(backend, whole(data[0], longest, backend.carrier), longest, group)
        contents = _cut(flat, longest, lengths)
    return _decoded(backend, contents, group)


def gather_values(backend: Backend, value: Any, dst: int, group: Group | None) -> list[Any] | None:
    """Give one rank the values of all; all learn whether they can be sent."""
    data, wrong = _encoded(backend, [value])
    contents, lengths, longest = _gathered_rows(backend, rows_of(data, backend.carrier), group, wrong)
    here = backend.topology.rank == dst
    if longest > ROOM:
        stacked = backend.gather(whole(data[0], longest, backend.carrier).tensor, dst, group)
        contents = _cut(memoryview(bytes_of(stacked)), longest, lengths) if here else []
    return _decoded(backend, contents, group) if here else None


def broadcast_value(backend: Backend, value: Any, src: int, group: Group | None, wrong: Wrong = None) -> Any:
    """Give every rank the value of one, or what is wrong with it; who sends a tensor gets that very tensor back."""
    here = backend.topology.rank == src
    data = []
    if here and isinstance(value, Tensor) and is_dense(value) and value.nbytes > ROOM // 2:
        data = [b"T" + layout_of(value)]
    elif here:
        data, wrong = _encoded(backend, [value], wrong)
    row = rows_of(data, backend.carrier) if here else empty(ROW, backend.carrier)
    (content,), (length,), _ = _read(row.read(backend.broadcast(row.tensor, src, group)), wrong)
    if content[0] == _LAYOUT:
        place = backend.broadcast(brought(backend, value) if here else _place_for(content, backend), src, group)
        return value if here else place
    if length > ROOM:
        rest = whole(data[0], length, backend.carrier) if here else empty(length, backend.carrier)
        content = rest.read(backend.broadcast(rest.tensor, src, group))
    return value if here else _placed(decode(content), backend)


def scatter_values(backend: Backend, values: Sequence[Any], src: int, group: Group | None, wrong: Wrong = None) -> Any:
    """Give every rank its own of the values that one holds, in the order of the ranks in the group."""
    here = backend.topology.rank == src
    data, wrong = _encoded(backend, values, wrong) if here else ([], None)
    rows = rows_of(data, backend.carrier).tensor.view(-1, ROW) if here else None
    row = empty(ROW, backend.carrier)
    (content,), (length,), longest = _read(row.read(backend.scatter(rows, row.tensor, src, group)), wrong)
    if longest > ROOM:
        wholes = torch.stack([whole(one, longest, backend.carrier).tensor for one in data]) if here else None
        own = empty(longest, backend.carrier)
        content = own.read(backend.scatter(wholes, own.tensor, src, group))[:length]
    return _placed(decode(content), backend)


def all_to_all_values(backend: Backend, values: Sequence[Any], group: Group | None, wrong: Wrong = None) -> list[Any]:
    """Give the k-th rank the k-th value, and return the values meant for this rank."""
    data, wrong = _encoded(backend, values, wrong)
    ones = [1] * len(data)
    rows = backend.all_to_all(rows_of(data, backend.carrier).tensor.view(-1, ROW), ones, ones, group)
    contents, lengths, longest = _read(memoryview(bytes_of(rows)), wrong)
    if longest > ROOM:
        joined = b"".join(data)
        sent = whole(joined, len(joined), backend.carrier).tensor
        flat = memoryview(bytes_of(backend.all_to_all(sent, [len(one) for one in data], lengths, group)))
        contents = [flat[end - length : end] for end, length in zip(accumulate(lengths), lengths, strict=True)]
    return [_placed(one, backend) for one in _decoded(backend, contents, group)]


def _encoded(backend: Backend, values: Sequence[Any], wrong: Wrong = None) -> tuple[list[bytes], Wrong]:
    """Encode values, or where that is impossible refuse all of them and say why."""
    if wrong is None:
        try:
            return [encode(value) for value in values], None
        except TypeError as error:
            wrong = error
    return [refusal(wrong, backend.topology.rank)] * len(values), wrong


def _gathered(backend: Backend, sent: Parcel, length: int, group: Group | None) -> memoryview:
    """Give the bytes of all ranks, one after the other, of which each sends so many."""
    received = empty(len(backend.members(group)) * length, backend.carrier)
    backend.all_gather_into(received.tensor, sent.tensor, group)
    return received.read()


def _gathered_rows(
    backend: Backend, row: Parcel, group: Group | None, wrong: Wrong
) -> tuple[list[memoryview], list[int], int]:
    return _read(_gathered(backend, row, ROW, group), wrong)


def _read(rows: memoryview, wrong: Wrong) -> tuple[list[memoryview], list[int], int]:
    """Read rows, if nothing was wrong here or elsewhere."""
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


def _place_for(layout: memoryview, backend: Backend) -> Tensor:
    dtype, shape = read_layout(bytes(layout[1:]))
    return torch.empty(shape, dtype=dtype, device=backend.device)


def _placed(value: Any, backend: Backend) -> Any:
    return value.to(backend.device) if isinstance(value, Tensor) else value
