"""Trainers and evaluators for models that learn from pairs of inputs and targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from camshaft.engine.builders import (
    supervised_evaluation_step,
    supervised_evaluation_step_amp,
    supervised_training_step,
    supervised_training_step_amp,
    supervised_training_step_apex,
    supervised_training_step_tpu,
)
from camshaft.engine.deterministic import DeterministicEngine
from camshaft.engine.engine import Engine
from camshaft.engine.precision import device_type_of
from camshaft.engine.steps import PrepareBatch, Step, call_model, identity, loss_value, predictions_and_targets
from camshaft.engine.steps import prepare_batch as _prepare_batch
from camshaft.errors import check_is_no_class
from camshaft.types import DeviceLike

_AMP_MODES = (None, "amp", "apex")


def create_supervised_trainer(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[[Any, Any], Tensor],
    device: DeviceLike | None = None,
    non_blocking: bool = False,
    prepare_batch: PrepareBatch = _prepare_batch,
    model_transform: Callable[[Any], Any] = identity,
    output_transform: Callable[[Any, Any, Any, Tensor], Any] = loss_value,
    deterministic: bool = False,
    amp_mode: str | None = None,
    scaler: bool | torch.amp.GradScaler = False,
    gradient_accumulation_steps: int = 1,
    model_fn: Callable[[Any, Any], Any] = call_model,
    *,
    amp_dtype: torch.dtype | None = None,
    clip_grad_norm: float | None = None,
    clip_grad_value: float | None = None,
    batch_weight: Callable[[Any, Any], float | Tensor] | None = None,
) -> Engine[Any, Any]:
    """Make an engine that trains a model on batches of inputs and targets.

    Args:
        deterministic: make a :class:`DeterministicEngine`.
        amp_mode: ``None`` for the precision of the model, ``"amp"`` for torch's mixed precision, ``"apex"``.
        scaler: a gradient scaler for ``"amp"``; ``True`` makes one and keeps it as ``state.scaler``.
        amp_dtype: the lower precision of ``"amp"``; ``None`` for torch's choice for the device.

    The other arguments are those of :func:`supervised_training_step`, which is the step of a ``device`` other
    than ``"xla"`` without ``amp_mode``.

    Raises:
        ValueError: the arguments do not go together, or a number is out of range.
        RuntimeError: ``device`` is ``"xla"`` and torch_xla is not installed.
        ModuleNotFoundError: ``amp_mode`` is ``"apex"`` and apex is not installed.

    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
    >>> trainer = create_supervised_trainer(model, optimizer, torch.nn.MSELoss(), clip_grad_norm=1.0)
    >>> trainer.run([(torch.ones(2, 1), torch.zeros(2, 1))], max_epochs=3).iteration
    3
    """
    mode = _mode(device, amp_mode, scaler, amp_dtype)
    ours: dict[str, Any] = {
        "clip_grad_norm": clip_grad_norm,
        "clip_grad_value": clip_grad_value,
        "batch_weight": batch_weight,
    }
    builders: Mapping[str | None, Callable[..., Step]] = {
        None: supervised_training_step,
        "amp": supervised_training_step_amp,
        "apex": supervised_training_step_apex,
        "xla": supervised_training_step_tpu,
    }
    if mode == "amp":
        ours |= {"scaler": _scaler(scaler, device, model), "amp_dtype": amp_dtype}
    step = builders[mode](
        model, optimizer, loss_fn, device=device, non_blocking=non_blocking, prepare_batch=prepare_batch,
        model_transform=model_transform, output_transform=output_transform,
        gradient_accumulation_steps=gradient_accumulation_steps, model_fn=model_fn, **ours,
    )  # fmt: skip
    trainer: Engine[Any, Any] = DeterministicEngine(step) if deterministic else Engine(step)
    if scaler is True:
        trainer.state.scaler = ours["scaler"]
    return trainer


def create_supervised_evaluator(
    model: torch.nn.Module,
    metrics: Mapping[str, Any] | None = None,
    device: DeviceLike | None = None,
    non_blocking: bool = False,
    prepare_batch: PrepareBatch = _prepare_batch,
    model_transform: Callable[[Any], Any] = identity,
    output_transform: Callable[[Any, Any, Any], Any] = predictions_and_targets,
    amp_mode: str | None = None,
    model_fn: Callable[[Any, Any], Any] = call_model,
    *,
    amp_dtype: torch.dtype | None = None,
) -> Engine[Any, Any]:
    """Make an engine that evaluates a model on batches of inputs and targets.

    Args:
        metrics: by name, objects with ``attach(engine, name)``; their results appear in ``state.metrics``.
        amp_mode: ``"amp"`` for torch's mixed precision; else the precision of the model, which apex, for
            ``"apex"``, has changed by itself.

    The other arguments are those of :func:`supervised_evaluation_step`.

    Raises:
        ValueError: the arguments do not go together.
        RuntimeError: ``device`` is ``"xla"`` and torch_xla is not installed.

    >>> evaluator = create_supervised_evaluator(torch.nn.Identity())
    >>> evaluator.run([(torch.ones(1), torch.zeros(1))]).output
    (tensor([1.]), tensor([0.]))
    """
    mode = _mode(device, amp_mode, False, amp_dtype)
    _check_metrics({} if metrics is None else metrics)
    options = {
        "device": device, "non_blocking": non_blocking, "prepare_batch": prepare_batch,
        "model_transform": model_transform, "output_transform": output_transform, "model_fn": model_fn,
    }  # fmt: skip
    if mode == "amp":
        step = supervised_evaluation_step_amp(model, amp_dtype=amp_dtype, **options)  # type: ignore[arg-type]  # as above
    else:
        step = supervised_evaluation_step(model, **options)  # type: ignore[arg-type]  # as typed above
    evaluator: Engine[Any, Any] = Engine(step)
    for name, metric in (metrics or {}).items():
        metric.attach(evaluator, name)
    return evaluator


def _check_metrics(metrics: Any) -> None:
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics must be a mapping of names to metrics, got {metrics!r}")
    for name, metric in metrics.items():
        check_is_no_class(f"metrics[{name!r}]", metric)
        if not callable(getattr(metric, "attach", None)):
            hint = ": use camshaft.handlers.attach_metrics" if callable(getattr(metric, "compute", None)) else ""
            raise TypeError(f"metrics[{name!r}] must have attach(engine, name), got {metric!r}{hint}")


def _mode(device: DeviceLike | None, amp_mode: str | None, scaler: Any, amp_dtype: torch.dtype | None) -> str | None:
    """Choose the kind of step, and refuse what does not go together."""
    kind = None if device is None else torch.device(device).type
    if amp_mode not in _AMP_MODES:
        raise ValueError(f"amp_mode must be one of {_AMP_MODES}, got {amp_mode!r}")
    if kind == "mps" and amp_mode is not None:
        raise ValueError(
            f"amp_mode must be None on mps, got {amp_mode!r}; supervised_training_step_amp makes a step in mixed "
            "precision for mps where torch has autocast for it"
        )
    if kind == "xla" and amp_mode is not None:
        raise ValueError(f"amp_mode must be None on xla, got {amp_mode!r}")
    if kind == "xla" and find_spec("torch_xla") is None:
        raise RuntimeError("device 'xla' needs torch_xla: pip install torch_xla")
    if scaler and amp_mode != "amp":
        raise ValueError(f"scaler needs amp_mode='amp', got amp_mode={amp_mode!r} and scaler={scaler!r}")
    if amp_dtype is not None and amp_mode != "amp":
        raise ValueError(f"amp_dtype needs amp_mode='amp', got amp_mode={amp_mode!r} and amp_dtype={amp_dtype}")
    return "xla" if kind == "xla" else amp_mode


def _scaler(scaler: bool | torch.amp.GradScaler, device: DeviceLike | None, model: Any) -> torch.amp.GradScaler | None:
    if isinstance(scaler, bool):
        return torch.amp.GradScaler(device_type_of(device, model)) if scaler else None
    return scaler
