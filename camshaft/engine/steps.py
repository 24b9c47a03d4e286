"""One training step and one evaluation step, composed of small policies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from camshaft.engine.accumulation import Accumulation, shared
from camshaft.engine.lazy import LazyNumber
from camshaft.engine.precision import Update
from camshaft.errors import annotate
from camshaft.tree import convert_tensor
from camshaft.types import DeviceLike

Step = Callable[[Any, Any], Any]
PrepareBatch = Callable[..., tuple[Any, Any]]
_in_training = attrgetter("training")


def prepare_batch(batch: Any, device: DeviceLike | None = None, non_blocking: bool = False) -> tuple[Any, Any]:
    """Take a batch for a pair of inputs and targets, and move both to a device.

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
    """Give the loss as a number: at once on the CPU, and from other devices when somebody reads it."""
    return loss.item() if loss.is_cpu else LazyNumber(loss)


def predictions_and_targets(x: Any, y: Any, y_pred: Any) -> Any:
    """Give predictions and targets, the output that metrics take."""
    return y_pred, y


def identity(output: Any) -> Any:
    """Give what the model gave."""
    return output


def call_model(model: Any, x: Any) -> Any:
    """Call a model with its input."""
    return model(x)


class Mode:
    """Switches a model to train or eval mode, when one of its modules is not in it.

    A switch visits every module in Python; to look at their flags costs a tenth of that. Which modules there are
    is listed at the start of each epoch.

    >>> model = nn.Sequential(nn.Linear(1, 1), nn.Dropout())
    >>> mode = Mode(model)
    >>> mode.evaluate(None)
    >>> model.training, model[1].training
    (False, False)
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._modules: list[nn.Module] = []

    def train(self, engine: Any) -> None:
        """Switch to train mode."""
        self._look_again(engine)
        if not self._modules or not all(map(_in_training, self._modules)):
            self._model.train()
            self._modules = _modules_of(self._model)

    def evaluate(self, engine: Any) -> None:
        """Switch to eval mode."""
        self._look_again(engine)
        if not self._modules or any(map(_in_training, self._modules)):
            self._model.eval()
            self._modules = _modules_of(self._model)

    def _look_again(self, engine: Any) -> None:
        if self._modules and (engine is None or engine.iteration_in_epoch <= 1):
            self._modules = _modules_of(self._model)


def _modules_of(model: Any) -> list[nn.Module]:
    return list(model.modules()) if isinstance(model, nn.Module) else []


def training_step(
    model: Any,
    loss_fn: Callable[[Any, Any], Tensor],
    update: Update,
    batch_of: Callable[[Any], tuple[Any, Any]],
    model_transform: Callable[[Any], Any],
    output_transform: Callable[[Any, Any, Any, Tensor], Any],
    model_fn: Callable[[Any, Any], Any],
    autocast: Callable[[], AbstractContextManager[Any]] | None,
    accumulation: Accumulation | None,
) -> Step:
    """Make the function that trains on one batch, without anything in it that is not used."""
    _check_parts(model, model_transform=model_transform, output_transform=output_transform, model_fn=model_fn)
    _check_callable("loss_fn", loss_fn)
    mode = Mode(model)

    def loss_of(x: Any, y: Any) -> tuple[Any, Tensor]:
        y_pred = model_transform(model_fn(model, x))
        return y_pred, loss_fn(y_pred, y)

    def autocast_loss_of(x: Any, y: Any) -> tuple[Any, Tensor]:
        with autocast():  # type: ignore[misc]  # used only where it is given
            return loss_of(x, y)

    forward = loss_of if autocast is None else autocast_loss_of
    optimizer = update.optimizer

    def plain_step(engine: Any, batch: Any) -> Any:
        optimizer.zero_grad()
        mode.train(engine)
        x, y = batch_of(batch)
        y_pred, loss = forward(x, y)
        shared(engine, loss).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimizer.step()
        return output_transform(x, y, y_pred, loss)

    def step(engine: Any, batch: Any) -> Any:
        optimizer.zero_grad()
        mode.train(engine)
        x, y = batch_of(batch)
        y_pred, loss = forward(x, y)
        update.backward(shared(engine, loss))
        update.apply()
        return output_transform(x, y, y_pred, loss)

    def accumulating_step(engine: Any, batch: Any) -> Any:
        assert accumulation is not None, "chosen only where it is given"
        last = accumulation.begin(engine)
        mode.train(engine)
        x, y = batch_of(batch)
        with accumulation.exchange(engine, last):
            y_pred, loss = forward(x, y)
            update.backward(accumulation.share(engine, x, y, loss))
        accumulation.end(engine, last)
        return output_transform(x, y, y_pred, loss)

    if accumulation is not None:
        return accumulating_step
    return plain_step if update.is_plain else step


def evaluation_step(
    model: Any,
    batch_of: Callable[[Any], tuple[Any, Any]],
    model_transform: Callable[[Any], Any],
    output_transform: Callable[[Any, Any, Any], Any],
    model_fn: Callable[[Any, Any], Any],
    autocast: Callable[[], AbstractContextManager[Any]] | None,
) -> Step:
    """Make the function that evaluates one batch."""
    _check_parts(model, model_transform=model_transform, output_transform=output_transform, model_fn=model_fn)
    mode = Mode(model)

    def predict(x: Any) -> Any:
        return model_transform(model_fn(model, x))

    def autocast_predict(x: Any) -> Any:
        with autocast():  # type: ignore[misc]  # used only where it is given
            return predict(x)

    forward = predict if autocast is None else autocast_predict

    @torch.no_grad()
    def step(engine: Any, batch: Any) -> Any:
        mode.evaluate(engine)
        x, y = batch_of(batch)
        return output_transform(x, y, forward(x))

    return step


def _check_parts(model: Any, **functions: Any) -> None:
    """Refuse arguments that cannot be what they are given for, as when two changed places."""
    if not callable(getattr(model, "train", None)) or not callable(getattr(model, "eval", None)):
        raise TypeError(f"model must be a module, or have train() and eval(), got {model!r}")
    if functions["model_fn"] is call_model:
        _check_callable("model", model)
    for name, function in functions.items():
        _check_callable(name, function)


def _check_callable(name: str, function: Any) -> None:
    if not callable(function):
        raise TypeError(f"{name} must be callable, got {function!r}")
