"""Log to a text file that any program reads: a CSV table, or one JSON object per line."""

from __future__ import annotations

import csv
import errno
import io
import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from io import FileIO
from pathlib import Path as FilePath
from typing import Any, ClassVar

from camshaft.files import write_atomically
from camshaft.handlers import base_logger
from camshaft.handlers.base_logger import Path
from camshaft.handlers.steps import global_step_from_engine
from camshaft.types import PathLike

__all__ = [
    "CSVLogger",
    "FileLogger",
    "GradsScalarHandler",
    "JSONLinesLogger",
    "OptimizerParamsHandler",
    "OutputHandler",
    "WeightsScalarHandler",
    "global_step_from_engine",
]

Record = dict[str, Any]

STEP, TIME, ITERATION = "step", "time", "iteration"  # names of values contain a slash, these do not


class FileLogger(base_logger.BaseLogger, ABC):
    """Writes records to one file: a step, the Unix time in seconds, the trainer's iteration, and values by name.

    Each record is written in one piece. A resumed run continues the file and first removes the records at its end that
    have a later iteration; a new job renames an existing file. A record after :meth:`close` reopens the file; several
    loggers may write to the same file. If the disk is full, records are lost with one warning. A record with the step
    and the values of the last one with the same names is not written again, as at the start of an epoch that a resumed
    run repeats, or at two events of the same step.

    Args:
        path: the file, or a directory for it. A path with the suffix of the logger is a file.

    Raises:
        OSError: the file cannot be written.
        ValueError: the file was not written by such a logger.
    """

    suffix: ClassVar[str]
    logs_text = True

    def __init__(self, path: PathLike) -> None:
        given = FilePath(path).expanduser()
        is_file = given.suffix == self.suffix and not given.is_dir()
        self.path = given if is_file else given / f"metrics{self.suffix}"
        self._file: FileIO | None = None
        self._latest: dict[tuple[str, ...], dict[str, str]] = {}  # by the names in it
        if self.writes_here:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._open()

    def write_values(self, values: Mapping[Path, Any], step: int) -> None:
        """Append a record."""
        if not (values and self.writes_here):
            return
        named = {"/".join(path): plain(value) for path, value in values.items()}
        if self._file is None or os.fstat(self._file.fileno()).st_nlink == 0:  # closed, removed, or replaced
            self._open()
        record = {STEP: step, TIME: round(time.time(), 3), ITERATION: self.iteration, **named}
        content = _content(record)
        if self._latest.get(tuple(content)) != content:
            self._append(record)
            self._latest[tuple(content)] = content

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    @abstractmethod
    def _read(self, content: bytes) -> list[Record]:
        """Read the records in the lines of a file, which may be empty."""

    @abstractmethod
    def _line(self, record: Record) -> bytes:
        """Format a record."""

    def _append(self, record: Record) -> None:
        """Write a record in one piece, or nothing."""
        assert self._file is not None, "records are written to open files only"
        content = self._line(record)
        written = self._file.write(content)
        if written < len(content):
            self._file.truncate(self._file.tell() - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _open(self) -> list[Record]:
        """Open the file, without a last line that a kill has cut off, and return its records."""
        self.close()
        self._file = FileIO(self.path, "ab")
        content = self.path.read_bytes()
        size = content.rfind(b"\n") + 1
        try:
            if content and not size:
                raise ValueError("there is no complete line")
            records = self._read(content[:size])
            self._latest = {tuple(content): content for content in map(_content, records)}
        except (ValueError, KeyError, TypeError) as error:
            self.close()
            kind = type(self).__name__
            raise ValueError(f"path must be a new file, or one that a {kind} wrote, got '{self.path}'") from error
        self._file.truncate(size)
        return records

    def _rewind(self, iteration: int) -> None:
        records = self._open()
        kept, later = len(records), math.inf
        while kept and iteration < (found := int(records[kept - 1].get(ITERATION, 0))) <= later:
            kept, later = kept - 1, found  # an increase is the end of another run, as of a trainer that ran before
        lines = self.path.read_bytes().splitlines(keepends=True)
        os.truncate(self.path, sum(map(len, lines[: len(lines) - len(records) + kept])))
        self._open()

    def _begin(self) -> None:
        if not self._open():
            return
        number = 1
        while (aside := self.path.with_name(f"{self.path.stem}.{number}{self.suffix}")).exists():
            number += 1
        os.rename(self.path, aside)
        self._open()


class CSVLogger(FileLogger):
    """Writes a table with the columns ``step``, ``time``, ``iteration`` and one for each value, as ``training/loss``.

    Each handler writes rows of its own, and the cells of the others are empty there. ``frame.groupby("step").first()``
    of pandas merges the rows of a step, provided that all handlers count the same steps: let evaluators log with the
    trainer's iteration, ``global_step_from_engine(trainer, Events.ITERATION_COMPLETED)``. A value without a column
    rewrites the file with one more column.

    See :class:`~camshaft.handlers.file_logger.FileLogger` for resuming and errors.

    Args:
        path: the file, with the suffix ``.csv``, or a directory, in which it is ``metrics.csv``.

    Raises:
        OSError: the file cannot be written.
        ValueError: the file is not a table of this logger.

    >>> import tempfile
    >>> from camshaft.engine import Engine, Events
    >>> trainer = Engine(lambda engine, batch: {"loss": 1 / batch})
    >>> with tempfile.TemporaryDirectory() as folder, CSVLogger(folder) as logger:
    ...     every_second = Events.ITERATION_COMPLETED(every=2)
    ...     handle = logger.attach_output_handler(
    ...         trainer, every_second, "training", output_transform=lambda o: o
    ...     )
    ...     state = trainer.run([1, 2, 4, 8])
    ...     for row in csv.DictReader(logger.path.read_text().splitlines()):
    ...         print(row["step"], row["training/loss"])
    2 0.5
    4 0.125
    """

    suffix = ".csv"
    _columns: list[str]  # of the file, set when it is read

    def _append(self, record: Record) -> None:
        new = [name for name in record if name not in self._columns]
        if new:
            rows = self.path.read_bytes().splitlines()[1:]
            lines = [_row([*self._columns, *new]), *(row + b"," * len(new) + b"\n" for row in rows)]
            write_atomically(self.path, lambda file: file.writelines(lines))
            self._open()
        super()._append(record)

    def _read(self, content: bytes) -> list[Record]:
        self._columns, *rows = csv.reader(content.decode().splitlines()) if content else [[]]
        if content and self._columns[:2] != [STEP, TIME]:
            raise ValueError(f"the columns are {self._columns}")
        return [{name: cell for name, cell in zip(self._columns, row, strict=True) if cell != ""} for row in rows]

    def _line(self, record: Record) -> bytes:
        return _row([record.get(name, "") for name in self._columns])


class JSONLinesLogger(FileLogger):
    """Writes a line ``{"step": ..., "time": ..., "iteration": ..., "training/loss": ...}`` whenever a handler writes.

    JSON has no NaN and no infinity; they are written as the strings ``NaN``, ``Infinity`` and ``-Infinity``.
    See :class:`~camshaft.handlers.file_logger.FileLogger` for resuming and errors.

    Args:
        path: the file, with the suffix ``.jsonl``, or a directory, in which it is ``metrics.jsonl``.

    Raises:
        OSError: the file cannot be written.
        ValueError: the file holds other lines.

    >>> import tempfile
    >>> from camshaft.engine import Engine, Events
    >>> trainer = Engine(lambda engine, batch: {"loss": 1 / batch})
    >>> with tempfile.TemporaryDirectory() as folder, JSONLinesLogger(folder) as logger:
    ...     every_second = Events.ITERATION_COMPLETED(every=2)
    ...     handle = logger.attach_output_handler(
    ...         trainer, every_second, "training", output_transform=lambda o: o
    ...     )
    ...     state = trainer.run([1, 2, 4, 8])
    ...     [json.loads(line)["training/loss"] for line in logger.path.read_text().splitlines()]
    [0.5, 0.125]
    """

    suffix = ".jsonl"

    def _read(self, content: bytes) -> list[Record]:
        return [json.loads(line) for line in content.splitlines()]

    def _line(self, record: Record) -> bytes:
        finite = {
            name: json.dumps(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()
        }
        return json.dumps(finite).encode() + b"\n"


class OutputHandler(base_logger.BaseOutputHandler):
    """Writes metrics, outputs and state attributes to a file, text too."""

    logger_class = FileLogger


class OptimizerParamsHandler(base_logger.BaseOptimizerParamsHandler):
    """Writes a parameter of each group of an optimizer to a file."""

    logger_class = FileLogger


class WeightsScalarHandler(base_logger.BaseWeightsScalarHandler):
    """Writes a number for each parameter of a model to a file."""

    logger_class = FileLogger


class GradsScalarHandler(WeightsScalarHandler):
    """Writes a number for the gradient of each parameter of a model to a file."""

    of_gradients = True


def plain(value: Any) -> Any:
    """Convert a value to what a file can hold: a built-in number, or a string.

    >>> import numpy
    >>> plain(numpy.float64(0.5)), plain(2), plain(True), plain(1j)
    (0.5, 2, True, '1j')
    """
    value = value.item() if hasattr(value, "item") else value
    return value if isinstance(value, (bool, int, float, str)) else str(value)


def _content(record: Record) -> dict[str, str]:
    """Return the step and the values of a record as text, as a file has them."""
    step = str(int(record[STEP]))
    return {STEP: step, **{name: str(value) for name, value in record.items() if name not in (STEP, TIME, ITERATION)}}


def _row(cells: list[Any]) -> bytes:
    """Format a line of a CSV file, without line breaks in its cells."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerow(" ".join(str(cell).splitlines()) for cell in cells)
    return text.getvalue().encode(errors="backslashreplace")
