"""What handlers share: global steps of another engine, argument checks, optional libraries, and joined handles."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from numbers import Integral, Real
from typing import Any

from torch import Tensor

from camshaft.dtensors import full_value
from camshaft.engine.engine import Engine
from camshaft.engine.events import Events, RemovableEventHandle, translated
from camshaft.engine.progress import Origin, derived_max_epochs
from camshaft.engine.state import State
from camshaft.errors import check_takes, described
from camshaft.errors import check_type as check_type

__all__ = ["global_step_from_engine"]


def global_step_from_engine(
    engine: Engine[Any, Any], custom_event_name: Any = None, fallback_attr: str = "epoch"
) -> Callable[[Any, Any], int]:
    """Return a ``global_step_transform`` that reads the step from another engine.

    Args:
        engine: the engine whose counters are the steps, usually the trainer.
        custom_event_name: the event whose count is the step; by default the event that the handler is attached to.
        fallback_attr: the attribute of ``engine.state`` to use for events without a counter.

    Returns:
        A function of an engine, which it ignores, and an event.

    >>> from camshaft.engine import Events
    >>> trainer = Engine(lambda engine, batch: None)
    >>> step = global_step_from_engine(trainer)
    >>> state = trainer.run(range(10), max_epochs=2)
    >>> (
    ...     step(None, Events.COMPLETED),
    ...     step(None, Events.ITERATION_COMPLETED),
    ...     step(None, Events.TERMINATE),
    ... )
    (2, 20, 2)
    """
    check_engine("engine", engine)
    return StepOf(engine, custom_event_name, fallback_attr)


@dataclass(frozen=True)
class StepOf:
    """The steps of another engine, which loggers recognize in a handler."""

    engine: Engine[Any, Any]
    event: Any
    fallback_attr: str

    def __call__(self, _: Any, event_name: Any) -> int:
        """Return the count of the engine for an event."""
        state = self.engine.state
        event = translated(event_name if self.event is None else self.event)
        count: int = getattr(state, state.event_to_attr.get(event, self.fallback_attr))
        return count


def resumes_epoch(engine: Engine[Any, Any]) -> bool:
    """Return whether ``EPOCH_STARTED`` fires for an epoch that a resumed run continues, which is not a new epoch."""
    return engine.last_event_name is Events.EPOCH_STARTED and engine.iteration_in_epoch > 0


def repeats_iteration(engine: Engine[Any, Any]) -> bool:
    """Return whether a run resumed, from a loaded state or after an error, in the present iteration."""
    progress = engine._progress
    is_resumed = progress.origin in (Origin.LOADED, Origin.FAILED)
    return is_resumed and engine._state.iteration == progress.iteration + 1


def check_callable(name: str, value: Any, arguments: str | None = None) -> None:
    """Raise an error unless ``value`` is ``None`` or callable, with arguments if they are given as in "(engine)"."""
    if value is not None and arguments is not None:
        check_takes(name, value, arguments)
    elif value is not None and not callable(value):
        raise TypeError(f"{name} must be callable, got {described(value)}")


def check_engine(name: str, value: Any) -> None:
    """Raise ``TypeError`` unless ``value`` is an engine of this library."""
    check_type(name, value, Engine, "an Engine")


def check_text(name: str, value: Any, optional: bool = False) -> None:
    """Raise ``TypeError`` unless ``value`` is a string, or ``None`` where that is allowed."""
    if not (isinstance(value, str) or (optional and value is None)):
        raise TypeError(f"{name} must be a str, got {described(value)}")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise ``ValueError`` unless ``value`` is one of the strings.

    >>> check_choice("mode", "best", ("max", "min"))
    Traceback (most recent call last):
    ValueError: mode must be 'max' or 'min', got 'best'
    """
    if value not in choices:
        *others, last = map(repr, choices)
        raise ValueError(f"{name} must be {', '.join(others)} or {last}, got {value!r}")


def scalar(name: str, value: Any) -> Tensor | float:
    """Return a number as a float, or the element of a tensor, detached, as a 0-d tensor on its device.

    For a DTensor, this is the element of the full tensor, and all ranks must call this.

    >>> import torch
    >>> scalar("output_transform", torch.tensor([0.5])), scalar("output_transform", 2)
    (tensor(0.5000), 2.0)
    """
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"{name} must return a number, or a tensor with one element, got one of shape {tuple(value.shape)}"
            )
        element: Tensor = full_value(value.detach()).reshape(())
        return element
    if type(value) is float:  # saves the look-up of an abstract class
        return value
    if not isinstance(value, Real):
        raise TypeError(f"{name} must return a number, or a tensor with one element, got {described(value)}")
    return float(value)


def check_is_no_counter(argument: str, name: str, state: State[Any, Any]) -> None:
    """Raise ``ValueError`` if ``name`` is an attribute that the engine uses as a counter.

    >>> check_is_no_counter("param_name", "epoch", State())
    Traceback (most recent call last):
    ValueError: param_name must not be 'epoch', which is a counter of the engine; choose another name
    """
    if name in state.event_to_attr.values():
        raise ValueError(f"{argument} must not be {name!r}, which is a counter of the engine; choose another name")


def missing_metric(needed_by: str, name: str, metrics: Mapping[str, Any]) -> str:
    """Return the message that a metric, which an argument needs, does not exist."""
    hint = "correct the name, or attach metric and handler to the same engine, usually the evaluator"
    return f"{needed_by} needs the metric {name!r}, but engine.state.metrics has {list(metrics)}: {hint}"


def check_entries(param_name: str, groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise ``ValueError`` unless all parameter groups have the parameter.

    >>> check_entries("rl", [{"params": [], "lr": 0.1}])
    Traceback (most recent call last):
    ValueError: param_name must be a parameter of all groups of the optimizer, got 'rl': there are ['lr']
    """
    for group in groups:
        known = [name for name in group if name != "params"]
        if param_name not in known:
            raise ValueError(
                f"param_name must be a parameter of all groups of the optimizer, got {param_name!r}: there are {known}"
            )


def check_sequence(name: str, value: Any) -> None:
    """Raise ``TypeError`` if an argument is not a list, a tuple, or another sequence; a string is not accepted."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TypeError(f"{name} must be a list or a tuple, got {described(value)}")


def number(
    name: str,
    value: Any,
    *,
    least: float = -math.inf,
    most: float = math.inf,
    above: float = -math.inf,
    below: float = math.inf,
) -> float:
    """Return an argument as a float, after checking that it is a finite number within bounds.

    >>> number("start_value", 1)
    1.0
    >>> number("smooth_f", 1, least=0, below=1)
    Traceback (most recent call last):
    ValueError: smooth_f must be at least 0 and below 1, got 1
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {described(value)}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    _check_bounds(name, value, least, most, above, below)
    return float(value)


def integer(name: str, value: Any, least: int, below: float = math.inf) -> int:
    """Return an argument as an int, after checking that it is an integer within bounds.

    >>> integer("warmup", 0, least=1)
    Traceback (most recent call last):
    ValueError: warmup must be at least 1, got 0
    """
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {described(value)}")
    _check_bounds(name, value, least, math.inf, -math.inf, below)
    return int(value)


def _check_bounds(name: str, value: Any, least: float, most: float, above: float, below: float) -> None:
    if not (least <= value <= most and above < value < below):
        bounds = {"at least": least, "at most": most, "above": above, "below": below}
        allowed = " and ".join(f"{word} {bound}" for word, bound in bounds.items() if math.isfinite(bound))
        raise ValueError(f"{name} must be {allowed}, got {value!r}")


def load_optional(module: str, *, extra: str, needed_by: str) -> Any:
    """Import a module that may not be installed.

    Args:
        module: the full name of the module.
        extra: the extra of camshaft that installs it.
        needed_by: the name of the class or function that needs it.

    Raises:
        ModuleNotFoundError: the module is not installed; the message says how to install it.

    >>> load_optional("json", extra="progress", needed_by="ProgressBar").dumps([])
    '[]'
    >>> load_optional("no_such_library", extra="progress", needed_by="ProgressBar")
    Traceback (most recent call last):
    ModuleNotFoundError: ProgressBar needs 'no_such_library': pip install 'camshaft[progress]'
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        message = f"{needed_by} needs {error.name!r}: pip install 'camshaft[{extra}]'"
        raise ModuleNotFoundError(message, name=error.name) from error


def joined(
    handles: Iterable[RemovableEventHandle], event_name: Any, handler: Callable[..., object], engine: Engine[Any, Any]
) -> RemovableEventHandle:
    """Return one handle that removes everything that several handles of an engine would."""
    registrations = tuple(number for handle in handles for number in handle.registrations)
    return RemovableEventHandle(event_name, handler, engine, registrations)


def num_epochs(state: State[Any, Any]) -> int | None:
    """Return the number of epochs of a run, if known."""
    return derived_max_epochs(state) if state.max_epochs is None else state.max_epochs


def identity(output: Any) -> Any:
    """Return the argument; the default of ``output_transform``."""
    return output
