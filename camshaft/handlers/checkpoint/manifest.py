"""The manifest of a directory of checkpoints: what each file is, and by which checksum it is known to be whole.

It is a folder of small files, one for each checkpoint, each written before its checkpoint gets its name: whenever
the process is killed, a file that can be seen is the one that its entry tells of, or the one before it, whose entry
is still there. Several writers may share a directory.
"""

from __future__ import annotations

import json
import platform
import time
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from camshaft.files import checksum_of, write_atomically
from camshaft.version import __version__

FOLDER = ".manifest"
_FORMAT = 1
_OWN = "checksum_of_entry"  # of all the rest


@dataclass(frozen=True)
class Entry:
    """What is known of a checkpoint.

    Args:
        file: its name.
        checksum: of its content.
        size: in bytes.
        saved_at: nanoseconds since 1970; grows from one checkpoint of a directory to the next.
        objects: names of what is in it, if the handler that saved it told.
        step: of the engine, if the handler told.
        score: what it was kept for, if there was a score.
        score_name: of the score.
        versions: of the libraries that wrote it.
    """

    file: str
    checksum: str
    size: int
    saved_at: int
    objects: list[str] | None = None
    step: int | float | None = None
    score: int | float | None = None
    score_name: str | None = None
    versions: Mapping[str, str] | None = None

    def problem(self, path: Path) -> str | None:
        """Say what is wrong with the file, or ``None``; reads all of it."""
        try:
            size = path.stat().st_size
            if size != self.size:
                return f"has {size:,} bytes instead of {self.size:,}"
            return None if checksum_of(path) == self.checksum else "is damaged: its content does not fit its checksum"
        except FileNotFoundError:
            return "is not there: it was removed, or its save was interrupted"
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


def write_entry(directory: Path, entry: Entry) -> None:
    """Add an entry; what is known of an older file of the same name stays."""
    folder = directory / FOLDER
    folder.mkdir(exist_ok=True)
    content = {"format": _FORMAT, **asdict(entry)}
    text = json.dumps({**content, _OWN: _sum_of(content)}, indent=1) + "\n"
    write_atomically(_path_of(directory, entry), lambda file: file.write(text.encode()))


def entries_of(directory: Path, file: str | None = None, damaged: list[str] | None = None) -> list[Entry]:
    """Read the entries of a directory, or those of one file of it: the newest first.

    Args:
        directory: of checkpoints.
        file: the name of one.
        damaged: a list that is told of entries that cannot be read; they are left out.
    """
    found = []
    for path in _paths(directory, file):
        try:
            found.append(_read(path))
        except FileNotFoundError:  # removed meanwhile
            pass
        except (OSError, ValueError, TypeError, KeyError) as error:
            if damaged is not None:
                damaged.append(f"'{path}' cannot be read, so that nothing is known of its checkpoint: {error!r}")
    return sorted(
        (entry for entry in found if file is None or entry.file == file), key=lambda entry: entry.saved_at, reverse=True
    )


def _read(path: Path) -> Entry:
    content = json.loads(path.read_bytes())
    own = content.pop(_OWN, None)
    if own is not None and own != _sum_of(content):
        raise ValueError("its content does not fit its checksum")
    entry = Entry(**{field.name: content[field.name] for field in fields(Entry)})
    for name, kind in (("file", str), ("checksum", str), ("size", int), ("saved_at", int)):
        if not isinstance(content[name], kind):
            raise TypeError(f"{name} is {content[name]!r}")
    return entry


def _sum_of(content: Mapping[str, Any]) -> str:
    return f"crc32:{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def remove_entries(directory: Path, file: str, but: Entry | None = None) -> None:
    """Forget what is known of a file, those entries too that cannot be read; one may stay."""
    for path in _paths(directory, file):
        if but is None or path != _path_of(directory, but):
            path.unlink(missing_ok=True)


def problem_of(path: Path) -> str | None:
    """Say what is wrong with a checkpoint; ``None`` if nothing is, or if nothing is known of it."""
    damaged: list[str] = []
    problem = problem_among(entries_of(path.parent, path.name, damaged), path)
    for text in damaged:
        warnings.warn(text, stacklevel=3)
    return problem


def problem_among(entries: Sequence[Entry], path: Path) -> str | None:
    """Say what is wrong with a file, if none of some entries tells of it as it is."""
    problem = None
    for entry in entries:
        problem = entry.problem(path)
        if problem is None:
            return None
    return problem


def _path_of(directory: Path, entry: Entry) -> Path:
    return directory / FOLDER / f"{entry.file}.{entry.checksum.rpartition(':')[2]}.json"


def _paths(directory: Path, file: str | None) -> list[Path]:
    """Find the entries of a directory, or of one file of it."""
    paths = (directory / FOLDER).glob("*.json")
    return [path for path in paths if file is None or path.name.rpartition(".json")[0].rpartition(".")[0] == file]
