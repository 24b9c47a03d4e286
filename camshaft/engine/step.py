"""One training step and one evaluation step: precision, clipping, accumulation, and the mode of the model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from numbers import Real
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from camshaft.engine.accumulation import Accumulation, scaled_to_all_ranks
from camshaft.engine.state import LazyNumber
from camshaft.errors import annotate
from camshaft.tree import convert_tensor
from camshaft.types import DeviceLike

Step = Callable[[Any, Any], Any]
PrepareBatch = Callable[..., tuple[Any, Any]]
_in_training = attrgetter("training")


def prepare_batch(batch: Any, device: DeviceLike | None = None, non_blocking: bool = False) -> tuple[Any, Any]:
    """Split a batch into inputs and targets, and move both to a device.

    >>> prepare_batch((torch.ones(2), torch.zeros(2)))
    (tensor([1., 1.]), tensor([0., 0.]))
    """
    try:
        x, y = batch
    except (TypeError, ValueError) as error:
        annotate(error, "a batch must be a pair of inputs and targets, or prepare_batch must make one of it")
        raise
    return (
        x if device is None and isinstance(x, Tensor) else convert_tensor(x, device, non_blocking),
        y if device is None and isinstance(y, Tensor) else convert_tensor(y, device, non_blocking),
    )


def loss_value(x: Any, y: Any, y_pred: Any, loss: Tensor) -> Any:
    """Return the loss as a number, which on devices other than the CPU is read on first use."""
    return loss.item() if loss.is_cpu else LazyNumber(loss)


def predictions_and_targets(x: Any, y: Any, y_pred: Any) -> Any:
    """Return predictions and targets, the output that metrics take."""
    return y_pred, y


def identity(output: Any) -> Any:
    """Return the output of the model."""
    return output


def call_model(model: Any, x: Any) -> Any:
    """Call a model with its input."""
    return model(x)


class Mode:
    """Switches a model to train or eval mode if one of its modules is not in it.

    Switching visits every module in Python; looking at their flags takes a tenth of that. The modules are listed once
    per epoch.

    >>> model = nn.Sequential(nn.Linear(1, 1), nn.Dropout())
    >>> Mode(model, training=False)(None)
    >>> model.training, model[1].training
    (False, False)
    """

    def __init__(self, model: Any, training: bool) -> None:
        self._model = model
        self._training = training
        self._modules: list[nn.Module] = []

    def __call__(self, engine: Any) -> None:
        """Switch the model. The engine tells when an epoch starts."""
        if self._modules and (engine is None or engine.iteration_in_epoch <= 1):
            self._list_modules()
        flags = map(_in_training, self._modules)
        if not self._modules or (not all(flags) if self._training else any(flags)):
            self._model.train() if self._training else self._model.eval()
            self._list_modules()

    def _list_modules(self) -> None:
        self._modules = list(self._model.modules()) if isinstance(self._model, nn.Module) else []


# --- precision and updates ---------------------------------------------------------------------------------------


def autocast(
    device: DeviceLike | None, model: Any, dtype: torch.dtype | None = None
) -> Callable[[], AbstractContextManager[Any]]:
    """Return a function that returns the autocast context of a device.

    Args:
        device: device of the batches; ``None`` for that of the model, which is looked up on first use.
        model: the model.
        dtype: the lower precision; by default that of torch for the device (float16 on CUDA, bfloat16 on CPU).

    >>> model = torch.nn.Linear(2, 2)
    >>> with autocast(None, model)():
    ...     model(torch.ones(1, 2)).dtype
    torch.bfloat16
    """

    @functools.cache
    def context() -> AbstractContextManager[Any]:
        kind = device_type_of(device, model)
        if not torch.amp.is_autocast_available(kind):
            raise ValueError(f"amp needs a device type that torch has autocast for, got {kind!r}")
        return torch.autocast(kind, dtype=dtype)

    if device is not None:
        context()
    return context


def device_type_of(device: DeviceLike | None, model: Any) -> str:
    """Return the type of a device, or of the device of a model's parameters.

    >>> device_type_of("cuda:1", None), device_type_of(None, torch.nn.Linear(1, 1))
    ('cuda', 'cpu')
    """
    if device is not None:
        return torch.device(device).type
    parameter = next(iter(model.parameters()), None) if hasattr(model, "parameters") else None
    return "cpu" if parameter is None else str(parameter.device.type)


class Update:
    """Computes gradients and steps the optimizer: scaling, clipping, stepping.

    Optimizers of Horovod exchange gradients during ``backward``; ``synchronize`` waits for them.

    Args:
        optimizer: the optimizer.
        scaler: scales the loss, against underflow in float16.
        clip_grad_norm: maximum norm of all gradients together.
        clip_grad_value: maximum absolute value of any element of a gradient.
        step: called instead of ``optimizer.step``.
        backward: called instead of ``loss.backward``.

    Attributes:
        is_plain: whether ``loss.backward()`` and ``optimizer.step()`` are all that is needed.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None = None,
        clip_grad_norm: float | None = None,
        clip_grad_value: float | None = None,
        step: Callable[[], Any] | None = None,
        backward: Callable[[Tensor], Any] | None = None,
    ) -> None:
        if not callable(getattr(optimizer, "zero_grad", None)) or not callable(getattr(optimizer, "step", None)):
            raise TypeError(f"optimizer must have zero_grad() and step(), got {optimizer!r}")
        for name, limit in (("clip_grad_norm", clip_grad_norm), ("clip_grad_value", clip_grad_value)):
            if limit is not None and not isinstance(limit, Real):
                raise TypeError(f"{name} must be a number or None, got {limit!r}")
            if limit is not None and not limit > 0:
                raise ValueError(f"{name} must be above 0 or None, got {limit!r}")
        self.optimizer = optimizer
        self._scaler = scaler
        self._clip_grad_norm = clip_grad_norm
        self._clip_grad_value = clip_grad_value
        self._step = step
        self._backward = backward
        self.is_plain = (scaler, clip_grad_norm, clip_grad_value, step, backward) == (None,) * 5

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of a loss."""
        if self._backward is not None:
            self._backward(loss)
        else:
            (loss if self._scaler is None else self._scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]

    def apply(self, factor: float | Tensor | None = None) -> None:
        """Step the optimizer with the gradients, multiplied by ``factor``."""
        optimizer, scaler = self.optimizer, self._scaler
        if hasattr(optimizer, "synchronize"):
            optimizer.synchronize()
        if factor is not None:
            self.multiply(factor)
        if self._clip_grad_norm is not None or self._clip_grad_value is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            parameters = list(self.parameters())
            if self._clip_grad_norm is not None:
                nn.utils.clip_grad_norm_(parameters, self._clip_grad_norm)
            if self._clip_grad_value is not None:
                nn.utils.clip_grad_value_(parameters, self._clip_grad_value)
        with getattr(optimizer, "skip_synchronize", nullcontext)():
            if self._step is not None:
                self._step()
            elif scaler is None:
                optimizer.step()  # looked up here, as schedulers replace the method
            else:
                scaler.step(optimizer)
                scaler.update()

    def multiply(self, factor: float | Tensor) -> None:
        """Multiply the gradients."""
        for parameter in self.parameters():
            assert parameter.grad is not None, "parameters() yields those with a gradient"
            parameter.grad.mul_(factor)

    def parameters(self) -> Iterable[Tensor]:
        """Yield the parameters that have a gradient."""
        for group in self.optimizer.param_groups:
            yield from (parameter for parameter in group["params"] if parameter.grad is not None)


def import_for(user: str, module: str, remedy: str) -> Any:
    """Import an optional library; if it is missing, raise an error that says how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ModuleNotFoundError(f"{user} needs {module.split('.')[0]}: {remedy}") from error


# --- the steps ---------------------------------------------------------------------------------------------------


def training_step(
    update: Update,
    model: Any,
    loss_fn: Callable[[Any, Any], Tensor],
    device: DeviceLike | None,
    non_blocking: bool,
    prepare_batch: PrepareBatch,
    model_transform: Callable[[Any], Any],
    output_transform: Callable[[Any, Any, Any, Tensor], Any],
    gradient_accumulation_steps: int,
    model_fn: Callable[[Any, Any], Any],
    batch_weight: Callable[[Any, Any], float | Tensor] | None,
    context: Callable[[], AbstractContextManager[Any]] | None = None,
) -> Step:
    """Return the function that trains on one batch.

    Args:
        update: computes gradients and steps the optimizer.
        context: returns the context of the forward pass, such as autocast.

    The other arguments are those of ``supervised_training_step``.
    """
    _check_callables(model, model_transform=model_transform, output_transform=output_transform, model_fn=model_fn)
    _check_callables(None, loss_fn=loss_fn)
    accumulation: Accumulation | None = Accumulation(model, update, gradient_accumulation_steps, batch_weight)
    if gradient_accumulation_steps == 1 and batch_weight is None:
        accumulation = None
    batch_of, set_mode = _preparing(prepare_batch, device, non_blocking), Mode(model, training=True)
    optimizer, is_plain = update.optimizer, update.is_plain

    def forward(x: Any, y: Any) -> tuple[Any, Tensor]:
        y_pred = model_transform(model_fn(model, x))
        return y_pred, loss_fn(y_pred, y)

    def forward_in_context(x: Any, y: Any) -> tuple[Any, Tensor]:
        with context():  # type: ignore[misc]  # chosen only if it is given
            return forward(x, y)

    predict = forward if context is None else forward_in_context

    def step(engine: Any, batch: Any) -> Any:
        if accumulation is None:
            optimizer.zero_grad()
        else:
            is_last = accumulation.begin(engine)
        set_mode(engine)
        x, y = batch_of(batch)
        if accumulation is not None:
            with accumulation.synchronization(engine, is_last):
                y_pred, loss = predict(x, y)
                update.backward(accumulation.scaled(engine, x, y, loss))
            accumulation.end(engine, is_last)
        else:
            y_pred, loss = predict(x, y)
            if is_plain:
                scaled_to_all_ranks(engine, loss).backward()  # type: ignore[no-untyped-call]  # untyped in torch
                optimizer.step()
            else:
                update.backward(scaled_to_all_ranks(engine, loss))
                update.apply()
        return output_transform(x, y, y_pred, loss)

    return step


def evaluation_step(
    model: Any,
    device: DeviceLike | None,
    non_blocking: bool,
    prepare_batch: PrepareBatch,
    model_transform: Callable[[Any], Any],
    output_transform: Callable[[Any, Any, Any], Any],
    model_fn: Callable[[Any, Any], Any],
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Step:
    """Return the function that evaluates one batch.

    Args:
        context: returns the context of the forward pass, such as autocast.

    The other arguments are those of ``supervised_evaluation_step``.
    """
    _check_callables(model, model_transform=model_transform, output_transform=output_transform, model_fn=model_fn)
    batch_of, set_mode = _preparing(prepare_batch, device, non_blocking), Mode(model, training=False)

    @torch.no_grad()
    def step(engine: Any, batch: Any) -> Any:
        set_mode(engine)
        x, y = batch_of(batch)
        with context():
            y_pred = model_transform(model_fn(model, x))
        return output_transform(x, y, y_pred)

    return step


def _preparing(
    prepare: PrepareBatch, device: DeviceLike | None, non_blocking: bool
) -> Callable[[Any], tuple[Any, Any]]:
    if device is None and prepare is prepare_batch:
        return prepare
    return lambda batch: prepare(batch, device=device, non_blocking=non_blocking)


def _check_callables(model: Any, **functions: Any) -> None:
    """Reject arguments of the wrong kind, such as two in the wrong order."""
    if model is not None:
        if not callable(getattr(model, "train", None)) or not callable(getattr(model, "eval", None)):
            raise TypeError(f"model must be a module, or have train() and eval(), got {model!r}")
        if functions["model_fn"] is call_model:
            functions["model"] = model
    for name, function in functions.items():
        if not callable(function):
            raise TypeError(f"{name} must be callable, got {function!r}")
