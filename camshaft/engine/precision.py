"""How a step computes and how its gradients become an update, without and with mixed precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from camshaft.types import DeviceLike


class Autocast:
    """Mixed precision for the device that computes, found when it is first used.

    Args:
        device: where the batches go; ``None`` for where the model is.
        model: asked for its device when ``device`` is ``None``.
        dtype: the lower precision; ``None`` for torch's choice for the device (float16 on CUDA, bfloat16 on CPU).

    >>> model = torch.nn.Linear(2, 2)
    >>> with Autocast(None, model)():
    ...     model(torch.ones(1, 2)).dtype
    torch.bfloat16
    """

    def __init__(self, device: DeviceLike | None, model: Any, dtype: torch.dtype | None = None) -> None:
        self._device = device
        self._model = model
        self._dtype = dtype
        self._context: AbstractContextManager[Any] | None = None
        if device is not None:
            self()

    def __call__(self) -> AbstractContextManager[Any]:
        """Give the context to compute in."""
        if self._context is None:
            kind = device_type_of(self._device, self._model)
            if not torch.amp.is_autocast_available(kind):
                raise ValueError(f"amp needs a device type that torch has autocast for, got {kind!r}")
            self._context = torch.autocast(kind, dtype=self._dtype)
        return self._context


def device_type_of(device: DeviceLike | None, model: Any) -> str:
    """Give the type of a device, or of the one a model's parameters are on.

    >>> device_type_of("cuda:1", None), device_type_of(None, torch.nn.Linear(1, 1))
    ('cuda', 'cpu')
    """
    if device is not None:
        return torch.device(device).type
    parameter = next(iter(model.parameters()), None) if hasattr(model, "parameters") else None
    return "cpu" if parameter is None else str(parameter.device.type)


class Update:
    """Turns gradients into a step of the optimizer: scaling, clipping, stepping.

    An optimizer of Horovod's exchanges gradients while ``backward`` runs, and says with ``synchronize`` when they are
    there.

    Args:
        optimizer: what is stepped.
        scaler: scales the loss, against underflow in float16; ``None`` for none.
        clip_grad_norm: the largest norm of all gradients together; ``None`` for no limit.
        clip_grad_value: the largest absolute value of a gradient's element; ``None`` for no limit.
        step: called instead of ``optimizer.step``.

    Attributes:
        is_plain: whether nothing of all this is wanted: ``loss.backward()`` and ``optimizer.step()`` do.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None = None,
        clip_grad_norm: float | None = None,
        clip_grad_value: float | None = None,
        step: Callable[[], Any] | None = None,
    ) -> None:
        if not callable(getattr(optimizer, "zero_grad", None)) or not callable(getattr(optimizer, "step", None)):
            raise TypeError(f"optimizer must have zero_grad() and step(), got {optimizer!r}")
        _check_limit("clip_grad_norm", clip_grad_norm)
        _check_limit("clip_grad_value", clip_grad_value)
        self.optimizer = optimizer
        self._scaler = scaler
        self._clip_grad_norm = clip_grad_norm
        self._clip_grad_value = clip_grad_value
        self._step = step
        self.is_plain = type(self) is Update and (scaler, clip_grad_norm, clip_grad_value, step) == (None,) * 4

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of a loss."""
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]  # torch's

    def apply(self, factor: float | Tensor | None = None) -> None:
        """Step the optimizer, with the gradients times a factor."""
        if hasattr(self.optimizer, "synchronize"):
            self.optimizer.synchronize()
        if factor is not None:
            self.multiply(factor)
        if self._clip_grad_norm is not None or self._clip_grad_value is not None:
            self._clip()
        with getattr(self.optimizer, "skip_synchronize", nullcontext)():
            if self._step is not None:
                self._step()
            elif self._scaler is None:
                self.optimizer.step()  # looked up now: schedulers put a method of their own in its place
            else:
                self._scaler.step(self.optimizer)
                self._scaler.update()

    def multiply(self, factor: float | Tensor) -> None:
        """Multiply the gradients."""
        for parameter in self.parameters():
            assert parameter.grad is not None, "parameters() gives those with a gradient"
            parameter.grad.mul_(factor)

    def parameters(self) -> Iterable[Tensor]:
        """Give the parameters of the optimizer that have a gradient."""
        for group in self.optimizer.param_groups:
            yield from (parameter for parameter in group["params"] if parameter.grad is not None)

    def _clip(self) -> None:
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        parameters = list(self.parameters())
        if self._clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self._clip_grad_norm)
        if self._clip_grad_value is not None:
            torch.nn.utils.clip_grad_value_(parameters, self._clip_grad_value)


class ApexUpdate(Update):
    """Updates in the way of apex, which scales the loss by itself."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, clip_grad_norm: float | None, clip_grad_value: float | None
    ) -> None:
        super().__init__(optimizer, None, clip_grad_norm, clip_grad_value)
        self._amp = import_for("supervised_training_step_apex", "apex.amp", "see NVIDIA/apex for how to build it")

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of a loss that apex scales."""
        with self._amp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()


def import_for(user: str, module: str, remedy: str) -> Any:
    """Import an optional library, or say who needs it and where it comes from."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ModuleNotFoundError(f"{user} needs {module.split('.')[0]}: {remedy}") from error


def _check_limit(name: str, value: float | None) -> None:
    if value is not None and not isinstance(value, Real):
        raise TypeError(f"{name} must be a number or None, got {value!r}")
    if value is not None and not value > 0:
        raise ValueError(f"{name} must be above 0 or None, got {value!r}")
