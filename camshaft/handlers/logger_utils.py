"""One call for the usual: what a trainer, its optimizers and its evaluators log.

PyTorch-Ignite's Visdom, Neptune and Polyaxon are not here; docs/migrating/from-ignite.md says what to use instead.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from camshaft.engine.engine import Engine
from camshaft.engine.event import Events
from camshaft.errors import described
from camshaft.handlers.base_logger import BaseLogger
from camshaft.handlers.clearml_logger import ClearMLLogger
from camshaft.handlers.csv_logger import CSVLogger
from camshaft.handlers.jsonl_logger import JSONLinesLogger
from camshaft.handlers.mlflow_logger import MLflowLogger
from camshaft.handlers.tensorboard_logger import TensorboardLogger
from camshaft.handlers.utils import check_engine, global_step_from_engine
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

Optimizers = Any
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

    What all functions of this module do: they make a logger, and attach to it the metrics of the trainer each
    ``log_every_iters`` iterations, with the tag ``training``; the learning rates of the optimizers, as often; and the
    metrics of each evaluator at the end of its run, with the trainer's epoch as step.

    Args:
        output_path: the directory of the files.
        trainer: the trainer.
        optimizers: one, or several by tag.
        evaluators: one, whose tag is ``validation``, or several by tag.
        log_every_iters: ``None`` for each iteration.
        trainer_metric_names: metrics of the trainer, or ``"all"``.
        evaluator_metric_names: metrics of the evaluators, or ``"all"``.
        kwargs: for the logger.

    Returns:
        The logger; close it when the run is over.

    Raises:
        TypeError: trainer, optimizers, evaluators or names are of another kind.

    >>> import tempfile
    >>> trainer, evaluator = Engine(lambda engine, batch: None), Engine(lambda engine, batch: None)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with setup_tb_logging(folder, trainer, evaluators={"test": evaluator}) as logger:
    ...         state = trainer.run(range(200))
    """
    choice = Choice(trainer, optimizers, evaluators, log_every_iters, trainer_metric_names, evaluator_metric_names)
    return choice.attach(lambda: TensorboardLogger(log_dir=os.fspath(output_path), **kwargs))


def setup_csv_logging(
    output_path: PathLike,
    trainer: Engine[Any, Any],
    optimizers: Optimizers = None,
    evaluators: Evaluators | None = None,
    log_every_iters: int | None = 100,
    *,
    trainer_metric_names: Names = "all",
    evaluator_metric_names: Names = "all",
    **kwargs: Any,
) -> CSVLogger:
    """Log to a table; arguments as for :func:`setup_tb_logging`."""
    choice = Choice(trainer, optimizers, evaluators, log_every_iters, trainer_metric_names, evaluator_metric_names)
    return choice.attach(lambda: CSVLogger(output_path, **kwargs))


def setup_jsonl_logging(
    output_path: PathLike,
    trainer: Engine[Any, Any],
    optimizers: Optimizers = None,
    evaluators: Evaluators | None = None,
    log_every_iters: int | None = 100,
    *,
    trainer_metric_names: Names = "all",
    evaluator_metric_names: Names = "all",
    **kwargs: Any,
) -> JSONLinesLogger:
    """Log to a file of JSON lines; arguments as for :func:`setup_tb_logging`."""
    choice = Choice(trainer, optimizers, evaluators, log_every_iters, trainer_metric_names, evaluator_metric_names)
    return choice.attach(lambda: JSONLinesLogger(output_path, **kwargs))


def setup_mlflow_logging(
    trainer: Engine[Any, Any],
    optimizers: Optimizers = None,
    evaluators: Evaluators | None = None,
    log_every_iters: int | None = 100,
    *,
    trainer_metric_names: Names = "all",
    evaluator_metric_names: Names = "all",
    **kwargs: Any,
) -> MLflowLogger:
    """Log to MLflow; arguments as for :func:`setup_tb_logging`."""
    choice = Choice(trainer, optimizers, evaluators, log_every_iters, trainer_metric_names, evaluator_metric_names)
    return choice.attach(lambda: MLflowLogger(**kwargs))


def setup_wandb_logging(
    trainer: Engine[Any, Any],
    optimizers: Optimizers = None,
    evaluators: Evaluators | None = None,
    log_every_iters: int | None = 100,
    *,
    trainer_metric_names: Names = "all",
    evaluator_metric_names: Names = "all",
    **kwargs: Any,
) -> WandBLogger:
    """Log to Weights & Biases; arguments as for :func:`setup_tb_logging`.

    The step of evaluators is the trainer's iteration, because steps never decrease there.
    """
    choice = Choice(trainer, optimizers, evaluators, log_every_iters, trainer_metric_names, evaluator_metric_names)
    return choice.attach(lambda: WandBLogger(**kwargs), Events.ITERATION_COMPLETED)


def setup_clearml_logging(
    trainer: Engine[Any, Any],
    optimizers: Optimizers = None,
    evaluators: Evaluators | None = None,
    log_every_iters: int | None = 100,
    *,
    trainer_metric_names: Names = "all",
    evaluator_metric_names: Names = "all",
    **kwargs: Any,
) -> ClearMLLogger:
    """Log to ClearML; arguments as for :func:`setup_tb_logging`."""
    choice = Choice(trainer, optimizers, evaluators, log_every_iters, trainer_metric_names, evaluator_metric_names)
    return choice.attach(lambda: ClearMLLogger(**kwargs))


def setup_trains_logging(*args: Any, **kwargs: Any) -> ClearMLLogger:
    """Log to ClearML, which was called Trains; deprecated."""
    warnings.warn("setup_trains_logging is deprecated: use setup_clearml_logging", DeprecationWarning, stacklevel=2)
    return setup_clearml_logging(*args, **kwargs)


class Choice:
    """What is to be logged, checked before there is a logger."""

    def __init__(
        self,
        trainer: Engine[Any, Any],
        optimizers: Optimizers,
        evaluators: Evaluators | None,
        log_every_iters: int | None,
        trainer_metric_names: Names,
        evaluator_metric_names: Names,
    ) -> None:
        check_engine("trainer", trainer)
        self.trainer = trainer
        self.optimizers = _by_tag("optimizers", optimizers, None, _is_optimizer)
        self.evaluators = _by_tag("evaluators", evaluators, "validation", lambda one: isinstance(one, Engine))
        self.each = 1 if log_every_iters is None else log_every_iters
        self.names = trainer_metric_names
        self.evaluator_names = evaluator_metric_names
        for name, names in (("trainer", trainer_metric_names), ("evaluator", evaluator_metric_names)):
            if names != "all" and not isinstance(names, list):
                raise TypeError(f"{name}_metric_names must be a list of names or 'all', got {names!r}")

    def attach(self, make_logger: Callable[[], Logger], step_event: Any = None) -> Logger:
        """Make the logger, and attach all that was chosen."""
        started = Events.ITERATION_STARTED(every=self.each)
        completed = Events.ITERATION_COMPLETED(every=self.each)
        logger = make_logger()
        logger.attach_output_handler(self.trainer, completed, tag="training", metric_names=self.names)
        for tag, optimizer in self.optimizers.items():
            logger.attach_opt_params_handler(self.trainer, started, optimizer, param_name="lr", tag=tag)
        step = global_step_from_engine(self.trainer, step_event)
        for tag, evaluator in self.evaluators.items():
            logger.attach_output_handler(
                evaluator,
                Events.COMPLETED,
                tag=tag,
                metric_names=self.evaluator_names,
                global_step_transform=step,
            )
        return logger


def _by_tag(name: str, given: Any, tag: str | None, fits: Callable[[Any], bool]) -> dict[Any, Any]:
    """Put one thing under a tag, and leave several as they are."""
    found = dict(given) if isinstance(given, Mapping) else {} if given is None else {tag: given}
    for one in found.values():
        if not fits(one):
            raise TypeError(f"{name} must be one, or a mapping of tags to them, got {described(one)}")
    return found


def _is_optimizer(one: Any) -> bool:
    return isinstance(getattr(one, "param_groups", None), Sequence)
