"""Debug mode: before each collective the ranks compare what they are about to do, and raise where they differ."""

from __future__ import annotations

import atexit
import logging
import math
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from camshaft.distributed.backend import Backend, Group
from camshaft.distributed.board import Board, Said
from camshaft.distributed.exchange import all_gather_values
from camshaft.distributed.guard import line_of_caller
from camshaft.errors import RankDivergenceError

_COMPARED = ("collective", "ranks", "how", "root", "value")
_COLUMNS = (*_COMPARED, "line")
_SOON = 10.0  # seconds until the log tells that somebody is missing

logger = logging.getLogger(__name__)
patience: float | None = None
"""Seconds to wait for a rank that is late, unless the run's timeout is shorter; ``None``: the comparison is off."""
_runs = 0  # of this process with the comparison on: a store may be older than the run
_boards: weakref.WeakKeyDictionary[Backend, Board] = weakref.WeakKeyDictionary()


def enable(seconds: float | None, backend: Backend | None = None) -> None:
    """Turn the comparison on or off.

    Args:
        seconds: to wait for a rank that is late, at most; the run's timeout limits it too. ``None`` turns it off.
        backend: of the run, so that the others learn that this rank has ended also if it ends before its first call.
    """
    global patience, _runs
    leave()
    patience = seconds
    _runs += seconds is not None
    if seconds is not None and backend is not None:
        _board_of(backend)


def enable_if(wanted: bool | None, backend: Backend | None = None) -> None:
    """Turn the comparison on if the user or ``CAMSHAFT_DEBUG`` wants it, whose value may be the seconds to wait."""
    text = os.environ.get("CAMSHAFT_DEBUG", "")
    seconds = float(text) if text.replace(".", "", 1).isdigit() else 0.0
    if wanted is None:
        wanted = text.lower() not in ("", "0", "false", "off", "no")
    enable((seconds if seconds > 1 else math.inf) if wanted else None, backend)


def enabled() -> bool:
    """Say whether the comparison is on."""
    return patience is not None


def leave() -> None:
    """Tell the other ranks that this one does nothing any more."""
    boards = list(_boards.values())
    _boards.clear()
    for board in boards:
        board.leave()


def check(
    backend: Backend,
    group: Group | None,
    ranks: Sequence[int],
    collective: str,
    value: Any = None,
    how: str = "",
    root: Any = None,
    is_long: bool = False,
) -> None:
    """Compare with the other ranks of a group.

    Args:
        backend: of this rank.
        group: the group.
        ranks: the ranks of the group.
        collective: what this rank is about to do; the rest of the arguments say more about it.
        is_long: some ranks may do something else for long before they come.

    Raises:
        RankDivergenceError: one does something else, has ended, or does not come in time; with a table of who does
            what.
    """
    if len(ranks) == 1:
        return
    mine = _describe(collective, ranks, backend, value, how, root)
    board = _board_of(backend)
    if board is None:
        rows = dict(zip(ranks, all_gather_values(backend, mine, group), strict=True))
    else:
        rows = _heard(board, ranks, mine, is_long)
    if _differ(rows, mine):
        raise RankDivergenceError(f"the ranks do different things:\n{_table(rows)}")


def _heard(board: Board, ranks: Sequence[int], mine: Said, is_long: bool) -> dict[int, Said]:
    """Wait until all have said what they do, or it is known before that they differ or that some never will."""
    limit = board.timeout if is_long or patience is None else min(patience, board.timeout)
    place = ""
    has_warned = False

    def look(waited: float) -> None:
        nonlocal has_warned
        here = board.here(ranks, place)
        is_different, stuck = _differ(here, mine), board.stuck()
        shown = sorted({*ranks, *([] if is_different else stuck)})
        table = _table({rank: here.get(rank) or _elsewhere(board, rank) for rank in shown})
        if is_different:
            raise RankDivergenceError(f"the ranks do different things:\n{table}")
        if stuck or waited >= limit:
            board.give_up(place, mine, table)
            reason = "never come" if stuck else f"have not come within {waited:.0f} s"
            raise RankDivergenceError(f"some ranks {reason}:\n{table}")
        _check_patience(here)
        if waited >= _SOON and not has_warned and board.rank == min(here):  # one rank says it for all
            has_warned = True
            missing = [rank for rank in ranks if rank not in here]
            logger.warning("rank %d has waited %.0f s for ranks %s:\n%s", board.rank, waited, missing, table)

    try:
        place = board.say(ranks, mine)
        rows = board.hear(ranks, place, look)
    except dist.DistNetworkError as error:
        table = _table({board.rank: mine})
        raise RankDivergenceError(
            f"who holds the store of this run has ended, which is rank 0 if no launcher does:\n{table}"
        ) from error
    _check_patience(rows)
    return rows


def _differ(rows: Mapping[int, Said], mine: Said) -> bool:
    return any(row[field] != mine[field] for row in rows.values() for field in _COMPARED)


def _check_patience(rows: Mapping[int, Said]) -> None:
    """Refuse to go on with ranks that have waited in vain, and do not any more."""
    for rank, row in rows.items():
        if "gave up" in row:
            raise RankDivergenceError(f"rank {rank} has given up to wait here:\n{row['gave up']}")


def _elsewhere(board: Board, rank: int) -> Said:
    """Say where a rank is that has not come."""
    now = board.now(rank)
    if now is None:
        return {"collective": "nothing yet"}
    said: Said | None = now["said"]
    if said is not None:
        return {**said, "collective": f"last in {said['collective']}"}
    in_vain: Said | None = now["in vain"]
    if in_vain is not None:
        return {**in_vain, "collective": f"has ended, last in {in_vain['collective']}"}
    return {"collective": "has ended"}


def _describe(collective: str, ranks: Sequence[int], backend: Backend, value: Any, how: str, root: Any) -> Said:
    """Write down what this rank is about to do, and on which line of the user's."""
    return {
        "collective": collective,
        "ranks": "all" if len(ranks) == backend.topology.world_size else str(list(ranks)),
        "how": how,
        "root": "" if root is None else str(root),
        "value": _kind(value),
        "line": line_of_caller(),
    }


def _kind(value: Any) -> str:
    """Say what of a value is the same on all ranks."""
    if not isinstance(value, Tensor):
        return ""
    return " ".join(
        [*str(value.layout).removeprefix("torch.strided").split(), str(value.dtype), str(list(value.shape))]
    )


def _table(rows: Mapping[int, Said]) -> str:
    columns = [name for name in _COLUMNS if any(row.get(name) for row in rows.values())]
    lines = [("rank", *columns)]
    lines += [(str(rank), *(row.get(name, "") for name in columns)) for rank, row in rows.items()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _board_of(backend: Backend) -> Board | None:
    board = _boards.get(backend)
    if board is None:
        store = backend.store()
        if store is None:
            return None
        name = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{_runs}"  # torchrun's store outlives its processes
        board = _boards[backend] = Board(store, name, backend.topology.rank, backend.topology.world_size)
        atexit.unregister(leave)
        atexit.register(leave)  # the last comes first: before a backend waits there for all ranks to end
    return board
