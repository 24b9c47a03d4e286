"""Debug mode: before each collective the ranks compare, through the store, what they are about to do."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import Tensor

from camshaft.distributed.backend import Backend
from camshaft.errors import RankDivergenceError

_PACKAGE = str(Path(__file__).parent)
_FIELDS = ("collective", "op", "value", "line")

_SECONDS = 5.0

_seconds: float | None = None
_numbers: Counter[tuple[int, ...]] = Counter()


def enable(seconds: float | None) -> None:
    """Turn the comparison on, with the seconds to wait for a missing rank, or (``None``) off."""
    global _seconds
    _seconds = seconds
    _numbers.clear()


def enable_if(wanted: bool | None) -> None:
    """Turn the comparison on if the user or ``CAMSHAFT_DEBUG`` wants it."""
    if wanted is None:
        wanted = os.environ.get("CAMSHAFT_DEBUG", "0") not in ("", "0", "false", "False")
    enable(_SECONDS if wanted else None)


def enabled() -> bool:
    """Say whether the comparison is on."""
    return _seconds is not None


def describe(collective: str, value: Any, op: str | None) -> dict[str, str]:
    """Write down what this rank is about to do, and on which line of the user's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    line = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    kind = f"tensor {value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    return {"collective": collective, "op": op or "", "value": kind, "line": line}


def check(backend: Backend, ranks: tuple[int, ...], mine: dict[str, str]) -> None:
    """Compare with the other ranks of a group.

    Raises:
        RankDivergenceError: one does something else, or nothing in time; with a table of who does what.
    """
    store = backend.store()
    if store is None or _seconds is None or len(ranks) == 1:
        return
    number = _numbers[ranks]
    _numbers[ranks] += 1
    prefix = f"camshaft/agreement/{','.join(map(str, ranks))}/{number}"
    store.set(f"{prefix}/{backend.topology.rank}", json.dumps(mine))
    rows = {rank: _read(store, f"{prefix}/{rank}", timedelta(seconds=_seconds)) for rank in ranks}
    said = [row for row in rows.values() if row is not None]
    if len(said) < len(ranks) or any(row[field] != mine[field] for row in said for field in _FIELDS[:3]):
        raise RankDivergenceError("the ranks do different things:\n" + _table(rows))


def _read(store: Any, key: str, limit: timedelta) -> dict[str, str] | None:
    try:
        store.wait([key], limit)
    except RuntimeError:  # torch's own kinds of it, all for a time that ran out
        return None
    found: dict[str, str] = json.loads(store.get(key))
    return found


def _table(rows: dict[int, dict[str, str] | None]) -> str:
    lines = [("rank", *_FIELDS)]
    for rank, row in rows.items():
        lines.append((str(rank), *((row[field] for field in _FIELDS) if row else ("nothing in time", "", "", ""))))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
