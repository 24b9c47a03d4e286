"""The collectives that this process has sent, with the number of each in its group.

torch's flight recorder has them, also those of DDP and FSDP, and those that a script calls directly. What is recorded
was sent: a call that fails in the check of its arguments is not there. Reading all of it takes milliseconds to a tenth
of a second, in which no other thread runs, so that is done only while some rank waits; whether this one does takes
microseconds. Backends of other libraries keep a list of their own, :class:`Calls`.
"""

from __future__ import annotations

import json
import math
import pickle
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from camshaft.text import spans

DEBUG = "debug "  # before the names of the groups of calls that debug mode compares
_MOST = 64  # calls that are kept
_MOST_GROUPS = 32
_MOST_FRAMES = 30  # of a stack
_SHARE = 10.0  # times the duration of one reading, at least, until the next one
# alike on all ranks; gloo also demands it of all_gather
_SIZED = ("all_reduce", "reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor")
_NAMES = {"_all_gather_base": "all_gather_into_tensor", "_reduce_scatter_base": "reduce_scatter_tensor"}
RECORDS_GLOO = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10)
_DTYPES = {"Byte": "uint8", "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64", "Bool": "bool"}
_DTYPES |= {"Half": "float16", "BFloat16": "bfloat16", "Float": "float32", "Double": "float64"}
_DTYPES |= {"ComplexFloat": "complex64", "ComplexDouble": "complex128"}


class Call(NamedTuple):
    """One collective that was sent.

    Args:
        group: the same text on all ranks of the group, and of no other group.
        sequence: number of the collective in the group.
        operation: such as ``"all_reduce"``.
        value: dtype and shape, ``"torch.float32 [4]"``; ``""`` if there is none.
        size: dtype and number of elements if these must be the same on all ranks, otherwise ``""``.
        began: ``time.monotonic()``.
        is_done: whether it has completed, or failed.
        thread: identifier of the thread that sent it; 0 for one of torch's own, such as in a backward pass on a GPU.
        library: that carries it out, such as ``"gloo"``; ``""`` if groups of the same ranks are not told apart, so that
            numbers prove nothing about which calls differ.
    """

    group: str
    sequence: int
    operation: str
    value: str
    size: str
    began: float
    is_done: bool
    thread: int
    library: str


class Found(NamedTuple):
    """What :meth:`Trace.read` found.

    Args:
        calls: the last calls, oldest first, and those that are running.
        begun: number of the last call of each group that the recorder still has, or whose calls are counted here.
        at_most: the same for other groups; the real number may be lower, where messages are counted, too. The key
            ``DEBUG`` stands for all groups of debug mode that are not in ``begun``.
        members: the ranks of each group, as text.
        threads: identifiers of all threads that sent something.
    """

    calls: tuple[Call, ...] = ()
    begun: Mapping[str, int] = {}
    at_most: Mapping[str, int] = {}
    members: Mapping[str, str] = {}
    threads: frozenset[int] = frozenset()


class Calls:
    """The last collectives over a library that torch does not record; see :class:`Call` for its name."""

    def __init__(self, library: str = "") -> None:
        self._library = library
        self._recent: deque[list[Any]] = deque(maxlen=_MOST)
        self.counts: dict[str, int] = {}
        self.members: dict[str, str] = {}

    def begin(self, group: str, ranks: Sequence[int], operation: str, tensors: Sequence[Tensor] = ()) -> list[Any]:
        """Add a call, and return it for :meth:`end`.

        Args:
            group: a text that stands for the group on all of its ranks.
            ranks: of the group.
            operation: what is called.
            tensors: what this rank passes.
        """
        if group not in self.members:
            self.members[group] = spans(ranks)
        number = self.counts[group] = self.counts.get(group, 0) + 1
        layout = str(tensors[0].dtype) if tensors else "", [list(one.shape) for one in tensors]
        call = [group, number, operation, *layout, time.monotonic(), False, threading.get_ident(), _stack()]
        self._recent.append(call)
        return call

    def end(self, call: list[Any], was_sent: bool = True) -> None:
        """Record that a call has completed, or failed; one that was not sent does not count."""
        call[6] = True
        if not was_sent and self.counts[call[0]] == call[1]:
            self.counts[call[0]] -= 1
            self._recent.remove(call)

    def read(self) -> Iterator[Call]:
        """Yield the calls, oldest first."""
        for group, number, operation, dtype, shapes, began, is_done, thread, _ in tuple(self._recent):
            layout = _layout(operation, dtype, shapes, self._library)
            yield Call(group, number, operation, *layout, began, is_done, thread, self._library)


def _stack() -> list[tuple[CodeType, int]]:
    """Return code and line of the frames of this thread, without the frames, which would keep objects alive."""
    frame: FrameType | None = sys._getframe(2)
    found: list[tuple[CodeType, int]] = []
    while frame is not None and len(found) < _MOST_FRAMES:
        found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return found


class Trace:
    """Reads what this process has sent.

    Args:
        own: calls that torch does not record, if there are any.
    """

    def __init__(self, own: Calls | None = None) -> None:
        self.own = [] if own is None else [own]
        self._keys: WeakKeyDictionary[Any, tuple[str, str]] = WeakKeyDictionary()  # and the ranks, of torch's groups
        self._known: list[tuple[str, str, str, int]] = []  # groups, when they were looked for last
        self._state: Any = None
        self._found = Found()
        self._next = 0.0
        self._lock = threading.Lock()

    def unfinished(self) -> list[Any]:
        """Return what has not completed; it changes whenever something else has begun."""
        own = [(one.group, one.sequence) for calls in self.own for one in calls.read() if not one.is_done]
        names = {name for name, *_ in self._groups()}
        return own + [
            (name, begun) for name, (begun, ended) in sorted(_statuses().items()) if begun > ended and name in names
        ]

    def read(self, now: float, is_urgent: bool = False) -> Found | None:
        """Return the last calls; ``None`` if it is too early to read them again, although there are new ones."""
        with self._lock:
            return self._read(now, is_urgent)

    def _read(self, now: float, is_urgent: bool) -> Found | None:
        groups = self._groups()
        counts = {group: count for calls in self.own for group, count in tuple(calls.counts.items())}
        own = [one for calls in self.own for one in calls.read()]
        statuses = _statuses()
        state = [one[0::3] for one in groups], statuses, own
        if state == self._state:
            return self._found
        if now < self._next and not is_urgent:
            return None
        began = time.monotonic()
        known = {name: (key, ranks, count) for name, key, ranks, count in groups}
        members = {key: ranks for key, ranks, _ in known.values()}
        for calls in self.own:
            members |= calls.members
        by_group: dict[str, list[Call]] = {}
        latest: dict[str, int] = {}  # torch's number of the group object; a group that is made anew may have its name
        unlisted = {name: begun for name, (begun, _) in statuses.items() if name in known}
        clocks = time.monotonic(), time.time_ns()  # once: this thread may be suspended at any time
        for entry in _recorded(True).get("entries", ()):
            name, sequence = entry["process_group"][0], int(entry["collective_seq_id"])
            key, ranks, count = known.get(name, ("", "", 0))
            if not key or entry.get("is_p2p") or sequence > count:  # the last: of an earlier group
                continue
            if unlisted.get(name) == sequence:
                del unlisted[name]
            call = _call(entry, key, clocks, *statuses.get(name, (0, 0)))
            members[call.group] = ranks
            if latest.setdefault(call.group, entry["pg_id"]) != entry["pg_id"]:  # the others are of an earlier group
                latest[call.group] = entry["pg_id"]
                by_group[call.group] = []
            by_group.setdefault(call.group, []).append(call)
        for call in own:
            by_group.setdefault(call.group, []).append(call)
        found = sorted((call for one in by_group.values() for call in one), key=lambda call: call.began)
        begun = {group: one[-1].sequence for group, one in by_group.items()}
        at_most = {key: count for key, _, count in known.values() if key not in begun}
        if len(counts) <= _MOST_GROUPS:
            begun, at_most = counts | begun, at_most | {DEBUG: 0}
        last = (call for index, call in enumerate(found) if not call.is_done or index >= len(found) - _MOST)
        self._found = Found(tuple(last), begun, at_most, members, frozenset(call.thread for call in found))
        # torch counts a call shortly before it lists it: such a reading is repeated, though nothing may change any more
        self._state = None if any(begun > 0 for begun in unlisted.values()) else state
        self._next = now + _SHARE * (time.monotonic() - began)
        return self._found

    def stack_of(self, group: str, sequence: int) -> list[str]:
        """Return the stack in which a call was sent, innermost first; the first time, torch takes seconds for it."""
        for call in (call for calls in self.own for call in tuple(calls._recent) if call[:2] == [group, sequence]):
            return [f"{code.co_filename}:{line} in {code.co_name}" for code, line in call[-1]]
        name = next((name for name, key, *_ in self._groups() if key == group.partition(" ")[0]), None)
        found = pickle.loads(c10d._dump_fr_trace(True, True, False)) if name is not None and RECORDS_GLOO else {}  # type: ignore[attr-defined]  # torch's stubs
        for entry in reversed(found.get("entries", ())):
            if entry["process_group"][0] == name and entry["collective_seq_id"] == sequence:
                return [f"{one['filename']}:{one['line']} in {one['name']}" for one in entry.get("frames", ())]
        return []

    def _groups(self) -> list[tuple[str, str, str, int]]:
        """Return for each of torch's groups its name, key, ranks, and the number of operations that it has begun."""
        if not (dist.is_available() and dist.is_initialized()):  # destroyed, with the recorder left as it is
            return [(name, key, ranks, sys.maxsize) for name, key, ranks, _ in self._known]
        world, groups = dist.distributed_c10d._world, list[tuple[str, str, str, int]]()
        for group, name in tuple(world.pg_names.items())[:_MOST_GROUPS]:
            if (count := num_begun(group)) is None:
                continue
            if group not in self._keys:
                ranks = spans(world.pg_group_ranks.get(group, ()))
                # The names of groups that only some ranks have made may be those of others elsewhere.
                self._keys[group] = f"{name}/{crc32(ranks.encode()):x}", ranks
            groups.append((str(name), *self._keys[group], count))
        self._known = groups
        return groups


def _recorded(has_calls: bool) -> Any:
    """Return what torch has recorded, except for nccl."""
    return json.loads(c10d._dump_fr_trace_json(has_calls, not has_calls)) if RECORDS_GLOO else {}  # type: ignore[attr-defined]  # torch's stubs


def num_begun(group: Any) -> int | None:
    """Return the number of operations that a group of torch has begun; ``None`` if its backend does not count.

    Torch also lists an integer in place of the groups that this process is not in.
    """
    if isinstance(group, int):
        return None
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:
        return None


def _statuses() -> dict[str, tuple[int, int]]:
    """Return the numbers of the last operation of each group that has begun, and that has completed."""
    found = _recorded(False).get("pg_status", {})
    names = "last_enqueued_collective", "last_completed_collective"
    return {group: (int(one[names[0]]), int(one[names[1]])) for group, one in found.items()}


def _call(entry: Mapping[str, Any], key: str, clocks: tuple[float, int], begun: int, ended: int) -> Call:
    library, _, name = str(entry["profiling_name"]).rpartition(":")
    operation, dtypes = _NAMES.get(name, name), entry["input_dtypes"]
    dtype = f"torch.{_DTYPES.get(dtypes[0], dtypes[0])}" if dtypes else ""
    now, now_ns = clocks
    is_of_torch = str(entry.get("thread_name", "")).startswith("pt_autograd")
    return Call(
        key if library in ("", "gloo") else f"{key} {library}",
        int(entry["collective_seq_id"]),
        operation,
        *_layout(operation, dtype, entry["input_sizes"], library),
        now - (now_ns - int(entry["time_created_ns"])) / 1e9,
        bool(entry["retired"]) or begun == ended,  # one that has failed may stay, but its group has nothing to do
        0 if is_of_torch else int(entry.get("thread_id", 0)),
        library,
    )


def _layout(operation: str, dtype: str, shapes: Sequence[Sequence[int]], library: str) -> tuple[str, str]:
    """Return dtype and shape as text, and the size in bytes if it must be the same on all ranks.

    Libraries exchange as many bytes whatever the dtype, and the kinds of numbers are compared where they arrive.
    """
    size = sum(map(math.prod, shapes))
    value = f"{dtype} {shapes[0] if len(shapes) == 1 else [size]}" if dtype else ""
    is_sized = operation in _SIZED or (operation, library) == ("all_gather", "gloo")
    if not (is_sized and dtype):
        return value, ""
    kind = getattr(torch, dtype.removeprefix("torch."), None)
    return value, f"{size * kind.itemsize} bytes" if isinstance(kind, torch.dtype) else f"{dtype} {size}"
