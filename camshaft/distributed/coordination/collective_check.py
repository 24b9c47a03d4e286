"""Debug mode: before each collective the ranks compare their calls, and raise if they differ or a rank cannot come.

Each rank has one key in the store, with its latest calls: for each group the number of calls, what it is about to call,
and what it called before, which slower ranks may still read. A counter per call tells when all ranks have written.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
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
State = dict[str, Any]
"""What a rank writes: its latest group and the ranks of it (their number if all), its calls by group, its end."""

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
        self._state: State = {"group": "", "ranks": [], "calls": {}, "ended": False}
        self._gave_up = False

    def exchange(self, ranks: Sequence[int], mine: Row, is_long: bool) -> dict[int, Row]:
        """Write this rank's call, and return those of all ranks of a group as soon as they are there.

        Raises:
            RankDivergenceError: some differ already, or will not come.
        """
        is_world = len(ranks) == len(self._all)
        group = "all" if is_world else ",".join(map(str, ranks))
        number, latest = self._state["calls"].get(group, (0, None, None))[:2]
        number, self._gave_up = number + 1, False
        self._state["calls"][group] = [number, mine, latest]
        self._state.update(group=group, ranks=len(ranks) if is_world else list(ranks))
        place = f"{group}/{number}"
        try:
            self._write()
            self._store.add(place, 1)
            self._wait(ranks, place, mine, is_long)
            states = map(json.loads, self._store.multi_get([str(rank) for rank in ranks]))
            rows = {rank: _call(state, group, number) or {} for rank, state in zip(ranks, states, strict=True)}
            if number > 1 and self._rank == ranks[0]:
                self._store.delete_key(f"{group}/{number - 1}")
        except dist.DistNetworkError as error:
            table = _table({self._rank: mine})
            raise RankDivergenceError(
                f"the process that serves the store has ended: rank 0, unless a launcher does:\n{table}"
            ) from error
        _check_patience(rows)
        return rows

    def close(self) -> None:
        """Announce that this rank has finished."""
        self._state["ended"] = True
        if not self._gave_up:
            self._state.update(group="", ranks=[])
        try:
            self._write()
            deadline = time.monotonic() + _FAREWELL
            while self._rank == 0 and sum(state["ended"] for state in self._read().values()) < len(self._all):
                if time.monotonic() > deadline:
                    break
                time.sleep(_PAUSE)
        except RuntimeError:  # the rank that serves the store has ended already
            return

    def _write(self) -> None:
        self._store.set(str(self._rank), json.dumps(self._state))

    def _read(self) -> dict[int, State]:
        """Return the states of the ranks that have written one."""
        there = [str(rank) for rank in self._all if self._store.check([str(rank)])]
        return {int(key): json.loads(text) for key, text in zip(there, self._store.multi_get(there), strict=True)}

    def _wait(self, ranks: Sequence[int], place: str, mine: Row, is_long: bool) -> None:
        """Wait until all have come; look once a second whether they differ, or some never will."""
        timeout: timedelta = self._store.timeout  # type: ignore[attr-defined]  # torch's stubs lack it
        limit = timeout.total_seconds() if is_long else min(self._patience, timeout.total_seconds())
        group, number = self._state["group"], self._state["calls"][self._state["group"]][0]
        began = looked = time.monotonic()
        has_warned = False
        while self._store.add(place, 0) < len(ranks):
            now = time.monotonic()
            time.sleep(min(max((now - began) / 4, 1e-4), _LOOK))
            if now - looked < _LOOK:
                continue
            looked, waited = now, now - began
            states = self._read()
            here = {rank: row for rank in ranks if (row := _call(states.get(rank), group, number)) is not None}
            if _differ(here, mine):
                raise _divergence({rank: here.get(rank) or _elsewhere(states.get(rank)) for rank in ranks})
            stuck = self._stuck(states)
            shown = sorted({*ranks, *stuck})
            table = _table({rank: here.get(rank) or _elsewhere(states.get(rank)) for rank in shown})
            if stuck or waited >= limit:
                self._gave_up = True
                self._state["calls"][group][1] = {**mine, "gave up": table}
                self._write()
                reason = "will never arrive" if stuck else f"have not arrived within {waited:.0f} s"
                raise RankDivergenceError(f"some ranks {reason}:\n{table}")
            _check_patience(here)
            if waited >= _WARN_AFTER and not has_warned and self._rank == min(here):  # one rank for all
                has_warned = True
                missing = [rank for rank in ranks if rank not in here]
                logger.warning("rank %d has waited %.0f s for ranks %s:\n%s", self._rank, waited, missing, table)

    def _stuck(self, states: Mapping[int, State]) -> list[int]:
        """Return this rank and those it waits for if they wait for each other or have ended; else an empty list."""
        first = _waiting(self._rank, states)
        left = {rank: set(missing) for rank, missing in first.items()}
        while free := [rank for rank, missing in left.items() if not missing & left.keys()]:
            for rank in free:  # it can continue, and then those can that wait for it
                del left[rank]
        if self._rank not in left:
            return []
        time.sleep(_PAUSE)
        again = self._read()  # otherwise they may not have waited at the same time
        return sorted(first) if all(states.get(rank) == again.get(rank) for rank in first) else []


def _waiting(rank: int, states: Mapping[int, State]) -> dict[int, set[int]]:
    """Return the ranks that a rank waits for, and so on for those; one that has ended waits for itself."""
    found: dict[int, set[int]] = {}
    todo = [rank]
    while todo:
        one = todo.pop()
        if one in found:
            continue
        state = states.get(one) or {"ranks": [], "ended": False}
        missing = {one} if state["ended"] else set()
        if members := state["ranks"]:
            group, number = state["group"], state["calls"][state["group"]][0]
            members = range(members) if isinstance(members, int) else members
            missing.update(other for other in members if _call(states.get(other), group, number) is None)
        found[one] = missing
        todo.extend(missing)
    return found


def _call(state: State | None, group: str, number: int) -> Row | None:
    """Return a rank's n-th call over a group, which is its latest or the one before; ``None`` if it has not come."""
    latest, row, previous = (state or {"calls": {}})["calls"].get(group, (0, None, None))
    found: Row | None = None if latest < number else row if latest == number else previous
    return found


def _elsewhere(state: State | None) -> Row:
    """Describe where a rank is that has not come."""
    if state is None or not (state["ended"] or state["ranks"]):
        return {"collective": "no call yet"}
    if not state["ranks"]:
        return {"collective": "has ended"}
    row: Row = state["calls"][state["group"]][1]
    return {**row, "collective": f"{'has ended, ' if state['ended'] else ''}last in {row['collective']}"}


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
