"""A run with growing learning rates, until the loss diverges; and what it says about the rate to train with."""

from __future__ import annotations

import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from numbers import Real
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from camshaft.distributed import all_reduce, get_world_size
from camshaft.engine.engine import Engine
from camshaft.engine.event import Events
from camshaft.handlers.lr_finder.drawing import draw
from camshaft.handlers.lr_finder.restoring import restored
from camshaft.handlers.lr_finder.sweep import Sweep, checked_number, checked_objects, present_rates, rates_of
from camshaft.handlers.param_scheduler.param import write
from camshaft.handlers.utils import check_callable, check_engine, load_optional

_LAST = sys.maxsize  # of all handlers of an event


def _same(output: Any) -> Any:
    return output


class FastaiLRFinder:
    """Searches a learning rate: trains for a while with rates that grow, and looks at where the loss falls fastest.

    Afterwards everything is as it was: the objects given, the trainer, and the generators of random numbers. Over
    several ranks the mean of their losses counts. The loss is read in each iteration, which waits for the device.

    >>> import torch
    >>> from camshaft.engine import create_supervised_trainer
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    >>> trainer = create_supervised_trainer(model, optimizer, torch.nn.MSELoss())
    >>> data = [(torch.ones(4, 1), torch.zeros(4, 1))] * 50
    >>> finder = FastaiLRFinder()
    >>> with finder.attach(trainer, {"model": model, "optimizer": optimizer}) as searching:
    ...     state = searching.run(data)
    >>> 1e-3 < finder.lr_suggestion() < 1.0, optimizer.param_groups[0]["lr"]
    (True, 0.001)
    >>> finder.apply_suggested_lr(optimizer)
    """

    def __init__(self) -> None:
        self.logger = logging.getLogger(f"camshaft.handlers.lr_finder.{type(self).__name__}")
        self._rates: list[list[float]] = []
        self._rates_now: list[float] = []
        self._losses: list[float] = []
        self._best = math.inf
        self._num_iter = 0
        self._has_run = False
        self._diverged = False

    def attach(
        self,
        trainer: Engine[Any, Any],
        to_save: Mapping[str, Any],
        output_transform: Callable[[Any], Any] = _same,
        num_iter: int | None = None,
        start_lr: float | list[float] | None = None,
        end_lr: float | list[float] = 10.0,
        step_mode: str = "exp",
        smooth_f: float = 0.05,
        diverge_th: float = 5.0,
    ) -> AbstractContextManager[Engine[Any, Any]]:
        """Make a ``with`` block in which a run of the trainer is a search.

        Args:
            trainer: the trainer, not in the middle of a run; what the block is given.
            to_save: what the run changes, by name, to be restored after the block: the optimizer as ``"optimizer"``,
                the model, schedulers.
            output_transform: called with the output of the trainer, gives the loss: a number or a tensor with one
                element.
            num_iter: iterations of the search, whatever ``run`` is asked for; by default as many as that.
            start_lr: the rate of the first iteration, or one for each parameter group; by default those of the
                optimizer.
            end_lr: the rate of the last iteration, or one for each parameter group.
            step_mode: ``"exp"`` multiplies the rate in each iteration, ``"linear"`` adds to it.
            smooth_f: the weight of a new loss in the smoothed one; 0 for no smoothing.
            diverge_th: the search ends when the loss is so many times the best one. For losses below 0 this is the
                same distance beyond the best one.

        Raises:
            TypeError: an argument is of another kind.
            ValueError: a number is out of range, or there is no optimizer.
            RuntimeError: on entry, if the trainer is in the middle of a run.
        """
        check_engine("trainer", trainer)
        objects = checked_objects(to_save)
        check_callable("output_transform", output_transform)
        optimizer: Optimizer = objects["optimizer"]
        sweep = Sweep(
            start=present_rates(optimizer) if start_lr is None else rates_of("start_lr", start_lr, optimizer),
            end=rates_of("end_lr", end_lr, optimizer),
            num_iter=num_iter,
            step_mode=step_mode,
            smooth_f=checked_number("smooth_f", smooth_f),
            diverge_th=checked_number("diverge_th", diverge_th),
        )
        return self._searching(trainer, objects, output_transform, sweep)

    @contextmanager
    def _searching(
        self,
        trainer: Engine[Any, Any],
        objects: Mapping[str, Any],
        output_transform: Callable[[Any], Any],
        sweep: Sweep,
    ) -> Iterator[Engine[Any, Any]]:
        optimizer = objects["optimizer"]
        add = trainer.add_event_handler
        with ExitStack() as stack:
            stack.enter_context(restored(trainer, objects))
            stack.enter_context(add(Events.STARTED, self._start, sweep, order=_LAST))
            # after schedulers, so that this is the rate of the iteration
            stack.enter_context(add(Events.ITERATION_STARTED, self._set_rates, sweep, optimizer, order=_LAST))
            stack.enter_context(add(Events.ITERATION_COMPLETED, self._record, sweep, output_transform))
            stack.enter_context(add(Events.COMPLETED, self._complete))
            yield trainer

    def _start(self, engine: Engine[Any, Any], sweep: Sweep) -> None:
        state = engine.state
        count = sweep.num_iter
        if count is None:
            target = state.max_iters
            if target is None and state.epoch_length is not None and state.max_epochs is not None:
                target = state.epoch_length * state.max_epochs
            if target is None:
                raise ValueError("num_iter must be given, since the data do not tell how long an epoch is")
            count = target - state.iteration
        state.max_epochs, state.max_iters = None, state.iteration + count
        self._rates, self._losses, self._best = [], [], math.inf
        self._num_iter, self._has_run, self._diverged = count, True, False

    def _set_rates(self, engine: Engine[Any, Any], sweep: Sweep, optimizer: Optimizer) -> None:
        rates = sweep.rates(len(self._losses), self._num_iter)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            write(group, "lr", rate)
        self._rates_now = rates

    def _record(self, engine: Engine[Any, Any], sweep: Sweep, output_transform: Callable[[Any], Any]) -> None:
        loss = _loss(output_transform(engine.state.output))
        if get_world_size() > 1:
            loss = all_reduce(loss) / get_world_size()
        if self._losses and sweep.smooth_f:
            loss = sweep.smooth_f * loss + (1 - sweep.smooth_f) * self._losses[-1]
        is_finite = math.isfinite(loss)
        if is_finite:
            self._rates.append(self._rates_now)
            self._losses.append(loss)
            self._best = min(self._best, loss)
        if not is_finite or loss > self._best + (sweep.diverge_th - 1) * abs(self._best):
            self._diverged = True
            self.logger.info("The loss has diverged after %d iterations: the search is over", len(self._rates))
            engine.terminate()

    def _complete(self) -> None:
        if not self._diverged:
            warnings.warn(
                "the search ended before the loss diverged: a larger end_lr or num_iter may show more", stacklevel=2
            )

    def get_results(self) -> dict[str, list[Any]]:
        """Give the rates and the smoothed losses of the search: ``{"lr": [...], "loss": [...]}``.

        With several parameter groups the rates of an iteration are a list.
        """
        return {"lr": [_single(rates) for rates in self._rates], "loss": list(self._losses)}

    def lr_suggestion(self) -> float | list[float]:
        """Give the rate at which the loss fell fastest on its way to the minimum; a list with several groups.

        Raises:
            RuntimeError: there was no search, or it was too short.
        """
        return _single(self._rates[self._steepest()])

    def apply_suggested_lr(self, optimizer: Optimizer) -> None:
        """Give an optimizer the suggested rates.

        Args:
            optimizer: with as many parameter groups as the one of the search.

        Raises:
            RuntimeError: it has another number, or there is no suggestion.
        """
        rates = self._rates[self._steepest()]
        if len(optimizer.param_groups) != len(rates):
            raise RuntimeError(
                f"the optimizer must have {len(rates)} parameter groups, as that of the search, "
                f"got {len(optimizer.param_groups)}"
            )
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            write(group, "lr", rate)

    def plot(
        self,
        skip_start: int = 10,
        skip_end: int = 5,
        log_lr: bool = True,
        display_suggestion: bool = True,
        ax: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Draw the losses over the rates with matplotlib.

        Args:
            skip_start: points to leave out at the beginning.
            skip_end: points to leave out at the end.
            log_lr: a logarithmic axis for the rates.
            display_suggestion: mark the suggested rate.
            ax: axes to draw into; by default new ones.
            kwargs: for ``matplotlib.pyplot.subplots``, which makes them.

        Returns:
            The axes.

        Raises:
            RuntimeError: there was no search.
            ValueError: a number is negative.
            ModuleNotFoundError: matplotlib is not installed.
        """
        pyplot = load_optional("matplotlib.pyplot", extra="plot", needed_by="FastaiLRFinder.plot")
        self._check_has_run()
        suggestion = self._steepest() if display_suggestion else None
        return draw(pyplot, self.get_results(), suggestion, skip_start, skip_end, log_lr, ax, **kwargs)

    def _steepest(self) -> int:
        """Find the point before the minimum with the steepest descent, from the one before to the one after it."""
        self._check_has_run()
        losses = self._losses[: self._losses.index(min(self._losses)) + 1] if self._losses else []
        if len(losses) < 3:
            raise RuntimeError(
                f"there are {len(losses)} points up to the smallest loss, too few to suggest a rate: start with a "
                "smaller start_lr, or search for longer"
            )
        return min(range(1, len(losses) - 1), key=lambda index: losses[index + 1] - losses[index - 1])

    def _check_has_run(self) -> None:
        if not self._has_run:
            raise RuntimeError("there was no search yet: run the trainer in a block `with finder.attach(...)`")


def _single(rates: list[float]) -> float | list[float]:
    return rates[0] if len(rates) == 1 else list(rates)


def _loss(value: Any) -> float:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"output_transform must give one loss, got a tensor of shape {tuple(value.shape)}")
        return float(value.item())
    if not isinstance(value, Real):
        raise TypeError(f"output_transform must give a number or a tensor, got {value!r} of {type(value).__name__}")
    return float(value)
