"""Training steps compiled by ``torch.compile``: the forward pass with the loss, the optimizer, and what that took."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from camshaft.arguments import described
from camshaft.dtensors import any_dtensor, is_fully_sharded, is_wrapped
from camshaft.engine.events import Events, Order
from camshaft.errors import level_of_caller
from camshaft.text import counted


class Compiler:
    """Compiles the parts of one training step.

    Functions are compiled, and parts of wrapped models in place, so the keys of state dicts have no prefix.

    Args:
        requested: ``True``; ``"model"``, which leaves the optimizer as it is; or options of ``torch.compile``.

    Raises:
        TypeError: ``requested`` is none of these.
    """

    def __init__(self, requested: bool | str | Mapping[str, Any]) -> None:
        if requested is not True and requested != "model" and not isinstance(requested, Mapping):
            hint = "must be True, 'model', or a mapping of options of torch.compile"
            raise TypeError(f"compile {hint}, got {described(requested)}")
        self._options = dict(requested) if isinstance(requested, Mapping) else {}
        self._with_optimizer = requested != "model"
        self._epochs = 0  # of the run
        self._began = 0  # when the epoch did
        self._has_warned = False

    def function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a compiled function.

        Torch keeps what it compiles by code object, a limited number of variants each. So that many trainers may exist,
        each of them has code objects of its own.
        """
        if isinstance(function, FunctionType):
            code = function.__code__.replace()
            own = FunctionType(
                code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
            )
            own.__kwdefaults__ = function.__kwdefaults__
            function = own
        compiled: Callable[..., Any] = torch.compile(function, **self._options)
        return compiled

    def inside(self, model: Any) -> bool:
        """Compile the parts of a wrapped or sharded model in place; return whether it is one.

        The wrappers communicate in Python code around these parts.
        """
        modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
        blocks = [one for one in modules if is_fully_sharded(one) and sum(map(is_fully_sharded, one.modules())) == 1]
        parts: list[Any] = blocks or [one.module for one in modules if hasattr(one, "module") and is_wrapped(one)]
        for part in parts:
            part.compile(**self._options)
        return bool(parts)

    def step_of(self, optimizer: Any) -> Callable[[], None] | None:
        """Return a compiled step of an optimizer, or ``None`` if its own step is to be used."""
        # that of Horovod and ZeroRedundancyOptimizer, respectively
        communicates = hasattr(optimizer, "synchronize") or hasattr(optimizer, "consolidate_state_dict")
        if not self._with_optimizer or communicates or not isinstance(optimizer, torch.optim.Optimizer):
            return None
        if any_dtensor(parameter for group in optimizer.param_groups for parameter in group["params"]):
            return None
        return CompiledStep(optimizer, self.function)

    def attach(self, engine: Any) -> None:
        """Warn if the steps of an engine are compiled again after the first epoch of a run."""
        engine.add_event_handler(Events.STARTED, self._start_run, order=Order.STEP)
        engine.add_event_handler(Events.EPOCH_STARTED, self._start_epoch, order=Order.LAST)
        engine.add_event_handler(Events.EPOCH_COMPLETED, self._end_epoch, order=Order.STEP)

    def _start_run(self) -> None:
        self._epochs = 0

    def _start_epoch(self) -> None:
        self._began = now()

    def _end_epoch(self, engine: Any) -> None:
        self._epochs += 1
        if self._epochs == 1 or self._has_warned:
            return
        again = [one for one in compilations_since(self._began) if one.recompile_reason]
        if again:
            self._has_warned = True
            name, reason = again[0].co_name, " ".join(str(again[0].recompile_reason).split())
            seconds = sum((one.duration_us or 0) for one in again) / 1e6
            warnings.warn(
                f"torch compiled {name!r} again in epoch {engine.state.epoch}, because {reason} failed; "
                f"{counted(len(again), 'compilation')} took {seconds:.1f} s",
                stacklevel=level_of_caller(),
            )


class CompiledStep:
    """The compiled step of an optimizer.

    The learning rates become tensors, which schedules change without a new compilation. State dicts hold numbers.

    Args:
        optimizer: the optimizer.
        compiled: compiles a function.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, compiled: Callable[..., Callable[..., Any]]) -> None:
        self._rates: dict[int, Tensor] = {}

        def step() -> None:
            optimizer.step()  # looked up here, as schedules replace the method

        self._step = compiled(step)
        self._optimizer = optimizer
        optimizer.register_state_dict_post_hook(_hold_numbers)

    def __call__(self) -> None:
        """Step."""
        for place, group in enumerate(self._optimizer.param_groups):
            rate = group.get("lr")
            if rate is not None and not isinstance(rate, Tensor):  # at first, or if the user or a schedule has set it
                if place not in self._rates:
                    self._rates[place] = torch.tensor(0.0, dtype=torch.float64)
                group["lr"] = self._rates[place].fill_(rate)
        self._step()


def _hold_numbers(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    for group in state_dict["param_groups"]:
        if isinstance(group.get("lr"), Tensor):
            group["lr"] = group["lr"].item()


# --- what was compiled -------------------------------------------------------------------------------------------


def now() -> int:
    """Return the present time as :func:`compilations_since` takes it, in microseconds."""
    return time.time_ns() // 1000


def compilations_since(begin: int) -> list[Any]:
    """Return torch's records of the functions that it has compiled in this process since a time, oldest first.

    Torch keeps the last 64.
    """
    if "torch._dynamo.utils" not in sys.modules:
        return []
    recorded = sys.modules["torch._dynamo.utils"].get_compilation_metrics()
    return [one for one in recorded if (one.start_time_us or 0) >= begin]
