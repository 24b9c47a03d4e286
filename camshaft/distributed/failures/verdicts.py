"""Find out from what the ranks report why their job cannot proceed.

All functions are pure: they read snapshots, which may have been taken at slightly different times, and no clock.

A verdict ends the job, so it needs a proof: a rank has failed; ranks wait for one that has left; ranks have sent
different calls under the same number in the same group; or ranks wait for each other in a cycle. The last holds for
snapshots of any age: a rank that is stuck in one call and has not sent another one sends that after the first has
completed. What looks suspicious without being a proof is at most a part of the text of a verdict, and of reports.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from camshaft import activity
from camshaft.distributed.failures.record import LEFT_BY_EXEC, LEFT_BY_EXIT, Snapshot
from camshaft.distributed.failures.status import PATIENCE, named, user_line
from camshaft.distributed.failures.trace import DEBUG
from camshaft.text import aligned, spans

ROOTED = ("broadcast", "reduce", "gather", "scatter")  # in which not every rank waits for every other one
NO_ANSWER = "does not answer, nor does its node"
_MOST_ROWS = 16  # of a table

Ranks = Mapping[int, Snapshot]


class Verdict(NamedTuple):
    """Why a job cannot proceed.

    Attributes:
        kind: ``"failed"`` or ``"diverged"``.
        text: for the error.
        unknown: rank, group, and number of calls whose line is not in the text, as they have completed.
    """

    kind: str
    text: str
    unknown: tuple[tuple[int, str, int], ...] = ()


@dataclass(frozen=True)
class Wait:
    """A call that a rank has sent and not completed."""

    rank: int
    group: str
    ranks: frozenset[int]
    sequence: int
    operation: str
    value: str
    began: float
    what: str
    line: str
    via: str

    @property
    def place(self) -> str:
        """The user's line, and that of a handler of this package in which it led to the call."""
        return f"{self.line}, in {self.via}" if self.via else self.line

    @property
    def key(self) -> tuple[str, int]:
        """What identifies the call on all ranks."""
        return self.group, self.sequence

    def __str__(self) -> str:
        return f"{self.what} at {self.place}"


def waits_of(one: Snapshot) -> list[Wait]:
    """Return what a rank waits in."""
    if not one.is_alive or one.status.get("left") or one.status.get("failure"):
        return []
    return [Wait(one.rank, **{**wait, "ranks": members(wait["ranks"])}) for wait in one.status.get("waits", ())]


@functools.lru_cache(1024)
def members(text: str) -> frozenset[int]:
    """Return the ranks in a text of :func:`camshaft.text.spans`.

    >>> sorted(members("0-2, 5"))
    [0, 1, 2, 5]
    """
    pairs = [span.partition("-")[::2] for span in text.split(", ") if span]
    return frozenset(rank for first, last in pairs for rank in range(int(first), int(last or first) + 1))


def has_sent(other: Snapshot | None, wait: Wait) -> bool | None:
    """Return whether a rank has sent the call that another one waits in; ``None`` if that is unknown."""
    if other is None:
        return None
    known = other.status.get("begun", {}).get(wait.group)
    if known is not None:
        return bool(known >= wait.sequence)
    bounds = other.status.get("at_most", {})
    at_most = bounds.get(DEBUG if wait.group.startswith(DEBUG) else wait.group)
    return False if at_most is not None and at_most < wait.sequence else None


def missing(wait: Wait, ranks: Ranks) -> list[int]:
    """Return the ranks that are not known to have sent the call that a rank waits in."""
    return sorted(rank for rank in wait.ranks if rank != wait.rank and not has_sent(ranks.get(rank), wait))


def has_ended(one: Snapshot) -> bool:
    """Return True if a rank sends nothing more: it has left, or its process has ended."""
    return bool(one.status.get("left")) or not one.is_alive


def verdict(snapshots: Iterable[Snapshot], now: float) -> Verdict | None:
    """Return why a job cannot proceed, if that is certain.

    Args:
        snapshots: of the ranks of a job, as far as they are known.
        now: the time.
    """
    ranks = {one.rank: one for one in sorted(snapshots, key=lambda one: one.rank)}
    if found := _different(ranks):
        return found._replace(text="\n".join([*_hints(ranks), found.text]))
    if text := _cycle(ranks):
        return Verdict("diverged", "\n".join([*_hints(ranks), text]))
    for one in ranks.values():
        if one.status.get("killed") and not one.status.get("left"):
            return Verdict("failed", end_text(one, ranks))
    if text := _awaited_end(ranks, now):
        return Verdict("failed", "\n".join([text, *_hints(ranks)]))
    return None


# --- different calls ------------------------------------------------------------------------------------------------


def _different(ranks: Ranks) -> Verdict | None:
    """Return a verdict with a table of calls that were sent under the same number of one group, and differ."""
    calls: defaultdict[tuple[str, int], defaultdict[int, list[tuple[str, ...]]]]
    calls = defaultdict(lambda: defaultdict(list))  # several in one number if they were coalesced
    for rank, one in ranks.items():
        for group, sequence, *call in one.status.get("calls", ()):
            calls[group, sequence][rank].append(tuple(call))
    differing = [key for key, found in calls.items() if _differ(list(found.values()))]
    if not differing:
        return None
    waits = {(wait.rank, *wait.key): wait for one in ranks.values() for wait in waits_of(one)}
    lost = [lost_call(rank, one.status["lost"]) for rank, one in ranks.items() if one.status.get("lost")]
    waits |= {(wait.rank, *wait.key): wait for wait in lost}
    running = [key for key in differing if any((rank, *key) in waits for rank in calls[key])]
    group, sequence = min(running or differing, key=lambda key: key[1])
    group, sequence = min(key for key in differing if key[0] == group)  # the others follow from it
    rows, unknown = {}, []
    for rank, sent in calls[group, sequence].items():
        one, (operation, value, _) = ranks[rank], sent[0]
        stack, completed = one.status.get("stack", ()), one.status.get("completed") or ["", 0, {}]
        is_looked_up, place = completed[:2] == [group, sequence], completed[2]
        if wait := waits.get((rank, group, sequence)):
            what, line = wait.what, wait.place
        elif is_looked_up and place["line"]:
            what, line = place["what"] or operation, place["line"]
        elif one.status.get("crash"):
            what, line = named(stack, operation)["what"], user_line(stack)
        else:
            what, line = operation, f"(completed; then at {user_line(stack)})" if stack else "(completed)"
            if not is_looked_up:
                unknown.append((rank, group, sequence))
        rows[rank] = _row(one, what, operation, value, line)
    return Verdict("diverged", f"the ranks call different things:\n{_table(rows)}", tuple(unknown))


def _differ(sent: Sequence[Sequence[tuple[str, ...]]]) -> bool:
    """Return whether ranks have sent different things; of what was coalesced, the first parts may be forgotten."""
    known = min(map(len, sent))
    return len({tuple((operation, size) for operation, _, size in parts[-known:]) for parts in sent}) > 1


# --- ranks that wait for each other -----------------------------------------------------------------------------------


def _cycle(ranks: Ranks) -> str | None:
    """Find the largest set of ranks that are stuck, each in calls that need another one of them."""
    stuck = {rank: waits_of(one) for rank, one in ranks.items() if one.status.get("is_stuck")}
    stuck = {rank: waits for rank, waits in stuck.items() if waits}
    while True:
        calls = {wait.key: wait for waits in stuck.values() for wait in waits}  # once for all ranks in the same call
        culprits = {key: _culprits(wait, stuck, ranks) for key, wait in calls.items()}
        free = [rank for rank, waits in stuck.items() if not all(culprits[wait.key] for wait in waits)]
        if not free:
            break
        for rank in free:
            del stuck[rank]
    if not stuck:
        return None
    rows = {}
    for rank, (wait, *_) in stuck.items():
        row = _row(ranks[rank], wait.what, wait.operation, wait.value, wait.place)
        rows[rank] = {"ranks": spans(wait.ranks), **row, "waits for": _named(culprits[wait.key])}
    return f"the ranks wait for each other, and none of them can proceed:\n{_table(rows)}"


def _culprits(wait: Wait, stuck: Mapping[int, Any], ranks: Ranks) -> list[int]:
    """Return the ranks without which a call cannot complete, which have not sent it, and are stuck."""
    found = [rank for rank in stuck if rank in wait.ranks and has_sent(ranks[rank], wait) is False]
    if wait.operation in ROOTED and found != missing(wait, ranks):  # it may need only one of them
        return []
    return found


# --- ranks that ended -------------------------------------------------------------------------------------------------


def _awaited_end(ranks: Ranks, now: float) -> str | None:
    """Return how a rank ended that another one waits for, or to which it lost the connection."""
    ended = {rank for rank, one in ranks.items() if has_ended(one)}
    if not ended:
        return None
    for rank, one in ranks.items():
        if lost := one.status.get("lost"):  # an operation has failed
            wait = lost_call(rank, lost)
            gone = [other for other in sorted(wait.ranks & ended) if other != rank and not has_sent(ranks[other], wait)]
            if gone:
                return f"{end_text(ranks[min(gone)], ranks)}; rank {rank} waits for it in {wait}"
        for wait in waits_of(one):
            gone = [other for other in missing(wait, ranks) if other in ended]
            is_needed = wait.operation not in ROOTED or len(gone) == len(missing(wait, ranks))
            if gone and is_needed and now - wait.began > PATIENCE:
                return f"{end_text(ranks[gone[0]], ranks)}; rank {rank} waits for it in {wait}"
    return None


def end_text(one: Snapshot, ranks: Ranks | None = None) -> str:
    """Return how a rank ended that has failed, left, or disappeared, and where.

    Args:
        one: of the rank.
        ranks: whose calls may be why it crashed in a collective.
    """
    failure, left, crash = (one.status.get(name) for name in ("failure", "left", "crash"))
    if failure:
        return str(failure["text"])
    place, stack = place_of(one), one.status.get("stack", ())
    if left:
        text = f"rank {one.rank} {left}"
    else:
        how = f" ({crash or one.status['killed']})" if crash or one.status.get("killed") else ""
        text = f"rank {one.rank}'s process was killed or crashed{how}"
    if stack and crash:
        text += f"; it was at {user_line(stack)}"
    elif stack and left in (None, LEFT_BY_EXIT, LEFT_BY_EXEC):
        text += f"; it was last seen at {user_line(stack)}" + (f", in {place}" if place else "")
    if crash and (what := named(stack)["what"]):
        rows = {one.rank: _row(one, what, "", "", user_line(stack))}
        for rank, other in (ranks or {}).items():
            lost = [lost_call(rank, other.status["lost"])] if other.status.get("lost") else []
            if rank != one.rank and (waits := lost or waits_of(other)):
                rows[rank] = _row(other, waits[0].what, waits[0].operation, waits[0].value, waits[0].place)
        text += f". A library aborts a process whose tensor has another size than that of another rank:\n{_table(rows)}"
    return text


def lost_call(rank: int, lost: Mapping[str, Any]) -> Wait:
    """Return the call of a rank that has failed."""
    group, sequence = lost["key"] or ("", 0)
    texts = {name: lost[name] for name in ("operation", "value", "what", "line", "via")}
    return Wait(rank, group, members(lost["ranks"]), sequence, began=0.0, **texts)


def place_of(one: Snapshot, run: str = " of the run at {line}") -> str:
    """Return where the innermost engine of a rank is."""
    engines = one.status.get("engines", ())
    return f"epoch {{epoch}}, iteration {{iteration}}{run}".format(**engines[-1]) if engines else ""


def _hints(ranks: Ranks) -> list[str]:
    """Return hints: which ranks ended a run early that others are in, or sent something in code for some ranks only."""
    texts = []
    for rank, one in ranks.items():
        inside = {_run_of(engine) for engine in one.status.get("engines", ())}
        for end in one.status.get("ended", ()):
            if _run_of(end) in inside or end["how"] == activity.TOGETHER or one.status.get("failure"):
                continue
            others = [
                other.rank
                for other in ranks.values()
                if any(
                    _run_of(engine) == _run_of(end) and engine["iteration"] >= end["iteration"]
                    for engine in other.status.get("engines", ())
                )
            ]
            if others:
                texts.append(_stop_text(rank, end, others))
                break
        texts += [f"rank {rank} {text}, which not all of them run" for text in one.status.get("strays", ())[-1:]]
    return texts


def _stop_text(rank: int, end: Mapping[str, Any], others: Sequence[int]) -> str:
    where = f"epoch {end['epoch']}, iteration {end['iteration']} of the run at {end['line']}"
    verb = "is" if len(others) == 1 else "are"
    text = f"rank {rank} stopped alone in {where}: {end['how']}; {_named(others)} {verb} still in that run"
    if end["how"].startswith("terminate"):
        return f"{text}. To stop all ranks after the same iteration, call camshaft.handlers.stop_together(engine)"
    return f"{text}. The error ended the loop of this rank only: raise it, or handle it inside the step"


def _run_of(run: Mapping[str, Any]) -> tuple[str, int]:
    return run["line"], run["number"]


# --- texts ------------------------------------------------------------------------------------------------------------


def _row(one: Snapshot, what: str, operation: str, value: str, line: str) -> dict[str, str]:
    block = one.status.get("inside")
    return {
        "collective": what,
        "operation": "" if what.endswith(operation) else operation,
        "value": value,
        "line": line,
        "inside": f"{block[0]} ({block[1]})" if block else "",
    }


def _table(cells: Mapping[int, Mapping[str, str]]) -> str:
    """Return a table with one row for all ranks that do the same."""
    names = [name for name in next(iter(cells.values())) if any(row[name] for row in cells.values())]
    rows: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank, row in sorted(cells.items()):
        rows[tuple(row[name] or "-" for name in names)].append(rank)
    shown = [[_named(found), *row] for row, found in rows.items()]
    more = [] if len(shown) <= _MOST_ROWS else [[f"and {len(shown) - _MOST_ROWS} more rows", *[""] * len(names)]]
    return aligned([["", *names], *shown[:_MOST_ROWS], *more])


def _named(ranks: Iterable[int]) -> str:
    """Return ranks as text.

    >>> _named([0, 1, 2, 5])
    'ranks 0-2, 5'
    """
    found = list(ranks)
    return f"rank{'s' if len(found) > 1 else ''} {spans(found)}" if found else ""
