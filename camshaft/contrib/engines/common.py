"""Set up the usual handlers of a trainer and its evaluators in one call each."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from camshaft.arguments import check_callable, check_type, described, integer
from camshaft.distributed import device as current_device
from camshaft.distributed import get_world_size
from camshaft.engine.engine import Engine, check_engine
from camshaft.engine.events import Events
from camshaft.engine.sources import samplers_of
from camshaft.handlers.base_logger import BaseLogger
from camshaft.handlers.checkpoint import Checkpoint, DiskSaver
from camshaft.handlers.early_stopping import EarlyStopping
from camshaft.handlers.logger_utils import (
    set_up_logger,
    setup_clearml_logging,
    setup_mlflow_logging,
    setup_tb_logging,
    setup_trains_logging,
    setup_wandb_logging,
)
from camshaft.handlers.metrics import RunningAverage
from camshaft.handlers.steps import global_step_from_engine
from camshaft.handlers.terminate_on_nan import TerminateOnNan
from camshaft.handlers.tqdm_logger import ProgressBar
from camshaft.handlers.wandb_logger import WandBLogger
from camshaft.interop import missing_names
from camshaft.types import PathLike

__all__ = [
    "add_early_stopping_by_val_score",
    "gen_save_best_models_by_val_score",
    "save_best_model_by_val_score",
    "setup_any_logging",
    "setup_clearml_logging",
    "setup_common_distrib_training_handlers",
    "setup_common_training_handlers",
    "setup_mlflow_logging",
    "setup_tb_logging",
    "setup_trains_logging",
    "setup_wandb_logging",
]

if not TYPE_CHECKING:  # or type checkers would accept every name
    __getattr__ = missing_names(__name__)


def setup_common_training_handlers(
    trainer: Engine[Any, Any],
    train_sampler: Any = None,
    to_save: Mapping[str, Any] | None = None,
    save_every_iters: int = 1000,
    output_path: PathLike | None = None,
    lr_scheduler: Any = None,
    with_gpu_stats: bool = False,
    output_names: Iterable[str] | None = None,
    with_pbars: bool = True,
    with_pbar_on_iters: bool = True,
    log_every_iters: int = 100,
    stop_on_nan: bool = True,
    clear_cuda_cache: bool = True,
    save_handler: Any = None,
    **kwargs: Any,
) -> None:
    """Attach the usual handlers to a trainer, in one process or in each process of a job.

    These are, in this order: :class:`TerminateOnNan <camshaft.handlers.TerminateOnNan>`, the learning rate schedule, a
    handler that empties torch's cache of GPU memory after each epoch, a
    :class:`Checkpoint <camshaft.handlers.Checkpoint>`, GPU statistics, running averages of the output, and two progress
    bars.

    Args:
        trainer: the trainer, whose step returns a mapping, a sequence or a single value.
        train_sampler: a sampler whose ``set_epoch`` is called when an epoch starts. Samplers of the loader need not be
            passed, because the engine itself calls their ``set_epoch``.
        to_save: what to save, by name; needs ``output_path`` or ``save_handler``.
        save_every_iters: iterations between two checkpoints.
        output_path: directory of the checkpoints, ``training_checkpoint_<iteration>.pt``.
        lr_scheduler: a torch scheduler, which steps after each iteration, or a scheduler of ``camshaft.handlers``.
        with_gpu_stats: whether to add the memory use and utilization of this process's GPU, in percent, to
            ``state.metrics``, as ``gpu:0 mem(%)`` and ``gpu:0 util(%)``; needs nvidia-ml-py.
        output_names: names of the running averages in ``state.metrics``: keys of the output, or of its elements in
            their order, or of the single value.
        with_pbars: whether to show a progress bar over the epochs.
        with_pbar_on_iters: whether to show one over the iterations of each epoch, too.
        log_every_iters: iterations between two updates of GPU statistics and of the bar over iterations.
        stop_on_nan: whether to stop the run when the output is NaN or infinite.
        clear_cuda_cache: whether to call ``torch.cuda.empty_cache()`` after each epoch.
        save_handler: what saves the checkpoints, instead of ``output_path``; see ``Checkpoint``.
        kwargs: passed to ``Checkpoint``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: ``to_save`` is given without ``output_path`` or ``save_handler``, or with both; or a number is out
            of range.
        RuntimeError: ``with_gpu_stats`` is given in a process without a GPU.
        ModuleNotFoundError: ``with_pbars`` needs tqdm, or ``with_gpu_stats`` needs nvidia-ml-py.

    >>> import tempfile
    >>> trainer = Engine(lambda engine, batch: {"loss": batch / 10})
    >>> to_save = {"model": nn.Linear(1, 1), "trainer": trainer}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     setup_common_training_handlers(
    ...         trainer, None, to_save, 4, folder, output_names=["loss"], with_pbars=False
    ...     )
    ...     state = trainer.run([1, 2, 3], max_epochs=3)
    ...     saved = DiskSaver(folder, require_empty=False).dirname.glob("*.pt")
    ...     [path.name for path in saved], f"{state.metrics['loss']:.3f}"
    (['training_checkpoint_8.pt'], '0.117')
    """
    check_engine("trainer", trainer)
    has_epochs = callable(getattr(train_sampler, "set_epoch", None))
    if train_sampler is not None and not has_epochs and get_world_size() > 1:
        raise TypeError(f"train_sampler must have set_epoch(epoch) in a job, got {described(train_sampler)}")
    if to_save is not None and (output_path is None) == (save_handler is None):
        given = "neither" if output_path is None else "both"
        raise ValueError(f"to_save needs either output_path or save_handler, got {given}")
    if isinstance(lr_scheduler, ReduceLROnPlateau):
        raise TypeError(
            "lr_scheduler must not be a ReduceLROnPlateau, whose step needs a metric: attach a "
            "camshaft.handlers.ReduceLROnPlateauScheduler to the evaluator"
        )
    if not isinstance(lr_scheduler, LRScheduler):
        check_callable("lr_scheduler", lr_scheduler)
    if output_names is not None and (isinstance(output_names, str) or not isinstance(output_names, Iterable)):
        raise TypeError(f"output_names must be a list of names, got {described(output_names)}")
    save_every_iters = integer("save_every_iters", save_every_iters, least=1)
    log_every_iters = integer("log_every_iters", log_every_iters, least=1)
    gpu = _gpu() if with_gpu_stats else None
    bar_of_epochs = ProgressBar(persist=True, bar_format="") if with_pbars else None  # in the default format of tqdm
    bar_of_iterations = ProgressBar(persist=False) if with_pbars and with_pbar_on_iters else None
    checkpoint = None
    if to_save is not None:
        saver = _saver(output_path, kwargs) if save_handler is None else save_handler
        checkpoint = Checkpoint(to_save, saver, **{"filename_prefix": "training", **kwargs})

    if has_epochs:
        trainer.add_event_handler(Events.EPOCH_STARTED, _set_epoch, train_sampler)
    if stop_on_nan:
        trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    if isinstance(lr_scheduler, LRScheduler):
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: lr_scheduler.step())
    elif lr_scheduler is not None:
        trainer.add_event_handler(Events.ITERATION_STARTED, lr_scheduler)
    if clear_cuda_cache:
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: torch.cuda.empty_cache())
    if checkpoint is not None:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(every=save_every_iters), checkpoint)
    due = Events.ITERATION_COMPLETED(every=log_every_iters)
    if gpu is not None:
        trainer.add_event_handler(due, _add_gpu_stats, gpu)
    for index, name in enumerate(output_names or ()):
        RunningAverage(partial(_element, index=index, name=name)).attach(trainer, name)
    if bar_of_iterations is not None:
        bar_of_iterations.attach(trainer, metric_names="all", event_name=due)
    if bar_of_epochs is not None:
        bar_of_epochs.attach(trainer, event_name=Events.EPOCH_STARTED, closing_event_name=Events.COMPLETED)


setup_common_distrib_training_handlers = setup_common_training_handlers
"""Another name of :func:`setup_common_training_handlers`."""


def save_best_model_by_val_score(
    output_path: PathLike,
    evaluator: Engine[Any, Any],
    model: nn.Module,
    metric_name: str,
    n_saved: int = 3,
    trainer: Engine[Any, Any] | None = None,
    tag: str = "val",
    score_sign: float = 1.0,
    **kwargs: Any,
) -> Checkpoint:
    """Save a model in a directory whenever a metric of an evaluator is among the best so far.

    Args:
        output_path: the directory for files such as ``best_model_3_val_accuracy=0.9000.pt``.
        model: the model.

    The other arguments and the return value are those of :func:`gen_save_best_models_by_val_score`.
    """
    saver = _saver(output_path, kwargs)
    return gen_save_best_models_by_val_score(
        saver, evaluator, model, metric_name, n_saved, trainer, tag, score_sign, **kwargs
    )


def gen_save_best_models_by_val_score(
    save_handler: Any,
    evaluator: Engine[Any, Any],
    models: nn.Module | Mapping[str, Any],
    metric_name: str,
    n_saved: int = 3,
    trainer: Engine[Any, Any] | None = None,
    tag: str = "val",
    score_sign: float = 1.0,
    **kwargs: Any,
) -> Checkpoint:
    """Save models whenever a metric of an evaluator is among the best so far.

    Args:
        save_handler: what saves the models; see :class:`Checkpoint <camshaft.handlers.Checkpoint>`.
        evaluator: the evaluator; models are saved at the end of its runs.
        models: a model, or objects with ``state_dict()`` by name.
        metric_name: name of the metric in ``evaluator.state.metrics``.
        n_saved: number of checkpoints to keep.
        trainer: the engine whose epoch is part of the file names; by default they contain no epoch.
        tag: prefix of the metric name in the file names.
        score_sign: -1.0 if lower is better, otherwise 1.0.
        kwargs: passed to ``Checkpoint``.

    Returns:
        The handler.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: ``n_saved`` or ``score_sign`` is out of range.

    >>> import tempfile
    >>> evaluator = Engine(lambda engine, batch: None)
    >>> evaluator.state.metrics = {"accuracy": 0.9}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     best = gen_save_best_models_by_val_score(folder, evaluator, nn.Linear(1, 1), "accuracy")
    ...     state = evaluator.run([0])
    ...     best.last_checkpoint.name
    'best_model_val_accuracy=0.9000.pt'
    """
    check_engine("evaluator", evaluator)
    options: dict[str, Any] = {
        "filename_prefix": "best",
        "score_function": Checkpoint.get_default_score_fn(metric_name, score_sign),
        "score_name": f"{tag}_{metric_name}",
        "n_saved": n_saved,
        "global_step_transform": None if trainer is None else global_step_from_engine(trainer),
    }
    to_save = {"model": models} if isinstance(models, nn.Module) else models
    checkpoint = Checkpoint(to_save, save_handler, **{**options, **kwargs})
    evaluator.add_event_handler(Events.COMPLETED, checkpoint)
    return checkpoint


def add_early_stopping_by_val_score(
    patience: int,
    evaluator: Engine[Any, Any],
    trainer: Engine[Any, Any],
    metric_name: str,
    score_sign: float = 1.0,
) -> EarlyStopping:
    """Stop a trainer when a metric of an evaluator has not improved for ``patience`` evaluations.

    Args:
        patience: number of evaluations without improvement before stopping.
        evaluator: the evaluator.
        trainer: the trainer.
        metric_name: name of the metric in ``evaluator.state.metrics``.
        score_sign: -1.0 if lower is better, otherwise 1.0.

    Returns:
        The handler.

    Raises:
        TypeError: ``evaluator`` or ``trainer`` is not an engine.
        ValueError: ``patience`` or ``score_sign`` is out of range.

    >>> trainer, evaluator = Engine(lambda engine, batch: None), Engine(lambda engine, batch: None)
    >>> stopping = add_early_stopping_by_val_score(2, evaluator, trainer, "loss", score_sign=-1.0)
    >>> stopping.patience
    2
    """
    check_engine("evaluator", evaluator)
    stopping = EarlyStopping(patience, Checkpoint.get_default_score_fn(metric_name, score_sign), trainer)
    evaluator.add_event_handler(Events.COMPLETED, stopping)
    return stopping


def setup_any_logging(
    logger: BaseLogger,
    logger_module: Any,
    trainer: Engine[Any, Any],
    optimizers: Any = None,
    evaluators: Any = None,
    log_every_iters: int | None = 100,
) -> None:
    """Attach a logger to a trainer, its optimizers and its evaluators.

    Deprecated: use the function for this kind of logger, such as :func:`setup_tb_logging`.

    Args:
        logger: the logger.
        logger_module: not used.

    The other arguments are those of :func:`setup_tb_logging`.
    """
    check_type("logger", logger, BaseLogger, "a logger")
    warnings.warn(
        "setup_any_logging is deprecated: use the function for this kind of logger, such as setup_tb_logging",
        DeprecationWarning,
        stacklevel=2,
    )
    step_event = Events.ITERATION_COMPLETED if isinstance(logger, WandBLogger) else None
    set_up_logger(lambda: logger, step_event, trainer, optimizers, evaluators, log_every_iters)


def _saver(output_path: Any, options: Mapping[str, Any]) -> DiskSaver:
    """Return a saver for a directory that may already contain the checkpoints of the run to resume."""
    return DiskSaver(output_path, require_empty=False, save_on_rank=options.get("save_on_rank", 0))


def _set_epoch(engine: Engine[Any, Any], sampler: Any) -> None:
    """Call ``set_epoch`` on a sampler that is not part of the engine's data."""
    if all(one is not sampler for one in samplers_of(engine.state.dataloader)):
        sampler.set_epoch(engine.state.epoch - 1)


def _element(output: Any, index: int, name: str) -> Any:
    """Return the part of an output that a running average is named after."""
    if isinstance(output, Mapping):
        return output[name]
    return output[index] if isinstance(output, Sequence) else output


def _gpu() -> torch.device:
    """Return the GPU of this process, after checking that its statistics can be read."""
    gpu = torch.device(current_device())
    if gpu.type != "cuda":
        raise RuntimeError(f"with_gpu_stats=True needs a GPU, but this process uses {str(gpu)!r}")
    try:
        torch.cuda.utilization(gpu)
    except ModuleNotFoundError as error:
        message = "with_gpu_stats=True needs nvidia-ml-py: pip install nvidia-ml-py"
        raise ModuleNotFoundError(message, name=error.name) from error
    return gpu


def _add_gpu_stats(engine: Engine[Any, Any], gpu: torch.device) -> None:
    free, total = torch.cuda.mem_get_info(gpu)
    name = f"gpu:{gpu.index or 0}"
    engine.state.metrics[f"{name} mem(%)"] = round(100 * (total - free) / total)
    engine.state.metrics[f"{name} util(%)"] = torch.cuda.utilization(gpu)
