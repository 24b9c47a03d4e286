"""Learning rate search: a short run with increasing rates, and the rate at which its loss falls fastest."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy, deepcopy
from typing import Any

from torch.optim import Optimizer

from camshaft.distributed import all_reduce, get_world_size
from camshaft.engine.engine import Engine
from camshaft.engine.events import Events, Order
from camshaft.handlers import utils
from camshaft.handlers.param_scheduler import plain, write
from camshaft.seeding import preserved_random_state
from camshaft.text import counted

__all__ = ["FastaiLRFinder"]

_OF_THE_RUN = ("dataloader", "batch", "_output")  # attributes of the state that are large and never changed in place


class FastaiLRFinder:
    """Search for a learning rate: train briefly with increasing rates, and find where the loss falls fastest.

    Afterwards the given objects, the trainer, and the random number generators are restored. With several ranks the
    mean of their losses is used. Each iteration reads the loss, which waits for the device.

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
        self._losses: list[float] = []

    @contextmanager
    def attach(
        self,
        trainer: Engine[Any, Any],
        to_save: Mapping[str, Any],
        output_transform: Callable[[Any], Any] = lambda output: output,
        num_iter: int | None = None,
        start_lr: float | list[float] | None = None,
        end_lr: float | list[float] = 10.0,
        step_mode: str = "exp",
        smooth_f: float = 0.05,
        diverge_th: float = 5.0,
    ) -> Iterator[Engine[Any, Any]]:
        """Return a context manager in which a run of the trainer is a search.

        Args:
            trainer: the trainer, not in the middle of a run; the context manager yields it.
            to_save: objects that the run changes, by name, to restore on exit: the optimizer as ``"optimizer"``, the
                model, schedulers.
            output_transform: called with the output of the trainer; returns the loss, a number or a tensor with one
                element.
            num_iter: number of iterations, whatever ``run`` is called with; by default those of the run.
            start_lr: rate of the first iteration, or a list with one per parameter group; by default the current
                rates of the optimizer.
            end_lr: rate of the last iteration, or a list with one per parameter group.
            step_mode: ``"exp"`` multiplies the rate in each iteration, ``"linear"`` adds to it.
            smooth_f: weight of a new loss in the smoothed loss; 0 for no smoothing.
            diverge_th: stop the search when the loss exceeds this multiple of the best loss. For losses below 0 the
                distance from the best loss is the same.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: a number is out of range, or there is no optimizer.
            RuntimeError: the trainer is in the middle of a run.
        """
        utils.check_engine("trainer", trainer)
        _check_objects(to_save)
        utils.check_callable("output_transform", output_transform)
        if num_iter is not None:
            utils.integer("num_iter", num_iter, least=1)
        utils.check_choice("step_mode", step_mode, ("exp", "linear"))
        utils.number("smooth_f", smooth_f, least=0, below=1)
        utils.number("diverge_th", diverge_th, least=1)
        bounds = _bounds(to_save["optimizer"].param_groups, start_lr, end_lr, step_mode == "exp")
        count, diverged = 0, False

        def start(engine: Engine[Any, Any]) -> None:
            nonlocal count, diverged
            state, target = engine.state, engine.state.max_iters
            if target is None and state.epoch_length is not None and state.max_epochs is not None:
                target = state.epoch_length * state.max_epochs
            if num_iter is not None:
                target = state.iteration + num_iter
            if target is None:
                raise ValueError("num_iter must be given, since the data have no length")
            state.max_epochs, state.max_iters = None, target
            self._rates, self._losses = [], []
            count, diverged = target - state.iteration, False

        def current_rates() -> list[float]:
            share = len(self._losses) / max(1, count - 1)
            if step_mode == "linear":
                return [start + share * (end - start) for start, end in bounds]
            return [start * (end / start) ** share for start, end in bounds]

        def set_rates() -> None:
            _write_rates(to_save["optimizer"], current_rates())

        def record(engine: Engine[Any, Any]) -> None:
            nonlocal diverged
            loss = float(utils.scalar("output_transform", output_transform(engine.state.output)))
            if get_world_size() > 1:
                loss = all_reduce(loss) / get_world_size()
            if self._losses and smooth_f:
                loss = smooth_f * loss + (1 - smooth_f) * self._losses[-1]
            if math.isfinite(loss):
                self._rates.append(current_rates())
                self._losses.append(loss)
            best = min(self._losses, default=math.inf)
            if not math.isfinite(loss) or loss > best + (diverge_th - 1) * abs(best):
                diverged = True
                self.logger.info(
                    "The loss diverged after %s; stopping the search", counted(len(self._rates), "iteration")
                )
                engine._terminate_together()

        def complete() -> None:
            if not diverged:
                text = "the search ended before the loss diverged: a larger end_lr or num_iter may show more"
                warnings.warn(text, stacklevel=2)

        with _restored(trainer, to_save), ExitStack() as stack:
            for event, handler, order in (
                (Events.STARTED, start, Order.LAST),
                (Events.ITERATION_STARTED, set_rates, Order.LAST),  # after schedulers, whose rates it replaces
                (Events.ITERATION_COMPLETED, record, Order.DEFAULT),
                (Events.COMPLETED, complete, Order.DEFAULT),
            ):
                stack.enter_context(trainer.add_event_handler(event, handler, order=order))
            yield trainer

    def get_results(self) -> dict[str, list[Any]]:
        """Return the rates and the smoothed losses of the search as ``{"lr": [...], "loss": [...]}``.

        With several parameter groups the rates of an iteration are a list.
        """
        return {"lr": [_single(rates) for rates in self._rates], "loss": list(self._losses)}

    def lr_suggestion(self) -> float | list[float]:
        """Return the rate of the steepest descent before the minimum of the loss, or a list with one per group.

        Raises:
            RuntimeError: there was no search, or it was too short.
        """
        return _single(self._rates[self._steepest()])

    def apply_suggested_lr(self, optimizer: Optimizer) -> None:
        """Set the rates of an optimizer to the suggested ones.

        Args:
            optimizer: an optimizer with as many parameter groups as the one of the search.

        Raises:
            RuntimeError: the number of groups differs, or there is no suggestion.
        """
        rates = self._rates[self._steepest()]
        if len(optimizer.param_groups) != len(rates):
            count = len(optimizer.param_groups)
            raise RuntimeError(f"the optimizer must have {len(rates)} parameter groups, as in the search, got {count}")
        _write_rates(optimizer, rates)

    def plot(
        self,
        skip_start: int = 10,
        skip_end: int = 5,
        log_lr: bool = True,
        display_suggestion: bool = True,
        ax: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Plot the losses over the rates with matplotlib, a line for each parameter group.

        Args:
            skip_start: number of points to omit at the start.
            skip_end: number of points to omit at the end.
            log_lr: whether the axis of the rates is logarithmic.
            display_suggestion: whether to mark the suggested rate.
            ax: axes to draw into; new ones by default.
            kwargs: arguments of ``matplotlib.pyplot.subplots``, which makes the axes.

        Returns:
            The axes.

        Raises:
            RuntimeError: there was no search.
            ValueError: ``skip_start`` or ``skip_end`` is negative.
            ModuleNotFoundError: matplotlib is not installed.
        """
        pyplot = utils.load_optional("matplotlib.pyplot", extra="plot", needed_by="FastaiLRFinder.plot")
        self._check_has_losses()
        utils.integer("skip_start", skip_start, least=0)
        utils.integer("skip_end", skip_end, least=0)
        suggestion = self._steepest() if display_suggestion else None
        if ax is None:
            _, ax = pyplot.subplots(**kwargs)
        groups, losses = list(zip(*self._rates, strict=True)), self._losses
        shown = slice(skip_start, max(skip_start, len(losses) - skip_end))
        for index, rates in enumerate(groups):
            label = f"group {index}" if len(groups) > 1 else None
            (line,) = ax.plot(rates[shown], losses[shown], label=label)
            if suggestion is not None:
                rate, color = rates[suggestion], line.get_color()
                ax.scatter([rate], [losses[suggestion]], color=color, zorder=3, label=f"suggested: {rate:.3g}")
        if suggestion is not None and suggestion < skip_start:
            text = f"the suggested rate, that of point {suggestion}, is not drawn: choose a smaller skip_start"
            warnings.warn(text, stacklevel=2)
        if log_lr:
            ax.set_xscale("log")
        ax.set_xlabel("Learning rate")
        ax.set_ylabel("Loss")
        if suggestion is not None or len(groups) > 1:
            ax.legend()
        return ax

    def _steepest(self) -> int:
        """Return the point before the minimum with the steepest descent, by central differences."""
        self._check_has_losses()
        losses = self._losses[: self._losses.index(min(self._losses)) + 1]
        if len(losses) < 3:
            raise RuntimeError(f"too few points before the smallest loss, {len(losses)}: use a smaller start_lr")
        return min(range(1, len(losses) - 1), key=lambda index: losses[index + 1] - losses[index - 1])

    def _check_has_losses(self) -> None:
        if not self._losses:
            raise RuntimeError("there was no search with finite losses: run the trainer in `with finder.attach(...)`")


def _single(rates: list[float]) -> float | list[float]:
    return rates[0] if len(rates) == 1 else list(rates)


def _write_rates(optimizer: Any, rates: list[float]) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        write(group, "lr", rate)


def _bounds(groups: list[Any], start_lr: Any, end_lr: Any, is_factor: bool) -> list[tuple[float, float]]:
    """Return the first and the last rate of each parameter group."""
    current = [float(plain(group["lr"])) for group in groups]
    starts = current if start_lr is None else _one_per_group("start_lr", start_lr, len(groups))
    bounds = list(zip(starts, _one_per_group("end_lr", end_lr, len(groups)), strict=True))
    for start, end in bounds:
        if not start < end:
            raise ValueError(f"start_lr must be below end_lr, got {start} and {end}")
        if is_factor and start <= 0:
            raise ValueError(f"start_lr must be above 0 for step_mode='exp', got {start}")
    return bounds


def _one_per_group(name: str, value: Any, count: int) -> list[float]:
    """Return one rate for each parameter group, given a number or a list of numbers."""
    if not isinstance(value, list):
        return [utils.number(name, value)] * count
    rates = [utils.number(name, one) for one in value]
    if len(rates) != count:
        raise ValueError(f"{name} must hold one rate for each of {count} parameter groups, got {rates}")
    return rates


def _check_objects(to_save: Any) -> None:
    utils.check_type("to_save", to_save, Mapping, "a mapping")
    for name, one in to_save.items():
        if not all(callable(getattr(one, method, None)) for method in ("state_dict", "load_state_dict")):
            raise TypeError(f"to_save[{name!r}] must have state_dict() and load_state_dict(), got {one!r}")
    if "optimizer" not in to_save:
        raise ValueError(f"to_save must hold 'optimizer', whose rate is searched, got {list(to_save)}")
    utils.check_type("to_save['optimizer']", to_save["optimizer"], Optimizer, "a torch.optim.Optimizer")


@contextmanager
def _restored(engine: Engine[Any, Any], objects: Mapping[str, Any]) -> Iterator[None]:
    """Restore objects, an engine and the random states on exit, also after an error.

    All attributes of the engine and of its state are restored: no state dict holds them all.
    """
    if engine._run is not None:
        raise RuntimeError("the trainer is in the middle of a run: search before it, or when it has ended")
    own = {name: copy(value) if isinstance(value, (dict, list)) else value for name, value in vars(engine).items()}
    of_state = {
        name: deepcopy(value) if isinstance(value, (dict, list)) and name not in _OF_THE_RUN else value
        for name, value in vars(engine.state).items()
    }

    def restore() -> None:
        for target, contents in ((engine, own), (own["_state"], of_state)):
            vars(target).clear()
            vars(target).update(contents)

    with ExitStack() as stack:  # restores in reverse order, and all of it whatever fails
        stack.callback(restore)
        for one in objects.values():
            stack.callback(one.load_state_dict, deepcopy(one.state_dict()))
        stack.enter_context(preserved_random_state())
        yield
