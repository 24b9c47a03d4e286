"""Debug mode: before each collective the ranks compare their calls, and raise if they differ.

For each call, a rank writes a row to the store, and reads the rows of the others. Ranks that never make the call are
left to the watcher, as outside debug mode.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from camshaft.distributed.backends.contract import Backend, Group, Resource
from camshaft.distributed.collectives.values import all_gather_values
from camshaft.distributed.failures.store import store_at, wait_for
from camshaft.distributed.failures.trace import DEBUG, Calls
from camshaft.distributed.failures.watcher import Watcher
from camshaft.errors import RankDivergenceError, line_of_caller
from camshaft.text import shortened_ranks, table

Row = dict[str, str]
"""What a rank calls."""

_COMPARED = ("collective", "ranks", "how", "root", "value")
_COLUMNS = (*_COMPARED, "line")


def enable(backend: Backend) -> None:
    """Compare all collectives of a job from now on; all ranks call this."""
    store = store_at(backend, backend.job.unique_name("collectives"))
    if store is not None:
        backend.job.resource(CollectiveCheck, backend, store)
    backend.job.compares_collectives = True


def enable_if(wanted: bool | None, backend: Backend) -> None:
    """Enable the debug mode if the user or the environment variable ``CAMSHAFT_DEBUG`` asks for it."""
    if wanted is None:
        wanted = os.environ.get("CAMSHAFT_DEBUG", "").lower() not in ("", "0", "false", "off", "no")
    if wanted:
        enable(backend)


def compare(
    backend: Backend,
    group: Group | None,
    ranks: Sequence[int],
    collective: str,
    value: Any = None,
    how: str = "",
    root: Any = None,
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

    Raises:
        RankDivergenceError: a rank calls something else, or times out; with a table of all calls.
        RankFailedError: a rank has failed or left.
    """
    mine = {
        "collective": collective,
        "ranks": "all" if len(ranks) == backend.topology.world_size else str(list(ranks)),
        "how": how,
        "root": "" if root is None else str(root),
        "value": _layout(value),
        "line": line_of_caller("distributed"),
    }
    if (check := backend.job.find(CollectiveCheck)) is not None:
        rows = check.exchange(getattr(group, "group_name", mine["ranks"]), ranks, mine)
    else:
        rows = dict(zip(ranks, all_gather_values(backend, mine, group), strict=True))
    if _differ(rows, mine):
        raise RankDivergenceError(f"the calls of the ranks differ:\n{_table(rows)}")


class CollectiveCheck(Resource):
    """Exchanges the calls of the ranks through the store of the job.

    Args:
        backend: of this rank.
        store: for this check alone.
    """

    def __init__(self, backend: Backend, store: Store) -> None:
        self._backend, self._store = backend, store
        self._calls = Calls()
        if (watcher := backend.job.find(Watcher)) is not None:
            watcher.add_calls(self._calls)

    def exchange(self, group: str, ranks: Sequence[int], mine: Row) -> dict[int, Row]:
        """Write this rank's call, and return those of all ranks of a group; if some differ, those known so far.

        Args:
            group: a name of the group, which tells it from others of the same ranks.
            ranks: of the group.
            mine: what this rank calls.

        Raises:
            RankDivergenceError: some ranks time out, or diverge elsewhere.
            RankFailedError: a rank has failed or left.
        """
        what, job, this = mine["collective"], self._backend.job, self._backend.topology.rank
        call = self._calls.begin(f"{DEBUG}{group}", ranks, what)
        number = call[1]
        keys = {rank: f"{group}/{number}/{rank}" for rank in ranks}
        here: dict[int, Row] = {}

        def known() -> dict[int, Row]:
            return {rank: here.get(rank, {"collective": "no call yet"}) for rank in ranks}

        def poll() -> dict[int, Row] | None:
            if job.verdict is not None:
                raise job.verdict()
            if not here:
                self._store.set(keys[this], json.dumps(mine))
            for rank in [rank for rank in ranks if rank not in here]:
                if self._store.check([keys[rank]]):
                    here[rank] = json.loads(self._store.get(keys[rank]))
            return known() if len(here) == len(ranks) or _differ(here, mine) else None

        def detail() -> str:
            return f"ranks {shortened_ranks(rank for rank in ranks if rank not in here)} in {what}:\n{_table(known())}"

        try:
            rows = wait_for(poll, self._store, what, ranks=ranks, rank=this, detail=detail, is_watched=True)
        finally:
            self._calls.end(call)
        if number > 2:  # all have written the call before this one, so they have read the one before that
            self._store.delete_key(f"{group}/{number - 2}/{this}")
        return rows


def _layout(value: Any) -> str:
    """Return dtype and shape of a tensor as text; of other values, ``""``."""
    if not isinstance(value, Tensor):
        return ""
    try:
        layout = [] if value.layout is torch.strided else [str(value.layout).removeprefix("torch.")]
        return " ".join([*layout, str(value.dtype), str(list(value.shape))])
    except Exception:  # a subclass of the user's
        return type(value).__name__


def _differ(rows: Mapping[int, Row], mine: Row) -> bool:
    return any(row.get(field) != mine[field] for row in rows.values() for field in _COMPARED)


def _table(rows: Mapping[int, Row]) -> str:
    columns = {name: {f"rank {rank}": row.get(name) or "-" for rank, row in rows.items()} for name in _COLUMNS}
    return table({name: cells for name, cells in columns.items() if set(cells.values()) != {"-"}})
