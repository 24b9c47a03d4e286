"""Optimizers that step together with those of the other XLA devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def stepping_together(optimizer: Optimizer) -> Optimizer:
    """Make an object of the optimizer's kind whose steps average the gradients of all devices, and begin at once.

    All else is that of the optimizer: what is read or changed through one of the two is read or changed in both.

    Args:
        optimizer: what is stepped; the attribute ``wrapped_optimizer`` of the new one.
    """
    if hasattr(optimizer, "wrapped_optimizer"):
        return optimizer
    kind = type(optimizer)
    wrapping = type(kind.__name__, (_SteppingTogether, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    made: Optimizer = object.__new__(wrapping)
    vars(made)["wrapped_optimizer"] = optimizer
    return made


class _SteppingTogether:
    """What stands before the class of the optimizer. An object of it has no state besides the one it wraps."""

    wrapped_optimizer: Optimizer

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients over all devices, step, and let the device begin.

        Args:
            closure: computes the loss and its gradients, perhaps several times.

        Returns:
            What the closure gave.
        """
        import torch_xla
        import torch_xla.core.xla_model as xla_model

        def averaged() -> Any:
            assert closure is not None, "used only then"
            loss = closure()
            self.synchronize()
            return loss

        if closure is None and not vars(self).get("skips"):
            return xla_model.optimizer_step(self.wrapped_optimizer, barrier=True)
        loss = self.wrapped_optimizer.step(None if closure is None else averaged)
        torch_xla.sync()
        return loss

    def synchronize(self) -> None:
        """Average the gradients over all devices, to clip them for example; once more does no harm."""
        import torch_xla.core.xla_model as xla_model

        xla_model.reduce_gradients(self.wrapped_optimizer)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let steps take the gradients as they are."""
        vars(self)["skips"] = True
        try:
            yield
        finally:
            del vars(self)["skips"]

    def reduce_as_gradients(self, tensor: Tensor) -> Tensor:
        """Give the mean of a tensor over all devices."""
        import torch_xla.core.xla_model as xla_model
        import torch_xla.runtime as runtime

        mean: Tensor = xla_model.all_reduce("sum", tensor, scale=1 / runtime.world_size())
        return mean

    def __getattr__(self, name: str) -> Any:
        if name == "wrapped_optimizer":  # before it is there
            raise AttributeError(name)
        return getattr(self.wrapped_optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # schedulers put a counting method in the place of this one; the wrapped optimizer keeps its own
        if name == "step":
            vars(self)[name] = value
        else:
            setattr(self.wrapped_optimizer, name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.wrapped_optimizer.__setstate__(state)

    def __reduce__(self) -> Any:
        return stepping_together, (self.wrapped_optimizer,)
