"""The record of a process: its status, and the stack of a crash, in files that outlive it.

Sibling ranks, the parent process, and ``python -m camshaft.distributed --inspect`` read them, also after the process
was killed. A record is alive as long as its process holds a lock on the file; the kernel releases it however the
process ends.
"""

from __future__ import annotations

import errno
import faulthandler
import itertools
import json
import logging
import mmap
import os
import re
import signal
import socket
import stat
import struct
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # the module does not exist there

logger = logging.getLogger(__name__)

_MEMORY = Path("/dev/shm")
PREFIX, REPORTED = "camshaft-", ".reported"
_SUFFIX, _STACKS = ".record", ".stacks"
_FATAL = "Fatal Python error: "  # what faulthandler begins with when a process crashes
_MAX_AGE, _MAX_DEAD = 24 * 3600.0, 64  # seconds, and number, of records to keep of processes that have ended
_MAGIC = b"camshaft record 5"
_AREA = struct.Struct("=II")  # before JSON: its size and CRC-32, which differs while it is written
_HEADER, _HEADER_BYTES, _STATUS_BYTES = 64, 1024, 48 * 1024
_STATUS = _HEADER + _HEADER_BYTES
_SIZE = _STATUS + _STATUS_BYTES
_ATTEMPTS, _PAUSE = 20, 0.001  # to read an area that is being written; seconds between them
_SEARCH = 10.0  # seconds between two searches for records of more ranks than are known to be on this node
_UNREADABLE = (OSError, ValueError, TypeError, KeyError, RecursionError, struct.error)  # raised by damaged content

LEFT_BY_EXIT = "has ended with exit code 0, without leaving the job: os._exit(0)?"
LEFT_BY_EXEC = "has replaced its program: os.execv?"


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
        start: the namespace of ``pid`` and the time when the process started, which no other process has in common.
        script: name of the file that Python runs; ``""`` if it is unknown.
    """

    path: Path
    job: str
    rank: int
    world_size: int
    pid: int
    is_alive: bool
    host: str
    status: dict[str, Any]
    start: str = ""
    script: str = ""


class Record:
    """The record of this process; in a forked child, which is not a rank, its methods do nothing.

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
        self._lock = threading.RLock()  # a signal handler may interrupt a write
        self._facts = {"rank": rank, "world_size": world_size, "pid": os.getpid(), "host": socket.gethostname()}
        self._facts |= {"start": start_of(os.getpid()), "script": os.path.basename(next(iter(sys.argv), ""))}
        self._job = ""
        temporary, self._file = _created(default_folders() if folder is None else [folder])
        self._map = mmap.mmap(self._file, _SIZE)
        self._map[: len(_MAGIC)] = _MAGIC
        self.job = ""
        self.path = temporary.with_suffix("")
        os.rename(temporary, self.path)  # it appears complete, and locked
        self._stacks = -1
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

    def write_status(self, status: Mapping[str, Any]) -> None:
        """Replace the status, which JSON must be able to represent; beyond 48 KB, its largest items are left out."""
        self._write(_STATUS, _STATUS_BYTES, status)
        with suppress(OSError, ValueError):
            os.utime(self._file)  # writing to a mapped file does not update its time everywhere

    def catch_crashes(self) -> None:
        """Make ``faulthandler`` write the stack of a crash beside the record, unless the user has enabled it before.

        Raises:
            OSError: the file cannot be created.
        """
        global _catching
        if _catching is None and faulthandler.is_enabled():  # the stack goes to where the user wants it
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
        self._stacks = os.open(self.path.with_suffix(_STACKS), flags, 0o600)
        faulthandler.enable(self._stacks)
        _catching = self

    def close(self, keep: bool = False) -> None:
        """Stop recording, and remove the file unless ``keep``; the file of stacks is always removed."""
        with self._lock:
            if self._file >= 0:
                _open_records.discard(self)
                self._release()
                with suppress(OSError):
                    remove(self.path, keep)

    def _release(self) -> None:
        global _catching
        if _catching is self:
            faulthandler.disable()
            _catching = None
        self._map.close()
        for file in (self._file, self._stacks):
            if file >= 0:
                os.close(file)
        self._file = self._stacks = -1

    def _write(self, start: int, size: int, content: Mapping[str, Any]) -> None:
        """Write content as JSON to an area, as far as it fits."""
        try:
            data = _fitting(content, size - _AREA.size)
            with self._lock:
                self._map[start + _AREA.size : start + _AREA.size + len(data)] = data
                _AREA.pack_into(self._map, start, len(data), zlib.crc32(data))
        except Exception as error:
            logger.debug("the record was not written: %r", error)


_open_records: set[Record] = set()  # of this process
_catching: Record | None = None  # beside which faulthandler writes


def _forget_after_fork() -> None:
    """Close the files in a forked child, which would otherwise hold the locks of its parent, or write its crash."""
    for record in _open_records:
        record._lock = threading.RLock()  # another thread of the parent may have held it
        record._release()
    _open_records.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)


class Node:
    """The records of the ranks of a job on this machine, and how those processes ended that have ended.

    Args:
        record: of this rank.
        num_expected: of ranks that are known to be on this machine.
        folder: where to look; by default, wherever records are created by default.
    """

    def __init__(self, record: Record, num_expected: int, folder: Path | None = None) -> None:
        self._record, self._num_expected, self._folder = record, num_expected, folder
        self._foreign: set[Path] = set()  # records of other jobs
        self._paths: list[Path] = [record.path]
        self._next_search = 0.0
        self._ends: dict[int, dict[str, str]] = {}

    def read(self, is_urgent: bool = False) -> dict[int, Snapshot]:
        """Return what the records say, by rank.

        Args:
            is_urgent: whether to look for more records than are known at once.
        """
        found: dict[int, Snapshot] = {}
        for path in self._candidates(is_urgent):
            if (one := read(path)) is not None:
                if one.job == self._record.job or path == self._record.path:
                    found[one.rank] = self._with_end(one)
                elif one.job:
                    self._foreign.add(path)
        self._paths = [one.path for one in found.values()]
        return found

    def _candidates(self, is_urgent: bool) -> Sequence[Path]:
        """Return the paths to read; the folders are searched rarely, as those for temporary files may be large."""
        record = self._record
        if not record.job:
            return [record.path]
        now, num_known = time.monotonic(), len(self._paths)
        if is_urgent or num_known < self._num_expected or now >= self._next_search:
            self._next_search = now + _SEARCH
            return [path for path in find(self._folder) if path not in self._foreign]
        return self._paths

    def _with_end(self, one: Snapshot) -> Snapshot:
        """Add to the status of a process that has ended without leaving how it did, as far as that can be found out."""
        if one.is_alive or one.status.get("left"):
            return one
        if one.rank not in self._ends and (end := _end_of(one)):
            self._ends[one.rank] = end
        return replace(one, status=one.status | self._ends.get(one.rank, {}))


def start_of(pid: int) -> str:
    """Return the namespace of a process id and the time when the process started; ``""`` where that is unknown."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
        return f"{namespace}/{Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[19]}"
    except (OSError, IndexError):
        return ""


def _end_of(one: Snapshot) -> dict[str, str]:
    """Return ``{"left": ...}`` or ``{"killed": ...}`` of a process that released its record, and nothing if unknown.

    The system knows it until the parent of the process has asked for it.
    """
    code: int | None = None
    if "crash" in one.status:
        return {"killed": one.status["crash"]}
    with suppress(OSError, ValueError, IndexError):
        if one.start and start_of(one.pid) == one.start:  # else, of a container with process ids of its own
            fields = Path(f"/proc/{one.pid}/stat").read_text().rpartition(")")[2].split()
            if fields[0] in "ZX":
                code = int(fields[49])
            elif Path(f"/proc/{one.pid}/cmdline").read_bytes():  # it has memory, so it is not about to end
                return {"left": LEFT_BY_EXEC}
    if code is None:
        return {}
    if os.WIFSIGNALED(code):
        return {"killed": signal.Signals(os.WTERMSIG(code)).name}
    return {"killed": f"exit code {os.WEXITSTATUS(code)}"} if os.WEXITSTATUS(code) else {"left": LEFT_BY_EXIT}


def read(path: Path) -> Snapshot | None:
    """Return what a record says, which may be written meanwhile; ``None`` if it is not a record of this user."""
    try:
        with _opened(path) as file:
            is_alive = not _can_lock(file)  # first: what a dead process has written is complete
            header = _read_area(file, _HEADER, _HEADER_BYTES)
            if os.pread(file, len(_MAGIC), 0) != _MAGIC or not isinstance(header, dict):
                return None
            status = _read_area(file, _STATUS, _STATUS_BYTES)
            status = status if isinstance(status, dict) else {}
            return Snapshot(
                path=path,
                job=str(header["job"]),
                rank=int(header["rank"]),
                world_size=int(header["world_size"]),
                pid=int(header["pid"]),
                is_alive=is_alive,
                host=str(header["host"]),
                status=status if is_alive else status | _crash(path.with_suffix(_STACKS), status.get("thread")),
                start=str(header.get("start", "")),
                script=str(header.get("script", "")),
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
    names: list[tuple[Path, str]] = []
    for one in default_folders() if folder is None else [folder]:
        with suppress(OSError):  # this process may have too many files open
            names += [(one, name) for name in os.listdir(one) if name.startswith(PREFIX)]  # faster than glob
    return [one / name for one, name in sorted(names) if name.endswith(_SUFFIX)]


def remove(path: Path, keep: bool = False) -> None:
    """Remove the file of stacks beside a record and, unless ``keep``, the record.

    Raises:
        OSError: one of them exists but cannot be removed.
    """
    path.with_suffix(_STACKS).unlink(missing_ok=True)
    if not keep:
        path.unlink(missing_ok=True)


def default_folders() -> list[Path]:
    """Return where the files of a job may be on this machine, the first choice first."""
    return [folder for folder in (_MEMORY, Path(tempfile.gettempdir())) if folder.is_dir()]


def _created(folders: Sequence[Path]) -> tuple[Path, int]:
    """Create and lock a temporary file of the size of a record in the first folder that has space for it."""
    if fcntl is None:
        raise OSError(errno.ENOTSUP, "records need flock")
    failure: OSError = FileNotFoundError(errno.ENOENT, "there is no folder for records")
    for folder in folders:
        path = folder / f"{PREFIX}{os.getpid()}-{os.urandom(8).hex()}{_SUFFIX}.tmp"
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
    for path in (*folder.glob(f"{PREFIX}*{_SUFFIX}"), *folder.glob(f"{PREFIX}*{_SUFFIX}.tmp")):
        with suppress(OSError):
            found.append((time.time() - path.lstat().st_mtime, path))
    for index, (age, path) in enumerate(sorted(found)):
        if age > _MAX_AGE or index >= _MAX_DEAD:
            with suppress(OSError), _opened(path) as file:
                if _can_lock(file):
                    remove(path)
    for path in folder.glob(f"{PREFIX}*{REPORTED}"):
        with suppress(OSError):
            if time.time() - path.lstat().st_mtime > _MAX_AGE:
                path.unlink()
    for path in folder.glob(f"{PREFIX}*{_STACKS}"):
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
        length, checksum = _AREA.unpack_from(data)
        text = data[_AREA.size : _AREA.size + length]
        if zlib.crc32(text) == checksum:
            return json.loads(text.decode()) if text else None
        time.sleep(_PAUSE)
    return None


def _fitting(content: Mapping[str, Any], size: int) -> bytes:
    """Return content as JSON of at most ``size`` bytes, without the largest items if there is too much."""
    data = _json(content)
    if len(data) > size:
        sizes = {name: len(_json({name: value})) for name, value in content.items()}
        smallest = sorted(sizes, key=lambda name: sizes[name])
        ends = itertools.accumulate(sizes[name] for name in smallest)
        data = _json({name: content[name] for name, end in zip(smallest, ends, strict=True) if end <= size})
    return data


def _json(content: Any) -> bytes:
    return json.dumps(content, default=repr, skipkeys=True).encode()
