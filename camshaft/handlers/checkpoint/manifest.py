"""The manifest of a directory of checkpoints: what each file is, and the checksum to verify it.

The manifest is a folder of small files, one per checkpoint, each written before its checkpoint gets its name. Whenever
the process is killed, a visible checkpoint has an entry of its own, or is the previous file, whose entry still exists.
Several writers may share a directory.

An entry is named ``<checkpoint>.<checksum>.json``. The name decides which file it describes, not the content: a
name read from a directory leads nowhere else, and the checksum survives damage to the content.
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
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from camshaft.files import checksum_of, write_atomically
from camshaft.version import __version__

FOLDER = ".manifest"
MISSING = "is not there: it was removed, or its save was interrupted"
"""The problem of a checkpoint that has an entry and no file."""
_FORMAT = 1
_OWN = "checksum_of_entry"  # of all other fields
_NAME = re.compile(r"(.+)\.([0-9a-f]{8})\.json", re.DOTALL)


@dataclass(frozen=True)
class Entry:
    """A checkpoint in the manifest.

    Args:
        file: its name.
        checksum: of its content.
        size: in bytes; ``None`` if the entry is damaged and only its name could be read.
        saved_at: nanoseconds since 1970; increases from one checkpoint of a directory to the next.
        objects: the names of the saved objects, if known.
        step: of the engine, if known.
        score: the score that it was saved with, if any.
        score_name: of the score.
        versions: of the libraries that wrote it.
        unreadable: why only the name of the entry could be read.
    """

    file: str
    checksum: str
    size: int | None
    saved_at: int
    objects: list[str] | None = None
    step: int | float | None = None
    score: int | float | None = field(default=None, compare=False)  # NaN is not equal to itself
    score_name: str | None = None
    versions: Mapping[str, str] | None = None
    unreadable: str | None = None

    def problem(self, path: Path) -> str | None:
        """Return what is wrong with a file, or ``None``; reads all of it."""
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


class Manifest:
    """The entries of the checkpoints in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.folder = directory / FOLDER
        self._newest: int | None = None  # saved_at of the newest entry

    def entries(self, file: str | None = None) -> list[Entry]:
        """Read the entries of all files or of one file, the newest first."""
        found = []
        for path, name, checksum in self._paths(file):
            with suppress(FileNotFoundError):  # removed meanwhile
                try:
                    found.append(_read(path, name, checksum))
                except FileNotFoundError:
                    raise
                except Exception as error:  # whatever the file contains
                    modified_at = (self.directory / name).stat().st_mtime_ns
                    text = f"'{path}' cannot be read, so that only its name is used: {type(error).__name__}: {error}"
                    found.append(Entry(name, f"crc32:{checksum}", None, modified_at, unreadable=text))
        return sorted(found, key=lambda entry: entry.saved_at, reverse=True)

    def lists(self, file: str) -> bool:
        """Return whether a file is a checkpoint of this directory."""
        return bool(self._paths(file))

    def problem(self, file: str) -> str | None:
        """Return what is wrong with a checkpoint; ``None`` if nothing is, or if the manifest does not list it."""
        entries = self.entries(file)
        problems = [entry.problem(self.directory / file) for entry in entries]
        if not problems or None in problems:
            return None
        if self.entries(file) != entries:
            return self.problem(file)  # replaced or removed while it was read
        return problems[-1]

    def new_entry(self, file: str, checksum: str, size: int, metadata: Mapping[str, Any]) -> Entry:
        """Return an entry that is newer than all others, whatever the clock says."""
        if self._newest is None:
            self._newest = max((entry.saved_at for entry in self.entries()), default=0)
        self._newest = max(time.time_ns(), self._newest + 1)
        about = {name: metadata.get(name) for name in ("objects", "step", "score", "score_name")}
        versions = {"camshaft": __version__, "torch": torch.__version__, "python": platform.python_version()}
        return Entry(file, checksum, size, self._newest, **about, versions=versions)

    def write(self, entry: Entry) -> None:
        """Add an entry; those of an older file of the same name stay."""
        self.folder.mkdir(exist_ok=True)
        content = {"format": _FORMAT, **asdict(entry)}
        del content["unreadable"]
        text = json.dumps({**content, _OWN: checksum_of_entry(content)}, indent=1) + "\n"
        write_atomically(self._path(entry), lambda file: file.write(text.encode()))

    def remove(self, file: str, but: Entry | None = None) -> None:
        """Remove the entries of a file, including unreadable ones, with one exception."""
        for path, _, _ in self._paths(file):
            if but is None or path != self._path(but):
                path.unlink(missing_ok=True)

    def _path(self, entry: Entry) -> Path:
        return self.folder / f"{entry.file}.{entry.checksum.rpartition(':')[2]}.json"

    def _paths(self, file: str | None) -> list[tuple[Path, str, str]]:
        """List the entries of all files or of one, with the file and the checksum that their names contain."""
        try:
            names = [] if self.folder.is_symlink() else os.listdir(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        matches = [match for name in names if (match := _NAME.fullmatch(name))]
        return [(self.folder / match[0], match[1], match[2]) for match in matches if file in (None, match[1])]


def checksum_of_entry(content: Mapping[str, Any]) -> str:
    """Return the checksum of the fields of an entry."""
    return f"crc32:{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def _read(path: Path, file: str, checksum: str) -> Entry:
    """Read an entry; raise if it is not one of this file and checksum."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise ValueError("it is not a regular file")
    content = json.loads(path.read_bytes())
    if content.pop(_OWN) != checksum_of_entry(content):
        raise ValueError("its content does not match its checksum")
    entry = Entry(**{one.name: content.get(one.name) for one in fields(Entry)})
    if entry.file != file or entry.checksum.rpartition(":")[2] != checksum:
        raise ValueError("its content does not match its name")
    return entry
