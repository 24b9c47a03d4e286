"""The flight record of a process: its last collectives and its status, in a mapped file that outlives it.

Sibling ranks, the parent process, and ``python -m camshaft.distributed --inspect`` read it, also after the process was
killed. The file has a header, the status, and a ring of the last collectives, each of which consists of numbers and a
text: what a line of the user calls is the same from step to step, so the text is kept, and copied. A record is alive as
long as its process holds a lock on the file; the kernel releases it however the process ends.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import logging
import math
import mmap
import os
import re
import socket
import stat
import struct
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from camshaft.errors import line_of

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # the module does not exist there

logger = logging.getLogger(__name__)

_MEMORY = Path("/dev/shm")
_PREFIX, _SUFFIX = "camshaft-", ".record"
STACKS = ".stacks"  # suffix of a file beside a record
_FATAL = "Fatal Python error: "  # what faulthandler begins with when a process crashes
_MAX_AGE, _MAX_DEAD = 24 * 3600.0, 64  # seconds, and number, of records to keep of processes that have ended
_MAGIC = b"camshaft record 3"
_STAMP = struct.Struct("=Q")
_AREA = struct.Struct("=QII")  # before JSON: stamp, odd while it is written; size and CRC-32 of the JSON
_NUM_ENTRIES, _HEADER_BYTES, _STATUS_BYTES, _TEXT_BYTES = 64, 1024, 24 * 1024, 472
_ENTRY = struct.Struct(
    f"@QQddQ{_TEXT_BYTES}sQ"
)  # number, sequence, began, ended or 0, CRC-32 of the text, text, number
_HEADER = 64
_STATUS = _HEADER + _HEADER_BYTES
_ENTRIES = _STATUS + _STATUS_BYTES
_SIZE = _ENTRIES + _NUM_ENTRIES * _ENTRY.size
_ENTRY_BYTES, _ENTRY_WORDS, _ENDED = _ENTRY.size, _ENTRY.size // 8, 3  # of an entry; the last is a place in it
_ATTEMPTS, _PAUSE = 20, 0.001  # to read an area that is being written; seconds between them
_MANY = 1024  # entries after which a cache starts anew
BACKWARD = "backward (gradient reduction)"
FSDP, DDP = "FSDP (parameters or gradients)", "DistributedDataParallel (parameters or buffers)"
IN_TORCH = "torch.distributed"
_PARENT = os.path.join(Path(__file__).parents[2], "")
_LIBRARIES = tuple(os.path.join(folder, "") for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))
# modules of this folder that record what they call
_RECORDING = tuple(f"{name}.py" for name in ("collectives", "mesh", "point_to_point", "ranks", "sharding"))
_SIZED = ("all_reduce", "reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor")  # alike on all ranks
_UNREADABLE = (OSError, ValueError, TypeError, KeyError, RecursionError, struct.error)  # raised by damaged content

# looked up once, as begin and end have a microsecond
_write_entry, _now = _ENTRY.pack_into, time.monotonic


@dataclass(frozen=True)
class Entry:
    """One collective of one rank.

    Args:
        number: of the rank, from 1.
        group: ``"all"``, or the ranks, ``"[0, 2]"``.
        sequence: number in the group, from 1.
        collective: its name.
        how: what else is the same on all ranks, for example the reduction; of what torch issues by itself, also the
            operation, ``"all_reduce SUM"``.
        root: the rank that sends, or that receives the result; ``""`` if there is none.
        value: dtype and shape, ``"torch.float32 [4]"``; ``""`` if the value is not a tensor, or may differ.
        line: the user's line, ``"train.py:12 in main"`` with its full path.
        began: ``time.monotonic()``, comparable between processes of one machine.
        ended: ``None`` while the rank is in it.
        is_long: whether other ranks may be busy for a long time before they call it.
        via: the line of this package, such as that of a metric, in which the user's line led to the collective; ``""``
            if the user's line calls it.
    """

    number: int
    group: str
    sequence: int
    collective: str
    how: str
    root: str
    value: str
    line: str
    began: float
    ended: float | None
    is_long: bool
    via: str = ""

    @property
    def inner_line(self) -> str:
        """The line that is in the stack of the rank as long as it is in the collective."""
        return self.via or self.line

    @property
    def place(self) -> str:
        """The user's line, and that of this package, as text."""
        return f"{self.line}, in {self.via.removeprefix(_PARENT)}" if self.via else self.line

    @property
    def is_of_torch(self) -> bool:
        """Whether torch was asked for it directly, or issued it by itself, as in a backward pass."""
        return self.collective in (BACKWARD, FSDP, DDP) or self.collective.startswith(IN_TORCH)


@dataclass(frozen=True)
class Snapshot:
    """What a record says.

    Args:
        path: the file.
        job: name of the job; ``""`` if the process did not know it yet.
        rank: of the process.
        world_size: of the job.
        pid: of the process.
        is_alive: whether the process still writes the record.
        host: name of its machine.
        status: as last written by :meth:`Record.write_status`; empty if there is none. Of a process that crashed, with
            ``"crash"`` and the stack at that time, as far as ``faulthandler`` wrote them beside the record.
        entries: the last collectives, at most 64, oldest first.
        running_since: when the oldest of them that has not completed began, infinity if all have.
    """

    path: Path
    job: str
    rank: int
    world_size: int
    pid: int
    is_alive: bool
    host: str
    status: dict[str, Any]
    entries: tuple[Entry, ...]
    running_since: float = math.inf

    @property
    def last(self) -> Entry | None:
        """The collective that the rank is in, otherwise the last one; ``None`` if there was no call yet."""
        running = [entry for entry in self.entries if entry.ended is None]
        return (running or self.entries or (None,))[-1]


class Record:
    """The record of this process.

    Its methods do not raise, whatever they are passed; in a forked child, which is not a rank, they do nothing.

    Args:
        rank: of this process.
        world_size: of the job.
        folder: where to create the file; by default ``/dev/shm``, or the folder for temporary files.

    Attributes:
        path: the file.

    Raises:
        OSError: the file cannot be created or locked.
    """

    def __init__(self, rank: int, world_size: int, folder: Path | None = None) -> None:
        _inner_files.update(map(str, Path(__file__).parent.rglob("*.py")), [contextlib.__file__])
        self._lock = threading.RLock()  # a signal handler may interrupt a write
        self._numbers = itertools.count(1)
        self._all = _Counted("all")
        self._counted = {tuple(range(world_size)): self._all}  # by ranks
        self._groups: dict[int, tuple[Sequence[int], _Counted]] = {}  # by the id of the group that the user holds
        self._in_torch: dict[str, _Counted] = {}  # what torch itself calls in other groups, by their names
        self._stamps = itertools.count(2, 2)
        self._facts = {"rank": rank, "world_size": world_size, "pid": os.getpid(), "host": socket.gethostname()}
        self._job = ""
        temporary, self._file = _created(_folders() if folder is None else [folder])
        self._map = mmap.mmap(self._file, _SIZE)
        self._map[: len(_MAGIC)] = _MAGIC
        self._entries = memoryview(self._map)[_ENTRIES:]
        self._words, self._times = self._entries.cast("Q"), self._entries.cast("d")
        self.job = ""
        self.path = temporary.with_suffix("")
        os.rename(temporary, self.path)  # it appears complete, and locked
        _open_records.add(self)
        _remove_old(self.path.parent)

    @property
    def job(self) -> str:
        """Name of the job, the same on all ranks; ``""`` until it is set."""
        return self._job

    @job.setter
    def job(self, name: str) -> None:
        self._job = name
        self._write(_HEADER, _HEADER_BYTES, {**self._facts, "job": name})

    def begin(
        self,
        group: Any,
        ranks: Sequence[int],
        collective: str,
        value: Any,
        how: str,
        root: Any,
        is_long: bool = False,
        depth: int = 1,
    ) -> int:
        """Record that this rank begins a collective.

        Args:
            group: as the user passed it; ``None`` for all ranks.
            ranks: the ranks of the group.
            collective: its name.
            value: what this rank passes; of a tensor, dtype and shape are recorded.
            how: what else is the same on all ranks, for example the reduction.
            root: the rank that sends, or that receives the result.
            is_long: whether other ranks may be busy for a long time before they call it.
            depth: number of callers to skip when looking for the user's line, which are known to be of this package.

        Returns:
            A number for :meth:`end`; 0 if the record is closed.
        """
        try:
            if group is None:
                counted = self._all
            else:
                known = self._groups.get(id(group))
                if known is None or known[0] != ranks:
                    known = self._add_group(group, ranks)
                counted = known[1]
            sequence, number = next(counted.sequence), next(self._numbers)
            frame = sys._getframe(depth)
            code = frame.f_code
            while code.co_filename in _inner_files and (back := frame.f_back) is not None:
                frame = back
                code = frame.f_code
            try:
                if value is None or not isinstance(value, Tensor):
                    checksum, text, _ = counted.texts[
                        collective, None, None, how, root, is_long, id(code), frame.f_lasti
                    ]
                else:
                    dtype, shape = value.dtype, value.shape
                    checksum, text, _ = counted.texts[
                        collective, dtype, shape, how, root, is_long, id(code), frame.f_lasti
                    ]
            except Exception:  # it is new, or odd
                dtype, shape, layout = layout_of(value)
                root = root if root is None or type(root) is int else str(root)  # a tensor must not stay alive
                key: tuple[Any, ...] = collective, dtype, shape, how, root, is_long, id(code), frame.f_lasti
                if (user := _user_frame(frame)) is not frame:  # a handler, which is the same for all users
                    key = *key, id(user.f_code), user.f_lasti
                found = counted.texts.get(key)
                if found is None:
                    found = counted.add_text(key, collective, layout, how, root, is_long, user, frame)
                checksum, text, _ = found
            start = number % _NUM_ENTRIES * _ENTRY_BYTES
            _write_entry(self._entries, start, number, sequence, _now(), 0.0, checksum, text, number)
            return number
        except Exception as error:
            logger.debug("no flight record of %s: %r", collective, error)
            return 0

    def begin_in_torch(self, group: str, operation: str, how: str, root: Any, tensors: Sequence[Tensor]) -> int:
        """Record that torch begins a collective, unless that is a part of a recorded one.

        Args:
            group: ``"all"`` for the default group, otherwise a name for this group with its ranks, ``"1: [0, 2]"``.
            operation: what torch does, such as ``"all_reduce"``.
            how: the reduction.
            root: the rank in the group that sends, or that receives the result.
            tensors: what this rank passes.

        Returns:
            A number for :meth:`end`; 0 if this is a part of a recorded collective, or the record is closed.
        """
        try:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and (place := _places.get(frame.f_code.co_filename)) != "user":
                if place == "recorded":
                    return 0
                if place is not None:
                    frame = frame.f_back
                else:
                    _place_of(frame.f_code.co_filename)
            if frame is None:  # a thread of torch, such as that of a backward pass on a GPU, has no code of the user
                frame = _user_frame(sys._current_frames()[threading.main_thread().ident or 0])
            code, shape = frame.f_code, tensors[0].shape if len(tensors) == 1 else tuple(map(Tensor.size, tensors))
            counted = self._all if group == "all" else self._in_torch.setdefault(group, _Counted(group))
            sequence, number = next(counted.sequence), next(self._numbers)
            key = operation, tensors[0].dtype if tensors else None, shape, how, root, id(code), frame.f_lasti
            if (found := counted.texts.get(key)) is None:
                collective, how = _named_in_torch(operation, how, sys._getframe(1))
                layout = _total_layout(tensors) if operation in _SIZED else ""
                found = counted.add_text(key, collective, layout, how, root, False, frame, frame)
            start = number % _NUM_ENTRIES * _ENTRY_BYTES
            _write_entry(self._entries, start, number, sequence, _now(), 0.0, found[0], found[1], number)
            return number
        except Exception as error:
            logger.debug("no flight record of %s in torch: %r", operation, error)
            return 0

    def end(self, number: int) -> None:
        """Record that a collective has completed, or raised an error."""
        try:
            start = number % _NUM_ENTRIES * _ENTRY_WORDS
            if self._words[start] == number:  # otherwise, other threads have begun many since
                self._times[start + _ENDED] = _now()
        except ValueError:  # the record is closed
            pass

    def write_status(self, status: Mapping[str, Any]) -> None:
        """Replace the status, which JSON must be able to represent; beyond 24 KB, its longest texts are shortened."""
        self._write(_STATUS, _STATUS_BYTES, status)
        with suppress(OSError, ValueError):
            os.utime(self._file)  # writing to a mapped file does not update its time everywhere

    def close(self, keep: bool = False) -> None:
        """Stop recording, and remove the file unless ``keep``; the file of stacks is always removed."""
        with self._lock:
            if self._file >= 0:
                _open_records.discard(self)
                self._release()
                with suppress(OSError):
                    remove(self.path, keep)

    def _release(self) -> None:
        for view in (self._words, self._times, self._entries):
            view.release()
        self._map.close()
        file, self._file = self._file, -1
        os.close(file)

    def _add_group(self, group: Any, ranks: Sequence[int]) -> tuple[Sequence[int], _Counted]:
        """Return the ranks of a group and the count of its calls, and remember them by the identity of the group."""
        with self._lock:
            counted = self._counted.setdefault(tuple(ranks), _Counted(_mask(ranks)))
            if len(self._groups) >= _MANY:  # lists of ranks may be new in each call
                self._groups.clear()
            self._groups[id(group)] = found = (ranks[:], counted)
            return found

    def _write(self, start: int, size: int, content: Any) -> None:
        """Write content as JSON to an area, shortened as far as necessary."""
        try:
            data = _fitting(content, size - _AREA.size)
            with self._lock:
                stamp = next(self._stamps)
                _STAMP.pack_into(self._map, start, stamp + 1)
                self._map[start + _AREA.size : start + _AREA.size + len(data)] = data
                _AREA.pack_into(self._map, start, stamp + 1, len(data), zlib.crc32(data))
                _STAMP.pack_into(self._map, start, stamp)
        except Exception as error:
            logger.debug("the flight record was not written: %r", error)


class _Counted:
    """The calls of the ranks of a group, with their texts."""

    __slots__ = ("group", "sequence", "texts")

    def __init__(self, group: str) -> None:
        self.group = group
        self.sequence = itertools.count(1)
        self.texts: dict[tuple[Any, ...], _Text] = {}

    def add_text(
        self,
        key: tuple[Any, ...],
        collective: str,
        layout: str,
        how: str,
        root: Any,
        is_long: bool,
        user: FrameType,
        inner: FrameType,
    ) -> _Text:
        """Return the text of a call, and remember it for the next call of the same code."""
        root_text = "" if root is None else str(root)
        line, via = line_of(user), "" if inner is user else line_of(inner)
        content = [self.group, collective, how, root_text, layout, line, is_long, via]
        if via and len(_json(content)) > _TEXT_BYTES:  # what the stack is compared with is more important
            content = [self.group, collective, how, root_text, layout, via, is_long, ""]
        text = _fitting(content, _TEXT_BYTES).ljust(_TEXT_BYTES)
        if len(self.texts) >= _MANY:
            self.texts.clear()
        self.texts[key] = found = zlib.crc32(text), text, (inner.f_code, user.f_code)
        return found


# its CRC-32, the text, and the code that calls: while that is alive, no other has its id
_Text = tuple[int, bytes, tuple[CodeType, ...]]
_inner_files: set[str] = set()  # of this folder, and what is between them and the user's
_places: dict[str, str] = {}  # by the path of a file
_open_records: set[Record] = set()  # of this process


def _place_of(path: str) -> str:
    """Return whose code is in a file: ``"user"``, ``"library"``, or ``"recorded"`` if its collectives are."""
    if path in _places:
        return _places[path]
    folder, name = os.path.split(path)
    is_recorded = folder == str(Path(__file__).parent) and name in _RECORDING
    is_library = path.startswith(_LIBRARIES) or path == contextlib.__file__ or path.startswith("<frozen")
    _places[path] = "recorded" if is_recorded else "library" if is_library else "user"
    return _places[path]


def _user_frame(first: FrameType) -> FrameType:
    """Return the innermost frame of the user's code, or ``first`` if there is none."""
    frame: FrameType | None = first
    while frame is not None and _place_of(frame.f_code.co_filename) != "user":
        frame = frame.f_back
    return frame or first


def _named_in_torch(operation: str, how: str, frame: FrameType | None) -> tuple[str, str]:
    """Return what in torch begins an operation, up to the user's line, and how.

    It is the backward pass, FSDP, or DDP, which may begin the same operation, or the user, who asks torch for it.
    """
    name = ""
    while frame is not None and _place_of(frame.f_code.co_filename) != "user":
        path = frame.f_code.co_filename.replace("\\", "/")
        if frame.f_code.co_name == "_engine_run_backward":
            name = BACKWARD
        elif "/torch/distributed/fsdp/" in path and name != BACKWARD:
            name = FSDP
        elif path.endswith("/torch/nn/parallel/distributed.py"):
            name = name or DDP
        frame = frame.f_back
    if frame is None and not name:
        name = BACKWARD
    return (name, f"{operation} {how}".rstrip()) if name else (f"{IN_TORCH}.{operation}", how)


def _total_layout(tensors: Sequence[Tensor]) -> str:
    if len(tensors) == 1:
        return layout_of(tensors[0])[2]
    return f"{tensors[0].dtype} [{sum(tensor.numel() for tensor in tensors)}]" if tensors else ""


def _forget_after_fork() -> None:
    """Close the files in a forked child, which would otherwise hold the locks of its parent."""
    for record in _open_records:
        record._lock = threading.RLock()  # another thread of the parent may have held it
        record._release()
    _open_records.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)


def read(path: Path, with_entries: bool = True) -> Snapshot | None:
    """Return what a record says, or ``None`` if there is none at a path, or not one of this user.

    It may be written meanwhile. Entries that are being replaced are left out.

    Args:
        path: the file.
        with_entries: whether to read the collectives, which takes longer than the rest.
    """
    try:
        with _opened(path) as file:
            is_alive = not _can_lock(file)  # first: what a dead process has written is complete
            header = _read_area(file, _HEADER, _HEADER_BYTES)
            if os.pread(file, len(_MAGIC), 0) != _MAGIC or not isinstance(header, dict):
                return None
            status = _read_area(file, _STATUS, _STATUS_BYTES)
            status = status if isinstance(status, dict) else {}
            rows = os.pread(file, _NUM_ENTRIES * _ENTRY.size, _ENTRIES)
            running = [row[2] for row in _ENTRY.iter_unpack(rows) if not row[3] and row[0] == row[-1] != 0]
            return Snapshot(
                path=path,
                job=str(header["job"]),
                rank=int(header["rank"]),
                world_size=int(header["world_size"]),
                pid=int(header["pid"]),
                is_alive=is_alive,
                host=str(header["host"]),
                status=status if is_alive else status | _crash(path.with_suffix(STACKS), status.get("thread")),
                entries=_entries(rows) if with_entries else (),
                running_since=min(running, default=math.inf),
            )
    except _UNREADABLE:
        return None


def _crash(path: Path, thread: int | None) -> dict[str, Any]:
    """Return how a process crashed, and the stack of a thread, by default the main one, which is the last one."""
    try:
        _, is_found, dump = path.read_text(errors="replace").rpartition(_FATAL)
    except OSError:
        return {}
    what, *stacks = re.split(r"^(?:Current thread|Thread) (?=0x)", dump, flags=re.MULTILINE)
    if not is_found or not stacks:
        return {}
    stack = next((one for one in stacks if thread is not None and int(one.split()[0], 16) == thread), stacks[-1])
    frames = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', stack, re.MULTILINE)
    return {"crash": what.split("\n")[0], "stack": [f"{file}:{line} in {name}" for file, line, name in frames]}


def find(folder: Path | None = None) -> list[Path]:
    """Return the records on this machine, including those of processes that ended without removing theirs.

    Args:
        folder: where to look; by default, wherever records are created by default.
    """
    folders = _folders() if folder is None else [folder]
    names = [(one, name) for one in folders for name in os.listdir(one) if name.startswith(_PREFIX)]  # faster than glob
    return [one / name for one, name in sorted(names) if name.endswith(_SUFFIX)]


def remove(path: Path, keep: bool = False) -> None:
    """Remove the file of stacks beside a record and, unless ``keep``, the record.

    Raises:
        OSError: one of them exists but cannot be removed.
    """
    path.with_suffix(STACKS).unlink(missing_ok=True)
    if not keep:
        path.unlink(missing_ok=True)


def state_of(snapshot: Snapshot, entry: Entry) -> str:
    """Return ``"completed"``, ``"waiting for 12 s"``, or ``"died after 12 s"``."""
    if entry.ended is not None:
        return "completed"
    # A process that has ended, or on another machine, last told the time with its status.
    is_here = snapshot.is_alive and snapshot.host == socket.gethostname()
    now = _now() if is_here else snapshot.status.get("time", entry.began)
    seconds = max(0.0, now - entry.began)
    return f"{'waiting for' if snapshot.is_alive else 'died after'} {seconds:.{seconds < 10:d}f} s"


def _folders() -> list[Path]:
    return [folder for folder in (_MEMORY, Path(tempfile.gettempdir())) if folder.is_dir()]


def _created(folders: Sequence[Path]) -> tuple[Path, int]:
    """Create and lock a temporary file of the size of a record in the first folder that has space for it."""
    if fcntl is None:
        raise OSError(errno.ENOTSUP, "flight records need flock")
    failure: OSError = FileNotFoundError(errno.ENOENT, "there is no folder for flight records")
    for folder in folders:
        path = folder / f"{_PREFIX}{os.getpid()}-{os.urandom(8).hex()}{_SUFFIX}.tmp"
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # All of it: writing to a mapped page that the file system has no space for would kill the process.
                if os.write(file, bytes(_SIZE)) < _SIZE:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(path))
                return path, file
            except OSError:
                os.close(file)
                path.unlink()
                raise
        except OSError as error:
            failure = error
    raise failure


def _remove_old(folder: Path) -> None:
    """Remove the records of processes that ended long ago, or before many others."""
    found = []
    for path in (*folder.glob(f"{_PREFIX}*{_SUFFIX}"), *folder.glob(f"{_PREFIX}*{_SUFFIX}.tmp")):
        with suppress(OSError):
            found.append((time.time() - path.lstat().st_mtime, path))
    for index, (age, path) in enumerate(sorted(found)):
        if age > _MAX_AGE or index >= _MAX_DEAD:
            with suppress(OSError), _opened(path) as file:
                if _can_lock(file):
                    remove(path)
    for path in folder.glob(f"{_PREFIX}*{STACKS}"):
        if not path.with_suffix(_SUFFIX).exists():  # it is created after the record, and removed before
            with suppress(OSError):
                path.unlink()


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a file that can be a record of this user, and yield its descriptor.

    Raises:
        OSError: it is something else, to which anyone may have given such a name.
    """
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        facts = os.fstat(file)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_size != _SIZE:
            raise OSError(errno.EINVAL, "not a record of this user", os.fspath(path))
        yield file
    finally:
        os.close(file)


def _can_lock(file: int) -> bool:
    """Return whether no process holds the lock of a record, not even this one."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    fcntl.flock(file, fcntl.LOCK_UN)
    return True


def _read_area(file: int, start: int, size: int) -> Any:
    """Return the content of an area; ``None`` if it is empty, damaged, or still being written."""
    for _ in range(_ATTEMPTS):
        data = os.pread(file, size, start)
        stamp, length, checksum = _AREA.unpack_from(data)
        text = data[_AREA.size : _AREA.size + length]
        if stamp % 2 == 0:
            if zlib.crc32(text) == checksum:
                return json.loads(text.decode()) if text else None
            if os.pread(file, _AREA.size, start) == data[: _AREA.size]:
                return None
        time.sleep(_PAUSE)
    return None


def _entries(rows: bytes) -> tuple[Entry, ...]:
    entries = []
    for number, sequence, began, ended, checksum, text, again in _ENTRY.iter_unpack(rows):
        if number == again != 0 and (found := _decoded(text, checksum)):  # otherwise, it is being replaced
            group, collective, how, root, value, line, is_long, via = found
            call = collective, how, root, value, line
            entries.append(Entry(number, group, sequence, *call, began, ended or None, is_long, via))
    return tuple(sorted(entries, key=lambda entry: entry.number))


@functools.lru_cache(_MANY)
def _decoded(text: bytes, checksum: int) -> tuple[Any, ...]:
    """Return the content of a text, and nothing if it was read while it was written."""
    if zlib.crc32(text) != checksum:
        return ()
    group, *others = json.loads(text)
    return _ranks(group), *others


def _mask(ranks: Iterable[int]) -> str:
    """Return the ranks of a group as the bits of a hexadecimal number: a text has little space.

    >>> _mask([0, 2])
    '0x5'
    """
    return hex(sum(1 << rank for rank in ranks))


def _ranks(group: str) -> str:
    """Return the text of a group as users see it.

    >>> _ranks("0x5")
    '[0, 2]'
    """
    try:
        mask = int(group, 16)
    except ValueError:  # "all", or shortened
        return group
    return str([rank for rank in range(mask.bit_length()) if mask >> rank & 1])


def layout_of(value: Any) -> tuple[Any, Any, str]:
    """Return dtype and shape of a tensor, and both as text; of other values, ``(None, None, "")``."""
    if not isinstance(value, Tensor):
        return None, None, ""
    try:
        layout = [] if value.layout is torch.strided else [str(value.layout).removeprefix("torch.")]
        hash(value.shape)  # a shape under tracing cannot be a key
        return value.dtype, value.shape, " ".join([*layout, str(value.dtype), str(list(value.shape))])
    except Exception:
        return None, None, type(value).__name__


def _fitting(content: Any, size: int) -> bytes:
    """Return content as JSON of at most ``size`` bytes."""
    data, longest = _json(content), size
    while len(data) > size and longest > 8:
        longest //= 2
        data = _json(_shortened(content, longest))
    if len(data) > size:  # it has many short texts, or numbers
        content = _shortened(content, longest)
        sizes = {name: len(_json({name: value})) for name, value in content.items()}
        smallest = sorted(sizes, key=lambda name: sizes[name])
        ends = itertools.accumulate(sizes[name] for name in smallest)
        data = _json({name: content[name] for name, end in zip(smallest, ends, strict=True) if end <= size})
    return data


def _json(content: Any) -> bytes:
    return json.dumps(content, default=repr, skipkeys=True).encode()


def _shortened(content: Any, longest: int) -> Any:
    """Return content without the middle of long texts."""
    if isinstance(content, str) and len(content) > longest:
        half = (longest - 3) // 2
        return f"{content[:half]}...{content[-half:]}"
    if isinstance(content, Mapping):
        return {name: _shortened(value, longest) for name, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_shortened(value, longest) for value in content]
    return content
