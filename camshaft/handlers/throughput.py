"""How much a run gets done in a second, and how much of what the devices could do that is."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from camshaft.distributed import all_reduce, device, get_world_size
from camshaft.engine.engine import Engine
from camshaft.engine.events import EventLike, Events, RemovableEventHandle
from camshaft.handlers.flops import FlopCount, peak_of
from camshaft.handlers.utils import check_engine, joined

__all__ = ["Throughput"]

Amount = float | Callable[[Any], Any] | None
"""So much in each iteration, or a function of the batch that tells how much it is."""

_FIRST, _LAST = -(2**41), 2**41  # of the handlers of an event, but within those of the profilers of handlers
_EARLY = -1  # before loggers


Mark = tuple[float, Any, Any, Any]
"""The end of an iteration: when it was, and how many samples, tokens and operations there were in it."""


class Throughput:
    """Measures steps, samples and tokens per second, and the model FLOP utilisation (MFU), over the last iterations.

    The results are in ``engine.state.metrics``, where loggers and progress bars find them: ``steps_per_second``,
    ``samples_per_second``, ``tokens_per_second``, ``flops_per_second`` and ``mfu``, as far as they are asked for. They
    are those of all ranks together, computed at the events given to :meth:`attach`, and NaN before that. In between, an
    iteration costs a look at the clock and the functions that are given.

    The time counts from the end of one iteration to that of another, less what the handlers of epochs take, and what is
    between :meth:`pause` and :meth:`resume`. The clock is that of the host, which waits for no device: over a
    window it runs as fast as the device, which cannot fall behind for ever.

    Args:
        samples: in the batch of this rank: a number, or a function of the batch. A tensor that it gives is read
            when results are computed, not before.
        tokens: likewise.
        flops: floating point operations of this rank in an iteration, forward, backward and all: likewise, or
            ``"count"`` to have torch count them in the first iteration of a run, which cannot see into compiled code.
        peak_flops: what one device could do in a second. By default that of its name, in dense bfloat16, in the table
            of :mod:`camshaft.handlers.flops`.
        window: the number of iterations to look back.

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
        flops: Amount | str = None,
        peak_flops: float | None = None,
        window: int = 100,
    ) -> None:
        self._samples, self._tokens = _amount("samples", samples), _amount("tokens", tokens)
        self._flops = FlopCount() if flops == "count" else _amount("flops", flops)
        if peak_flops is not None and not 0 < peak_flops < math.inf:
            raise ValueError(f"peak_flops must be above 0, got {peak_flops!r}")
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise ValueError(f"window must be an integer above 0, got {window!r}")
        self._peak = peak_flops
        self._knows_device = peak_flops is not None
        self._window = window
        self._marks: deque[Mark] = deque(maxlen=window + 1)
        self._idle = self._paused_at = 0.0
        self._pauses = 0  # more than one, if a pause is within another

    def attach(self, engine: Engine[Any, Any], event_name: EventLike | None = None) -> RemovableEventHandle:
        """Measure the runs of an engine.

        Args:
            engine: the engine.
            event_name: when to compute the results, on all ranks at the same time, before the other handlers. By
                default once in a window, and at the end of epochs.

        Returns:
            A handle that ends that.
        """
        check_engine("engine", engine)
        if event_name is None:
            event_name = Events.ITERATION_COMPLETED(every=self._window) | Events.EPOCH_COMPLETED
        handles = [
            engine.add_event_handler(Events.STARTED, self._start, order=_FIRST),
            engine.add_event_handler(Events.EPOCH_STARTED, self._go_on, order=_LAST),
            engine.add_event_handler(Events.ITERATION_COMPLETED, self._mark, order=_FIRST),
            engine.add_event_handler(Events.EPOCH_COMPLETED, self.pause, order=_FIRST),
            engine.add_event_handler(Events.INTERRUPT, self._forget, order=_LAST),
            engine.add_event_handler(event_name, self._publish, order=_EARLY),
        ]
        if isinstance(self._flops, FlopCount):
            handles += self._flops.attach(engine)
        return joined(handles, event_name, self._publish, engine)

    def rates(self) -> dict[str, float]:
        """Give what this rank alone does now; NaN until there are two iterations."""
        return self._named(self._own_rates())

    def pause(self) -> None:
        """Stop the clock: what comes does not count. It may be a handler, of ``STARTED`` of an evaluator, say."""
        if self._pauses == 0:
            self._paused_at = perf_counter()
        self._pauses += 1

    def resume(self) -> None:
        """Let the clock go on, if this ends the outermost pause."""
        if self._pauses > 0:
            self._pauses -= 1
            if self._pauses == 0:
                self._idle += perf_counter() - self._paused_at

    def _start(self, engine: Engine[Any, Any]) -> None:
        self._forget()
        self._pauses = 0
        if self._flops is not None and not self._knows_device:
            self._peak = peak_of(device())
        self._knows_device = True
        engine.state.metrics.update(self.rates())

    def _forget(self) -> None:
        """Begin another window: nobody knows how long a run is interrupted."""
        self._marks.clear()

    def _go_on(self) -> None:
        """End all pauses with the handlers of an epoch's end and of the next one's start."""
        self._pauses = min(self._pauses, 1)
        self.resume()

    def _mark(self, engine: Engine[Any, Any]) -> None:
        now = self._paused_at if self._pauses else perf_counter()
        batch = engine.state.batch
        samples, tokens, flops = self._samples, self._tokens, self._flops
        self._marks.append(
            (
                now - self._idle,
                samples(batch) if callable(samples) else samples,
                tokens(batch) if callable(tokens) else tokens,
                flops(batch) if callable(flops) else flops,
            )
        )

    def _own_rates(self) -> list[float]:
        """Give steps, samples, tokens, operations per second, and the peak: what adds up over ranks."""
        marks = list(self._marks)
        seconds = marks[-1][0] - marks[0][0] if marks else 0.0
        if seconds <= 0:
            return [math.nan] * 5
        _, samples, tokens, flops = zip(*marks[1:], strict=True)
        return [
            (len(marks) - 1) / seconds,
            *(_total(amounts) / seconds for amounts in (samples, tokens, flops)),
            self._peak or 0.0,
        ]

    def _publish(self, engine: Engine[Any, Any]) -> None:
        rates, size = self._own_rates(), get_world_size()
        if size > 1:
            rates = all_reduce(torch.tensor(rates, dtype=torch.float64)).tolist()
            rates[0] /= size
        engine.state.metrics.update(self._named(rates))

    def _named(self, rates: list[float]) -> dict[str, float]:
        """Name the rates that are asked for."""
        steps, samples, tokens, flops, peak = rates
        values = {"steps_per_second": steps}
        if self._samples is not None:
            values["samples_per_second"] = samples
        if self._tokens is not None:
            values["tokens_per_second"] = tokens
        if self._flops is not None:
            values["flops_per_second"] = flops
            if self._peak is not None:
                values["mfu"] = flops / peak
        return values


def _total(amounts: Sequence[Any]) -> float:
    """Add up numbers, and tensors with one transfer from the device."""
    tensors = [amount for amount in amounts if isinstance(amount, Tensor)]
    total: float = sum(amount for amount in amounts if amount is not None and not isinstance(amount, Tensor))
    return total + (torch.stack(tensors).sum().item() if tensors else 0.0)


def _amount(name: str, amount: Any) -> Any:
    if amount is None or callable(amount):
        return amount
    if isinstance(amount, bool) or not isinstance(amount, (int, float)):
        raise TypeError(f"{name} must be a number, or a function of the batch, got {amount!r}")
    if not 0 < amount < math.inf:
        raise ValueError(f"{name} must be above 0, got {amount!r}")
    return amount
