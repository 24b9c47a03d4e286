"""Learning rate search: a short run with increasing rates, and the rate at which its loss falls fastest."""

from __future__ import annotations

import functools
import logging
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy, deepcopy
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from camshaft.arguments import check_callable, check_choice, check_type, integer, load_optional, number, scalar
from camshaft.distributed import all_reduce, get_world_size
from camshaft.engine.engine import Engine, check_engine
from camshaft.engine.events import Events, Order
from camshaft.engine.loop import Phase
from camshaft.errors import level_of_caller
from camshaft.handlers.param_scheduler import plain, write
from camshaft.seeding import preserved_random_state
from camshaft.text import counted

__all__ = ["FastaiLRFinder"]

_OF_THE_RUN = ("dataloader", "batch", "_output")  # attributes of the state that are large and never changed in place
_NOT_OF_THE_STEP = (*_OF_THE_RUN, "_dispatcher", "_surroundings")  # attributes of an engine
_EMPTY = CellType()
_MOST_ELEMENTS = 1000  # of a container in which objects are looked for; a larger one holds data


class FastaiLRFinder:
    """Search for a learning rate: train briefly with increasing rates, and find where the loss falls fastest.

    A search runs the trainer's step without the handlers that were attached before: no checkpoint, log record,
    average, or schedule is made. Handlers that are attached inside of the ``with`` block run.

    Afterwards everything is as before: the trainer, random number generators (of the data too), the given objects,
    and each object with ``state_dict`` and ``load_state_dict`` that the step refers to: in its closure, in global
    variables that it names, and in attributes of objects found there. What other objects hold is not restored. The
    copies of these states take memory during the search.

    With several ranks the mean of their losses is used. Each iteration reads the loss, which waits for the device.

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
        *,
        run_handlers: bool = False,
    ) -> Iterator[Engine[Any, Any]]:
        """Return a context manager in which a run of the trainer is a search.

        Args:
            trainer: the trainer, not in the middle of a run; the context manager yields it.
            to_save: objects to restore on exit, by name: the optimizer as ``"optimizer"``, and objects that the step
                changes and that are not found, see above.
            output_transform: called with the output of the trainer; returns the loss, a number or a tensor with one
                element.
            num_iter: number of iterations, whatever ``run`` is called with; by default those of the run.
            start_lr: rate of the first iteration, or a list with one per parameter group; by default the current
                rates of the optimizer.
            end_lr: rate of the last iteration, or a list with one per parameter group.
            step_mode: ``"exp"`` multiplies the rate in each iteration, ``"linear"`` adds to it.
            smooth_f: weight of a new loss in the smoothed loss; 0 for no smoothing.
            diverge_th: stop the search when the loss exceeds this multiple of the best loss. For losses below 0 the
                distance from the best loss is the same. With ``math.inf``, the search runs to its end, and losses that
                are not finite are left out; otherwise such a loss ends it.
            run_handlers: whether the handlers that are attached already run too, such as one that makes the optimizer
                step. What they refer to is restored likewise; files and log records remain.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: a number is out of range, or there is no optimizer.
            RuntimeError: the trainer is in the middle of a run.
        """
        check_engine("trainer", trainer)
        _check_objects(to_save)
        check_callable("output_transform", output_transform)
        if num_iter is not None:
            integer("num_iter", num_iter, least=1)
        check_choice("step_mode", step_mode, ("exp", "linear"))
        number("smooth_f", smooth_f, least=0, below=1)
        if diverge_th != math.inf:
            number("diverge_th", diverge_th, least=1)
        bounds = _bounds(to_save["optimizer"].param_groups, start_lr, end_lr, step_mode == "exp")
        rates: list[float] = []
        first, last, diverged = 0, 0, False  # iterations

        def start(engine: Engine[Any, Any]) -> None:
            nonlocal first, last, diverged
            state, target = engine.state, engine.state.max_iters
            if target is None and state.epoch_length is not None and state.max_epochs is not None:
                target = state.epoch_length * state.max_epochs
            if num_iter is not None:
                target = state.iteration + num_iter
            if target is None:
                raise ValueError("num_iter must be given, since the data have no length")
            state.max_epochs, state.max_iters = None, target
            self._rates, self._losses = [], []
            first, last, diverged = state.iteration + 1, target, False
            _restore_later(stack, (), [one for one in _reached([state.dataloader]) if isinstance(one, torch.Generator)])

        def set_rates(engine: Engine[Any, Any]) -> None:
            share = (engine.state.iteration - first) / max(1, last - first)
            if step_mode == "linear":
                rates[:] = [start + share * (end - start) for start, end in bounds]
            else:
                rates[:] = [start * (end / start) ** share for start, end in bounds]
            _write_rates(to_save["optimizer"], rates)

        def record(engine: Engine[Any, Any]) -> None:
            nonlocal diverged
            loss = float(scalar("output_transform", output_transform(engine.state.output)))
            if get_world_size() > 1:
                loss = all_reduce(loss) / get_world_size()
            if self._losses and smooth_f:
                loss = smooth_f * loss + (1 - smooth_f) * self._losses[-1]
            if math.isfinite(loss):
                self._rates.append(list(rates))
                self._losses.append(loss)
            if diverge_th == math.inf:
                return
            best = min(self._losses, default=math.inf)
            if not math.isfinite(loss) or loss > best + (diverge_th - 1) * abs(best):
                diverged = True
                self.logger.info(
                    "The loss diverged after %s; stopping the search", counted(len(self._rates), "iteration")
                )
                engine.terminate(on_all_ranks=True)

        def complete() -> None:
            if not diverged and diverge_th != math.inf:
                text = "the search ended before the loss diverged: a larger end_lr or num_iter may show more"
                warnings.warn(text, stacklevel=level_of_caller())

        if trainer.phase is not Phase.IDLE:
            raise RuntimeError("the trainer is in the middle of a run: search before it, or when it has ended")
        with ExitStack() as stack:  # restores in reverse order, and all of it whatever fails
            _restore_engine_later(stack, trainer)
            _restore_later(stack, to_save.values(), _reached(_parts_of(trainer, run_handlers), trainer))
            stack.enter_context(preserved_random_state())
            if not run_handlers:
                stack.enter_context(trainer.silenced())
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
        pyplot = load_optional("matplotlib.pyplot", extra="plot", needed_by="FastaiLRFinder.plot")
        self._check_has_losses()
        integer("skip_start", skip_start, least=0)
        integer("skip_end", skip_end, least=0)
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
            warnings.warn(text, stacklevel=level_of_caller())
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
        return [number(name, value)] * count
    rates = [number(name, one) for one in value]
    if len(rates) != count:
        raise ValueError(f"{name} must hold one rate for each of {count} parameter groups, got {rates}")
    return rates


def _check_objects(to_save: Any) -> None:
    check_type("to_save", to_save, Mapping, "a mapping")
    for name, one in to_save.items():
        if not all(callable(getattr(one, method, None)) for method in ("state_dict", "load_state_dict")):
            raise TypeError(f"to_save[{name!r}] must have state_dict() and load_state_dict(), got {one!r}")
    if "optimizer" not in to_save:
        raise ValueError(f"to_save must hold 'optimizer', whose rate is searched, got {list(to_save)}")
    check_type("to_save['optimizer']", to_save["optimizer"], Optimizer, "a torch.optim.Optimizer")


# --- what a search changes -------------------------------------------------------------------------------------------


def _restore_later(stack: ExitStack, given: Collection[Any], found: Iterable[Any]) -> None:
    """Make a stack restore objects with a state; those that were found, not given, only warn if they cannot be."""
    memo: dict[int, Any] = {}  # copies memory that several states share only once
    for one in (*given, *found):
        is_given = any(one is other for other in given)
        if isinstance(one, torch.Generator):
            stack.callback(one.set_state, one.get_state())
        elif isinstance(one, Engine):
            if one.phase is Phase.IDLE:  # else it runs this search
                _restore_engine_later(stack, one)
        else:
            with _warning_unless(is_given, one):
                state = deepcopy(one.state_dict(), memo)
                stack.callback(_warning_unless(is_given, one)(one.load_state_dict), state)
        if isinstance(one, nn.Module):  # what its state does not contain
            for module in one.modules():
                stack.callback(setattr, module, "training", module.training)
                for name in module._non_persistent_buffers_set:
                    if (buffer := module._buffers[name]) is not None:
                        stack.callback(module._buffers.__setitem__, name, buffer)
                        stack.callback(buffer.copy_, buffer.clone())
        for group in one.param_groups if isinstance(one, Optimizer) else ():
            for parameter in group["params"]:
                stack.callback(setattr, parameter, "grad", parameter.grad)
                parameter.grad = None


@contextmanager
def _warning_unless(is_given: bool, one: Any) -> Iterator[None]:
    """Replace an error by a warning that an object is not restored, unless the user has requested that."""
    try:
        yield
    except Exception as error:
        if is_given:
            raise
        warnings.warn(f"{type(one).__name__} is not restored after the search: {error}", stacklevel=2)


def _restore_engine_later(stack: ExitStack, engine: Engine[Any, Any]) -> None:
    """Make a stack restore all attributes of an engine and of its state: no state dict holds them all."""
    own = {name: copy(value) if isinstance(value, (dict, list)) else value for name, value in vars(engine).items()}
    of_state = {
        name: deepcopy(value) if isinstance(value, (dict, list)) and name not in _OF_THE_RUN else value
        for name, value in vars(engine.state).items()
    }

    def restore() -> None:
        for target, contents in ((engine, own), (own["_state"], of_state)):
            vars(target).clear()
            vars(target).update(contents)

    stack.callback(restore)


def _reached(values: Iterable[Any], without: Engine[Any, Any] | None = None) -> list[Any]:
    """Return the engines, generators and objects with a state that code or objects refer to, directly or not."""
    found: list[Any] = []
    seen = {id(without): without}  # references, or another object may get the id
    waiting = list(values)
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, (ModuleType, type, str, bytes, torch.Tensor)):
            continue
        seen[id(one)] = one
        has_state = all(callable(getattr(type(one), name, None)) for name in ("state_dict", "load_state_dict"))
        if isinstance(one, torch.Generator) or (has_state and not isinstance(one, DataLoader)):
            found.append(one)
        waiting += _parts_of(one)
    return found


def _parts_of(value: Any, with_handlers: bool = True) -> list[Any]:
    """Return what a function, a container or another object refers to."""
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, DataLoader):
        return [value.sampler, value.batch_sampler, value.generator]
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY]
        is_of_library = str(value.__module__).partition(".")[0] in ("torch", "camshaft")
        names = () if is_of_library else _names_in(value.__code__)
        known = [value.__globals__[name] for name in names if name in value.__globals__]
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return [*cells, *known, *defaults, *vars(value).values()]
    if isinstance(value, (list, tuple, set, dict)):
        elements = value.values() if isinstance(value, dict) else value
        return list(elements) if len(value) <= _MOST_ELEMENTS else []
    attributes = vars(value) if hasattr(value, "__dict__") else {}
    if isinstance(value, nn.Module):  # its state is that of its parts
        return [one for name, one in attributes.items() if name not in ("_modules", "_parameters", "_buffers")]
    if isinstance(value, Engine):
        handlers = [one.invoke for one in value.registrations()] if with_handlers else []
        attributes = {**attributes, **vars(value.state)}
        return [*handlers, *(one for name, one in attributes.items() if name not in _NOT_OF_THE_STEP)]
    return list(attributes.values())


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names of global variables and attributes in a function and the functions inside of it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
