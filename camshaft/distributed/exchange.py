"""Exchanges of values of any kind, on top of a backend that moves tensors."""

from __future__ import annotations

from typing import Any

import torch

from camshaft.distributed.backend import Backend, Group
from camshaft.distributed.encoding import ROW, decode, encode, read_rows, rest_of, rows_of, to_bytes


def all_gather_values(backend: Backend, value: Any, group: Group | None) -> list[Any]:
    """Give every rank the values of all, each with its own type."""
    data = encode(value)
    rows = backend.all_gather(rows_of([data], backend.device)[0], group)
    contents, rests, longest = read_rows(rows)
    if longest > 0:
        tails = to_bytes(backend.all_gather(rest_of(data, longest, backend.device), group))
        contents = [head + tail[:rest] for head, tail, rest in zip(contents, tails, rests, strict=True)]
    return [decode(content) for content in contents]


def broadcast_value(backend: Backend, value: Any, src: int, group: Group | None) -> Any:
    """Give every rank the value of one."""
    here = backend.topology.rank == src
    data = encode(value) if here else b""
    row = rows_of([data], backend.device) if here else torch.empty(1, ROW, dtype=torch.uint8, device=backend.device)
    contents, _, longest = read_rows(backend.broadcast(row, src, group))
    if longest > 0:
        rest = rest_of(data, longest, backend.device) if here else row.new_empty(longest)
        contents[0] += to_bytes(backend.broadcast(rest, src, group).view(1, -1))[0]
    return value if here else decode(contents[0])


def scatter_values(backend: Backend, values: list[Any] | None, src: int, group: Group | None) -> Any:
    """Give every rank its own of the values that one holds, in the order of the ranks in the group."""
    data = None if values is None else [encode(value) for value in values]
    rows = None if data is None else rows_of(data, backend.device)
    row = torch.empty(ROW, dtype=torch.uint8, device=backend.device)
    contents, rests, longest = read_rows(backend.scatter(rows, row, src, group).view(1, -1))
    if longest > 0:
        tails = None if data is None else torch.stack([rest_of(one, longest, backend.device) for one in data])
        tail = backend.scatter(tails, row.new_empty(longest), src, group)
        contents[0] += to_bytes(tail.view(1, -1))[0][: rests[0]]
    return decode(contents[0])


def all_to_all_values(backend: Backend, values: list[Any], group: Group | None) -> list[Any]:
    """Give the k-th rank the k-th value, and return the values meant for this rank."""
    data, ones = [encode(value) for value in values], [1] * len(values)
    rows = backend.all_to_all(rows_of(data, backend.device), ones, ones, group)
    contents, rests, longest = read_rows(rows)
    if longest > 0:
        tails = torch.stack([rest_of(one, longest, backend.device) for one in data])
        received = to_bytes(backend.all_to_all(tails, ones, ones, group))
        contents = [head + tail[:rest] for head, tail, rest in zip(contents, received, rests, strict=True)]
    return [decode(content) for content in contents]
