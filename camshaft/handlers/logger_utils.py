"""Set up a logger for a trainer, its optimizers and its evaluators in one call.

PyTorch-Ignite's Visdom, Neptune and Polyaxon are not here; docs/reference/pytorch-ignite.md says what to use instead.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from camshaft.arguments import check_type, described
from camshaft.engine.engine import Engine, check_engine
from camshaft.engine.events import Events
from camshaft.handlers.base_logger import BaseLogger, has_groups
from camshaft.handlers.clearml_logger import ClearMLLogger
from camshaft.handlers.file_logger import CSVLogger, JSONLinesLogger
from camshaft.handlers.mlflow_logger import MLflowLogger
from camshaft.handlers.steps import global_step_from_engine
from camshaft.handlers.tensorboard_logger import TensorboardLogger
from camshaft.handlers.wandb_logger import WandBLogger
from camshaft.types import PathLike

__all__ = [
    "setup_clearml_logging",
    "setup_csv_logging",
    "setup_jsonl_logging",
    "setup_mlflow_logging",
    "setup_tb_logging",
    "setup_trains_logging",
    "setup_wandb_logging",
]

Optimizers = Any  # an optimizer, or a mapping of tags to optimizers
Evaluators = Engine[Any, Any] | Mapping[str, Engine[Any, Any]]
Names = list[str] | str
Logger = TypeVar("Logger", bound=BaseLogger)


def setup_tb_logging(
    output_path: PathLike,
    trainer: Engine[Any, Any],
    optimizers: Optimizers = None,
    evaluators: Evaluators | None = None,
    log_every_iters: int | None = 100,
    *,
    trainer_metric_names: Names = "all",
    evaluator_metric_names: Names = "all",
    **kwargs: Any,
) -> TensorboardLogger:
    """Log to event files of TensorBoard.

    Like all functions of this module, this creates a logger and attaches to it the metrics of the trainer every
    ``log_every_iters`` iterations, with the tag ``training``; the learning rates of the optimizers, as often; and the
    metrics of each evaluator at the end of its run, with the trainer's epoch as step.

    Args:
        output_path: the directory of the files.
        trainer: the trainer.
        optimizers: an optimizer, or a mapping of tags to optimizers.
        evaluators: an evaluator, which gets the tag ``validation``, or a mapping of tags to evaluators.
        log_every_iters: ``None`` for every iteration.
        trainer_metric_names: metrics of the trainer, or ``"all"``.
        evaluator_metric_names: metrics of the evaluators, or ``"all"``.
        kwargs: for the logger.

    Returns:
        The logger; close it after the run.

    Raises:
        TypeError: an argument has the wrong type.

    >>> import tempfile
    >>> trainer, evaluator = Engine(lambda engine, batch: None), Engine(lambda engine, batch: None)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with setup_tb_logging(folder, trainer, evaluators={"test": evaluator}) as logger:
    ...         state = trainer.run(range(200))
    """
    return set_up_logger(
        partial(TensorboardLogger, os.fspath(output_path)),
        None,
        trainer,
        optimizers,
        evaluators,
        log_every_iters,
        trainer_metric_names=trainer_metric_names,
        evaluator_metric_names=evaluator_metric_names,
        **kwargs,
    )


def setup_csv_logging(output_path: PathLike, trainer: Engine[Any, Any], *args: Any, **kwargs: Any) -> CSVLogger:
    """Log to a CSV file; arguments as for :func:`setup_tb_logging`."""
    return set_up_logger(partial(CSVLogger, output_path), None, trainer, *args, **kwargs)


def setup_jsonl_logging(output_path: PathLike, trainer: Engine[Any, Any], *args: Any, **kwargs: Any) -> JSONLinesLogger:
    """Log to a file of JSON lines; arguments as for :func:`setup_tb_logging`."""
    return set_up_logger(partial(JSONLinesLogger, output_path), None, trainer, *args, **kwargs)


def set_up_logger(
    make_logger: Callable[..., Logger],
    step_event: Events | None,
    /,
    trainer: Engine[Any, Any],
    optimizers: Optimizers = None,
    evaluators: Evaluators | None = None,
    log_every_iters: int | None = 100,
    *,
    trainer_metric_names: Names = "all",
    evaluator_metric_names: Names = "all",
    **kwargs: Any,
) -> Logger:
    """Check the arguments, make the logger, and attach everything to it."""
    check_engine("trainer", trainer)
    for name, names in (
        ("trainer_metric_names", trainer_metric_names),
        ("evaluator_metric_names", evaluator_metric_names),
    ):
        if names != "all":
            check_type(name, names, list, "a list of names or 'all'")
    tagged_optimizers = _by_tag("optimizers", optimizers, None, has_groups)
    tagged_evaluators = _by_tag("evaluators", evaluators, "validation", lambda one: isinstance(one, Engine))
    each = 1 if log_every_iters is None else log_every_iters
    started, completed = Events.ITERATION_STARTED(every=each), Events.ITERATION_COMPLETED(every=each)
    logger = make_logger(**kwargs)
    logger.attach_output_handler(trainer, completed, tag="training", metric_names=trainer_metric_names)
    for tag, optimizer in tagged_optimizers.items():
        logger.attach_opt_params_handler(trainer, started, optimizer, param_name="lr", tag=tag)
    step = global_step_from_engine(trainer, step_event)
    for tag, evaluator in tagged_evaluators.items():
        logger.attach_output_handler(
            evaluator, Events.COMPLETED, tag=tag, metric_names=evaluator_metric_names, global_step_transform=step
        )
    return logger


setup_mlflow_logging = partial(set_up_logger, MLflowLogger, None)
"""Log to MLflow; arguments as for :func:`setup_tb_logging`, without ``output_path``."""

setup_clearml_logging = partial(set_up_logger, ClearMLLogger, None)
"""Log to ClearML; arguments as for :func:`setup_tb_logging`, without ``output_path``."""

setup_wandb_logging = partial(set_up_logger, WandBLogger, Events.ITERATION_COMPLETED)
"""Log to Weights & Biases; arguments as for :func:`setup_tb_logging`, without ``output_path``.

Evaluators log with the trainer's iteration, because steps never decrease there.
"""


def setup_trains_logging(*args: Any, **kwargs: Any) -> ClearMLLogger:
    """Log to ClearML, formerly named Trains; deprecated."""
    warnings.warn("setup_trains_logging is deprecated: use setup_clearml_logging", DeprecationWarning, stacklevel=2)
    return setup_clearml_logging(*args, **kwargs)


def _by_tag(name: str, given: Any, tag: str | None, fits: Callable[[Any], bool]) -> dict[Any, Any]:
    """Return a mapping as it is, and a single object under ``tag``."""
    found = dict(given) if isinstance(given, Mapping) else {} if given is None else {tag: given}
    for one in found.values():
        if not fits(one):
            raise TypeError(f"{name} must be an {name[:-1]}, or a mapping of tags to {name}, got {described(one)}")
    return found
