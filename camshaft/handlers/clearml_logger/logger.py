"""Values and histograms for ClearML."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar

from camshaft.handlers.base_logger import (
    BaseLogger,
    BaseOptimizerParamsHandler,
    BaseOutputHandler,
    BaseWeightsScalarHandler,
    Forwarding,
    Silence,
)
from camshaft.handlers.log_handlers import WeightsHistHandler as BaseWeightsHistHandler
from camshaft.handlers.services import answers
from camshaft.handlers.utils import load_optional
from camshaft.handlers.values import Path


class ClearMLLogger(Forwarding, BaseLogger):
    """Writes values and histograms to a task of ClearML, on rank 0.

    A server that does not answer costs a warning; the task is then kept offline, for ``Task.import_offline_session``.
    A task that is gone on with (``continue_last_task``) counts steps as the engine does, without an offset.

    Args:
        kwargs: for ``Task.init``, unless there is a current task: ``project_name``, ``task_name``, ``task_type``
            and more. Files of ``torch.save`` are not uploaded by themselves (``auto_connect_frameworks``); see
            :class:`ClearMLSaver`.

    Attributes:
        clearml_logger: the logger of the task; unknown attributes are looked up there.
        grad_helper: makes surfaces of histograms.

    Raises:
        ModuleNotFoundError: clearml is not installed.

    >>> from camshaft.engine import Engine, Events
    >>> trainer = Engine(lambda engine, batch: 1 / batch)
    >>> with ClearMLLogger(project_name="digits", task_name="first") as logger:  # doctest: +SKIP
    ...     handle = logger.attach_output_handler(
    ...         trainer, Events.ITERATION_COMPLETED(every=2), "training", output_transform=lambda loss: {"loss": loss}
    ...     )
    ...     state = trainer.run([1, 2, 4, 8])
    """

    _forwards_to = "clearml_logger"
    _bypass: ClassVar[bool | None] = None

    def __init__(self, **kwargs: Any) -> None:
        clearml = load_optional("clearml", extra="clearml", needed_by="ClearMLLogger")
        self._task: Any = None
        self.clearml_logger: Any = Silence()
        self.grad_helper: Any = Silence()
        if not self.writes_here:
            return
        if self.bypass_mode():
            warnings.warn("ClearMLLogger is in bypass mode: the task is kept offline", stacklevel=2)
            clearml.Task.set_offline(True)
        self._task = clearml.Task.current_task() or _new_task(clearml, kwargs)
        self.clearml_logger = self._task.get_logger()
        helper = import_module("clearml.binding.frameworks.tensorflow_bind").WeightsGradientHistHelper
        self.grad_helper = helper(logger=self.clearml_logger, report_freq=1)

    @classmethod
    def set_bypass_mode(cls, bypass: bool) -> None:
        """Decide whether tasks are kept offline, whatever the environment variable ``CI`` says."""
        cls._bypass = bypass
        load_optional("clearml", extra="clearml", needed_by="ClearMLLogger").Task.set_offline(bypass)

    @classmethod
    def bypass_mode(cls) -> bool:
        """Say whether tasks are kept offline; by default where the environment variable ``CI`` means yes."""
        return _means_yes(os.environ.get("CI", "")) if cls._bypass is None else cls._bypass

    def get_task(self) -> Any:
        """Give the task; ``None`` on ranks that do not write."""
        return self._task

    def write_values(self, values: Mapping[Path, Any], step: int) -> None:
        """Report a scalar for each value."""
        for path, value in values.items():
            if len(path) > 1:
                title, series = title_and_series(path)
                self.clearml_logger.report_scalar(title=title, series=series, value=value, iteration=step)

    def write_histograms(self, tensors: Mapping[Path, Any], step: int) -> None:
        """Report a histogram for each tensor."""
        for path, tensor in tensors.items():
            title, series = title_and_series(path)
            data = tensor.cpu().float().numpy().ravel()
            self.grad_helper.add_histogram(title=title, series=series, step=step, hist_data=data)

    def close(self) -> None:
        """Report what is left, and close the task."""
        self.clearml_logger.flush()
        task, self._task = self._task, None
        if task is not None:
            task.close()

    def _create_output_handler(self, *args: Any, **kwargs: Any) -> OutputHandler:
        return OutputHandler(*args, **kwargs)

    def _create_opt_params_handler(self, *args: Any, **kwargs: Any) -> OptimizerParamsHandler:
        return OptimizerParamsHandler(*args, **kwargs)


class OutputHandler(BaseOutputHandler):
    """Writes metrics, outputs and attributes of the state: the plot ``<tag>`` has a line for each name."""

    logger_class = ClearMLLogger


class OptimizerParamsHandler(BaseOptimizerParamsHandler):
    """Writes a parameter of each group of an optimizer: the plot ``<tag>/<parameter>`` has a line for each."""

    logger_class = ClearMLLogger

    def path(self, group: int) -> Path:
        """Name the parameter of a group."""
        *front, _ = super().path(group)
        return ("/".join(front), str(group))


class WeightsScalarHandler(BaseWeightsScalarHandler):
    """Writes a number for each parameter: the plot ``<tag>/weights_<reduction>/<module>`` has a line for each."""

    logger_class = ClearMLLogger

    def path(self, name: str) -> Path:
        """Name what is written of a parameter."""
        return _with_joined_title(super().path(name), self.tag, "/")


class WeightsHistHandler(BaseWeightsHistHandler):
    """Writes histograms of the parameters: the plot ``<tag>/weights_<module>`` has one for each."""

    logger_class = ClearMLLogger

    def path(self, name: str) -> Path:
        """Name what is written of a parameter."""
        return _with_joined_title(super().path(name), self.tag, "_")


class GradsScalarHandler(WeightsScalarHandler):
    """Writes a number for the gradient of each parameter."""

    of_gradients = True


class GradsHistHandler(WeightsHistHandler):
    """Writes histograms of the gradients of a model."""

    of_gradients = True


def title_and_series(path: Path) -> tuple[str, str]:
    """Divide a name into that of a plot and that of a line in it.

    >>> title_and_series(("training", "loss")), title_and_series(("training", "loss", "box", "0"))
    (('training', 'loss'), ('training/loss', 'box/0'))
    """
    cut = 1 if len(path) == 2 else 2
    return "/".join(path[:cut]), "/".join(path[cut:])


def _with_joined_title(path: Path, tag: str | None, joint: str) -> Path:
    """Let the title of a plot end with the first part of the name of a parameter."""
    front = 2 if tag else 1
    title, first, *rest = "/".join(path[:front]), *path[front:]
    return (f"{title}{joint}{first}", "/".join(rest) or first)


def _new_task(clearml: Any, kwargs: Mapping[str, Any]) -> Any:
    host = import_module("clearml.backend_api").Session.get_api_server_host()
    if not clearml.Task.is_offline() and not answers(host):
        warnings.warn(f"ClearML at {host} does not answer: the task is kept offline", stacklevel=3)
        clearml.Task.set_offline(True)
    defaults = {"task_type": clearml.Task.TaskTypes.training, "auto_connect_frameworks": {"pytorch": False}}
    task = clearml.Task.init(**{**defaults, **kwargs})
    if kwargs.get("continue_last_task"):
        task.set_initial_iteration(0)
    return task


def _means_yes(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "no", "off", "n", "f")
