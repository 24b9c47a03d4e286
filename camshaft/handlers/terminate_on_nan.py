"""Terminate a run when its output is NaN or infinite."""

from __future__ import annotations

import cmath
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from camshaft.arguments import check_callable
from camshaft.dtensors import local
from camshaft.engine.engine import Engine, check_engine
from camshaft.engine.events import Events
from camshaft.engine.state import LazyNumber
from camshaft.errors import level_of_caller
from camshaft.handlers.stopping import StopTogether

__all__ = ["TerminateOnNan"]


class TerminateOnNan:
    """Terminate a run when its output is NaN or infinite, on all ranks after the same iteration.

    It never waits for a GPU: tensors are checked there, and the result is read one iteration later. Each rank checks
    its own part of a DTensor.

    Args:
        output_transform: called with the output of the engine; returns numbers, tensors, NumPy arrays, and mappings
            and sequences of them. Other values are ignored.

    Raises:
        TypeError: ``output_transform`` is not callable.

    >>> from camshaft.engine import Events
    >>> trainer = Engine(lambda engine, batch: {"loss": torch.tensor(batch)})
    >>> handle = trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    >>> trainer.run([0.5, float("nan"), 0.25]).iteration
    2
    """

    def __init__(self, output_transform: Callable[[Any], Any] = lambda output: output) -> None:
        check_callable("output_transform", output_transform)
        self._output_transform = output_transform
        self.logger = logging.getLogger(f"{__name__}.{type(self).__name__}")
        self._together = StopTogether()
        self._is_attached = False
        self._pending: _PendingCheck | None = None

    def __call__(self, engine: Engine[Any, Any]) -> None:
        """Check the output, and terminate the run if it or the previous one is not finite."""
        if is_first := not self._is_attached:
            check_engine("engine", engine)
            self._is_attached = True
            engine.add_event_handler(Events.COMPLETED, self._check_previous)
            engine.add_event_handler(Events.STARTED, self._forget)
        self._together.watch(engine)
        self._check_previous(engine)
        output = self._output_transform(engine.state._output)
        if is_first and output is None and engine.state._output is None:
            problem = "TerminateOnNan checks nothing: engine.state.output is None"
            warnings.warn(f"{problem}; return a value from the process function", stacklevel=level_of_caller())
        on_device: list[Tensor] = []
        for value in map(local, _leaves(output)):
            if isinstance(value, Tensor) and value.device.type != "cpu":
                on_device.append(value)
            elif not _is_finite(value):
                self._stop(engine, "output")
                return
        if on_device:
            self._pending = _PendingCheck(on_device)

    def _check_previous(self, engine: Engine[Any, Any]) -> None:
        pending, self._pending = self._pending, None
        if pending is not None and not pending.read():
            self._stop(engine, "output of the previous iteration")

    def _forget(self) -> None:
        self._pending = None

    def _stop(self, engine: Engine[Any, Any], what: str) -> None:
        self.logger.warning("TerminateOnNan: The %s is NaN or infinite. Stop training", what)
        self._together.stop(engine)


class _PendingCheck:
    """Whether tensors on a device are finite, on its way to the host."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._flag = torch.stack([tensor.detach().isfinite().all().to(tensors[0].device) for tensor in tensors]).all()
        self._arrival: Any = None
        if self._flag.is_cuda:
            host = torch.empty_like(self._flag, device="cpu", pin_memory=True)
            self._flag = host.copy_(self._flag, non_blocking=True)
            self._arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types for it
            self._arrival.record()

    def read(self) -> bool:
        """Return the result, which has arrived an iteration later."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return bool(self._flag)


def _leaves(output: Any) -> Iterator[Any]:
    if isinstance(output, Mapping):
        for value in output.values():
            yield from _leaves(value)
    elif isinstance(output, Sequence) and not isinstance(output, (str, bytes)):
        for value in output:
            yield from _leaves(value)
    elif isinstance(output, LazyNumber):
        yield output.peek()
    elif not isinstance(output, Tensor) or (
        output.layout is torch.strided and not output.is_nested and not output.is_quantized
    ):
        yield output


def _is_finite(value: Any) -> bool:
    """Return whether all numbers in a value are finite."""
    if isinstance(value, Tensor):
        if value.ndim:
            return bool(value.detach().isfinite().all())
        value = value.item()  # some microseconds faster
    if isinstance(value, Number):
        try:
            return cmath.isfinite(value)  # type: ignore[arg-type]  # numbers convert to complex
        except OverflowError:  # an integer larger than all floats
            return True
    is_array = getattr(getattr(value, "dtype", None), "kind", "") in ("f", "c")  # of NumPy, which may not be installed
    return not is_array or bool((abs(value) < math.inf).all())
