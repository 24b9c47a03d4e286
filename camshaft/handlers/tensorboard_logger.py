"""Log scalars and histograms to TensorBoard."""

from __future__ import annotations

import struct
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path as FilePath
from typing import Any, NamedTuple

from camshaft.handlers import base_logger
from camshaft.handlers.base_logger import Path, Reached, Silence
from camshaft.handlers.utils import global_step_from_engine, load_optional

__all__ = [
    "GradsHistHandler",
    "GradsScalarHandler",
    "OptimizerParamsHandler",
    "OutputHandler",
    "TensorboardLogger",
    "WeightsHistHandler",
    "WeightsScalarHandler",
    "global_step_from_engine",
]

_HEADER = struct.Struct("<QI")  # the length of a record, and a checksum of the length
_FOOTER_BYTES = 4


class TensorboardLogger(base_logger.ServiceLogger):
    """Writes event files for TensorBoard, on rank 0.

    A run that resumes in the directory of an earlier one hides the points after the step from which it resumes. Points
    logged before a checkpoint are on disk when the checkpoint is.

    Args:
        args: for the ``SummaryWriter`` of torch, which needs tensorboard, else for that of tensorboardX.
        kwargs: likewise, such as ``log_dir``, which may be spelled ``logdir`` as in tensorboardX.

    Attributes:
        writer: the ``SummaryWriter``; unknown attributes of the logger are looked up there.

    Raises:
        ModuleNotFoundError: neither tensorboard nor tensorboardX is installed.

    >>> import tempfile
    >>> from camshaft.engine import Engine, Events
    >>> trainer = Engine(lambda engine, batch: 1 / batch)
    >>> with tempfile.TemporaryDirectory() as folder, TensorboardLogger(log_dir=folder) as logger:
    ...     handle = logger.attach_output_handler(
    ...         trainer,
    ...         Events.ITERATION_COMPLETED(every=2),
    ...         "training",
    ...         output_transform=lambda loss: {"loss": loss},
    ...     )
    ...     state = trainer.run([1, 2, 4, 8])
    ...     logger.add_text("note", "any method of the writer")
    """

    _forwards_to = "writer"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        writer_class = _writer_class()
        if "logdir" in kwargs:
            kwargs["log_dir"] = kwargs.pop("logdir")
        self.writer: Any = Silence()
        if self.writes_here:
            self.writer = writer_class(*args, **kwargs)
            if hasattr(self.writer, "log_dir"):  # of torch; tensorboardX, which other code may expect, calls it logdir
                self.writer.logdir = self.writer.log_dir

    def write_values(self, values: Mapping[Path, Any], step: int) -> None:
        """Write a scalar for each value."""
        for path, value in values.items():
            self.writer.add_scalar("/".join(path), value, step)

    def write_histograms(self, tensors: Mapping[Path, Any], step: int) -> None:
        """Write a histogram for each tensor."""
        for path, tensor in tensors.items():
            self.writer.add_histogram("/".join(path), tensor.cpu().float().numpy(), step)

    def close(self) -> None:
        """Flush and close the files."""
        self.writer.close()

    def _checkpoint_saved(self) -> None:
        self.writer.flush()

    def _rewind(self, reached: Reached) -> set[tuple[str, int]]:
        # TensorBoard drops all points from some step on, whatever their name, when a new file says so. Where steps
        # count different things, iterations of a trainer and epochs of its evaluators, this drops too much; the points
        # to keep are written again, with their original times.
        self.writer.flush()
        folder = FilePath(self.writer.file_writer.get_logdir())
        # events of the library that the writer uses
        event_class = sys.modules[type(self.writer._get_file_writer()).__module__].event_pb2.Event
        points = _points(folder, event_class)
        beyond = [point.step for point in points if reached.is_beyond(point.path, point.step)]
        if beyond:
            first = min(beyond)
            kept = [one for one in points if one.step >= first and not reached.is_beyond(one.path, one.step)]
            self.writer.close()
            time.sleep(1)  # files are named by seconds, and read in the order of their names
            self.writer.purge_step = first  # read when the writer opens its next file
            file_writer = self.writer._get_file_writer()
            for point in kept:
                event = event_class()
                event.summary.value.append(point.value)
                file_writer.add_event(event, point.step, point.wall_time)
            self.writer.flush()
        return {("/".join(point.path), point.step) for point in points if reached(point.path) == point.step}


class OutputHandler(base_logger.BaseOutputHandler):
    """Writes metrics, outputs and state attributes as scalars ``<tag>/<name>``."""

    logger_class = TensorboardLogger


class OptimizerParamsHandler(base_logger.BaseOptimizerParamsHandler):
    """Writes a parameter of each group of an optimizer as scalars ``<tag>/<parameter>/group_<i>``."""

    logger_class = TensorboardLogger


class WeightsScalarHandler(base_logger.BaseWeightsScalarHandler):
    """Writes a number for each parameter of a model as scalars ``<tag>/weights_<reduction>/<name>``."""

    logger_class = TensorboardLogger


class WeightsHistHandler(base_logger.BaseWeightsHistHandler):
    """Writes histograms ``<tag>/weights/<name>`` of the parameters of a model."""

    logger_class = TensorboardLogger


class GradsScalarHandler(WeightsScalarHandler):
    """Writes a number for the gradient of each parameter as scalars ``<tag>/grads_<reduction>/<name>``."""

    of_gradients = True


class GradsHistHandler(WeightsHistHandler):
    """Writes histograms ``<tag>/grads/<name>`` of the gradients of a model."""

    of_gradients = True


def _writer_class() -> Any:
    try:
        load_optional("tensorboard", extra="tensorboard", needed_by="TensorboardLogger")
    except ModuleNotFoundError:
        if find_spec("tensorboardX") is None:
            raise
        warnings.warn(
            "TensorboardLogger uses tensorboardX, whose flush() does not write all points: those logged before a "
            "checkpoint may be lost if the process is killed; pip install 'camshaft[tensorboard]'",
            stacklevel=3,
        )
        return import_module("tensorboardX").SummaryWriter
    return import_module("torch.utils.tensorboard").SummaryWriter


# --- the event files of an earlier run ---------------------------------------------------------------------------


class _Point(NamedTuple):
    path: Path
    step: int
    wall_time: float
    value: Any


def _points(folder: FilePath, event_class: Any) -> list[_Point]:
    """Read all points that TensorBoard shows, in the order in which it reads them."""
    points: list[_Point] = []
    for file in sorted(folder.glob("*tfevents*")):
        for record in _records(file):
            event = event_class.FromString(record)
            if event.HasField("session_log") and event.session_log.status == event.session_log.START:
                points = [point for point in points if point.step < event.step]
            for value in event.summary.value:
                points.append(_Point(tuple(value.tag.split("/")), event.step, event.wall_time, value))
    return points


def _records(file: FilePath) -> Iterator[bytes]:
    """Read the records of an event file, without a last one that a kill has truncated."""
    with open(file, "rb") as stream:
        while len(header := stream.read(_HEADER.size)) == _HEADER.size:
            length, _ = _HEADER.unpack(header)
            record = stream.read(length)
            if len(record) < length or len(stream.read(_FOOTER_BYTES)) < _FOOTER_BYTES:
                return
            yield record
