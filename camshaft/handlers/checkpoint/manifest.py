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
from dataclasses import asdict, dataclass, fields
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
_LONGEST_ENTRY = 1 << 20  # bytes
_TOO_LARGE = 2**62  # as nanoseconds the year 2116, which a later entry would have to exceed


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
        self._newest = 0

    def check_folder(self) -> None:
        """Raise ``NotADirectoryError`` if entries cannot be written, or would be written elsewhere."""
        if self.folder.is_symlink() or (self.folder.exists() and not self.folder.is_dir()):
            kind = "a symbolic link" if self.folder.is_symlink() else "not a directory"
            raise NotADirectoryError(f"the manifest of the checkpoints, '{self.folder}', is {kind}: remove it")

    def entries(self, file: str | None = None, damaged: list[str] | None = None) -> list[Entry]:
        """Read the entries of all files or of one file, the newest first.

        Args:
            file: the name of a checkpoint.
            damaged: a list to which the problems of unreadable entries are appended. The information in the name of
                such an entry is still used.
        """
        found = []
        for path, name, checksum in self._paths(file):
            try:
                found.append(_read(path, name, checksum))
            except FileNotFoundError:  # removed meanwhile
                pass
            except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
                if damaged is not None:
                    text = f"{type(error).__name__}: {error}"
                    damaged.append(f"'{path}' cannot be read, so that only its name is used: {text}")
                with suppress(OSError):
                    modified_at = (self.directory / name).stat().st_mtime_ns
                    found.append(Entry(name, f"crc32:{checksum}", None, modified_at))
        return sorted(found, key=lambda entry: entry.saved_at, reverse=True)

    def lists(self, file: str) -> bool:
        """Return whether a file is a checkpoint of this directory."""
        return bool(self._paths(file))

    def problem(self, file: str, damaged: list[str] | None = None) -> str | None:
        """Return what is wrong with a checkpoint; ``None`` if nothing is, or if the manifest does not list it."""
        entries = self.entries(file, damaged)
        problems = [entry.problem(self.directory / file) for entry in entries]
        if not problems or None in problems:
            return None
        if {entry.checksum for entry in self.entries(file)} != {entry.checksum for entry in entries}:
            return self.problem(file)  # replaced or removed while it was read
        return problems[-1]

    def new_entry(self, file: str, checksum: str, size: int, metadata: Mapping[str, Any]) -> Entry:
        """Return an entry that is newer than all others, whatever the clock says."""
        known = self.entries(file if self._newest else None)
        self._newest = max([time.time_ns(), self._newest + 1, *(entry.saved_at + 1 for entry in known)])
        about = {name: metadata.get(name) for name in ("objects", "step", "score", "score_name")}
        versions = {"camshaft": __version__, "torch": torch.__version__, "python": platform.python_version()}
        return Entry(file, checksum, size, self._newest, **about, versions=versions)

    def write(self, entry: Entry) -> None:
        """Add an entry; those of an older file of the same name stay."""
        self.check_folder()
        self.folder.mkdir(exist_ok=True)
        content = {"format": _FORMAT, **asdict(entry)}
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
        matches = [match for name in names if (match := _NAME.fullmatch(name)) and match[1] not in (".", "..")]
        return [(self.folder / match[0], match[1], match[2]) for match in matches if file in (None, match[1])]


def checksum_of_entry(content: Mapping[str, Any]) -> str:
    """Return the checksum of the fields of an entry."""
    return f"crc32:{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def _read(path: Path, file: str, checksum: str) -> Entry:
    """Read an entry; raise if it is not one of this file and checksum."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise ValueError("it is not a regular file")
    with open(path, "rb") as opened:
        text = opened.read(_LONGEST_ENTRY + 1)
    content = json.loads(text) if len(text) <= _LONGEST_ENTRY else None
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    own = content.pop(_OWN, None)
    if own is not None and own != checksum_of_entry(content):
        raise ValueError("its content does not match its checksum")
    if content["file"] != file or str(content["checksum"]).rpartition(":")[2] != checksum:
        raise ValueError("its content does not match its name")
    for name in ("size", "saved_at"):
        if type(content[name]) is not int or not 0 <= content[name] < _TOO_LARGE:
            raise ValueError(f"{name} is {content[name]!r}")
    objects = content.get("objects")
    if objects is not None and not (isinstance(objects, list) and all(isinstance(one, str) for one in objects)):
        raise ValueError(f"objects is {objects!r}")
    known: dict[str, Any] = {field.name: content.get(field.name) for field in fields(Entry)}
    return Entry(**known)
