"""A table of all values, in a file that every spreadsheet reads."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Any

from camshaft.handlers.base_logger import BaseOptimizerParamsHandler, BaseOutputHandler, BaseWeightsScalarHandler
from camshaft.handlers.file_logger import STEP, TIME, FileLogger, Record
from camshaft.handlers.utils import global_step_from_engine
from camshaft.types import PathLike

__all__ = [
    "CSVLogger",
    "GradsScalarHandler",
    "OptimizerParamsHandler",
    "OutputHandler",
    "WeightsScalarHandler",
    "global_step_from_engine",
]


class CSVLogger(FileLogger):
    """Writes a table with the columns ``step``, ``time`` and one for each value, such as ``training/loss``.

    Cells stay empty where a handler had nothing to say. When a value comes that has no column yet, the file is
    written anew with one more.

    Args:
        path: of the file, ending with ``.csv``, or of a directory, in which it is ``metrics.csv``.

    Raises:
        OSError: the file cannot be written to.
        ValueError: it is no table of this logger.

    >>> import tempfile
    >>> from camshaft.engine import Engine, Events
    >>> trainer = Engine(lambda engine, batch: {"loss": 1 / batch})
    >>> with tempfile.TemporaryDirectory() as folder, CSVLogger(folder) as logger:
    ...     every_second = Events.ITERATION_COMPLETED(every=2)
    ...     handle = logger.attach_output_handler(trainer, every_second, "training", output_transform=lambda o: o)
    ...     state = trainer.run([1, 2, 4, 8])
    ...     for row in csv.DictReader(logger.path.read_text().splitlines()):
    ...         print(row["step"], row["training/loss"])
    2 0.5
    4 0.125
    """

    suffix = ".csv"

    def __init__(self, path: PathLike) -> None:
        self._columns: list[str] = []
        super().__init__(path)

    def _append(self, record: Record) -> None:
        columns = self._columns
        if record.keys() <= set(columns):
            self._write(_row(record, columns))
            return
        records = self._read(self.path.read_bytes())
        self._columns = [*self._columns, *(name for name in record if name not in self._columns)]
        try:
            self._replace([*records, record])
        except OSError:
            self._columns = columns
            raise

    def _read(self, content: bytes) -> list[Record]:
        if not content:
            self._columns = []
            return []
        header, *rows = csv.reader(content[: content.rfind(b"\n") + 1].decode().splitlines())
        if header[:2] != [STEP, TIME]:
            raise ValueError(f"the columns are {header}")
        self._columns = header
        return [_record(header, row) for row in rows]

    def _formatted(self, records: Iterable[Record]) -> bytes:
        header = dict(zip(self._columns, self._columns, strict=True))
        return b"".join(_row(record, self._columns) for record in (header, *records))

    def _create_output_handler(self, *args: Any, **kwargs: Any) -> OutputHandler:
        return OutputHandler(*args, **kwargs)

    def _create_opt_params_handler(self, *args: Any, **kwargs: Any) -> OptimizerParamsHandler:
        return OptimizerParamsHandler(*args, **kwargs)


class OutputHandler(BaseOutputHandler):
    """Writes metrics, outputs and attributes of the state to a :class:`CSVLogger`, text too."""

    logger_class = CSVLogger
    logs_text = True


class OptimizerParamsHandler(BaseOptimizerParamsHandler):
    """Writes a parameter of each group of an optimizer to a :class:`CSVLogger`."""

    logger_class = CSVLogger


class WeightsScalarHandler(BaseWeightsScalarHandler):
    """Writes a number for each parameter of a model to a :class:`CSVLogger`."""

    logger_class = CSVLogger


class GradsScalarHandler(WeightsScalarHandler):
    """Writes a number for the gradient of each parameter of a model to a :class:`CSVLogger`."""

    of_gradients = True


def _row(record: Record, columns: list[str]) -> bytes:
    """Give one line: a text in a cell must not break it."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerow(" ".join(str(record.get(name, "")).splitlines()) for name in columns)
    return text.getvalue().encode(errors="backslashreplace")


def _record(header: list[str], row: list[str]) -> Record:
    cells = {name: cell for name, cell in zip(header, row, strict=True) if cell != ""}
    return {**cells, STEP: int(cells[STEP])}
