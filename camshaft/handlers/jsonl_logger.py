"""One JSON object a line: for programs that read logs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from camshaft.handlers.base_logger import BaseOptimizerParamsHandler, BaseOutputHandler, BaseWeightsScalarHandler
from camshaft.handlers.file_logger import STEP, FileLogger, Record
from camshaft.handlers.utils import global_step_from_engine

__all__ = [
    "GradsScalarHandler",
    "JSONLinesLogger",
    "OptimizerParamsHandler",
    "OutputHandler",
    "WeightsScalarHandler",
    "global_step_from_engine",
]


class JSONLinesLogger(FileLogger):
    """Writes a line ``{"step": ..., "time": ..., "training/loss": ...}`` for each firing of a handler.

    JSON has no word for what is not finite: those are the texts ``NaN``, ``Infinity`` and ``-Infinity``.

    Args:
        path: of the file, ending with ``.jsonl``, or of a directory, in which it is ``metrics.jsonl``.

    Raises:
        OSError: the file cannot be written to.
        ValueError: it holds other lines.

    >>> import tempfile
    >>> from camshaft.engine import Engine, Events
    >>> trainer = Engine(lambda engine, batch: {"loss": 1 / batch})
    >>> with tempfile.TemporaryDirectory() as folder, JSONLinesLogger(folder) as logger:
    ...     every_second = Events.ITERATION_COMPLETED(every=2)
    ...     handle = logger.attach_output_handler(trainer, every_second, "training", output_transform=lambda o: o)
    ...     state = trainer.run([1, 2, 4, 8])
    ...     [json.loads(line)["training/loss"] for line in logger.path.read_text().splitlines()]
    [0.5, 0.125]
    """

    suffix = ".jsonl"

    def _append(self, record: Record) -> None:
        self._write(_line(record))

    def _read(self, content: bytes) -> list[Record]:
        return [_record(line) for line in content[: content.rfind(b"\n") + 1].splitlines()]

    def _formatted(self, records: Iterable[Record]) -> bytes:
        return b"".join(map(_line, records))

    def _create_output_handler(self, *args: Any, **kwargs: Any) -> OutputHandler:
        return OutputHandler(*args, **kwargs)

    def _create_opt_params_handler(self, *args: Any, **kwargs: Any) -> OptimizerParamsHandler:
        return OptimizerParamsHandler(*args, **kwargs)


class OutputHandler(BaseOutputHandler):
    """Writes metrics, outputs and attributes of the state to a :class:`JSONLinesLogger`, text too."""

    logger_class = JSONLinesLogger
    logs_text = True


class OptimizerParamsHandler(BaseOptimizerParamsHandler):
    """Writes a parameter of each group of an optimizer to a :class:`JSONLinesLogger`."""

    logger_class = JSONLinesLogger


class WeightsScalarHandler(BaseWeightsScalarHandler):
    """Writes a number for each parameter of a model to a :class:`JSONLinesLogger`."""

    logger_class = JSONLinesLogger


class GradsScalarHandler(WeightsScalarHandler):
    """Writes a number for the gradient of each parameter of a model to a :class:`JSONLinesLogger`."""

    of_gradients = True


def _line(record: Record) -> bytes:
    return json.dumps({name: _writable(value) for name, value in record.items()}, allow_nan=False).encode() + b"\n"


def _writable(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _record(line: bytes) -> Record:
    record: Record = json.loads(line)
    record[STEP] = int(record[STEP])
    return record
