"""Throughput of a run, and how much of the peak performance of the devices it uses."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from camshaft.arguments import integer, number
from camshaft.distributed import all_reduce, device, get_data_parallel_size, get_world_size
from camshaft.engine.compilation import compilations_since, now
from camshaft.engine.engine import Engine, check_engine
from camshaft.engine.events import EventLike, Events, Order, RemovableEventHandle, joined

__all__ = ["Throughput"]

Amount = float | Callable[[Any], Any] | None
"""An amount per iteration, or a function of the batch that returns it."""

PEAK_FLOPS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 5090": 209e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "V100": 125e12,
    "T4": 65e12,
    "MI325X": 1307e12,
    "MI300X": 1307e12,
    "MI250X": 191e12,
}
"""Dense bfloat16 (on older devices float16) operations per second, by a part of the device name; first match wins."""


class Throughput:
    """Measure steps, samples and tokens per second, and the model FLOP utilization (MFU), over the last iterations.

    The results are in ``engine.state.metrics``, where loggers and progress bars find them: ``steps_per_second``,
    ``samples_per_second``, ``tokens_per_second``, ``flops_per_second`` and ``mfu``, as far as they are requested. They
    are computed over all ranks, at the events passed to :meth:`attach`, and are NaN before that. If ``torch.compile``
    has compiled anything in this process during the run, ``compilations`` and ``compilation_seconds`` are there too.
    Otherwise an iteration costs one clock reading and the given functions.

    The time from the end of one iteration to that of another counts, except for the handlers of epochs and the time
    between :meth:`pause` and :meth:`resume`. The host clock is used, without waiting for the device: host time matches
    device time over a window.

    Args:
        samples: number of samples in the batch of this rank, or a function of the batch. If it returns a tensor, that
            is read when results are computed.
        tokens: number of tokens, likewise.
        flops: floating-point operations of this rank in an iteration, forward and backward, likewise; torch counts
            them in an iteration with ``torch.utils.flop_counter.FlopCounterMode``.
        peak_flops: peak operations per second of one device. By default the value for its name, in dense bfloat16, in
            ``PEAK_FLOPS`` of this module.
        window: number of iterations to average over.

    Raises:
        TypeError: an amount is neither a number nor a function.
        ValueError: a number is out of range.

    >>> import torch
    >>> trainer = Engine(lambda engine, batch: None)
    >>> flops = lambda batch: 6e6 * batch.numel()
    >>> throughput = Throughput(samples=len, tokens=torch.numel, flops=flops, peak_flops=1e12)
    >>> handle = throughput.attach(trainer, Events.EPOCH_COMPLETED)
    >>> sorted(trainer.run(torch.ones(10, 4, 8)).metrics)
    ['flops_per_second', 'mfu', 'samples_per_second', 'steps_per_second', 'tokens_per_second']
    """

    def __init__(
        self,
        *,
        samples: Amount = None,
        tokens: Amount = None,
        flops: Amount = None,
        peak_flops: float | None = None,
        window: int = 100,
    ) -> None:
        amounts = {"samples": samples, "tokens": tokens, "flops": flops}
        self._amounts = {name: amount for name, amount in amounts.items() if amount is not None}
        for name, amount in {**self._amounts, "peak_flops": peak_flops}.items():
            if amount is not None and (name == "peak_flops" or not callable(amount)):
                number(name, amount, above=0)
        self._peak = peak_flops
        self._knows_device = peak_flops is not None
        self._window = integer("window", window, least=1)
        self._marks: deque[tuple[float, list[Any]]] = deque(maxlen=self._window + 1)  # ends of iterations, amounts
        self._idle = self._paused_at = 0.0
        self._pauses = 0  # more than one if pauses are nested
        self._compiled_since, self._compilations, self._compilation_seconds = now(), 0, 0.0

    def attach(self, engine: Engine[Any, Any], event_name: EventLike | None = None) -> RemovableEventHandle:
        """Measure the runs of an engine.

        Args:
            engine: the engine.
            event_name: when to compute the results, on all ranks at the same time, before other handlers. By default
                once per window, and at the end of epochs.

        Returns:
            A handle that detaches this.
        """
        check_engine("engine", engine)
        if event_name is None:
            event_name = Events.ITERATION_COMPLETED(every=self._window) | Events.EPOCH_COMPLETED
        handles = [
            engine.add_event_handler(event, handler, order=order)
            for event, handler, order in (
                (Events.STARTED, self._start, Order.MEASURE_FIRST),
                (Events.EPOCH_STARTED, self._end_pauses, Order.MEASURE_LAST),
                (Events.ITERATION_COMPLETED, self._mark, Order.MEASURE_FIRST),
                (Events.EPOCH_COMPLETED, self.pause, Order.MEASURE_FIRST),
                (Events.INTERRUPT, lambda: self._marks.clear(), Order.MEASURE_LAST),  # pauses end without an event
                (event_name, self._publish, Order.RESULTS),
            )
        ]
        return joined(handles, event_name, self._publish, engine)

    def rates(self) -> dict[str, float]:
        """Return the current rates of this rank alone; NaN until there are two iterations."""
        return self._named(self._own_rates())

    def pause(self) -> None:
        """Stop the clock. It can be attached, for example to ``STARTED`` of an evaluator."""
        if self._pauses == 0:
            self._paused_at = perf_counter()
        self._pauses += 1

    def resume(self) -> None:
        """Restart the clock if this ends the outermost pause."""
        if self._pauses > 0:
            self._pauses -= 1
            if self._pauses == 0:
                self._idle += perf_counter() - self._paused_at

    def _start(self, engine: Engine[Any, Any]) -> None:
        self._marks.clear()
        self._pauses = 0
        if "flops" in self._amounts and not self._knows_device:
            self._peak = peak_of(device())
        self._knows_device = True
        engine.state.metrics.update(self.rates())
        self._compiled_since, self._compilations, self._compilation_seconds = now(), 0, 0.0

    def _end_pauses(self) -> None:
        """End all pauses after the handlers of ``EPOCH_COMPLETED`` and ``EPOCH_STARTED``."""
        self._pauses = min(self._pauses, 1)
        self.resume()

    def _mark(self, engine: Engine[Any, Any]) -> None:
        now = self._paused_at if self._pauses else perf_counter()
        batch = engine.state.batch
        amounts = [one(batch) if callable(one) else one for one in self._amounts.values()]
        self._marks.append((now - self._idle, amounts))

    def _own_rates(self) -> list[float]:
        """Return steps and amounts per second, and the peak, which all add up over ranks."""
        marks = list(self._marks)
        seconds = marks[-1][0] - marks[0][0] if marks else 0.0
        if seconds <= 0:
            return [math.nan] * (len(self._amounts) + 2)
        totals = map(_total, zip(*(amounts for _, amounts in marks[1:]), strict=True))
        return [(len(marks) - 1) / seconds, *(total / seconds for total in totals), self._peak or 0.0]

    def _publish(self, engine: Engine[Any, Any]) -> None:
        rates, size = self._own_rates(), get_world_size()
        if size > 1:
            rates = all_reduce(torch.tensor(rates, dtype=torch.float64)).tolist()
            rates[0] /= size
            peers = size / get_data_parallel_size()  # that process the same samples
            rates[1:-1] = [rate / peers for rate in rates[1:-1]]
        engine.state.metrics.update(self._named(rates))
        for one in compilations_since(self._compiled_since):
            self._compiled_since = one.start_time_us + 1
            self._compilations += 1
            self._compilation_seconds += (one.duration_us or 0) / 1e6
        if self._compilations:
            found = {"compilations": self._compilations, "compilation_seconds": self._compilation_seconds}
            engine.state.metrics.update(found)

    def _named(self, rates: list[float]) -> dict[str, float]:
        values = {f"{name}_per_second": rate for name, rate in zip(("steps", *self._amounts), rates, strict=False)}
        if "flops" in self._amounts and self._peak is not None:
            values["mfu"] = values["flops_per_second"] / rates[-1]
        return values


def _total(amounts: Sequence[Any]) -> float:
    """Return the sum of numbers and tensors, with one transfer from the device."""
    tensors = [amount for amount in amounts if isinstance(amount, Tensor)]
    total: float = sum(amount for amount in amounts if not isinstance(amount, Tensor))
    return total + (torch.stack(tensors).sum().item() if tensors else 0.0)


def peak_of(device: torch.device) -> float | None:
    """Return the peak operations per second of a device, or ``None`` with a warning if it is unknown."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    found = next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)
    if found is None:
        warnings.warn(f"peak FLOPS of {name!r} unknown, so the MFU is not computed; pass peak_flops", stacklevel=2)
    return found
