"""Diagnose from what the ranks recorded why a job does not proceed: diverging calls, a rank that stopped or has ended.

All functions but :func:`describe` are pure: they read snapshots of the records of ranks, which may have been taken at
slightly different times, and no clock. Times are those of ``time.monotonic()`` on the machine of the caller.

What proves a divergence holds for snapshots of any age. A rank that is in one call and has not made another one yet
makes the second after the first. If such facts form a cycle, then the ranks call in different orders.
"""

from __future__ import annotations

import ast
import functools
import json
import linecache
import math
import os
import re
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice, takewhile
from types import FrameType
from typing import Any, NamedTuple, cast

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from camshaft import activity
from camshaft.distributed.record import BACKWARD, DDP, FSDP, IN_TORCH, Entry, Snapshot
from camshaft.errors import line_of
from camshaft.text import aligned

PATIENCE = 3.0  # seconds that a rank waits before its wait is evidence
_ISSUED = (BACKWARD, FSDP, DDP)  # by torch, without a call of the user
_VARIANT = re.compile("_(into_tensor|tensor|single)$")  # of the same operation
_WORK = f"{IN_TORCH}.Work.wait"
_MESSAGES = (12, 13, 14)  # of torch's c10d::OpType: SEND, RECV, RECVANYSOURCE
# may have begun more than they wait for; the others wait for all, or the last
_AHEAD = (FSDP, DDP, IN_TORCH, _WORK)
_POINT_TO_POINT = ("send", "recv", "send_object_list", "recv_object_list")  # wait for one rank, not for a group
_WAITING_IN_TORCH = re.compile(r"/torch/(distributed/|nn/parallel/distributed\.py)")

_MPI = os.path.join("camshaft", "distributed", "backends", "mpi.py")

_SETTLED = 0.5  # age in seconds from which a running entry of a job with dead processes is read
_STALE = 10.0  # age in seconds from which a status shows that the watcher's thread does not run
_REST = 1.0  # seconds without CPU time after which a process counts as one that waits
_QUIET = 10.0  # seconds without CPU time that an evaluation does not explain: it may hang
_IDLE = 0.05  # share of one core below which a process counts as idle, without its watcher
_MOST_FRAMES = 30
_MOST_RANKS = 5
_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_ROOTED_IN_TORCH = re.compile(r"^torch\.distributed\.(broadcast|reduce|gather|scatter)(_object(_list)?)?$")
_MOST_OPERATIONS = 8  # of a group
_FOREIGN = re.compile(
    r"/site-packages/|/dist-packages/|/lib(64)?/python3|^<frozen|/camshaft/(?:engine|handlers|distributed)/"
)
_VICTIM = re.compile(
    r"^(RankFailedError|RankDivergenceError|Dist\w*Error|BrokenPipeError|Connection\w*Error)\b"
    r"|gloo|nccl|connection (was )?(closed|reset)|broken pipe|socket|timed? ?out",
    re.IGNORECASE,
)
_HERE = socket.gethostname()


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
    call: tuple[Any, ...] = ()


@dataclass(frozen=True)
class _Wait:
    """A collective that a rank has begun and not completed."""

    rank: int
    what: str
    group: str
    ranks: Sequence[int]
    sequence: int
    since: float
    line: str
    entry: Entry | None  # None: of torch, without a record
    operation: str = ""  # which one of torch, where that is known

    @property
    def is_rooted(self) -> bool:
        """Whether this is a collective in which not every rank waits for every other one."""
        return self.what in _ROOTED or self.operation in _ROOTED or _ROOTED_IN_TORCH.search(self.what) is not None

    def __str__(self) -> str:
        return f"{self.what} at {self.line}"


# --- this process ---------------------------------------------------------------------------------------------------


def describe(main_thread: int, previous: Mapping[str, Any]) -> dict[str, Any]:
    """Return the status of this process, for its record; call it about once a second, from a thread of its own.

    Args:
        main_thread: the identifier of the thread that trains.
        previous: what this function returned last, empty the first time.
    """
    now, used = time.monotonic(), time.process_time() - time.thread_time()
    cpu = idle_for = 0.0
    if previous:
        cpu, seconds = used - previous["cpu_total"], now - previous["time"]
        idle_for = previous["idle_for"] + seconds if cpu <= _IDLE * seconds else 0.0
    frame = sys._current_frames().get(main_thread)
    innermost = frame
    while isinstance(frame, FrameType) and _MPI in frame.f_code.co_filename:  # waits in Python, the others in torch
        frame = frame.f_back
    stack, doing = _stack(frame)
    status: dict[str, Any] = {
        "time": now,
        "thread": main_thread,
        "host": _HERE,
        "engines": [_engine(engine) for engine in activity.in_thread(main_thread)],
        "ended": [end._asdict() for end in tuple(activity.early_ends)],
        "stack": stack,
        "doing": doing,
        "is_in_mpi": frame is not innermost or any(_MPI in line for line in stack),
        "cpu": cpu,
        "cpu_total": used,
        "idle_for": idle_for,
        **_torch_groups(previous, idle_for > _REST),
        # not before it is evidence: up to Python 3.12, the locals of a frame stay referenced once they have been read
        "awaited": _awaited(frame) if idle_for > PATIENCE else None,
    }
    is_same = previous and all(status[key] == previous[key] for key in ("stack", "engines", "torch"))
    return {**status, "since": previous["since"] if is_same else now}


def _engine(engine: Any) -> dict[str, Any]:
    state, event = engine.state, engine.last_event_name
    return {
        "line": engine.run_line,
        "number": engine.run_number,
        "event": str(getattr(event, "name", event)),
        "epoch": state.epoch,
        "iteration": state.iteration,
    }


def _stack(frame: FrameType | None) -> tuple[list[str], str]:
    """Return the innermost lines of a stack, and what the code in it is known to do, from all frames."""
    lines: list[str] = []
    doing, place = "", None
    for _ in range(1000):
        if not isinstance(frame, FrameType):  # None; CPython 3.11 may find anything if the thread runs on meanwhile
            break
        code = frame.f_code
        if len(lines) < _MOST_FRAMES:
            lines.append(line_of(frame))
        found = _purpose(code.co_filename, code.co_name)
        if found is not None and (place is None or found < place):
            place, doing = found, _PURPOSES[found][1]
        frame = frame.f_back
    return lines, doing


def _awaited(frame: FrameType | None) -> tuple[str, int | None] | None:
    """Return what of torch a thread waits in that its stack does not tell, and for which rank, if it is one."""
    try:
        if frame is None:
            return None
        if frame.f_code.co_filename.endswith("/torch/distributed/distributed_c10d.py"):
            found = None
            while frame is not None and "/torch/" in frame.f_code.co_filename:
                found, frame = frame if frame.f_code.co_name in _POINT_TO_POINT else found, frame.f_back
            return None if found is None else (f"{IN_TORCH}.{found.f_code.co_name}", _peer(found.f_locals))
        work = _receiver_of_wait(frame)
        is_collective = isinstance(work, dist.Work) and cast(Any, work)._get_op_type() not in _MESSAGES  # torch's stubs
        return (_WORK, None) if is_collective else None
    except Exception:  # the thread runs on meanwhile, and the line may contain anything
        return None


def _peer(arguments: Mapping[str, Any]) -> int | None:
    """Return the rank at the other end of a message, from the arguments; ``None`` for any rank."""
    rank, in_group = (
        next((arguments[name] for name in names if arguments.get(name) is not None), None)
        for names in (("src", "dst"), ("group_src", "group_dst"))
    )
    if rank is None and in_group is not None:
        group: Any = arguments.get("group") or dist.group.WORLD
        rank = dist.get_global_rank(group, in_group)
    return rank


def _receiver_of_wait(frame: FrameType) -> Any:
    """Return the object of a call such as ``work.wait()`` or ``self.work.wait()`` that a frame is in, else ``None``."""
    code = frame.f_code
    if not hasattr(code, "co_positions"):  # Python 3.10
        return None
    first, last, start, end = next(islice(code.co_positions(), frame.f_lasti // 2, None))
    if first is None or first != last:
        return None
    line = linecache.getline(code.co_filename, first).encode()
    match ast.parse(line[start:end].decode(), mode="eval").body:
        case ast.Call(func=ast.Attribute(value=receiver, attr="wait")):
            names = ast.unparse(receiver).split(".")
    found = {**frame.f_globals, **frame.f_locals}[names[0]]
    for name in names[1:]:
        found = vars(found)[name]  # without the code of a property
    return found


# paths, or "path:function", with what runs there and whether that explains a long wait; the first match counts
_PURPOSES = (
    (("/pdb.py", "/bdb.py", "/pydevd", "/debugpy/", "/ipdb/"), "is paused in a debugger", True),
    (("/camshaft/handlers/checkpoint/loading.py", "/torch/serialization.py:load"), "is loading a checkpoint", True),
    (
        ("/camshaft/handlers/checkpoint/", "/torch/serialization.py:save", "/torch/distributed/checkpoint/"),
        "is saving or loading a checkpoint",
        True,
    ),
    # not eval_frame.py, which is also in the stack while compiled code runs
    (
        (
            *("/torch/_dynamo/convert_frame.py", "/torch/_inductor/codecache.py", "/torch/_inductor/async_compile.py"),
            *("/torch/_inductor/scheduler.py", "/torch/_inductor/graph.py", "/torch/_inductor/codegen/"),
        ),
        "is compiling",
        True,
    ),
    (("/camshaft/distributed/ranks.py:wrapper",), "is running a function for one rank only", True),
    (
        ("/torch/utils/data/dataloader.py:_get_data", "/torch/utils/data/dataloader.py:_try_get_data"),
        "is waiting for the workers of its data loader",
        False,
    ),
)
_EXPLAINS = {doing: explains for _, doing, explains in _PURPOSES}


@functools.lru_cache(4096)
def _purpose(path: str, function: str) -> int | None:
    path = path.replace("\\", "/")
    for number, (patterns, *_) in enumerate(_PURPOSES):
        for pattern in patterns:
            part, _, name = pattern.partition(":")
            if part in path and name in ("", function):
                return number
    return None


def _torch_groups(previous: Mapping[str, Any], is_idle: bool) -> dict[str, Any]:
    """Return how many collectives torch's process groups have started, and numbers and names of the unfinished ones.

    Groups are named as in ``"0: all"`` and ``"1: [0, 2]"``. The unfinished collectives are ``None`` if torch does not
    report them, and are listed only for a process that waits, since reading all of torch's flight recorder takes a
    while. Without the recorder, sends and receives over gloo are counted, too, so the real number may be lower.
    """
    if not (dist.is_available() and dist.is_initialized()):  # a rank that has left began no more than before
        return {"torch": previous.get("torch", {}), "unfinished": {}}
    world = dist.distributed_c10d._world
    size = dist.get_world_size()
    names: dict[str, str] = {}
    begun: dict[str, int] = {}
    for group, name in islice(tuple(world.pg_names.items()), 32):
        members = sorted(world.pg_group_ranks.get(group, ()))
        key = names[name] = f"{name}: {'all' if len(members) == size else members}"
        try:
            begun[key] = group._get_sequence_number_for_group()  # type: ignore[attr-defined]  # torch's stubs
        except RuntimeError:  # a backend that does not count, such as MPI's
            continue
    try:
        last = _flight_recorder(False)["pg_status"]
        if not {name for name, key in names.items() if begun.get(key)} <= last.keys():  # torch 2.9 does not record gloo
            return {"torch": begun, "unfinished": None}
        ends = {
            names[name]: [int(one["last_enqueued_collective"]), max(0, int(one["last_completed_collective"]))]
            for name, one in last.items()
            if name in names
        }
        unfinished: dict[str, list[Any]] = {name: [] for name, (first, second) in ends.items() if first > second}
        is_exact = not unfinished or is_idle
        if unfinished and is_idle:  # the last one that completed need not be the latest of those
            if previous.get("is_exact") and previous["ends"] == ends:
                begun, unfinished = previous["torch"], previous["unfinished"]
            else:
                begun, unfinished = _recorded(names, begun)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):  # a torch without it
        return {"torch": begun, "unfinished": None}
    return {"torch": begun, "unfinished": unfinished, "ends": ends, "is_exact": is_exact}


def _recorded(names: Mapping[str, str], begun: Mapping[str, int]) -> tuple[dict[str, int], dict[str, list[Any]]]:
    """Return what torch's flight recorder says groups have started, and numbers and names of what is unfinished.

    Args:
        names: the names of the groups in the result, by their names in the recorder.
        begun: how many operations the groups have started, including sends and receives.
    """
    counts = dict(begun)
    unfinished: defaultdict[str, list[Any]] = defaultdict(list)
    for one in _flight_recorder(True)["entries"]:
        group, number = names.get(one["process_group"][0]), int(one["collective_seq_id"])
        if group is None or one.get("is_p2p") or number > begun.get(group, 0):  # the last: of an earlier group
            continue
        counts[group] = number
        if not one["retired"]:
            running = unfinished[group]
            del running[_MOST_OPERATIONS - 1 :]  # the first ones and the last one tell what the rank may wait for
            running.append([number, one["profiling_name"].rpartition(":")[2]])
    return counts, {group: found for group, found in unfinished.items() if found}


def _flight_recorder(has_entries: bool) -> Any:
    return json.loads(c10d._dump_fr_trace_json(has_entries, True))  # type: ignore[attr-defined]  # torch's stubs


# --- who waits, and for whom ----------------------------------------------------------------------------------------


def _waits(one: Snapshot, now: float, patience: float) -> list[_Wait]:
    """Return what a rank waits in, if its main thread has waited for longer than ``patience``; otherwise nothing."""
    status = one.status
    if not one.is_alive or status.get("left") or status.get("failure"):
        return []
    stack = status.get("stack", ())
    running = [entry for entry in one.entries if entry.ended is None and (_members(entry.group, one) is not None)]
    current = [
        entry
        for entry in running
        if not status
        or (
            status.get("time", 0.0) > entry.began
            and (entry.inner_line in stack or (entry.is_of_torch and status.get("is_in_mpi")))
        )
    ]
    if any(not entry.is_of_torch for entry in current):  # those of torch may have completed before anybody looks
        running = [entry for entry in running if not entry.is_of_torch]
    # Where other threads call collectives, those that they are in do not tell what the main thread may still call.
    if any(now - entry.began > patience and entry in running for entry in current):
        return [
            _Wait(
                one.rank,
                call.collective,
                call.group,
                _members(call.group, one) or (),
                call.sequence,
                call.began,
                call.place,
                call,
                _operation(call)[0] if call.is_of_torch else "",
            )
            for call in running
        ]
    awaited, peer = status.get("awaited") or ("", None)
    is_recorded = any(not entry.is_of_torch for entry in running) or current
    what = "" if is_recorded else _operation_in(stack) or awaited
    since = max(status.get("time", 0.0) - status.get("idle_for", 0.0), status.get("since", 0.0))
    if not what or status["time"] - since <= patience:
        return []
    begun, unfinished = status.get("torch", {}), status.get("unfinished")
    line = _user_line(stack)
    if what == awaited and what != _WORK:
        ranks = range(one.world_size) if peer is None else sorted({one.rank, peer})
        return [_Wait(one.rank, what, "", ranks, 0, since, line, None)]
    if what == _WORK and unfinished is None:  # torch 2.9 only counts what it has begun; it may wait for an earlier one
        return []
    waits = []
    for group in begun if unfinished is None else unfinished:
        if group in begun:
            known = (unfinished or {}).get(group) or [(begun[group], "")]
            number, operation = known[0 if what in _AHEAD else -1]
            members = _members(group, one) or ()
            waits.append(_Wait(one.rank, what, group, members, number, since, line, None, operation))
    return waits


def _operation_in(stack: Sequence[str]) -> str:
    """Return the unrecorded torch operation in which a stack may be waiting for other ranks, or ``""``."""
    inner = list(takewhile(lambda line: "/torch/" in line, stack))
    if any("/torch/autograd/" in line and line.endswith(" in _engine_run_backward") for line in inner):
        return BACKWARD
    innermost = next((line for line in inner if "/torch/_ops.py" not in line), "")
    if not _WAITING_IN_TORCH.search(innermost):
        return ""
    for line in reversed(inner):
        function = line.rpartition(" in ")[2]
        if "/torch/distributed/fsdp/" in line:
            return FSDP
        if "/torch/nn/parallel/distributed.py" in line:
            return DDP
        if "/torch/distributed/distributed_c10d.py" in line and not function.startswith("_"):
            is_recorded = len(inner) < len(stack) and "/camshaft/distributed/" in stack[len(inner)]
            return "" if is_recorded or function in _POINT_TO_POINT else f"{IN_TORCH}.{function}"
    return IN_TORCH


def _members(group: str, one: Snapshot) -> Sequence[int] | None:
    """Return the ranks of a group by its name, ``"all"`` or ``"[0, 2]"``; ``None`` if that was too long to be kept."""
    name = group.rpartition(": ")[2]
    if name == "all":
        return range(one.world_size)
    return _parsed(name)


@functools.lru_cache(1024)
def _parsed(name: str) -> tuple[int, ...] | None:
    return tuple(map(int, re.findall(r"\d+", name))) if re.fullmatch(r"\[[\d, ]*\]", name) else None


def _has_begun(other: Snapshot | None, wait: _Wait) -> bool | None:
    """Return whether a rank has begun what another one waits in; ``None`` if that is unknown."""
    if other is None:
        return None
    if wait.entry is None:
        return _has_begun_in_torch(other, wait)
    entries = other.entries
    for entry in entries:
        if (entry.group, entry.sequence) == (wait.group, wait.sequence):
            return not _differ((entry, wait.entry))
    last = next((entry.sequence for entry in reversed(entries) if entry.group == wait.group), 0)
    if last >= wait.sequence:
        return True
    if entries and entries[-1].number - entries[0].number >= len(entries):
        return None  # some were not readable
    if last or not entries or entries[0].number == 1:
        return False
    # The history is too short. Had the rank begun it earlier, it could have left it only after all had begun it.
    is_ahead = not wait.is_rooted and entries[0].began < wait.since - 1.0
    return False if is_ahead else None


def _has_begun_in_torch(other: Snapshot, wait: _Wait) -> bool | None:
    status = other.status
    begun, unfinished = status.get("torch", {}).get(wait.group), status.get("unfinished")
    if begun is None:
        return None
    if begun < wait.sequence:
        return False
    running = [] if unfinished is None else unfinished.get(wait.group, ())
    operation = next((name for number, name in running if number == wait.sequence), "")
    if operation and wait.operation and operation != wait.operation:
        return False
    if begun == wait.sequence and status.get("has_mismatch"):  # it is that of the recorded call, which met another one
        return False
    if begun == wait.sequence and _is_in_recorded(other, wait.ranks):  # unless that begins, this is what it does
        return status.get("idle_for", 0.0) <= _REST if unfinished is None else wait.group not in unfinished
    return True


def _is_in_recorded(one: Snapshot, ranks: Sequence[int]) -> bool:
    """Return whether a rank is waiting in a recorded collective of exactly these ranks."""
    stack = one.status.get("stack", ())
    return any(
        entry.ended is None and entry.inner_line in stack and list(_members(entry.group, one) or ()) == list(ranks)
        for entry in one.entries
    ) and bool(_WAITING_IN_TORCH.search(stack[0]))


def _missing(wait: _Wait, by_rank: Mapping[int, Snapshot]) -> list[int]:
    """Return the ranks that are not known to have begun what a rank waits in."""
    return [rank for rank in wait.ranks if rank != wait.rank and not _has_begun(by_rank.get(rank), wait)]


def _by_rank(snapshots: Iterable[Snapshot]) -> dict[int, Snapshot]:
    return {one.rank: one for one in sorted(snapshots, key=lambda one: one.rank)}


def waited(one: Snapshot, now: float) -> float:
    """Return the seconds that a rank has waited in a collective; 0 if it does not wait."""
    return max((now - wait.since for wait in _waits(one, now, 0.0)), default=0.0)


def is_stale(one: Snapshot, now: float) -> bool:
    """Return True if a process lives, and has not run any Python for a while."""
    return one.is_alive and not one.status.get("left") and bool(now - one.status.get("time", now) > _STALE)


def has_made(one: Snapshot, call: Entry) -> bool:
    """Return whether a rank is known to have made the same call."""
    same = (entry for entry in one.entries if (entry.group, entry.sequence) == (call.group, call.sequence))
    return any(not _differ((entry, call)) for entry in same)


def mismatch(snapshots: Iterable[Snapshot], now: float) -> str | None:
    """Return the calls that differ, of ranks some of whose processes have ended: the difference may be the cause."""
    return _mismatch(_by_rank(snapshots), now, 0.0)


# --- divergence -----------------------------------------------------------------------------------------------------


def divergence(snapshots: Iterable[Snapshot], now: float, patience: float = PATIENCE) -> str | None:
    """Return who called what from which line if the calls of the ranks differ, or none of some ranks can proceed.

    The text is the same for the same state, so that a caller can look twice. Where a rank has stopped or ended, the
    calls differ as a consequence: :func:`departed` and :func:`stopped` come first.

    Args:
        snapshots: of ranks of one job.
        now: the time.
        patience: seconds that ranks have waited at least.
    """
    by_rank = _by_rank(snapshots)
    return _mismatch(by_rank, now, patience) or _deadlock(by_rank, now, patience)


def _mismatch(by_rank: Mapping[int, Snapshot], now: float, patience: float) -> str | None:
    is_ending = any(not one.is_alive or one.status.get("failure") for one in by_rank.values())
    age = min(_SETTLED, patience) if is_ending else patience
    calls: defaultdict[tuple[str, int], dict[int, Entry]] = defaultdict(dict)
    for rank, one in by_rank.items():
        for entry in one.entries:
            if entry.ended is not None or now - entry.began > age:
                calls[entry.group, entry.sequence][rank] = entry
    differing = {key: found for key, found in calls.items() if _differ(found.values())}
    if not differing:
        return None
    running = [key for key, found in differing.items() if any(entry.ended is None for entry in found.values())]
    if running:  # the cause is the first one that differs in this group
        group = min(running)[0]
        texts = [_calls_text(differing[min(key for key in differing if key[0] == group)])]
    else:  # of several in a loop, the same one each time
        texts = list(map(_calls_text, differing.values()))
    return f"the ranks call different things:\n{min(texts)}"


def _differ(entries: Iterable[Entry]) -> bool:
    """Return whether calls that met are certainly not the same one.

    What torch issues may have another shape, or come from elsewhere: a rank without data takes part in the reductions
    of the others' backward passes outside of one.
    """
    own: list[Entry] = []
    of_torch: list[Entry] = []
    for entry in entries:
        (of_torch if entry.is_of_torch else own).append(entry)
    if own and any(entry.collective in _ISSUED for entry in of_torch):
        return True
    if own and of_torch:
        return len({_operation(entry)[:3] for entry in (*own, *of_torch)}) > 1
    return len({_operation(entry) for entry in of_torch} or {_call(entry) for entry in own}) > 1


def _call(entry: Entry) -> tuple[str, ...]:
    """Return what must be the same on all ranks; dimensions of size 1 make no difference to any backend."""
    return entry.collective, entry.how, entry.root, _squeezed(entry.value)


def _operation(entry: Entry) -> tuple[str, str, str, str, int]:
    """Return what an entry of torch has in common with others: operation, reduction, root, dtype, and size."""
    name, how = entry.collective.removeprefix(f"{IN_TORCH}."), entry.how
    if name in _ISSUED:
        name, _, how = how.partition(" ")
    dtype, _, shape = entry.value.partition("[")
    return _VARIANT.sub("", name), how, entry.root, dtype, math.prod(map(int, re.findall(r"\d+", shape)))


@functools.lru_cache(4096)
def _squeezed(value: str) -> str:
    dtype, bracket, shape = value.partition("[")
    return dtype + bracket + ", ".join(size for size in shape.rstrip("]").split(", ") if size != "1")


def _calls_text(found: Mapping[int, Entry]) -> str:
    return _table({rank: _cells(entry) for rank, entry in found.items()})


def _cells(entry: Entry) -> dict[str, str]:
    texts = {"collective": entry.collective, "ranks": entry.group, "how": entry.how, "root": entry.root}
    return {**texts, "value": entry.value, "line": entry.place}


def _table(cells: Mapping[int, Mapping[str, str]]) -> str:
    """Return a table with one row for all ranks that do the same."""
    names = [name for name in next(iter(cells.values())) if any(row[name] for row in cells.values())]
    rows: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank, row in cells.items():
        rows[tuple(row[name] or "-" for name in names)].append(rank)
    return aligned([["", *names], *([_named(ranks), *row] for row, ranks in rows.items())])


def _deadlock(by_rank: Mapping[int, Snapshot], now: float, patience: float) -> str | None:
    """Find the ranks that wait for each other: the largest set of which each one waits for another one in it."""
    stuck = {rank: waits for rank, one in by_rank.items() if (waits := _waits(one, now, patience))}
    while True:
        # Once for all ranks in the same call, as the rank sees it that has been there for the longest time.
        calls = {_key(wait): wait for wait in sorted(chain(*stuck.values()), key=lambda wait: -wait.since)}
        culprits = {key: _culprits(wait, stuck, by_rank) for key, wait in calls.items()}
        free = [rank for rank, waits in stuck.items() if not all(culprits[_key(wait)] for wait in waits)]
        if not free:
            break
        for rank in free:
            del stuck[rank]
    if not stuck:
        return None
    cells = {}
    for rank, (wait, *_) in stuck.items():
        if wait.entry is None:
            call = dict.fromkeys(("collective", "ranks", "how", "root", "value", "line"), "")
            call.update(collective=wait.what, ranks=wait.group.rpartition(": ")[2], line=wait.line)
        else:
            call = _cells(wait.entry)
        cells[rank] = {**call, "waits for": _named(culprits[_key(wait)])}
    return f"the ranks wait for each other, and none of them can proceed:\n{_table(cells)}"


def _key(wait: _Wait) -> tuple[Any, ...]:
    return wait.group, wait.sequence, wait.is_rooted, wait.operation


def _culprits(wait: _Wait, stuck: Mapping[int, Any], by_rank: Mapping[int, Snapshot]) -> list[int]:
    """Return the ranks without which a call cannot complete and which have not begun it, if they cannot proceed."""
    if not wait.is_rooted:
        members = set(wait.ranks)
        return [rank for rank in stuck if rank in members and _has_begun(by_rank[rank], wait) is False]
    missing = _missing(wait, by_rank)  # it may need only one of them
    are_stuck = all(rank in stuck and _has_begun(by_rank[rank], wait) is False for rank in missing)
    return missing if are_stuck else []


# --- ranks that stopped or ended ------------------------------------------------------------------------------------


def stopped(snapshots: Iterable[Snapshot], now: float, patience: float = PATIENCE) -> str | None:
    """Return which rank ended a run early that other ranks are still in, and where these wait for it.

    Args:
        snapshots: of ranks of one job.
        now: the time.
        patience: seconds that another rank has waited at least.
    """
    by_rank = _by_rank(snapshots)
    waits = [wait for one in by_rank.values() for wait in _waits(one, now, patience)]
    texts = []
    for rank, one in by_rank.items():
        inside = {_run_of(engine) for engine in one.status.get("engines", ())}
        for end in one.status.get("ended", ()):
            if _run_of(end) in inside or end["how"] == activity.TOGETHER or one.status.get("failure"):
                continue
            waiting = [
                wait
                for wait in waits
                if rank in wait.ranks
                and _has_begun(one, wait) is False
                and any(
                    _run_of(engine) == _run_of(end) and engine["iteration"] >= end["iteration"]
                    for engine in by_rank[wait.rank].status.get("engines", ())
                )
            ]
            waiting = waiting or _met_after(one, end, by_rank)
            if waiting:
                texts.append(_stop_text(rank, end, waiting))
                break
    return "; ".join(texts) or None


def _met_after(one: Snapshot, end: Mapping[str, Any], by_rank: Mapping[int, Snapshot]) -> list[_Wait]:
    """Return the calls of ranks in a run that met other calls, which a rank has made since it ended that run."""
    since = end.get("time", math.inf)
    calls = {(entry.group, entry.sequence): entry for entry in one.entries if entry.began >= since}
    found = []
    for rank, other in by_rank.items():
        is_inside = any(
            _run_of(engine) == _run_of(end) and engine["iteration"] >= end["iteration"]
            for engine in other.status.get("engines", ())
        )
        for entry in other.entries if is_inside else ():
            own = calls.get((entry.group, entry.sequence))
            if own is not None and _differ((own, entry)):
                found.append(
                    _Wait(rank, entry.collective, entry.group, (), entry.sequence, entry.began, entry.place, entry)
                )
                break
    return found


def _stop_text(rank: int, end: Mapping[str, Any], waiting: Sequence[_Wait]) -> str:
    where = f"epoch {end['epoch']}, iteration {end['iteration']} of the run at {end['line']}"
    others = _named([wait.rank for wait in waiting])
    verb = "waits" if len({wait.rank for wait in waiting}) == 1 else "wait"
    is_over = all(wait.entry is not None and wait.entry.ended is not None for wait in waiting)
    doing = f"{others} met another call of it in" if is_over else f"{others} still {verb} for it in"
    text = f"rank {rank} stopped alone in {where}: {end['how']}; {doing} {waiting[0]}"
    if end["how"].startswith("terminate"):
        return f"{text}. To stop all ranks after the same iteration, call camshaft.handlers.stop_together(engine)"
    return f"{text}. The error ended the loop of this rank only: raise it, or handle it inside the step"


def _run_of(run: Mapping[str, Any]) -> tuple[str, int]:
    return run["line"], run["number"]


def departed(
    snapshots: Iterable[Snapshot], rank: int, now: float, patience: float = PATIENCE
) -> tuple[int, str] | None:
    """Return the rank that failed first, was killed, or left while others wait for it, and what became of it.

    Errors and killed processes concern every rank, a rank that has left only those that wait for it.

    Args:
        snapshots: of ranks of one job.
        rank: the one that asks.
        now: the time.
        patience: seconds that it has waited at least for a rank that has left.
    """
    by_rank = _by_rank(snapshots)
    causes = []
    for one in by_rank.values():
        failure, left = one.status.get("failure"), one.status.get("left")
        if failure:
            is_victim = _VICTIM.search(failure["error"]) is not None
            causes.append(((is_victim, failure["time"], one.rank), one))
        elif not one.is_alive and not left:
            # It lived for at most about a second after its last status.
            causes.append(((False, one.status.get("time", now) + 1.0, one.rank), one))
    if causes:
        cause = min(causes, key=lambda found: found[0])[1]
        return None if cause.rank == rank else (cause.rank, end_text(cause, by_rank.values()))
    seen, queue = {rank}, [rank]
    for current in queue:  # those that this rank waits for, and those that they wait for
        for wait in _waits(by_rank[current], now, patience) if current in by_rank else ():
            for other in _missing(wait, by_rank):
                if _has_begun(by_rank.get(other), wait) is None:
                    continue
                if by_rank[other].status.get("left"):
                    return other, f"{end_text(by_rank[other])}; rank {wait.rank} waits for it in {wait}"
                if other not in seen:
                    seen.add(other)
                    queue.append(other)
    return None


def end_text(one: Snapshot, others: Iterable[Snapshot] = ()) -> str:
    """Return how a rank ended that has failed, left, or disappeared, and where.

    Args:
        one: of the rank.
        others: of other ranks, whose calls may be why it crashed in a collective of torch.
    """
    failure, left, crash = (one.status.get(name) for name in ("failure", "left", "crash"))
    if failure:
        where = failure.get("where") or ""
        place = "" if "iteration" in where or "iteration" in failure["error"] else _place(one, "")
        return ", ".join(text for text in (f"rank {one.rank} failed first: {failure['error']}", where, place) if text)
    if left and not one.path.name:  # what it called is not known
        return f"rank {one.rank} {left}"
    how = left or f"process was killed or crashed{f' ({crash})' if crash else ''}"
    whose = f"rank {one.rank}" if left else f"rank {one.rank}'s"
    operation = _operation_in(stack) if (stack := one.status.get("stack", ())) and crash else ""
    if operation:
        calls = {other.rank: other.last for other in others if other.rank != one.rank}
        texts = [f"it was in {operation} at {_user_line(stack)}"]
        texts += [
            f"rank {rank}'s last call was {last.collective} at {last.place}" for rank, last in calls.items() if last
        ]
        call = "; ".join(texts[: _MOST_RANKS + 1])
    elif crash and not any(entry.ended is None for entry in one.entries):
        call = f"it was at {_user_line(stack)}"
    elif one.last:
        whose_call = "" if one.last.is_of_torch else " of camshaft"  # there may be later ones of torch, not recorded
        call = f"its last call{whose_call} was {one.last.collective} at {one.last.place}"
    else:
        call = "it had called no collective of camshaft"
    place = "" if crash else _place(one)  # a status is older than a crash, and may be younger than the call
    return f"{whose} {how}; {call}" + (f"; it last reported {place}" if place else "")


def _place(one: Snapshot, run: str = " of the run at {line}") -> str:
    """Return where the innermost engine of a rank is; of an engine of this package, there is always a place."""
    engines = one.status.get("engines", ())
    return f"epoch {{epoch}}, iteration {{iteration}}{run}".format(**engines[-1]) if engines else ""


# --- no progress ----------------------------------------------------------------------------------------------------


def hang_report(snapshots: Iterable[Snapshot], rank: int, now: float) -> Report | None:
    """Return what a rank waits in, for whom, and what those do; ``None`` if it does not wait.

    Args:
        snapshots: of ranks of one job, as far as there are any.
        rank: the one that waits.
        now: the time.
    """
    by_rank = _by_rank(snapshots)
    waits = _waits(by_rank[rank], now, 0.0) if rank in by_rank else []
    if not waits:
        return None
    lines = []
    awaited = sorted({other for wait in waits for other in _missing(wait, by_rank)})
    seen, queue, is_alarm, is_explained = {rank}, [rank], False, False
    for current in queue:
        for wait in waits if current == rank else _waits(by_rank[current], now, 0.0):
            missing = _missing(wait, by_rank)
            if current == rank:
                lines.append(
                    f"rank {rank} has been waiting for {now - wait.since:.0f} s in {wait}, "
                    + (f"for {_named(missing)}:" if missing else "which all ranks of the group have begun")
                )
                is_alarm |= not missing
            new = [other for other in missing if other not in seen]
            seen.update(new)
            for index, other in enumerate(new):
                one = by_rank.get(other)
                if one is not None and _waits(one, now, 0.0):
                    queue.append(other)
                what, explains = _activity(other, one, by_rank[current], wait, now, by_rank)
                is_alarm |= explains is False
                is_explained |= explains is True
                if index < _MOST_RANKS:
                    lines.append(f"  {what}")
                    stack = one.status.get("stack", ()) if one is not None else ()
                    lines += (f"    {line}" for line in stack)
            if len(new) > _MOST_RANKS:
                lines.append(f"  and {len(new) - _MOST_RANKS} more")
    call = waits[0].what, waits[0].line, waits[0].group, waits[0].sequence
    return Report("\n".join(lines), is_alarm or not is_explained, awaited, call)


def _activity(
    rank: int, one: Snapshot | None, waiting: Snapshot, wait: _Wait, now: float, by_rank: Mapping[int, Snapshot]
) -> tuple[str, bool | None]:
    """Return what a rank does that another one waits for, and whether that explains it; ``None`` if it waits too."""
    if one is None:
        return f"rank {rank} has not reported: it never arrived, or its node cannot be reached", False
    status = one.status
    if status.get("failure") or status.get("left") or not one.is_alive:
        return end_text(one), False
    age = now - status.get("time", now)
    engines = status.get("engines", ())
    at = f" at {line}" if (line := _user_line(status.get("stack", ()))) else ""
    place = f", in {_place(one)}" if engines else ""
    if age > _STALE:
        cause = "its process is stopped, or code of an extension holds the GIL"
        return f"rank {rank} has not run any Python for {age:.0f} s: {cause}; it was{at or ' busy'}{place}", False
    if waits := _waits(one, now, 0.0):
        others = _named(_missing(waits[0], by_rank)) or "data"
        return f"rank {rank} waits for {others} in {waits[0]}{place}", None
    doing = status.get("doing")
    if doing:
        return f"rank {rank} {doing}{at}{place}", _EXPLAINS.get(doing, False)
    entry = wait.entry
    if entry is not None and entry.is_long and entry.collective.startswith("one_rank"):
        body = "the body of one_rank_first" if entry.collective == "one_rank_first" else "a function of one_rank_only"
        return f"rank {rank} is in {body}{at}{place}", True
    theirs = {_run_of(engine) for engine in waiting.status.get("engines", ())}
    idle = f" and has not used the CPU for {seconds:.0f} s" if (seconds := status.get("idle_for", 0.0)) > _REST else ""
    if len(engines) > 1 and _run_of(engines[-1]) not in theirs:
        return f"rank {rank} is evaluating{at}{place}{idle}", seconds <= _QUIET
    return f"rank {rank} is{at or ' busy'}{place}{idle}", False


# --- texts ----------------------------------------------------------------------------------------------------------


def _user_line(stack: Sequence[str]) -> str:
    """Return the innermost line that is not of a library, otherwise the innermost one."""
    return next((line for line in stack if not _FOREIGN.search(line)), stack[0] if stack else "")


def _named(ranks: Sequence[int]) -> str:
    """Return ranks as text, in ascending order.

    >>> _named([0, 1, 2, 5])
    'ranks 0-2, 5'
    """
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(_spans(ranks))}" if ranks else ""


def _spans(ranks: Sequence[int]) -> Iterator[str]:
    for _, group in groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0]):
        span = [rank for _, rank in group]
        yield str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}"
