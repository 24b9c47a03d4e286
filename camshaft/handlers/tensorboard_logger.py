"""Curves and histograms for TensorBoard."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from camshaft.engine.engine import Engine
from camshaft.engine.event import EventLike
from camshaft.engine.handle import RemovableEventHandle
from camshaft.handlers import tensorboard_files
from camshaft.handlers.base_logger import (
    BaseLogger,
    BaseOptimizerParamsHandler,
    BaseOutputHandler,
    BaseWeightsScalarHandler,
    Forwarding,
    Silence,
)
from camshaft.handlers.checkpoint import CheckpointEvents
from camshaft.handlers.log_handlers import WeightsHistHandler as BaseWeightsHistHandler
from camshaft.handlers.log_steps import Reached, engine_followed
from camshaft.handlers.optional import load_optional
from camshaft.handlers.utils import global_step_from_engine
from camshaft.handlers.values import Path

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


class TensorboardLogger(Forwarding, BaseLogger):
    """Writes event files for TensorBoard, on rank 0.

    A run that goes on in the directory of an earlier one hides what lies beyond the place where it goes on.

    Args:
        args: for the ``SummaryWriter`` of torch, which needs tensorboard, else for that of tensorboardX.
        kwargs: the same, such as ``log_dir``, which may also be called ``logdir``, as in tensorboardX.

    Attributes:
        writer: the ``SummaryWriter``; unknown attributes of the logger are looked up there.

    Raises:
        ModuleNotFoundError: neither tensorboardX nor tensorboard is installed.

    >>> import tempfile
    >>> from camshaft.engine import Engine, Events
    >>> trainer = Engine(lambda engine, batch: 1 / batch)
    >>> with tempfile.TemporaryDirectory() as folder, TensorboardLogger(log_dir=folder) as logger:
    ...     handle = logger.attach_output_handler(
    ...         trainer, Events.ITERATION_COMPLETED(every=2), "training", output_transform=lambda loss: {"loss": loss}
    ...     )
    ...     state = trainer.run([1, 2, 4, 8])
    ...     logger.add_text("note", "any method of the writer")
    """

    _forwards_to = "writer"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        writer_class = _writer_class()
        if "logdir" in kwargs:
            kwargs["log_dir"] = kwargs.pop("logdir")
        self.writer: Any = writer_class(*args, **kwargs) if self.writes_here else Silence()

    def attach(
        self,
        engine: Engine[Any, Any],
        log_handler: Callable[..., object],
        event_name: EventLike,
        *args: Any,
        **kwargs: Any,
    ) -> RemovableEventHandle:
        """Call ``log_handler(engine, logger, event_name, ...)``; see :meth:`BaseLogger.attach`.

        What was logged before a checkpoint of the engine, or of the one whose steps the handler writes, is on the disk
        when that checkpoint is. This holds until the end of the engine, also after the handler was removed.
        """
        handle = super().attach(engine, log_handler, event_name, *args, **kwargs)
        saved = CheckpointEvents.SAVED_CHECKPOINT
        for one in (engine, engine_followed(log_handler)) if self.writes_here else ():
            if one is not None and not one.has_event_handler(self.writer.flush, saved):
                one.add_event_handler(saved, self.writer.flush)
        return handle

    def write_values(self, values: Mapping[Path, Any], step: int) -> None:
        """Write a scalar for each value."""
        for path, value in values.items():
            self.writer.add_scalar("/".join(path), value, step)

    def write_histograms(self, tensors: Mapping[Path, Any], step: int) -> None:
        """Write a histogram for each tensor."""
        for path, tensor in tensors.items():
            self.writer.add_histogram("/".join(path), tensor.cpu().float().numpy(), step)

    def close(self) -> None:
        """Write what is still in memory, and close the files."""
        self.writer.close()

    def _rewind(self, reached: Reached) -> None:
        self._already_written = tensorboard_files.rewind(self.writer, reached)

    def _create_output_handler(self, *args: Any, **kwargs: Any) -> OutputHandler:
        return OutputHandler(*args, **kwargs)

    def _create_opt_params_handler(self, *args: Any, **kwargs: Any) -> OptimizerParamsHandler:
        return OptimizerParamsHandler(*args, **kwargs)


class OutputHandler(BaseOutputHandler):
    """Writes metrics, outputs and attributes of the state as scalars ``<tag>/<name>``."""

    logger_class = TensorboardLogger


class OptimizerParamsHandler(BaseOptimizerParamsHandler):
    """Writes a parameter of each group of an optimizer as scalars ``<tag>/<parameter>/group_<i>``."""

    logger_class = TensorboardLogger


class WeightsScalarHandler(BaseWeightsScalarHandler):
    """Writes a number for each parameter of a model as scalars ``<tag>/weights_<reduction>/<name>``."""

    logger_class = TensorboardLogger


class WeightsHistHandler(BaseWeightsHistHandler):
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
            "TensorboardLogger uses tensorboardX, whose flush() does not write all points: those from before a "
            "checkpoint may be lost when the process is killed; pip install 'camshaft[tensorboard]'",
            stacklevel=3,
        )
        return import_module("tensorboardX").SummaryWriter
    return import_module("torch.utils.tensorboard").SummaryWriter
