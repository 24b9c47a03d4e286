"""Log values and histograms to ClearML, and upload checkpoints."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar

from camshaft.arguments import check_type, load_optional
from camshaft.distributed import broadcast, get_rank
from camshaft.handlers import base_logger
from camshaft.handlers.base_logger import Path, Silence, answers
from camshaft.handlers.checkpoint import DiskSaver
from camshaft.handlers.steps import global_step_from_engine
from camshaft.types import PathLike

__all__ = [
    "ClearMLLogger",
    "ClearMLSaver",
    "GradsHistHandler",
    "GradsScalarHandler",
    "OptimizerParamsHandler",
    "OutputHandler",
    "WeightsHistHandler",
    "WeightsScalarHandler",
    "global_step_from_engine",
]


class ClearMLLogger(base_logger.ServiceLogger):
    """Writes values and histograms to a task of ClearML, on rank 0.

    If the server does not answer, the logger warns and keeps the task offline, for ``Task.import_offline_session``.
    A continued task (``continue_last_task``) counts steps as the engine does, without an offset.

    Args:
        kwargs: for ``Task.init``, unless there is a current task: ``project_name``, ``task_name``, ``task_type``
            and more. Files of ``torch.save`` are not uploaded automatically (``auto_connect_frameworks``); see
            :class:`ClearMLSaver`.

    Attributes:
        clearml_logger: the logger of the task; unknown attributes are looked up there.
        grad_helper: ClearML's helper that reports histograms.

    Raises:
        ModuleNotFoundError: clearml is not installed.

    >>> from camshaft.engine import Engine, Events
    >>> trainer = Engine(lambda engine, batch: 1 / batch)
    >>> with ClearMLLogger(project_name="digits", task_name="first") as logger:  # doctest: +SKIP
    ...     handle = logger.attach_output_handler(
    ...         trainer,
    ...         Events.ITERATION_COMPLETED(every=2),
    ...         "training",
    ...         output_transform=lambda loss: {"loss": loss},
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
        """Set whether tasks are kept offline, regardless of the environment variable ``CI``."""
        cls._bypass = bypass
        load_optional("clearml", extra="clearml", needed_by="ClearMLLogger").Task.set_offline(bypass)

    @classmethod
    def bypass_mode(cls) -> bool:
        """Return whether tasks are kept offline; by default if the environment variable ``CI`` is true."""
        if cls._bypass is not None:
            return cls._bypass
        return os.environ.get("CI", "").strip().lower() not in ("", "0", "false", "no", "off", "n", "f")

    def get_task(self) -> Any:
        """Return the task; ``None`` on ranks that do not write."""
        return self._task

    def write_values(self, values: Mapping[Path, Any], step: int) -> None:
        """Report a scalar for each value."""
        for path, value in values.items():
            title, series = _title_and_series(path)
            self.clearml_logger.report_scalar(title=title, series=series, value=value, iteration=step)

    def write_histograms(self, tensors: Mapping[Path, Any], step: int) -> None:
        """Report a histogram for each tensor."""
        for path, tensor in tensors.items():
            title, series = _title_and_series(path)
            data = tensor.cpu().float().numpy().ravel()
            self.grad_helper.add_histogram(title=title, series=series, step=step, hist_data=data)

    def close(self) -> None:
        """Flush, and close the task, which failed after an error."""
        self.clearml_logger.flush()
        task, self._task = self._task, None
        if task is not None:
            if self.has_failed:
                task.mark_failed(status_reason="an error has ended the run")
            task.close()

    def _create_opt_params_handler(self, *args: Any, **kwargs: Any) -> OptimizerParamsHandler:
        return OptimizerParamsHandler(*args, **kwargs)


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


# --- handlers: ClearML names a plot and a line in it ----------------------------------------------------------------


class OutputHandler(base_logger.BaseOutputHandler):
    """Writes metrics, outputs and state attributes: plot ``<tag>`` has a line for each name."""

    logger_class = ClearMLLogger


class OptimizerParamsHandler(base_logger.BaseOptimizerParamsHandler):
    """Writes a parameter of each group of an optimizer: plot ``<tag>/<parameter>`` has a line for each group."""

    logger_class = ClearMLLogger

    def path(self, group: int) -> Path:
        """Return the path of a group's parameter."""
        *plot, _ = super().path(group)
        return ("/".join(plot), str(group))


class WeightsScalarHandler(base_logger.BaseWeightsScalarHandler):
    """Writes a number for each parameter: plot ``<tag>/weights_<reduction>/<module>`` has a line for each."""

    logger_class = ClearMLLogger

    def path(self, name: str) -> Path:
        """Return the path of a parameter."""
        return _plot_of_module("/".join(self.prefix) + "/", name)


class WeightsHistHandler(base_logger.BaseWeightsHistHandler):
    """Writes histograms of the parameters: plot ``<tag>/weights_<module>`` has one for each."""

    logger_class = ClearMLLogger

    def path(self, name: str) -> Path:
        """Return the path of a parameter."""
        return _plot_of_module("/".join(self.prefix) + "_", name)


class GradsScalarHandler(WeightsScalarHandler):
    """Writes a number for the gradient of each parameter."""

    of_gradients = True


class GradsHistHandler(WeightsHistHandler):
    """Writes histograms of the gradients of a model."""

    of_gradients = True


def _title_and_series(path: Path) -> tuple[str, str]:
    """Split a path into the names of a plot and of a line in it.

    >>> _title_and_series(("training", "loss")), _title_and_series(("training", "loss", "box", "0"))
    (('training', 'loss'), ('training/loss', 'box/0'))
    """
    cut = 1 if len(path) == 2 else 2
    return "/".join(path[:cut]), "/".join(path[cut:])


def _plot_of_module(title: str, name: str) -> Path:
    """Return a plot for each top-level module, with a line for each of its parameters."""
    module, _, rest = name.partition(".")
    return (title + module, rest.replace(".", "/") or module)


# --- checkpoints ----------------------------------------------------------------------------------------------------


class ClearMLSaver(DiskSaver):
    """Saves files to a directory and uploads each as a model of a task of ClearML, from rank 0.

    The models are named ``<basename>_<slot>``: a checkpoint takes the slot of a removed one.

    Args:
        logger: the logger whose task to use; by default the current task.
        output_uri: where ClearML uploads to.
        dirname: the directory; by default a temporary one, shared with all ranks.
        args: for :class:`DiskSaver`.
        kwargs: for :class:`DiskSaver`; ``atomic`` is off by default.

    Raises:
        TypeError: ``logger`` is not a :class:`ClearMLLogger`.
        RuntimeError: there is no task.

    >>> from camshaft.handlers import Checkpoint, ClearMLLogger
    >>> from camshaft.handlers.clearml_logger import ClearMLSaver
    >>> logger = ClearMLLogger(project_name="digits")  # doctest: +SKIP
    >>> saver = ClearMLSaver(logger, dirname="checkpoints")  # doctest: +SKIP
    >>> checkpoint = Checkpoint({"model": model}, saver, n_saved=2)  # doctest: +SKIP
    """

    def __init__(
        self,
        logger: ClearMLLogger | None = None,
        output_uri: str | None = None,
        dirname: PathLike | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if logger is not None:
            check_type("logger", logger, ClearMLLogger, "a ClearMLLogger")
        clearml = load_optional("clearml", extra="clearml", needed_by="ClearMLSaver")
        self._task: Any = None
        self._slots: dict[str, list[str | None]] = {}
        self._models: dict[str, Any] = {}
        if get_rank() == 0:
            self._task = clearml.Task.current_task() if logger is None else logger.get_task()
            if self._task is None:
                raise RuntimeError("there is no ClearML task: create a ClearMLLogger first, or call Task.init()")
            if output_uri is not None:
                self._task.output_uri = output_uri
        if dirname is None:
            dirname = broadcast(tempfile.mkdtemp(prefix="camshaft_") if get_rank() == 0 else "", src=0)
            warnings.warn(f"dirname is not given: saving to the temporary directory {dirname}", stacklevel=2)
        super().__init__(dirname, *args, **(kwargs if args else {"atomic": False, **kwargs}))

    def __call__(self, checkpoint: Mapping[str, Any], filename: str, metadata: Mapping[str, Any] | None = None) -> None:
        """Save a checkpoint and upload it in the background; its metadata become the comment of the model."""
        super().__call__(checkpoint, filename, metadata)
        if get_rank() != 0:
            return
        if metadata is None:
            warnings.warn("metadata is not given: the model is named 'checkpoint'", stacklevel=2)
        comment = {"filename": filename, **(metadata or {})}
        basename = comment.get("basename", "checkpoint")
        slots = self._slots.setdefault(basename, [])
        # the slot of the file, else the first that is free, else a new one
        slot = next((slots.index(one) for one in (filename, None) if one in slots), len(slots))
        slots[slot : slot + 1] = [filename]
        self._upload(f"{basename}_{slot}", filename, comment)

    def get_local_copy(self, filename: str) -> str | None:
        """Return the path of a checkpoint on this machine, downloading it if necessary; only on rank 0.

        Returns:
            The path; ``None`` if the checkpoint is unknown, and on the other ranks.
        """
        if get_rank() != 0:
            return None
        local = self.dirname / filename
        if local.exists() or self._task.is_offline():
            return str(local) if local.exists() else None
        for model in reversed(self._task.get_models()["output"]):
            if str(model.url).endswith(f"/{filename}"):
                return str(model.get_local_copy())
        return None

    def remove(self, filename: str) -> None:
        """Delete the file and free its slot; only on rank 0."""
        if get_rank() == 0:
            super().remove(filename)
            for slots in self._slots.values():
                slots[:] = [None if held == filename else held for held in slots]

    def _upload(self, name: str, filename: str, comment: Mapping[str, Any]) -> None:
        path = self.dirname / filename
        if self._task.is_offline():  # where models of ClearML 2.1 fail
            described = {key: str(value) for key, value in comment.items()}
            # waits: the upload in the background loses files that are removed before it, and a later close hangs
            self._task.upload_artifact(name, str(path), metadata=described, wait_on_upload=True)
            return
        if name not in self._models:
            model_class = import_module("clearml").OutputModel
            self._models[name] = model_class(task=self._task, name=name, framework="PyTorch")
        model = self._models[name]
        model.update_weights(str(path), target_filename=path.name, auto_delete_file=False, update_comment=False)
        model.comment = "\n".join(f"{key}: {value}" for key, value in comment.items())
