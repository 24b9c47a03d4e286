"""Log values to Weights & Biases."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from camshaft.arguments import load_optional
from camshaft.engine.engine import Engine
from camshaft.handlers.base_logger import BaseOptimizerParamsHandler, BaseOutputHandler, Path, ServiceLogger, Silence
from camshaft.handlers.steps import global_step_from_engine

__all__ = ["OptimizerParamsHandler", "OutputHandler", "WandBLogger", "global_step_from_engine"]


class WandBLogger(ServiceLogger):
    """Writes values to a run of Weights & Biases, on rank 0.

    Steps in W&B never decrease: let evaluators log with the trainer's iteration, ``global_step_from_engine(trainer,
    Events.ITERATION_COMPLETED)``. For the same reason a resumed run (``id=..., resume="must"``) keeps its values, and
    repeated ones of the same steps are dropped. If the server does not answer, the logger warns and writes the run
    offline, for ``wandb sync``.

    Args:
        args: for ``wandb.init``.
        kwargs: likewise; with ``init=False`` it is not called, because a run exists already.

    Raises:
        ModuleNotFoundError: wandb is not installed.

    >>> from camshaft.engine import Engine, Events
    >>> trainer = Engine(lambda engine, batch: 1 / batch)
    >>> with WandBLogger(project="digits", mode="offline") as logger:  # doctest: +SKIP
    ...     logger.config.update({"rate": 0.1})
    ...     handle = logger.attach_output_handler(
    ...         trainer,
    ...         Events.ITERATION_COMPLETED(every=2),
    ...         "training",
    ...         output_transform=lambda loss: {"loss": loss},
    ...     )
    ...     state = trainer.run([1, 2, 4, 8])
    """

    logs_text = True
    _forwards_to = "_wandb"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        wandb = load_optional("wandb", extra="wandb", needed_by="WandBLogger")
        self._wandb: Any = wandb if self.writes_here else Silence()
        if not kwargs.pop("init", True) or not self.writes_here:
            return
        try:
            wandb.init(*args, **kwargs)
        except wandb.errors.AuthenticationError:
            raise
        except wandb.errors.CommError as error:
            warnings.warn(f"W&B does not answer, so the run is written offline: {error}", stacklevel=2)
            wandb.init(*args, **{**kwargs, "mode": "offline"})

    def write_values(self, values: Mapping[Path, Any], step: int) -> None:
        """Log all values at once."""
        self._wandb.log({"/".join(path): value for path, value in values.items()}, step=step)

    def close(self) -> None:
        """Finish the run, which failed after an error."""
        self._attempt(self._wandb.finish, **({"exit_code": 1} if self.has_failed else {}))

    def _create_output_handler(self, *args: Any, **kwargs: Any) -> OutputHandler:
        return OutputHandler(*args, **kwargs)

    def _create_opt_params_handler(self, *args: Any, **kwargs: Any) -> OptimizerParamsHandler:
        return OptimizerParamsHandler(*args, **kwargs)


class OutputHandler(BaseOutputHandler):
    """Writes metrics, outputs and state attributes as ``<tag>/<name>``, text too.

    Args:
        tag: first component of all names.
        metric_names: metrics to write, or ``"all"``.
        output_transform: called with the engine's output; returns a mapping, or a value to be named ``output``.
        global_step_transform: called with the engine and the event, returns the step.
        sync: deprecated, has no effect.
        state_attributes: attributes of the engine's state to write.
    """

    logger_class = WandBLogger

    def __init__(
        self,
        tag: str,
        metric_names: list[str] | str | None = None,
        output_transform: Callable[[Any], Any] | None = None,
        global_step_transform: Callable[[Engine[Any, Any], Any], int] | None = None,
        sync: bool | None = None,
        state_attributes: list[str] | None = None,
    ) -> None:
        super().__init__(tag, metric_names, output_transform, global_step_transform, state_attributes)
        _warn_about(sync)


class OptimizerParamsHandler(BaseOptimizerParamsHandler):
    """Writes a parameter of each group of an optimizer as ``<tag>/<parameter>/group_<i>``.

    Args:
        optimizer: an optimizer, or another object with a sequence ``param_groups``.
        param_name: the parameter.
        tag: first component of all names.
        sync: deprecated, has no effect.
    """

    logger_class = WandBLogger

    def __init__(
        self, optimizer: Any, param_name: str = "lr", tag: str | None = None, sync: bool | None = None
    ) -> None:
        super().__init__(optimizer, param_name, tag)
        _warn_about(sync)


def _warn_about(sync: bool | None) -> None:
    if sync is not None:
        warnings.warn("sync is deprecated and has no effect: wandb writes in the background", stacklevel=3)
