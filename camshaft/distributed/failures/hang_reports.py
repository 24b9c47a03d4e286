"""What a rank waits for that has waited for long, as text for the log; pure functions over snapshots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from camshaft.distributed.failures.record import Snapshot
from camshaft.distributed.failures.status import EXPLAINS, user_line
from camshaft.distributed.failures.verdicts import Ranks, Wait, _named, end_text, has_ended, missing, place_of, waits_of

STALE = 10.0  # age in seconds from which a status shows that the watcher's thread does not run
_QUIET = 10.0  # seconds without CPU time that an evaluation does not explain: it may hang
_REST = 1.0  # seconds without CPU time that a report mentions
_MOST_RANKS = 5
_MOST_LINES = 30


class Report(NamedTuple):
    """What a rank waits for.

    Attributes:
        text: for the log.
        is_alarm: whether nothing that takes long by itself explains the wait.
        missing: the ranks that have not arrived. If there are none, the last one may have just done so.
        call: distinguishes this wait from a later one.
    """

    text: str
    is_alarm: bool
    missing: Sequence[int]
    call: tuple[str, int]


def waited(one: Snapshot, now: float) -> float:
    """Return the seconds that a rank has waited in a collective; 0 if it does not wait."""
    return max((now - wait.began for wait in waits_of(one)), default=0.0)


def is_stale(one: Snapshot, now: float) -> bool:
    """Return whether the watcher's thread of a rank does not run."""
    return bool(now - one.status.get("time", now) > STALE)


def hang_report(ranks: Ranks, rank: int, now: float) -> Report | None:
    """Return what a rank waits in, for whom, and what those do; ``None`` if it does not wait.

    Args:
        ranks: of the job, as far as they are known.
        rank: the one that waits.
        now: the time.
    """
    waits = waits_of(ranks[rank]) if rank in ranks else []
    if not waits:
        return None
    first, lines = waits[0], list[str]()
    asked: dict[tuple[str, int], Sequence[int]] = {}  # by call, as all ranks in it wait for the same ones
    seen, queue, is_alarm, is_explained = {rank}, [(rank, waits)], False, False
    for current, their_waits in queue:
        for wait in their_waits:
            if wait.key in asked:
                continue
            absent = asked[wait.key] = missing(wait, ranks)
            if current == rank:
                lines.append(_waiting(rank, wait, absent, now))
                is_alarm |= not absent
            new = [other for other in absent if other not in seen]
            seen.update(new)
            for index, other in enumerate(new):
                one = ranks.get(other)
                if one is not None and (theirs := waits_of(one)):
                    queue.append((other, theirs))
                if index < _MOST_RANKS:
                    what, explains = _activity(other, one, ranks[rank], now, ranks)
                    is_alarm |= explains is False
                    is_explained |= explains is True
                    lines.append(f"  {what}")
                    stack = one.status.get("stack", ()) if one is not None else ()
                    lines += (f"    {line}" for line in stack[:_MOST_LINES])
            if len(new) > _MOST_RANKS:
                lines.append(f"  and {len(new) - _MOST_RANKS} more")
    return Report("\n".join(lines), is_alarm or not is_explained, asked[first.key], first.key)


def _waiting(rank: int, wait: Wait, absent: Sequence[int], now: float) -> str:
    text = f"rank {rank} has been waiting for {now - wait.began:.0f} s in {wait}, "
    if absent:
        return f"{text}for {_named(absent)}:"
    return (
        f"{text}which all ranks of the group have begun: if it does not end, set CAMSHAFT_DEBUG=1 to compare the calls"
    )


def _activity(rank: int, one: Snapshot | None, waiting: Snapshot, now: float, ranks: Ranks) -> tuple[str, bool | None]:
    """Return what a rank does that another one waits for, and whether that explains it; ``None`` if it waits too."""
    if one is None:
        return f"rank {rank} has not reported: it never arrived, or its node cannot be reached", False
    status = one.status
    if status.get("failure") or has_ended(one):
        return end_text(one), False
    age = now - status.get("time", now)
    engines = status.get("engines", ())
    at = f" at {line}" if (line := user_line(status.get("stack", ()))) else ""
    place = f", in {place_of(one)}" if engines else ""
    if is_stale(one, now):
        cause = "its process is stopped, or code of an extension holds the GIL"
        return f"rank {rank} has not run any Python for {age:.0f} s: {cause}; it was{at or ' busy'}{place}", False
    if waits := waits_of(one):
        others = _named(missing(waits[0], ranks)[:_MOST_RANKS]) or "data"
        return f"rank {rank} waits for {others} in {waits[0]}{place}", None
    if block := status.get("inside"):
        return f"rank {rank} is in {block[0]} ({block[1]}){at}{place}", True
    if doing := status.get("doing"):
        return f"rank {rank} {doing}{at}{place}", EXPLAINS.get(doing, False)
    theirs = {(engine["line"], engine["number"]) for engine in waiting.status.get("engines", ())}
    seconds = status.get("idle_for", 0.0)
    idle = f" and has not used the CPU for {seconds:.0f} s" if seconds > _REST else ""
    if len(engines) > 1 and (engines[-1]["line"], engines[-1]["number"]) not in theirs:
        return f"rank {rank} is evaluating{at}{place}{idle}", seconds <= _QUIET
    return f"rank {rank} is{at or ' busy'}{place}{idle}", False
