"""Debug mode: before each collective the ranks compare their calls, and raise if they differ or a rank has ended.

For each call, a rank writes a row to the store, and reads those of the others. It also keeps there what it called last,
for ranks that wait for it elsewhere.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from camshaft.distributed.backend import Backend, Group, Resource
from camshaft.distributed.coordination.waiting import store_at, wait_for
from camshaft.distributed.values import all_gather_values
from camshaft.errors import RankDivergenceError, line_of_caller
from camshaft.text import table

Row = dict[str, str]
"""What a rank calls."""

_COMPARED = ("collective", "ranks", "how", "root", "value")
_COLUMNS = (*_COMPARED, "line")
_ENDED = "has ended"


def enable(backend: Backend, patience: float = math.inf) -> None:
    """Compare all collectives of a job from now on.

    Args:
        backend: of the job.
        patience: seconds to wait for a rank; the timeout of the job is a limit as well.
    """
    disable(backend)
    store = store_at(backend, backend.job.unique_name("collectives"))
    if store is not None:  # at once, so that the others learn of it if this rank ends before its first collective
        backend.job.resource(CollectiveCheck, store, backend.topology.rank, patience)
    backend.job.compares_collectives = True


def enable_if(wanted: bool | None, backend: Backend) -> None:
    """Enable the debug mode if the user or ``CAMSHAFT_DEBUG`` asks for it, whose value may be the patience."""
    text = os.environ.get("CAMSHAFT_DEBUG", "")
    if wanted is None:
        wanted = text.lower() not in ("", "0", "false", "off", "no")
    if wanted:
        seconds = float(text) if text.replace(".", "", 1).isdigit() else 0.0
        enable(backend, seconds if seconds > 1 else math.inf)


def disable(backend: Backend) -> None:
    """Stop comparing the collectives of a job; the other ranks see this one as ended."""
    backend.job.compares_collectives = False
    backend.job.release(CollectiveCheck)


def compare(
    backend: Backend,
    group: Group | None,
    ranks: Sequence[int],
    collective: str,
    value: Any = None,
    how: str = "",
    root: Any = None,
    is_long: bool = False,
) -> None:
    """Compare a call with those of the other ranks.

    Args:
        backend: of this rank.
        group: the group, ``None`` for all ranks.
        ranks: the ranks of the group.
        collective: its name.
        value: a tensor with the same shape and dtype on all ranks; other kinds of values may differ.
        how: what else is the same on all ranks, for example the reduction.
        root: the rank that sends, or that receives the result.
        is_long: some ranks may take long to reach the call, so there is no patience limit.

    Raises:
        RankDivergenceError: a rank calls something else, has ended, or times out; with a table of all calls.
    """
    mine = {
        "collective": collective,
        "ranks": "all" if len(ranks) == backend.topology.world_size else str(list(ranks)),
        "how": how,
        "root": "" if root is None else str(root),
        "value": _layout(value) if isinstance(value, Tensor) else "",
        "line": line_of_caller("distributed"),
    }
    if backend.job.has(CollectiveCheck):
        rows = backend.job.resource(CollectiveCheck).exchange(ranks, mine, is_long)
    else:
        rows = dict(zip(ranks, all_gather_values(backend, mine, group), strict=True))
    if _differ(rows, mine):
        raise RankDivergenceError(f"the calls of the ranks differ:\n{_table(rows)}")


class CollectiveCheck(Resource):
    """Exchanges the calls of the ranks through the store of the job.

    Args:
        store: for this check alone.
        rank: of this process.
        patience: seconds to wait for a rank.
    """

    def __init__(self, store: Store, rank: int, patience: float = math.inf) -> None:
        self._store, self._rank, self._patience = store, rank, patience
        self._num_calls = Counter[str]()  # of each group

    def exchange(self, ranks: Sequence[int], mine: Row, is_long: bool) -> dict[int, Row]:
        """Write this rank's call, and return those of all ranks of a group; if some differ, those known so far.

        Raises:
            RankDivergenceError: some ranks time out.
        """
        group, what = mine["ranks"], mine["collective"]
        self._num_calls[group] += 1
        number = self._num_calls[group]
        keys = {rank: f"{group}/{number}/{rank}" for rank in ranks}
        here: dict[int, Row] = {}

        def known() -> dict[int, Row]:
            return {rank: here.get(rank) or self._read(str(rank)) or {"collective": "no call yet"} for rank in ranks}

        def poll() -> dict[int, Row] | None:
            if not here:
                self._write(keys[self._rank], mine)
                self._write(str(self._rank), {**mine, "collective": f"last in {what}"})
            for rank in [rank for rank in ranks if rank not in here]:
                if row := self._read(keys[rank]):
                    here[rank] = row
            rows = known()
            has_ended = any(row["collective"].startswith(_ENDED) for row in rows.values())
            return rows if len(here) == len(ranks) or has_ended or _differ(here, mine) else None

        def detail() -> str:
            return f"ranks {[rank for rank in ranks if rank not in here]} in {what}:\n{_table(known())}"

        limit = math.inf if is_long else self._patience
        try:
            rows = wait_for(poll, self._store, what, ranks=ranks, rank=self._rank, detail=detail, patience=limit)
        except RankDivergenceError:
            with suppress(RuntimeError):  # ranks that arrive later learn that this one has timed out
                self._write(keys[self._rank], {**mine, "collective": f"timed out in {what}"})
            raise
        if number > 2:  # all have written the call before this one, so they have read the one before that
            self._store.delete_key(f"{group}/{number - 2}/{self._rank}")
        return rows

    def close(self) -> None:
        """Announce that this rank has ended."""
        with suppress(RuntimeError):  # the process that serves the store has ended already
            last = self._read(str(self._rank))
            text = f"{_ENDED}, {last['collective']}" if last else _ENDED
            self._write(str(self._rank), {**(last or {}), "collective": text})

    def _write(self, key: str, row: Row) -> None:
        self._store.set(key, json.dumps(row))

    def _read(self, key: str) -> Row | None:
        row: Row | None = json.loads(self._store.get(key)) if self._store.check([key]) else None
        return row


def _differ(rows: Mapping[int, Row], mine: Row) -> bool:
    return any(row.get(field) != mine[field] for row in rows.values() for field in _COMPARED)


def _layout(tensor: Tensor) -> str:
    layout = [] if tensor.layout is torch.strided else [str(tensor.layout).removeprefix("torch.")]
    return " ".join([*layout, str(tensor.dtype), str(list(tensor.shape))])


def _table(rows: Mapping[int, Row]) -> str:
    columns = {name: {f"rank {rank}": row.get(name) or "-" for rank, row in rows.items()} for name in _COLUMNS}
    return table({name: cells for name, cells in columns.items() if set(cells.values()) != {"-"}})
