"""What loggers to files of text share: records that a kill does not lose, and files that can be gone on with."""

from __future__ import annotations

import os
import time
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from io import FileIO
from numbers import Number, Real
from pathlib import Path as FilePath
from typing import Any, ClassVar

from camshaft.files import write_atomically
from camshaft.handlers.base_logger import BaseLogger
from camshaft.handlers.log_steps import Reached
from camshaft.handlers.values import Path
from camshaft.types import PathLike

Record = dict[str, Any]

STEP, TIME = "step", "time"  # names of values have a slash in them, these have none


class FileLogger(BaseLogger):
    """Writes records to one file: a step, the seconds since 1970, and values by name.

    Each record reaches the file in one piece before the next begins. A run that goes on with an earlier one goes
    on with its file, from which the records beyond are cut; a job that begins anew moves an earlier file aside.
    Records that come after :meth:`close` open it once more; several loggers may write to one file.

    Args:
        path: of the file, or of a directory for it. What has the suffix of the file is taken to be one.

    Raises:
        OSError: the file cannot be written to.
        ValueError: it holds something else.
    """

    suffix: ClassVar[str]

    def __init__(self, path: PathLike) -> None:
        given = FilePath(path).expanduser()
        is_file = given.suffix == self.suffix and not given.is_dir()
        self.path = given if is_file else given / f"metrics{self.suffix}"
        self._file: FileIO | None = None
        self._failed = False
        if self.writes_here:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._open()

    def write_values(self, values: Mapping[Path, Any], step: int) -> None:
        """Add a record; a disk that is full is told once, and costs records, but not the run."""
        if values and self.writes_here:
            named = {"/".join(path): plain(value) for path, value in values.items()}
            try:
                self._reopen()
                self._append({STEP: step, TIME: round(time.time(), 3), **named})
            except (OSError, ValueError) as error:
                if not self._failed:
                    warnings.warn(f"{self.path} cannot be written to, records are lost: {error}", stacklevel=2)
                self._failed = True

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    @abstractmethod
    def _append(self, record: Record) -> None:
        """Write a record behind the others."""

    @abstractmethod
    def _read(self, content: bytes) -> list[Record]:
        """Read the records in a file; what was cut off in the middle of its last one is left out."""

    @abstractmethod
    def _formatted(self, records: Iterable[Record]) -> bytes:
        """Give the content of a file with these records."""

    def _open(self) -> None:
        self._file = FileIO(self.path, "ab")
        content = self.path.read_bytes()
        try:
            if content and b"\n" not in content:
                raise ValueError("there is no whole line")
            records = self._read(content)
        except (ValueError, KeyError, TypeError) as error:
            self.close()
            raise ValueError(f"path must be a new file or one of {type(self).__name__}, got '{self.path}'") from error
        if content and not content.endswith(b"\n"):
            self._replace(records)

    def _reopen(self) -> None:
        """Open the file again if it was closed, or if what is open was removed, or replaced by another logger."""
        if self._file is None or os.fstat(self._file.fileno()).st_nlink == 0:
            self.close()
            self._open()

    def _write(self, content: bytes) -> None:
        """Write in one piece, or nothing."""
        assert self._file is not None, "only open files are written to"
        before = os.fstat(self._file.fileno()).st_size
        try:
            written = self._file.write(content)
            if written < len(content):
                self._file.write(content[written:])
        except OSError:
            self._file.truncate(before)
            raise

    def _replace(self, records: Iterable[Record]) -> None:
        """Put these records in the place of all there are."""
        content = self._formatted(records)
        write_atomically(self.path, lambda file: file.write(content))
        self.close()
        self._file = FileIO(self.path, "ab")

    def _rewind(self, reached: Reached) -> None:
        if not self.path.exists():
            return
        records = self._read(self.path.read_bytes())
        kept = [one for one in records if not any(reached.is_beyond(name, one[STEP]) for name in _paths(one))]
        if len(kept) < len(records):
            self._replace(kept)
        named = (("/".join(path), path, one[STEP]) for one in kept for path in _paths(one))
        self._already_written = {(name, step) for name, path, step in named if reached.is_last(path, step)}

    def _begin(self) -> None:
        if not self.path.exists() or not self._read(self.path.read_bytes()):
            return
        number = 1
        while (aside := self.path.with_name(f"{self.path.stem}.{number}{self.suffix}")).exists():
            number += 1
        self.close()
        os.rename(self.path, aside)
        self._open()


def plain(value: Any) -> Any:
    """Turn a value into what a file can hold: a number of Python's own, or text.

    >>> import numpy
    >>> plain(numpy.float64(0.5)), plain(2), plain(True), plain(1j)
    (0.5, 2, True, '1j')
    """
    value = value.item() if isinstance(value, Number) and hasattr(value, "item") else value
    if isinstance(value, (bool, int, float, str)):
        return value
    return float(value) if isinstance(value, Real) else str(value)


def _paths(record: Record) -> list[Path]:
    return [tuple(name.split("/")) for name in record if name not in (STEP, TIME)]
