"""Format values as text: numbers and tensors for log lines, and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from numbers import Number, Real
from typing import Any

import torch

_MOST_ELEMENTS = 10


def table(columns: Mapping[str, Mapping[str, str]]) -> str:
    """Return a table with a column per mapping, and a row per key of any of them.

    >>> print(table({"horovodrun": {"rank": "HOROVOD_RANK=0"}, "environment": {"rank": "RANK=1", "world_size": "3"}}))
                horovodrun      environment
    rank        HOROVOD_RANK=0  RANK=1
    world_size  -               3
    """
    keys = list(dict.fromkeys(key for column in columns.values() for key in column))
    rows = [["", *columns], *([key, *(column.get(key, "-") for column in columns.values())] for key in keys)]
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as text, with columns of the same width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the singular or the plural.

    >>> counted(1, "epoch"), counted(0, "epoch"), counted(2, "batch"), counted(1000, "process")
    ('1 epoch', '0 epochs', '2 batches', '1000 processes')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith(('tch', 's')) else 's'}"


def to_str_list(data: Any) -> list[str]:
    """Format ``data`` as a flat list of texts.

    Numbers and 0-d tensors have 4 decimals; 1-d tensors are in brackets, truncated after 10 elements; tensors of more
    dimensions are shown by their shape. Items of a mapping are prefixed with ``key: ``. A sequence becomes one text,
    joined by commas; mappings inside a value become entries of their own, before it. ``None`` and empty values leave
    the bare ``key: ``, or nothing without a key. Strings and all other values are dropped.

    >>> to_str_list({"loss": 0.25, "size": (2, 3), "weight": torch.ones(2, 3), "name": "run"})
    ['loss: 0.2500', 'size: 2.0000, 3.0000', 'weight: Shape[2, 3]']
    """
    texts: list[str] = []
    if isinstance(data, Mapping):
        for key, value in data.items():
            texts += _entries(value, prefix=f"{key}: ")
        return texts
    return _entries(data, prefix="")


def _entries(value: Any, prefix: str) -> list[str]:
    """Return the entries of mappings inside ``value``, then that of ``value`` itself, if any."""
    nested: list[str] = []
    own = ", ".join(_own_texts(value, nested))
    has_entry = own or (prefix and (value is None or _is_container(value)))
    return [*nested, prefix + own] if has_entry else nested


def _own_texts(value: Any, nested: list[str]) -> Iterator[str]:
    """Yield the texts of ``value``; add those of mappings in it to ``nested`` instead."""
    if isinstance(value, Real):
        yield f"{float(value):.4f}"  # Fraction has no float format before Python 3.12
    elif isinstance(value, Number):
        yield f"{value:.4f}"
    elif isinstance(value, torch.Tensor):
        yield _tensor_text(value)
    elif isinstance(value, Mapping):
        nested += to_str_list(value)
    elif _is_container(value):
        for item in value:
            yield from _own_texts(item, nested)


def _is_container(value: Any) -> bool:
    return isinstance(value, (Mapping, Sequence)) and not isinstance(value, (str, bytes))


def _tensor_text(tensor: torch.Tensor) -> str:
    if tensor.ndim == 0:
        return f"{tensor.item():.4f}"
    if tensor.ndim > 1:
        return f"Shape{list(tensor.shape)}"
    texts = [f"{number:.4f}" for number in tensor[:_MOST_ELEMENTS].tolist()]
    return f"[{', '.join(texts + ['...'] * (len(tensor) > _MOST_ELEMENTS))}]"
