"""The functions that run on one batch: training and evaluation steps of each kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from camshaft.engine.accumulation import Accumulation
from camshaft.engine.precision import ApexUpdate, Autocast, Update, import_for
from camshaft.engine.steps import (
    PrepareBatch,
    Step,
    call_model,
    evaluation_step,
    identity,
    loss_value,
    predictions_and_targets,
    prepare_batch,
    training_step,
)
from camshaft.types import DeviceLike

_prepare_batch = prepare_batch


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
    """Make a step that trains in the precision of the model.

    Args:
        model: the model, plain, compiled or wrapped for several ranks. It is not moved.
        optimizer: steps its parameters.
        loss_fn: ``loss_fn(y_pred, y)`` gives the loss, a tensor with one element.
        device: where batches are moved to; ``None`` leaves them where they are.
        non_blocking: do not wait for the move where that is possible.
        prepare_batch: ``prepare_batch(batch, device=..., non_blocking=...)`` gives ``x, y``.
        model_transform: applied to what the model gives.
        output_transform: ``output_transform(x, y, y_pred, loss)`` gives the output of the step; by default
            the loss as a number, which waits for the device only when somebody reads it.
        gradient_accumulation_steps: batches whose gradients make up one step of the optimizer.
        model_fn: ``model_fn(model, x)`` calls the model.
        clip_grad_norm: the largest norm of all gradients together.
        clip_grad_value: the largest absolute value of any element of a gradient.
        batch_weight: ``batch_weight(x, y)`` gives the weight of a batch among those of one step and of all
            ranks, of what ``prepare_batch`` made: what the loss is a mean over, samples (``lambda x, y: len(y)``),
            tokens, or the sum of the weights in a weighted loss. By default the batches of a step weigh the same,
            and those of the ranks by the samples that their loaders deal out.

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
        model=model,
        loss_fn=loss_fn,
        update=update,
        batch_of=_preparing(prepare_batch, device, non_blocking),
        model_transform=model_transform,
        output_transform=output_transform,
        model_fn=model_fn,
        autocast=None,
        accumulation=_accumulation(model, update, gradient_accumulation_steps, batch_weight),
    )


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
    """Make a step that trains in mixed precision, on any device that torch has autocast for.

    Args:
        scaler: scales the loss, which float16 needs; ``None`` for none.
        amp_dtype: the lower precision; ``None`` for torch's choice for the device.

    The other arguments are those of :func:`supervised_training_step`. A scaler makes torch wait for the device
    in each step, unless the optimizer is a fused one.

    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
    >>> step = supervised_training_step_amp(model, optimizer, torch.nn.MSELoss(), amp_dtype=torch.bfloat16)
    >>> isinstance(step(None, (torch.ones(2, 1), torch.zeros(2, 1))), float)
    True
    """
    update = Update(optimizer, scaler, clip_grad_norm, clip_grad_value)
    return training_step(
        model=model,
        loss_fn=loss_fn,
        update=update,
        batch_of=_preparing(prepare_batch, device, non_blocking),
        model_transform=model_transform,
        output_transform=output_transform,
        model_fn=model_fn,
        autocast=Autocast(device, model, amp_dtype),
        accumulation=_accumulation(model, update, gradient_accumulation_steps, batch_weight),
    )


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
    """Make a step for a model and an optimizer that were prepared by ``apex.amp.initialize``.

    The arguments are those of :func:`supervised_training_step`.

    Raises:
        ModuleNotFoundError: apex is not installed.
    """
    update = ApexUpdate(optimizer, clip_grad_norm, clip_grad_value)
    return training_step(
        model=model,
        loss_fn=loss_fn,
        update=update,
        batch_of=_preparing(prepare_batch, device, non_blocking),
        model_transform=model_transform,
        output_transform=output_transform,
        model_fn=model_fn,
        autocast=None,
        accumulation=_accumulation(model, update, gradient_accumulation_steps, batch_weight),
    )


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
    """Make a step that trains on XLA devices.

    The arguments are those of :func:`supervised_training_step`.

    Raises:
        ModuleNotFoundError: torch_xla is not installed.
    """
    xla_model = import_for("supervised_training_step_tpu", "torch_xla.core.xla_model", "pip install torch_xla")

    def step() -> None:
        if hasattr(optimizer, "wrapped_optimizer"):  # auto_optim made it, so that its own step does all this
            optimizer.step()
        else:
            xla_model.optimizer_step(optimizer, barrier=True)

    update = Update(optimizer, None, clip_grad_norm, clip_grad_value, step)
    return training_step(
        model=model,
        loss_fn=loss_fn,
        update=update,
        batch_of=_preparing(prepare_batch, device, non_blocking),
        model_transform=model_transform,
        output_transform=output_transform,
        model_fn=model_fn,
        autocast=None,
        accumulation=_accumulation(model, update, gradient_accumulation_steps, batch_weight),
    )


def supervised_evaluation_step(
    model: torch.nn.Module,
    device: DeviceLike | None = None,
    non_blocking: bool = False,
    prepare_batch: PrepareBatch = _prepare_batch,
    model_transform: Callable[[Any], Any] = identity,
    output_transform: Callable[[Any, Any, Any], Any] = predictions_and_targets,
    model_fn: Callable[[Any, Any], Any] = call_model,
) -> Step:
    """Make a step that evaluates in the precision of the model.

    Args:
        output_transform: ``output_transform(x, y, y_pred)`` gives the output; by default ``y_pred, y``.

    The other arguments are those of :func:`supervised_training_step`.

    >>> step = supervised_evaluation_step(torch.nn.Identity())
    >>> step(None, (torch.ones(1), torch.zeros(1)))
    (tensor([1.]), tensor([0.]))
    """
    batch_of = _preparing(prepare_batch, device, non_blocking)
    return evaluation_step(model, batch_of, model_transform, output_transform, model_fn, None)


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
    """Make a step that evaluates in mixed precision: the model and ``model_transform`` run under autocast.

    The arguments are those of :func:`supervised_evaluation_step` and :func:`supervised_training_step_amp`.

    >>> step = supervised_evaluation_step_amp(torch.nn.Linear(1, 1))
    >>> y_pred, y = step(None, (torch.ones(1), torch.zeros(1)))
    >>> y_pred.dtype
    torch.bfloat16
    """
    batch_of = _preparing(prepare_batch, device, non_blocking)
    autocast = Autocast(device, model, amp_dtype)
    return evaluation_step(model, batch_of, model_transform, output_transform, model_fn, autocast)


def _preparing(
    prepare_batch: PrepareBatch, device: DeviceLike | None, non_blocking: bool
) -> Callable[[Any], tuple[Any, Any]]:
    if device is None and prepare_batch is _prepare_batch:
        return prepare_batch
    return lambda batch: prepare_batch(batch, device=device, non_blocking=non_blocking)


def _accumulation(
    model: Any, update: Update, steps: int, batch_weight: Callable[[Any, Any], float | Tensor] | None
) -> Accumulation | None:
    accumulation = Accumulation(model, update, steps, batch_weight)  # checks the number in any case
    return accumulation if steps > 1 or batch_weight is not None else None
