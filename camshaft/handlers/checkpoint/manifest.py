"""The manifest of a directory of checkpoints: what each file is, and the checksum by which it is known to be whole.

It is a folder of small files, one per checkpoint, each written before its checkpoint gets its name: whenever the
process is killed, a file that can be seen is described by its own entry or is the previous one, whose entry is still
there. Several writers may share a directory.

An entry is named ``<checkpoint>.<checksum>.json``. The name decides which file it describes, not the content: a
name that was read from a directory leads nowhere else, and the checksum survives damage to the content.
"""

from __future__ import annotations

import json
import os
import platform
import re
import stat
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from camshaft.files import checksum_of, write_atomically
from camshaft.version import __version__

FOLDER = ".manifest"
_FORMAT = 1
_OWN = "checksum_of_entry"  # of all the rest
_NAME = re.compile(r"(?P<file>.+)\.(?P<sum>[0-9a-f]+)\.json", re.DOTALL)
_LONGEST_ENTRY = 1 << 20  # bytes
_TOO_LARGE = 2**62  # as nanoseconds the year 2116, which a later entry would have to exceed
SUFFIX_LENGTH = len(".01234567.json")
"""How much longer the name of an entry is than that of its checkpoint."""
MISSING = "is not there: it was removed, or its save was interrupted"
"""What is wrong with a checkpoint that has an entry and no file."""


@dataclass(frozen=True)
class Entry:
    """What is known of a checkpoint.

    Args:
        file: its name.
        checksum: of its content.
        size: in bytes; ``None`` if the entry is damaged and only its name could be read.
        saved_at: nanoseconds since 1970; grows from one checkpoint of a directory to the next.
        objects: names of what is in it, if the handler that saved it told.
        step: of the engine, if the handler told.
        score: what it was kept for, if there was a score.
        score_name: of the score.
        versions: of the libraries that wrote it.
    """

    file: str
    checksum: str
    size: int | None
    saved_at: int
    objects: list[str] | None = None
    step: int | float | None = None
    score: int | float | None = None
    score_name: str | None = None
    versions: Mapping[str, str] | None = None

    def problem(self, path: Path) -> str | None:
        """Return what is wrong with the file, or ``None``; reads all of it."""
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                return "is not a regular file"
            if self.size is not None and status.st_size != self.size:
                return f"has {status.st_size:,} bytes instead of {self.size:,}"
            return None if checksum_of(path) == self.checksum else "is damaged: its content does not match its checksum"
        except FileNotFoundError:
            return MISSING
        except OSError as error:
            return f"cannot be read: {error}"


def make_entry(file: str, checksum: str, size: int, saved_at: int, metadata: Mapping[str, Any] | None) -> Entry:
    """Make the entry of a checkpoint from what its save handler is told."""
    told = metadata or {}
    return Entry(
        file=file,
        checksum=checksum,
        size=size,
        saved_at=saved_at,
        objects=told.get("objects"),
        step=told.get("step"),
        score=told.get("score"),
        score_name=told.get("score_name"),
        versions={"camshaft": __version__, "torch": torch.__version__, "python": platform.python_version()},
    )


def next_time(entries: list[Entry]) -> int:
    """Give a time for a new entry: now, or if clocks differ just after the newest one."""
    return max([time.time_ns(), *(entry.saved_at + 1 for entry in entries)])


def check_folder(directory: Path) -> None:
    """Raise ``NotADirectoryError`` if entries cannot be written, or would be written elsewhere."""
    folder = directory / FOLDER
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        kind = "a symbolic link" if folder.is_symlink() else "not a directory"
        raise NotADirectoryError(f"the manifest of the checkpoints, '{folder}', is {kind}: remove it")


def write_entry(directory: Path, entry: Entry) -> None:
    """Add an entry; what is known of an older file of the same name stays."""
    check_folder(directory)
    (directory / FOLDER).mkdir(exist_ok=True)
    content = {"format": _FORMAT, **asdict(entry)}
    text = json.dumps({**content, _OWN: _sum_of(content)}, indent=1) + "\n"
    write_atomically(_path_of(directory, entry), lambda file: file.write(text.encode()))


def entries_of(directory: Path, file: str | None = None, damaged: list[str] | None = None) -> list[Entry]:
    """Read the entries of a directory, or those of one file of it: the newest first.

    Args:
        directory: of checkpoints.
        file: the name of one.
        damaged: a list to which the problems of entries that cannot be read are appended. What the name of such an
            entry says is still used.
    """
    found = []
    for path, name, checksum in _named(directory, file):
        try:
            found.append(_read(path, name, checksum))
        except FileNotFoundError:  # removed meanwhile
            pass
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            if damaged is not None:
                text = f"{type(error).__name__}: {error}"
                damaged.append(f"'{path}' cannot be read, so that only its name is used: {text}")
            if len(checksum) == len("01234567"):
                found.append(Entry(name, f"crc32:{checksum}", None, _changed_at(directory / name)))
    return sorted(found, key=lambda entry: entry.saved_at, reverse=True)


def _read(path: Path, file: str, checksum: str) -> Entry:
    if not stat.S_ISREG(path.lstat().st_mode):
        raise ValueError("it is not a regular file")
    with open(path, "rb") as opened:
        text = opened.read(_LONGEST_ENTRY + 1)
    content = json.loads(text) if len(text) <= _LONGEST_ENTRY else None
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    own = content.pop(_OWN, None)
    if own is not None and own != _sum_of(content):
        raise ValueError("its content does not match its checksum")
    if content["file"] != file or str(content["checksum"]).rpartition(":")[2] != checksum:
        raise ValueError("its content does not match its name")
    for name in ("size", "saved_at"):
        value = content[name]
        if type(value) is not int or not 0 <= value < _TOO_LARGE:
            raise ValueError(f"{name} is {value!r}")
    objects = content.get("objects")
    if objects is not None and not (isinstance(objects, list) and all(isinstance(one, str) for one in objects)):
        raise ValueError(f"objects is {objects!r}")
    known: dict[str, Any] = {field.name: content.get(field.name) for field in fields(Entry)}
    return Entry(**known)


def _changed_at(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _sum_of(content: Mapping[str, Any]) -> str:
    return f"crc32:{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def remove_entries(directory: Path, file: str, but: Entry | None = None) -> None:
    """Remove what is known of a file, including entries that cannot be read; one may stay."""
    for path, _, _ in _named(directory, file):
        if but is None or path != _path_of(directory, but):
            path.unlink(missing_ok=True)


def is_known(directory: Path, file: str) -> bool:
    """Return whether a file is a checkpoint of its directory."""
    return bool(_named(directory, file))


def problem_of(path: Path, damaged: list[str] | None = None) -> str | None:
    """Return what is wrong with a checkpoint; ``None`` if nothing is, or if nothing is known of it.

    Args:
        path: of the checkpoint.
        damaged: as in :func:`entries_of`.
    """
    entries = entries_of(path.parent, path.name, damaged)
    problem = None
    for entry in entries:
        problem = entry.problem(path)
        if problem is None:
            return None
    if problem is not None and {*map(_key, entries_of(path.parent, path.name))} != {*map(_key, entries)}:
        return problem_of(path)  # replaced or removed while it was read
    return problem


def _key(entry: Entry) -> tuple[str, str]:
    return entry.file, entry.checksum


def _path_of(directory: Path, entry: Entry) -> Path:
    return directory / FOLDER / f"{entry.file}.{entry.checksum.rpartition(':')[2]}.json"


def _named(directory: Path, file: str | None) -> list[tuple[Path, str, str]]:
    """Find the entries of a directory, or of one file of it, with the file and the checksum in their names."""
    folder = directory / FOLDER
    try:
        names = [] if folder.is_symlink() else os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [(name, match) for name in names if (match := _NAME.fullmatch(name)) and match["file"] not in (".", "..")]
    return [(folder / name, match["file"], match["sum"]) for name, match in found if file in (None, match["file"])]
