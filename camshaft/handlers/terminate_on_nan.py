"""Stop training when a number is none."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from camshaft.engine.engine import Engine
from camshaft.engine.events import Events
from camshaft.engine.lazy import LazyNumber
from camshaft.handlers.stopping import StopTogether
from camshaft.handlers.utils import check_callable, check_engine

__all__ = ["TerminateOnNan"]


def _same(output: Any) -> Any:
    return output


class TerminateOnNan:
    """Ends a run when its output holds NaN or infinity; on all ranks at the same iteration.

    Nothing waits for a GPU: tensors are looked at there, and the answer is read one iteration later.

    Args:
        output_transform: called with the output of the engine; gives numbers, tensors, arrays of NumPy, and mappings
            and sequences of them. What is something else is not looked at.

    Raises:
        TypeError: ``output_transform`` cannot be called.

    >>> from camshaft.engine import Events
    >>> trainer = Engine(lambda engine, batch: {"loss": torch.tensor(batch)})
    >>> handle = trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    >>> trainer.run([0.5, float("nan"), 0.25]).iteration
    2
    """

    def __init__(self, output_transform: Callable[[Any], Any] = _same) -> None:
        check_callable("output_transform", output_transform)
        self._output_transform = output_transform
        self.logger = logging.getLogger(f"{__name__}.{type(self).__name__}")
        self._together = StopTogether()
        self._has_engine = False
        self._later: _Answer | None = None

    def __call__(self, engine: Engine[Any, Any]) -> None:
        """Look at the output; end the run if it, or the one before, is not finite."""
        if not self._has_engine:
            check_engine("engine", engine)
            self._has_engine = True
            engine.add_event_handler(Events.COMPLETED, self._look_back)
            engine.add_event_handler(Events.STARTED, self._forget)
        self._together.watch(engine)
        self._look_back(engine)
        later: list[Tensor] = []
        for value in _leaves(self._output_transform(engine.state._output)):
            if isinstance(value, Tensor) and value.device.type != "cpu":
                later.append(value)
            elif not _is_finite(value):
                self._stop(engine, "output")
                return
        if later:
            self._later = _Answer(later)

    def _look_back(self, engine: Engine[Any, Any]) -> None:
        """Read the answer about the output before."""
        answer, self._later = self._later, None
        if answer is not None and not answer.read():
            self._stop(engine, "output of the iteration before")

    def _forget(self) -> None:
        self._later = None

    def _stop(self, engine: Engine[Any, Any], what: str) -> None:
        self.logger.warning("TerminateOnNan: The %s holds NaN or infinity. Stop training", what)
        self._together.stop(engine)


class _Answer:
    """Whether tensors on a device are finite, on its way to the host."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._flags = torch.stack([tensor.detach().isfinite().all().to(tensors[0].device) for tensor in tensors]).all()
        self._arrival: Any = None
        if self._flags.is_cuda:
            self._flags = torch.empty_like(self._flags, device="cpu", pin_memory=True).copy_(
                self._flags, non_blocking=True
            )
            self._arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types for it
            self._arrival.record()

    def read(self) -> bool:
        """Give the answer; a step later it has arrived."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return bool(self._flags)


def _leaves(output: Any) -> Iterator[Any]:
    if isinstance(output, Mapping):
        for value in output.values():
            yield from _leaves(value)
    elif isinstance(output, Sequence) and not isinstance(output, (str, bytes)):
        for value in output:
            yield from _leaves(value)
    elif isinstance(output, LazyNumber):
        yield output.peek()
    elif not isinstance(output, Tensor) or _has_plain_elements(output):
        yield output


def _has_plain_elements(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def _is_finite(value: Any) -> bool:
    """Whether all numbers are finite; what has none is."""
    if isinstance(value, Tensor):
        if value.ndim:
            return bool(value.detach().isfinite().all())
        value = value.item()  # some microseconds faster
    if isinstance(value, Number):
        return _is_finite_number(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)) and value.dtype.kind in "fc":
        return bool(numpy.isfinite(value).all())
    return True


def _is_finite_number(value: Any) -> bool:
    if isinstance(value, complex):
        return math.isfinite(value.real) and math.isfinite(value.imag)
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return True
