"""Trainers, evaluators, and their steps, for models that learn from pairs of inputs and targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from camshaft.engine.deterministic import DeterministicEngine
from camshaft.engine.engine import Engine
from camshaft.engine.step import (
    PrepareBatch,
    Step,
    Update,
    autocast,
    call_model,
    device_type_of,
    evaluation_step,
    identity,
    import_for,
    loss_value,
    predictions_and_targets,
    training_step,
)
from camshaft.engine.step import prepare_batch as _prepare_batch
from camshaft.errors import check_is_no_class
from camshaft.types import DeviceLike

_AMP_MODES = (None, "amp", "apex")


def supervised_training_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[[Any, Any], Tensor],
    device: DeviceLike | None = None,
    non_blocking: bool = False,
    prepare_batch: PrepareBatch = _prepare_batch,
    model_transform: Callable[[Any], Any] = identity,
    output_transform: Callable[[Any, Any, Any, Tensor], Any] = loss_value,
    gradient_accumulation_steps: int = 1,
    model_fn: Callable[[Any, Any], Any] = call_model,
    *,
    clip_grad_norm: float | None = None,
    clip_grad_value: float | None = None,
    batch_weight: Callable[[Any, Any], float | Tensor] | None = None,
) -> Step:
    """Return a step that trains in the precision of the model.

    Args:
        model: the model, plain, compiled or wrapped for several ranks. It is not moved.
        optimizer: optimizer of its parameters.
        loss_fn: ``loss_fn(y_pred, y)`` returns the loss, a tensor with one element.
        device: device that batches are moved to; ``None`` leaves them where they are.
        non_blocking: whether to move them asynchronously where that is possible.
        prepare_batch: ``prepare_batch(batch, device=..., non_blocking=...)`` returns ``x, y``.
        model_transform: applied to the output of the model.
        output_transform: ``output_transform(x, y, y_pred, loss)`` returns the output of the step; by default the loss
            as a number, which waits for the device only when it is read.
        gradient_accumulation_steps: batches whose gradients make up one step of the optimizer.
        model_fn: ``model_fn(model, x)`` calls the model.
        clip_grad_norm: maximum norm of all gradients together.
        clip_grad_value: maximum absolute value of any element of a gradient.
        batch_weight: ``batch_weight(x, y)`` returns the weight of a batch among those of one step and of all ranks,
            given what ``prepare_batch`` returned: the number of samples (``lambda x, y: len(y)``) or tokens that the
            loss is a mean over, or the sum of the weights in a weighted loss. By default, the batches of a step have
            equal weights, and those of different ranks are weighted by their samples.

    Returns:
        A function of an engine and a batch.

    Raises:
        ValueError: a number is out of range.

    >>> model = torch.nn.Linear(1, 1)
    >>> step = supervised_training_step(model, torch.optim.SGD(model.parameters(), 0.1), torch.nn.MSELoss())
    >>> from camshaft.engine import Engine
    >>> losses: list[float] = []
    >>> trainer = Engine(step)
    >>> @trainer.on("ITERATION_COMPLETED")
    ... def keep(engine: Engine) -> None:
    ...     losses.append(engine.state.output)
    >>> state = trainer.run([(torch.ones(2, 1), torch.zeros(2, 1))] * 5)
    >>> losses[-1] < losses[0]
    True
    """
    update = Update(optimizer, None, clip_grad_norm, clip_grad_value)
    return training_step(
        update, model, loss_fn, device, non_blocking, prepare_batch, model_transform, output_transform,
        gradient_accumulation_steps, model_fn, batch_weight,
    )  # fmt: skip


def supervised_training_step_amp(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[[Any, Any], Tensor],
    device: DeviceLike | None = None,
    non_blocking: bool = False,
    prepare_batch: PrepareBatch = _prepare_batch,
    model_transform: Callable[[Any], Any] = identity,
    output_transform: Callable[[Any, Any, Any, Tensor], Any] = loss_value,
    scaler: torch.amp.GradScaler | None = None,
    gradient_accumulation_steps: int = 1,
    model_fn: Callable[[Any, Any], Any] = call_model,
    *,
    amp_dtype: torch.dtype | None = None,
    clip_grad_norm: float | None = None,
    clip_grad_value: float | None = None,
    batch_weight: Callable[[Any, Any], float | Tensor] | None = None,
) -> Step:
    """Return a step that trains in mixed precision, on any device that torch has autocast for.

    Args:
        scaler: scales the loss, which float16 needs.
        amp_dtype: the lower precision; by default that of torch for the device.

    The other arguments are those of :func:`supervised_training_step`. With a scaler, torch waits for the device in each
    step unless the optimizer is fused.

    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
    >>> step = supervised_training_step_amp(model, optimizer, torch.nn.MSELoss(), amp_dtype=torch.bfloat16)
    >>> isinstance(step(None, (torch.ones(2, 1), torch.zeros(2, 1))), float)
    True
    """
    update = Update(optimizer, scaler, clip_grad_norm, clip_grad_value)
    return training_step(
        update, model, loss_fn, device, non_blocking, prepare_batch, model_transform, output_transform,
        gradient_accumulation_steps, model_fn, batch_weight,
        autocast(device, model, amp_dtype),
    )  # fmt: skip


def supervised_training_step_apex(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[[Any, Any], Tensor],
    device: DeviceLike | None = None,
    non_blocking: bool = False,
    prepare_batch: PrepareBatch = _prepare_batch,
    model_transform: Callable[[Any], Any] = identity,
    output_transform: Callable[[Any, Any, Any, Tensor], Any] = loss_value,
    gradient_accumulation_steps: int = 1,
    model_fn: Callable[[Any, Any], Any] = call_model,
    *,
    clip_grad_norm: float | None = None,
    clip_grad_value: float | None = None,
    batch_weight: Callable[[Any, Any], float | Tensor] | None = None,
) -> Step:
    """Return a step for a model and an optimizer that were prepared by ``apex.amp.initialize``.

    The arguments are those of :func:`supervised_training_step`.

    Raises:
        ModuleNotFoundError: apex is not installed.
    """
    amp = import_for("supervised_training_step_apex", "apex.amp", "see NVIDIA/apex for how to build it")

    def backward(loss: Tensor) -> None:
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()

    update = Update(optimizer, None, clip_grad_norm, clip_grad_value, backward=backward)
    return training_step(
        update, model, loss_fn, device, non_blocking, prepare_batch, model_transform, output_transform,
        gradient_accumulation_steps, model_fn, batch_weight,
    )  # fmt: skip


def supervised_training_step_tpu(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[[Any, Any], Tensor],
    device: DeviceLike | None = None,
    non_blocking: bool = False,
    prepare_batch: PrepareBatch = _prepare_batch,
    model_transform: Callable[[Any], Any] = identity,
    output_transform: Callable[[Any, Any, Any, Tensor], Any] = loss_value,
    gradient_accumulation_steps: int = 1,
    model_fn: Callable[[Any, Any], Any] = call_model,
    *,
    clip_grad_norm: float | None = None,
    clip_grad_value: float | None = None,
    batch_weight: Callable[[Any, Any], float | Tensor] | None = None,
) -> Step:
    """Return a step that trains on XLA devices.

    The arguments are those of :func:`supervised_training_step`.

    Raises:
        ModuleNotFoundError: torch_xla is not installed.
    """
    xla_model = import_for("supervised_training_step_tpu", "torch_xla.core.xla_model", "pip install torch_xla")

    def step() -> None:
        if hasattr(optimizer, "wrapped_optimizer"):  # of auto_optim, whose step does all of this
            optimizer.step()
        else:
            xla_model.optimizer_step(optimizer, barrier=True)

    update = Update(optimizer, None, clip_grad_norm, clip_grad_value, step)
    return training_step(
        update, model, loss_fn, device, non_blocking, prepare_batch, model_transform, output_transform,
        gradient_accumulation_steps, model_fn, batch_weight,
    )  # fmt: skip


def supervised_evaluation_step(
    model: torch.nn.Module,
    device: DeviceLike | None = None,
    non_blocking: bool = False,
    prepare_batch: PrepareBatch = _prepare_batch,
    model_transform: Callable[[Any], Any] = identity,
    output_transform: Callable[[Any, Any, Any], Any] = predictions_and_targets,
    model_fn: Callable[[Any, Any], Any] = call_model,
) -> Step:
    """Return a step that evaluates in the precision of the model.

    Args:
        output_transform: ``output_transform(x, y, y_pred)`` returns the output; by default ``y_pred, y``.

    The other arguments are those of :func:`supervised_training_step`.

    >>> step = supervised_evaluation_step(torch.nn.Identity())
    >>> step(None, (torch.ones(1), torch.zeros(1)))
    (tensor([1.]), tensor([0.]))
    """
    return evaluation_step(model, device, non_blocking, prepare_batch, model_transform, output_transform, model_fn)


def supervised_evaluation_step_amp(
    model: torch.nn.Module,
    device: DeviceLike | None = None,
    non_blocking: bool = False,
    prepare_batch: PrepareBatch = _prepare_batch,
    model_transform: Callable[[Any], Any] = identity,
    output_transform: Callable[[Any, Any, Any], Any] = predictions_and_targets,
    model_fn: Callable[[Any, Any], Any] = call_model,
    *,
    amp_dtype: torch.dtype | None = None,
) -> Step:
    """Return a step that evaluates in mixed precision: the model and ``model_transform`` run under autocast.

    The arguments are those of :func:`supervised_evaluation_step` and :func:`supervised_training_step_amp`.

    >>> step = supervised_evaluation_step_amp(torch.nn.Linear(1, 1))
    >>> y_pred, y = step(None, (torch.ones(1), torch.zeros(1)))
    >>> y_pred.dtype
    torch.bfloat16
    """
    return evaluation_step(
        model, device, non_blocking, prepare_batch, model_transform, output_transform, model_fn,
        autocast(device, model, amp_dtype),
    )  # fmt: skip


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
    """Return an engine that trains a model on batches of inputs and targets.

    Args:
        deterministic: whether to return a :class:`DeterministicEngine`.
        amp_mode: ``None`` for the precision of the model, ``"amp"`` for the mixed precision of torch, ``"apex"``.
        scaler: gradient scaler for ``"amp"``; ``True`` creates one and stores it as ``state.scaler``.
        amp_dtype: the lower precision of ``"amp"``; by default that of torch for the device.

    The other arguments are those of :func:`supervised_training_step`.

    Raises:
        ValueError: the arguments contradict each other, or a number is out of range.
        RuntimeError: ``device`` is ``"xla"`` and torch_xla is not installed.
        ModuleNotFoundError: ``amp_mode`` is ``"apex"`` and apex is not installed.

    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
    >>> trainer = create_supervised_trainer(model, optimizer, torch.nn.MSELoss(), clip_grad_norm=1.0)
    >>> trainer.run([(torch.ones(2, 1), torch.zeros(2, 1))], max_epochs=3).iteration
    3
    """
    mode = _mode(device, amp_mode, scaler, amp_dtype)
    builders: Mapping[str | None, Callable[..., Step]] = {
        None: supervised_training_step,
        "amp": supervised_training_step_amp,
        "apex": supervised_training_step_apex,
        "xla": supervised_training_step_tpu,
    }
    new_scaler = torch.amp.GradScaler(device_type_of(device, model)) if scaler is True else None
    of_amp = {"scaler": new_scaler or scaler or None, "amp_dtype": amp_dtype} if mode == "amp" else {}
    step = builders[mode](
        model, optimizer, loss_fn, device=device, non_blocking=non_blocking, prepare_batch=prepare_batch,
        model_transform=model_transform, output_transform=output_transform,
        gradient_accumulation_steps=gradient_accumulation_steps, model_fn=model_fn, clip_grad_norm=clip_grad_norm,
        clip_grad_value=clip_grad_value, batch_weight=batch_weight, **of_amp,
    )  # fmt: skip
    trainer: Engine[Any, Any] = DeterministicEngine(step) if deterministic else Engine(step)
    if new_scaler is not None:
        trainer.state.scaler = new_scaler
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
    """Return an engine that evaluates a model on batches of inputs and targets.

    Args:
        metrics: by name, objects with ``attach(engine, name)``; their results appear in ``state.metrics``.
        amp_mode: ``"amp"`` for the mixed precision of torch; otherwise the precision of the model, which for ``"apex"``
            apex has changed already.

    The other arguments are those of :func:`supervised_evaluation_step`.

    Raises:
        ValueError: the arguments contradict each other.
        RuntimeError: ``device`` is ``"xla"`` and torch_xla is not installed.

    >>> evaluator = create_supervised_evaluator(torch.nn.Identity())
    >>> evaluator.run([(torch.ones(1), torch.zeros(1))]).output
    (tensor([1.]), tensor([0.]))
    """
    mode = _mode(device, amp_mode, False, amp_dtype)
    _check_metrics({} if metrics is None else metrics)
    step = evaluation_step(
        model, device, non_blocking, prepare_batch, model_transform, output_transform, model_fn,
        autocast(device, model, amp_dtype) if mode == "amp" else nullcontext,
    )  # fmt: skip
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
    """Return the kind of step; reject arguments that contradict each other."""
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
