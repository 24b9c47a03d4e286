"""Human-readable log lines about a run, in the style of FAIR's research code."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from camshaft.arguments import check_callable, check_type, identity
from camshaft.distributed import get_rank
from camshaft.engine.engine import Engine, check_engine
from camshaft.engine.events import Events
from camshaft.engine.plan import num_epochs
from camshaft.handlers.base_logger import check_optimizer
from camshaft.handlers.timing import Timer
from camshaft.text import to_str_list

__all__ = ["FBResearchLogger"]

_MEGABYTE = 1024.0 * 1024.0


class FBResearchLogger:
    """Writes a line every few iterations, and at the start and the end of epochs, on rank 0.

    Args:
        logger: the logger to write to, with level INFO.
        delimiter: separates the fields of a line.
        show_output: whether lines show the output of the engine.

    Raises:
        TypeError: ``logger`` is not a Logger.

    Attributes:
        iter_timer: the mean time of an iteration, of the last attached engine.
        data_timer: the mean time of fetching a batch.

    >>> import sys
    >>> from camshaft.utils import setup_logger
    >>> logger = setup_logger("readable", stream=sys.stdout, format="%(message)s", reset=True)
    >>> trainer = Engine(lambda engine, batch: {"loss": 1 / batch})
    >>> FBResearchLogger(logger, show_output=True).attach(trainer, "Train", every=2)
    >>> state = trainer.run([1, 2, 4, 8])  # doctest: +ELLIPSIS
    Train: start epoch [1/1]
    Epoch [1/1]  [2/4]:  ETA: 0:00:...  loss: 0.5000  Iter time: ... s  Data prep time: ... s...
    Epoch [1/1]  [4/4]:  ETA: 0:00:...  loss: 0.1250  Iter time: ... s  Data prep time: ... s...
    Train: Epoch [1/1]  Total time: 0:00:... (... s / it)
    """

    def __init__(self, logger: logging.Logger, delimiter: str = "  ", show_output: bool = False) -> None:
        check_type("logger", logger, (logging.Logger, logging.LoggerAdapter), "a logging.Logger")
        self.logger = logger
        self.delimiter = delimiter
        self.show_output = show_output
        self.iter_timer = self.data_timer = Timer(average=True)

    def attach(
        self,
        engine: Engine[Any, Any],
        name: str,
        every: int = 1,
        output_transform: Callable[[Any], Any] | None = None,
        state_attributes: list[str] | None = None,
        optimizer: Any = None,
    ) -> None:
        """Write lines about an engine.

        Args:
            engine: the engine.
            name: the name of the engine in the lines.
            every: the number of iterations between lines.
            output_transform: called with the engine's output; returns what to show of it.
            state_attributes: attributes of the engine's state to show.
            optimizer: the optimizer whose learning rates to show.

        Raises:
            TypeError: ``output_transform`` is not callable, or ``optimizer`` has no ``param_groups``.
            ValueError: ``every`` is less than 1.
        """
        check_engine("engine", engine)
        check_callable("output_transform", output_transform)
        if optimizer is not None:
            check_optimizer(optimizer)
        each = Events.ITERATION_COMPLETED(every=every)
        if get_rank() != 0:
            return
        timers = self.iter_timer, self.data_timer = Timer(average=True), Timer(average=True)
        shown = output_transform or identity, state_attributes or ()
        for timer, resume, pause in (
            (self.iter_timer, Events.ITERATION_STARTED, Events.ITERATION_COMPLETED),
            (self.data_timer, Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED),
        ):
            timer.attach(engine, Events.EPOCH_STARTED, resume=resume, pause=pause, step=pause, start_paused=True)
        engine.add_event_handler(Events.EPOCH_STARTED, self.log_epoch_started, name)
        engine.add_event_handler(each, self.log_every, optimizer, *shown, timers)
        engine.add_event_handler(Events.EPOCH_COMPLETED, self.log_epoch_completed, name)
        engine.add_event_handler(Events.COMPLETED, self.log_completed, name)

    def log_every(
        self,
        engine: Engine[Any, Any],
        optimizer: Any = None,
        output_transform: Callable[[Any], Any] = identity,
        state_attributes: Sequence[str] = (),
        timers: tuple[Timer, Timer] | None = None,
    ) -> None:
        """Write the line of an iteration; the arguments are those of :meth:`attach`."""
        iter_time, data_time = (timer.value() for timer in timers or (self.iter_timer, self.data_timer))
        state, length, done = engine.state, engine.state.epoch_length, engine.iteration_in_epoch
        fields = [_epoch(engine), f"[{done}/{length}]: " if length else f"[{done}]: "]
        if length:
            fields.append(f"ETA: {_duration(iter_time * (length - done))}")
        groups = [] if optimizer is None else optimizer.param_groups
        for number, group in enumerate(groups):
            fields.append(f"lr{f' [g{number}]' if len(groups) > 1 else ''}: {float(group['lr']):.5f}")
        if self.show_output and state.output is not None:
            fields += to_str_list(output_transform(state.output))
        fields += to_str_list({name: getattr(state, name, None) for name in state_attributes})
        fields += [f"Iter time: {iter_time:.4f} s", f"Data prep time: {data_time:.4f} s"]
        if torch.cuda.is_available():
            fields.append(f"GPU Max Mem: {torch.cuda.max_memory_allocated() / _MEGABYTE:.0f} MB")
        self._write(*(field.rstrip() for field in fields))

    def log_epoch_started(self, engine: Engine[Any, Any], name: str) -> None:
        """Write that an epoch starts."""
        self._write(f"{name}: start {_epoch(engine).lower()}")

    def log_epoch_completed(self, engine: Engine[Any, Any], name: str) -> None:
        """Write how long the epoch took."""
        seconds = engine.state.times["EPOCH_COMPLETED"] or 0.0
        each = seconds / max(engine.iteration_in_epoch, 1)
        self._write(f"{name}: {_epoch(engine)}", f"Total time: {_duration(seconds)} ({each:.4f} s / it)")

    def log_completed(self, engine: Engine[Any, Any], name: str) -> None:
        """Write how long the run took, if it had more than one epoch."""
        if (num_epochs(engine.state) or engine.state.epoch) > 1:
            seconds = engine.state.times["COMPLETED"] or 0.0
            self._write(f"{name}: run completed", f"Total time: {_duration(seconds)}")

    def _write(self, *fields: str) -> None:
        self.logger.info("%s", self.delimiter.join(fields))


def _epoch(engine: Engine[Any, Any]) -> str:
    total = num_epochs(engine.state)
    return f"Epoch [{engine.state.epoch}]" if total is None else f"Epoch [{engine.state.epoch}/{total}]"


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=int(seconds)))
