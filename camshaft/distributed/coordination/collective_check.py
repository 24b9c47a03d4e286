"""Debug mode: before each collective the ranks compare their calls, and raise if they differ or a rank cannot come.

Each rank writes to the store what it is about to call: under two keys per group, for this call and the one before,
which slower ranks may still read; and under one key that says where the rank is now.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from camshaft.distributed.backend import Backend, Group, Resource
from camshaft.distributed.values.exchange import all_gather_values
from camshaft.errors import RankDivergenceError, line_of_caller

Row = dict[str, str]
"""A row of the table: what a rank calls."""
Waiting = dict[int, tuple[str, frozenset[int]]]
"""For each rank the call in which it waits, and the ranks that it waits for."""

_COMPARED = ("collective", "ranks", "how", "root", "value")
_COLUMNS = (*_COMPARED, "line")
_WARN_AFTER = 10.0  # seconds until the log names the ranks that are missing
_LOOK = 1.0  # seconds between looks at what keeps the missing ranks
_PAUSE = 0.05  # seconds
_FAREWELL = 2.0  # seconds that rank 0, which may serve the store, gives the others to read that it has ended

logger = logging.getLogger(__name__)


def enable(backend: Backend, patience: float = math.inf) -> None:
    """Compare all collectives of a job from now on.

    Args:
        backend: of the job.
        patience: seconds to wait for a rank; the timeout of the job is a limit as well.
    """
    disable(backend)
    store, rank, size = backend.store(), backend.topology.rank, backend.topology.world_size
    name = backend.job.unique_name("collectives")
    if store is not None:  # at once, so that the others learn of it if this rank ends before its first collective
        backend.job.resource(CollectiveCheck, PrefixStore(name, store), rank, size, patience)
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
    """Compare a call with those of the other ranks; see :func:`camshaft.distributed.ranks.begin` for the arguments.

    Raises:
        RankDivergenceError: a rank calls something else, has ended, or does not come in time; with a table of who calls
            what.
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
        raise _divergence(rows)


class CollectiveCheck(Resource):
    """Exchanges the calls of the ranks through the store of the job.

    Args:
        store: for this check alone.
        rank: of this process.
        size: the number of ranks.
        patience: seconds to wait for a rank.
    """

    def __init__(self, store: Store, rank: int, size: int, patience: float = math.inf) -> None:
        self._store, self._rank, self._all, self._patience = store, rank, range(size), patience
        self._numbers: Counter[str] = Counter()
        self._gave_up: dict[str, Any] | None = None

    def exchange(self, ranks: Sequence[int], mine: Row, is_long: bool) -> dict[int, Row]:
        """Write this rank's call, and return those of all ranks of a group as soon as they are there.

        Raises:
            RankDivergenceError: some differ already, or will not come.
        """
        name = "all" if ranks == self._all else ",".join(map(str, ranks))
        self._numbers[name] += 1
        number, self._gave_up = self._numbers[name], None
        place, members = f"{name}/{number}", None if ranks == self._all else list(ranks)
        keys = [f"{place}/{rank}" for rank in ranks]
        try:
            self._store.set(f"{place}/{self._rank}", json.dumps(mine))
            self._store.set(f"now/{self._rank}", json.dumps({"place": place, "ranks": members, "row": mine}))
            self._wait(ranks, place, mine, is_long)
            rows = dict(zip(ranks, map(json.loads, self._store.multi_get(keys)), strict=True))
            if number > 1:  # all have read it, since they have written more
                self._store.delete_key(f"{name}/{number - 1}/{self._rank}")
        except dist.DistNetworkError as error:
            table = _table({self._rank: mine})
            raise RankDivergenceError(
                f"the process that serves the store has ended: rank 0, unless a launcher does:\n{table}"
            ) from error
        _check_patience(rows)
        return rows

    def close(self) -> None:
        """Let the other ranks know that this one has ended."""
        try:
            farewell = {"place": "", "ranks": [], **(self._gave_up or {}), "row": None}
            farewell["gave up"] = self._gave_up and self._gave_up["row"]
            self._store.set(f"now/{self._rank}", json.dumps(farewell))
            deadline = time.monotonic() + _FAREWELL
            while self._rank == 0 and not self._is_last() and time.monotonic() < deadline:
                time.sleep(_PAUSE)
        except RuntimeError:  # the rank that serves the store has ended already
            return

    def _wait(self, ranks: Sequence[int], place: str, mine: Row, is_long: bool) -> None:
        """Wait until all have come; look once a second whether they differ, or some never will."""
        timeout: timedelta = self._store.timeout  # type: ignore[attr-defined]  # torch's stubs lack it
        limit = timeout.total_seconds() if is_long else min(self._patience, timeout.total_seconds())
        began = looked = time.monotonic()
        has_warned = False
        while not self._store.check([f"{place}/{rank}" for rank in ranks]):
            waited = time.monotonic() - began
            time.sleep(min(max(waited / 4, 1e-4), _LOOK))
            if time.monotonic() - looked < _LOOK:
                continue
            looked = time.monotonic()
            here = self._here(ranks, place)
            if _differ(here, mine):
                raise _divergence({rank: here.get(rank) or self._elsewhere(rank) for rank in ranks})
            stuck = self._stuck()
            table = _table({rank: here.get(rank) or self._elsewhere(rank) for rank in sorted({*ranks, *stuck})})
            if stuck or looked - began >= limit:
                self._gave_up = self._now(self._rank)
                self._store.set(f"{place}/{self._rank}", json.dumps({**mine, "gave up": table}))
                reason = "will never arrive" if stuck else f"have not arrived within {looked - began:.0f} s"
                raise RankDivergenceError(f"some ranks {reason}:\n{table}")
            _check_patience(here)
            if looked - began >= _WARN_AFTER and not has_warned and self._rank == min(here):  # one rank for all
                has_warned = True
                missing = [rank for rank in ranks if rank not in here]
                logger.warning(
                    "rank %d has waited %.0f s for ranks %s:\n%s", self._rank, looked - began, missing, table
                )

    def _here(self, ranks: Sequence[int], place: str) -> dict[int, Row]:
        """Return the calls of the ranks that have come."""
        come = [rank for rank in ranks if self._store.check([f"{place}/{rank}"])]
        return {rank: json.loads(self._store.get(f"{place}/{rank}")) for rank in come}

    def _elsewhere(self, rank: int) -> Row:
        """Describe where a rank is that has not come."""
        now = self._now(rank)
        if now is None:
            return {"collective": "no call yet"}
        if (row := now["row"]) is not None:
            return {**row, "collective": f"last in {row['collective']}"}
        if (row := now["gave up"]) is not None:
            return {**row, "collective": f"has ended, last in {row['collective']}"}
        return {"collective": "has ended"}

    def _now(self, rank: int) -> dict[str, Any] | None:
        """Return the latest call of a rank, ``None`` if it has not made any."""
        key = f"now/{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _is_last(self) -> bool:
        """Return True if all ranks have ended."""
        return all((now := self._now(rank)) is not None and now["row"] is None for rank in self._all)

    def _stuck(self) -> list[int]:
        """Return this rank and those it waits for if they wait for each other or have ended; else an empty list."""
        first = self._waiting()
        if not self._is_stuck(first):
            return []
        time.sleep(_PAUSE)
        # Look again: otherwise they may not have waited at the same time.
        return sorted(first) if self._waiting() == first else []

    def _waiting(self) -> Waiting:
        """Find where this rank waits and for whom, and the same for those ranks, and so on."""
        found: Waiting = {}
        todo = [self._rank]
        while todo:
            rank = todo.pop()
            if rank not in found:
                found[rank] = self._missing(rank)
                todo.extend(found[rank][1])
        return found

    def _missing(self, rank: int) -> tuple[str, frozenset[int]]:
        now = self._now(rank)
        if now is None:
            return "", frozenset()
        place, members = now["place"], self._all if now["ranks"] is None else now["ranks"]
        has_ended = now["row"] is None  # and does not continue, not even if the ranks come for which it gave up waiting
        if not has_ended and self._store.check([f"{place}/{member}" for member in members]):
            return place, frozenset()
        missing = {member for member in members if not self._store.check([f"{place}/{member}"])}
        return place, frozenset(missing | {rank} if has_ended else missing)

    def _is_stuck(self, waiting: Waiting) -> bool:
        """Return True if this rank remains when all continue that can, then those that waited for them, and so on."""
        left = {rank: set(missing) for rank, (_, missing) in waiting.items()}
        while free := [rank for rank, missing in left.items() if not missing & left.keys()]:
            for rank in free:
                del left[rank]
        return self._rank in left


def _differ(rows: Mapping[int, Row], mine: Row) -> bool:
    return any(row[field] != mine[field] for row in rows.values() for field in _COMPARED)


def _divergence(rows: Mapping[int, Row]) -> RankDivergenceError:
    return RankDivergenceError(f"the ranks call different things:\n{_table(rows)}")


def _check_patience(rows: Mapping[int, Row]) -> None:
    """Raise if a rank has stopped waiting for this one."""
    for rank, row in rows.items():
        if "gave up" in row:
            raise RankDivergenceError(f"rank {rank} has stopped waiting here:\n{row['gave up']}")


def _layout(tensor: Tensor) -> str:
    layout = [] if tensor.layout is torch.strided else [str(tensor.layout).removeprefix("torch.")]
    return " ".join([*layout, str(tensor.dtype), str(list(tensor.shape))])


def _table(rows: Mapping[int, Row]) -> str:
    columns = [name for name in _COLUMNS if any(row.get(name) for row in rows.values())]
    lines = [("rank", *columns)]
    lines += [(str(rank), *(row.get(name, "") for name in columns)) for rank, row in rows.items()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
