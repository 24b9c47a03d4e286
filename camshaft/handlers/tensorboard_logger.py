"""Log scalars and histograms to TensorBoard."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from camshaft.arguments import load_optional
from camshaft.handlers import base_logger
from camshaft.handlers.base_logger import Path, Silence
from camshaft.handlers.steps import global_step_from_engine

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


class TensorboardLogger(base_logger.ServiceLogger):
    """Writes event files for TensorBoard, on rank 0.

    A run that resumes in the directory of an earlier one hides all points with later steps than its iteration, by the
    writer's ``purge_step``. Points whose steps are epochs may thus remain and appear twice: let evaluators log with the
    trainer's iteration. A run that starts from the beginning hides nothing: give it a directory of its own. Points
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
        self._attempt(self.writer.close)
        self.writer.purge_step = None  # that of tensorboardX would hide points whenever it reopens

    def _checkpoint_saved(self) -> None:
        self.writer.flush()

    def _rewind(self, iteration: int) -> None:
        self.writer.close()
        self.writer.purge_step = iteration + 1  # in the file that the next point opens


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
