"""The manifest of a directory: which checkpoints are complete, and what they are."""

from __future__ import annotations

import json
import logging
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

logger = logging.getLogger(__name__)
FOLDER = ".manifest"
MISSING = "is not there: it was removed, or its save was interrupted"
"""The problem of a checkpoint that has an entry and no file."""
SHARD = re.compile(r"shard-\d+-[0-9a-f]{8}\.pt")
_FORMAT = 1
_OWN = "checksum_of_entry"  # of all other fields
_NAME = re.compile(r"(.*[^.].*)\.([0-9a-f]{8})\.json", re.DOTALL)  # "." and ".." are folders
_LONGEST_ENTRY = 1 << 20  # bytes
_TOO_LARGE = 2**62  # as nanoseconds the year 2116, which a later entry would have to exceed


@dataclass(frozen=True)
class Entry:
    """A checkpoint in the manifest.

    Args:
        file: its name.
        checksum: of its content; empty for a file without an entry.
        size: in bytes.
        saved_at: nanoseconds since 1970; increases from one checkpoint of a directory to the next.
        objects: the names of the saved objects, if known.
        step: of the engine, if known.
        score: the score that it was saved with, if any.
        score_name: of the score.
        handler: of the names of the files, which tells the files of several handlers in a directory apart.
        versions: of the libraries that wrote it.
        shards: of a sharded checkpoint, which is a directory: the checksum and the size of each file in it.
    """

    file: str
    checksum: str
    size: int
    saved_at: int
    objects: list[str] | None = None
    step: int | float | None = field(default=None, compare=False)  # NaN is not equal to itself
    score: int | float | None = field(default=None, compare=False)
    score_name: str | None = None
    handler: str | None = None
    versions: Mapping[str, str] | None = None
    shards: Mapping[str, list[Any]] | None = None

    def problem(self, path: Path, part: slice = slice(None), reads: bool = True) -> str | None:
        """Return what is wrong with a file, or with this part of the shards of a sharded checkpoint, or ``None``."""
        if self.shards is None:
            return _problem(path, self.checksum, self.size, reads)
        if path.is_symlink() or not path.is_dir():
            return "is not a directory, and links are not followed" if os.path.lexists(path) else MISSING
        for name, (checksum, size) in list(self.shards.items())[part]:
            is_link = (path / name).is_symlink()
            if problem := "is a link" if is_link else _problem(path / name, checksum, size, reads):
                return f"has a shard '{name}' that {problem}"
        return None


class Manifest:
    """What each checkpoint in a directory is, and the checksum to verify it.

    The manifest is a folder of small files, one per checkpoint, each written before its checkpoint gets its name.
    Whenever the process is killed, a visible checkpoint has an entry of its own, or is the previous file, whose entry
    still exists. Several writers may share a directory.

    An entry is named ``<checkpoint>.<checksum>.json``. The name decides which file it describes, not the content: a
    name read from a directory leads nowhere else, and the checksum survives damage to the content.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.folder = directory / FOLDER
        self.newest: int | None = None  # saved_at of the newest entry
        self._damaged: set[Path] = set()  # entries that were reported

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
                    if path not in self._damaged:
                        self._damaged.add(path)
                        logger.warning("skipping the damaged entry '%s' of the manifest: %r", path, error)
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

    def new_entry(
        self,
        file: str,
        checksum: str,
        size: int,
        metadata: Mapping[str, Any],
        shards: Mapping[str, list[Any]] | None = None,
    ) -> Entry:
        """Return an entry that is newer than all others, whatever the clock says."""
        if self.newest is None:
            self.newest = max((entry.saved_at for entry in self.entries()), default=0)
        self.newest = max(time.time_ns(), self.newest + 1)
        about = {name: metadata.get(name) for name in ("objects", "step", "score", "score_name", "handler")}
        versions = {"camshaft": __version__, "torch": torch.__version__, "python": platform.python_version()}
        return Entry(file, checksum, size, self.newest, **about, versions=versions, shards=shards)

    def write(self, entry: Entry) -> None:
        """Add an entry; those of an older file of the same name stay."""
        self.folder.mkdir(exist_ok=True)
        content = {"format": _FORMAT, **asdict(entry)}
        if entry.shards is None:
            del content["shards"]
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


def names_in(directory: Path) -> list[str]:
    """Return the names of the checkpoints in a directory, including sharded ones."""
    sharded = {entry.file for entry in Manifest(directory).entries() if entry.shards is not None}
    return sorted({*sharded, *(entry.name for entry in checkpoints_in(directory))})


def checkpoints_in(directory: Path) -> list[os.DirEntry[str]]:
    """List the regular files of a directory that are checkpoints by their names."""
    try:
        with os.scandir(directory) as entries:  # a glob would hide an error of the disk
            candidates = [entry for entry in entries if entry.name.endswith(".pt")]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [entry for entry in candidates if entry.is_file(follow_symlinks=False)]


def _problem(path: Path, checksum: str, size: int, reads: bool) -> str | None:
    """Return what is wrong with a file, or ``None``; reads all of it, or only looks at its size."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return "is not a regular file"
        if status.st_size != size:
            return f"has {status.st_size:,} bytes instead of {size:,}"
        return (
            None
            if not reads or checksum_of(path) == checksum
            else "is damaged: its content does not match its checksum"
        )
    except FileNotFoundError:
        return MISSING
    except OSError as error:
        return f"cannot be read: {error}"


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
    if not isinstance(content, dict) or content.pop(_OWN, None) != checksum_of_entry(content):
        raise ValueError("its content does not match its checksum")
    if (written := content.get("format")) != _FORMAT:
        raise ValueError(f"format is {written!r}, and this version of camshaft reads {_FORMAT}")
    values: dict[str, Any] = {one.name: content.get(one.name) for one in fields(Entry)}
    entry = Entry(**values)
    numbers, objects, shards = (entry.size, entry.saved_at), entry.objects, entry.shards
    is_valid = all(type(number) is int and 0 <= number < _TOO_LARGE for number in numbers)
    is_valid &= objects is None or (isinstance(objects, list) and all(isinstance(one, str) for one in objects))
    is_valid &= shards is None or (isinstance(shards, dict) and all(map(SHARD.fullmatch, shards)))
    if not is_valid or (entry.file, entry.checksum) != (file, f"crc32:{checksum}"):
        raise ValueError("its fields are not those of an entry of this name")
    return entry
