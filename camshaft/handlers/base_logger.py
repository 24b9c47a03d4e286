"""The base of all loggers: what handlers read from an engine, under which name and step, and resuming a log.

Handlers collect values under *paths* such as ``("training", "loss")``; a logger defines where they go, in
:meth:`BaseLogger.write_values`.
"""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from numbers import Integral, Number
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from camshaft.arguments import check_callable, check_text, check_type, described
from camshaft.distributed import get_rank
from camshaft.dtensors import full_value, is_dtensor, needs_all_ranks, reshard
from camshaft.engine.engine import Engine, check_engine, outermost_engine
from camshaft.engine.events import EventLike, Events, Order, RemovableEventHandle, events_in, joined
from camshaft.engine.state import LazyNumber, check_has_output, fetch
from camshaft.errors import level_of_caller
from camshaft.handlers.base_scheduler import check_entries
from camshaft.handlers.checkpoint import CheckpointEvents
from camshaft.handlers.steps import StepOf

__all__ = [
    "BaseHandler",
    "BaseLogger",
    "BaseOptimizerParamsHandler",
    "BaseOutputHandler",
    "BaseWeightsHandler",
    "BaseWeightsHistHandler",
    "BaseWeightsScalarHandler",
]

Self = TypeVar("Self", bound="BaseLogger")
Path = tuple[str, ...]
Whitelist = list[str] | Callable[[str, nn.Parameter], bool]


# --- handlers ----------------------------------------------------------------------------------------------------


class BaseHandler(ABC):
    """Writes something about an engine to a logger whenever an event fires."""

    logger_class: ClassVar[type | None] = None
    wrong_logger: ClassVar[type[Exception]] = RuntimeError

    @abstractmethod
    def __call__(self, engine: Engine[Any, Any], logger: Any, event_name: Any) -> None:
        """Write.

        Args:
            engine: the engine whose event fired.
            logger: the logger to write to.
            event_name: the event, as passed to ``attach``.
        """

    def global_step(self, engine: Engine[Any, Any], event_name: Any) -> int:
        """Return the step to write: the count of the event."""
        return _count_of(engine, event_name)

    def trainer(self, engine: Engine[Any, Any]) -> Engine[Any, Any]:
        """Return the engine that the values belong to: the one whose steps are written, or that runs ``engine``."""
        return engine_followed(self) or outermost_engine() or engine

    def check(self, logger: Any) -> None:
        """Raise an error if this handler is not made for ``logger``."""
        if self.logger_class is not None and not isinstance(logger, self.logger_class):
            needed = self.logger_class.__name__
            raise self.wrong_logger(f"{type(self).__name__} needs a {needed} as its logger, got {described(logger)}")


class BaseOutputHandler(BaseHandler):
    """Writes metrics, outputs and state attributes.

    Args:
        tag: first component of all names.
        metric_names: metrics to write, or ``"all"``.
        output_transform: called with the engine's output; returns a mapping, or a value to be named ``output``.
        global_step_transform: called with the engine and the event, returns the step; by default the count of
            the event. See ``global_step_from_engine``.
        state_attributes: attributes of the engine's state to write.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there is nothing to write.
    """

    def __init__(
        self,
        tag: str,
        metric_names: list[str] | str | None = None,
        output_transform: Callable[[Any], Any] | None = None,
        global_step_transform: Callable[[Engine[Any, Any], Any], int] | None = None,
        state_attributes: list[str] | None = None,
    ) -> None:
        check_text("tag", tag)
        if metric_names is not None and metric_names != "all":
            check_type("metric_names", metric_names, list, "a list of names or 'all'")
        check_callable("output_transform", output_transform)
        check_callable("global_step_transform", global_step_transform, "(engine, event_name)")
        if isinstance(state_attributes, str):
            raise TypeError(f"state_attributes must be a list of names, got {state_attributes!r}")
        if metric_names is None and output_transform is None and state_attributes is None:
            raise ValueError("pass at least one of metric_names, output_transform and state_attributes, got none")
        self.tag = tag
        self.metric_names = metric_names
        self.output_transform = output_transform
        self.global_step_transform = global_step_transform or _count_of
        self.state_attributes = state_attributes

    def __call__(self, engine: Engine[Any, Any], logger: Any, event_name: Any) -> None:
        """Write all values at once."""
        self.check(logger)
        values = self._setup_output_metrics_state_attrs(engine, log_text=logger.logs_text)
        logger._write(logger.write_values, values, self.global_step(engine, event_name), self.trainer(engine))

    def global_step(self, engine: Engine[Any, Any], event_name: Any) -> int:
        """Return the step to write.

        Raises:
            TypeError: ``global_step_transform`` does not return an integer.
        """
        step = self.global_step_transform(engine, event_name)
        if not isinstance(step, Integral):
            raise TypeError(f"global_step_transform must return an integer, got {described(step)}")
        return int(step)

    def _setup_output_metrics_state_attrs(
        self, engine: Engine[Any, Any], log_text: bool = False, key_tuple: bool = True
    ) -> dict[Any, Any]:
        """Read the values, which synchronizes with the device if they are tensors.

        Args:
            engine: the engine to read from.
            log_text: whether to keep strings. Everything else that contains no numbers is skipped with a warning.
            key_tuple: whether names are paths, which begin with the tag; otherwise they are joined with slashes.

        >>> engine = Engine(lambda engine, batch: {"loss": torch.tensor(0.5), "size": (2, 3)})
        >>> state = engine.run([1])
        >>> BaseOutputHandler("t", output_transform=dict)._setup_output_metrics_state_attrs(engine)
        {('t', 'loss'): 0.5, ('t', 'size', '0'): 2, ('t', 'size', '1'): 3}
        """
        values: dict[Path, Any] = {}
        for name, value, hint in self._named_values(engine):
            values.update(_flat((self.tag, str(name)), value, log_text, hint))
        fetch(values)
        return values if key_tuple else {"/".join(path): value for path, value in values.items()}

    def _named_values(self, engine: Engine[Any, Any]) -> Iterator[tuple[Any, Any, str]]:
        """Yield names and values, and what to do about a value that cannot be logged."""
        state = engine.state
        is_all = self.metric_names == "all"
        hint = "list the metrics to log in metric_names" if is_all else "remove it from metric_names"
        for name in state.metrics if is_all else self.metric_names or ():
            if name in state.metrics:
                yield name, state.metrics[name], hint
            else:
                text = f"metric {name!r} is not logged, as engine.state.metrics has {list(state.metrics)}"
                warnings.warn(
                    f"{text}: attach it to this engine, or correct metric_names", stacklevel=level_of_caller()
                )
        if self.output_transform is not None:
            try:
                output = self.output_transform(state.output)
            except Exception as error:
                check_has_output("output_transform", state, error)
                raise
            hint = "in output_transform, reduce it to a number, for example with .mean(), or leave it out"
            if state._output is None:
                hint = "engine.state.output is None, so return a value from the process function, and log after that"
            for name, value in output.items() if isinstance(output, Mapping) else [("output", output)]:
                yield name, value, hint
        for name in self.state_attributes or ():
            hint = f"set engine.state.{name} to a number, or remove it from state_attributes"
            yield name, getattr(state, name, None), hint


class BaseOptimizerParamsHandler(BaseHandler):
    """Writes a parameter of each group of an optimizer.

    Args:
        optimizer: an optimizer, or another object with a sequence ``param_groups``.
        param_name: the parameter, such as ``lr``.
        tag: first component of all names.

    Raises:
        TypeError: ``optimizer`` has no groups, ``tag`` is not a string, or the parameter is not a number.
        ValueError: a group does not have the parameter.
    """

    def __init__(self, optimizer: Any, param_name: str = "lr", tag: str | None = None) -> None:
        check_optimizer(optimizer)
        check_entries(param_name, optimizer.param_groups)
        for group in optimizer.param_groups:
            if not isinstance(group[param_name], (Number, torch.Tensor)):
                raise TypeError(f"param_name must name a number, got {param_name!r}, which is {group[param_name]!r}")
        check_text("tag", tag, optional=True)
        self.optimizer = optimizer
        self.param_name = param_name
        self.tag = tag

    def __call__(self, engine: Engine[Any, Any], logger: Any, event_name: Any) -> None:
        """Write the parameter of all groups."""
        self.check(logger)
        groups = enumerate(self.optimizer.param_groups)
        values = {self.path(number): group[self.param_name] for number, group in groups}
        fetch(values)
        values = {path: float(value) for path, value in values.items()}
        logger._write(logger.write_values, values, self.global_step(engine, event_name), self.trainer(engine))

    def path(self, group: int) -> Path:
        """Return the path of a group's parameter."""
        return (*_tagged(self.tag), self.param_name, f"group_{group}")


class BaseWeightsHandler(BaseHandler):
    """Writes something about the parameters of a model, or about their gradients.

    Parameters of a sharded model (DTensors) are written in full. All ranks gather them, one at a time, so attach this
    on all ranks, even though only one of them writes. While gradients are accumulated without being exchanged, sharded
    parameters have no gradients.

    Args:
        model: the model, already sharded if it will be.
        tag: first component of all names.
        whitelist: the parameters to write: prefixes of their names, or a predicate ``f(name, parameter)``, which is
            evaluated once. By default all.

    Attributes:
        weights: pairs of names and parameters.

    Raises:
        TypeError: an argument has the wrong type.
    """

    of_gradients: ClassVar[bool] = False

    def __init__(self, model: nn.Module, tag: str | None = None, whitelist: Whitelist | None = None) -> None:
        check_type("model", model, nn.Module, "a torch.nn.Module")
        check_text("tag", tag, optional=True)
        if not (whitelist is None or isinstance(whitelist, list) or callable(whitelist)):
            raise TypeError(f"whitelist must be a list of names or callable, got {whitelist!r}")
        self.model = model
        self.tag = tag
        reshard(model)
        weights = model.named_parameters()
        if callable(whitelist):
            self.weights = tuple(pair for pair in weights if whitelist(*pair))
        else:
            prefixes = ("",) if whitelist is None else tuple(whitelist)
            self.weights = tuple(pair for pair in weights if pair[0].startswith(prefixes))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters, or the gradients that exist, by name. Sharded ones are gathered from all ranks."""
        current = dict(self.model.named_parameters())  # some may have been replaced
        for name, given in self.weights:
            parameter = given if is_dtensor(given) else current.get(name)  # fully_shard replaces its own for a pass
            tensor = getattr(parameter, "grad", None) if self.of_gradients else parameter
            if tensor is not None:
                yield name, full_value(tensor.detach())

    @property
    def needs_all_ranks(self) -> bool:
        """Whether ranks that do not write have to call this handler too."""
        return any(needs_all_ranks(parameter) for _, parameter in self.weights)

    @property
    def title(self) -> str:
        """The name component before the names of the parameters."""
        return "grads" if self.of_gradients else "weights"

    @property
    def prefix(self) -> Path:
        """The path without the name of the parameter."""
        return (*_tagged(self.tag), self.title)

    def path(self, name: str) -> Path:
        """Return the path of a parameter."""
        return (*self.prefix, *name.split("."))


class BaseWeightsScalarHandler(BaseWeightsHandler):
    """Writes a number for each parameter of a model, or for its gradient.

    Args:
        model: the model.
        reduction: reduces a tensor to a number or a 0-d tensor. Its ``__name__`` is part of the names.
        tag: first component of all names.
        whitelist: the parameters to write; see :class:`BaseWeightsHandler`.

    Raises:
        TypeError: an argument has the wrong type, or ``reduction`` does not return a number.
    """

    def __init__(
        self,
        model: nn.Module,
        reduction: Callable[[torch.Tensor], Number | torch.Tensor] = torch.norm,
        tag: str | None = None,
        whitelist: Whitelist | None = None,
    ) -> None:
        super().__init__(model, tag, whitelist)
        check_callable("reduction", reduction)
        result = reduction(torch.ones(4, 2))
        if not (isinstance(result, Number) or (isinstance(result, torch.Tensor) and result.ndim == 0)):
            raise TypeError(f"reduction must return a number or a 0-d tensor, got {result!r}")
        self.reduction = reduction

    @property
    def title(self) -> str:
        """The name component before the names of the parameters."""
        function = getattr(self.reduction, "func", self.reduction)  # of functools.partial
        return f"{super().title}_{getattr(function, '__name__', type(function).__name__)}"

    def __call__(self, engine: Engine[Any, Any], logger: Any, event_name: Any) -> None:
        """Write all numbers, with one synchronization."""
        self.check(logger)
        values: dict[Any, Any] = {self.path(name): self.reduction(tensor) for name, tensor in self.tensors()}
        fetch(values)
        if logger.writes_here:
            logger._write(logger.write_values, values, self.global_step(engine, event_name), self.trainer(engine))


class BaseWeightsHistHandler(BaseWeightsHandler):
    """Writes a histogram for each parameter of a model, or for its gradient; see :class:`BaseWeightsHandler`."""

    def __call__(self, engine: Engine[Any, Any], logger: Any, event_name: Any) -> None:
        """Write the histograms."""
        self.check(logger)
        writes, gathers = logger.writes_here, self.needs_all_ranks
        # one gathered parameter at a time is in the memory of the device
        tensors = {self.path(name): one.cpu() if gathers else one for name, one in self.tensors() if writes}
        if writes:
            logger._write(logger.write_histograms, tensors, self.global_step(engine, event_name), self.trainer(engine))


def _count_of(engine: Engine[Any, Any], event_name: Any) -> int:
    return engine.state.get_event_attrib_value(event_name)


def _tagged(tag: str | None) -> Path:
    return (tag,) if tag else ()


def has_groups(optimizer: Any) -> bool:
    """Return whether an object is an optimizer, or like one."""
    return isinstance(getattr(optimizer, "param_groups", None), Sequence)


def check_optimizer(optimizer: Any) -> None:
    """Raise ``TypeError`` unless an object is an optimizer, or like one."""
    if not has_groups(optimizer):
        raise TypeError(f"optimizer must have a sequence param_groups, got {described(optimizer)}")


# --- values ------------------------------------------------------------------------------------------------------


def _flat(path: Path, value: Any, text: bool, hint: str) -> Iterator[tuple[Path, Any]]:
    """Yield the numbers in nested containers with their paths; the hint says what to do about other values."""
    if needs_all_ranks(value):  # other ranks may not be here
        problem = f"{'/'.join(path)} is not logged because it is a sharded DTensor: return its full_tensor()"
        warnings.warn(problem, stacklevel=level_of_caller())
        return
    value = full_value(value)
    if isinstance(value, LazyNumber):
        yield path, value.read()
    elif isinstance(value, Number) or (text and isinstance(value, str)):
        yield path, value
    elif isinstance(value, torch.Tensor) and value.ndim == 0:
        yield path, value.detach()  # fetched together with the others
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _flat((*path, str(key)), one, text, hint)
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        yield from _flat(path, dict(enumerate(value)), text, hint)
    elif isinstance(value, torch.Tensor) and value.ndim == 1:
        yield from _flat(path, value.tolist(), text, hint)
    else:
        kind = f"tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        problem = f"{'/'.join(path)} is not logged because it is a {kind}: {hint}"
        warnings.warn(problem, stacklevel=level_of_caller())


# --- loggers -----------------------------------------------------------------------------------------------------


class BaseLogger:
    """Writes what handlers read from engines; a context manager that closes the logger at its end.

    One rank writes. On the others, a logger checks the arguments of each call and does nothing, except that handlers of
    the weights and gradients of a sharded model gather these on all ranks. Values that are DTensors are logged if each
    rank holds the full tensor; other DTensors are skipped with a warning, since only the rank that writes would gather
    them.

    A failing write, on a full disk or to a service that does not answer, loses values. The logger warns once, and the
    run continues.

    Attributes:
        ranks: the ranks that write, ``None`` for all; may be set by a subclass.
        logs_text: whether strings are written; may be set by a subclass.
        iteration: of the trainer, for the values that are being written.
        has_failed: whether an error ends the ``with`` block of the logger; set before :meth:`close` is called.
    """

    ranks: ClassVar[tuple[int, ...] | None] = (0,)
    logs_text: ClassVar[bool] = False
    # defaults on the class: subclasses need not call __init__
    iteration = 0
    has_failed = False
    _attached: Sequence[RemovableEventHandle] = ()
    _has_begun = _has_warned = False

    def attach(
        self,
        engine: Engine[Any, Any],
        log_handler: Callable[..., object],
        event_name: EventLike,
        *args: Any,
        **kwargs: Any,
    ) -> RemovableEventHandle:
        """Call ``log_handler(engine, logger, event_name, *args, **kwargs)`` whenever an event fires.

        Args:
            engine: the engine that fires the event.
            log_handler: usually one of the handlers in the module of the logger.
            event_name: an event, or several joined by ``|``, which are passed to the handler one by one.
            args: passed to the handler.
            kwargs: passed to the handler.

        Raises:
            RuntimeError: the event has no counter, so there is no step to write.
        """
        check_engine("engine", engine)
        events = events_in(event_name)
        for event in events:
            if event not in engine.state.event_to_attr:
                known = ", ".join(str(getattr(one, "name", one)) for one in engine.state.event_to_attr)
                raise RuntimeError(f"event_name must be an event with a counter, got {event!r}; events: {known}")
        handles = [engine.add_event_handler(event, log_handler, self, event, *args, **kwargs) for event in events]
        handle = joined(handles, event_name, log_handler, engine)
        if not self.writes_here:
            if not getattr(log_handler, "needs_all_ranks", False):
                handle.remove()
            return handle
        self._attached = [*self._attached, *handles]
        for source in (engine, engine_followed(log_handler)):
            if source is not None and not source.has_event_handler(self._run_started, Events.STARTED):
                # before handlers that write at STARTED
                source.add_event_handler(Events.STARTED, self._run_started, order=Order.RESULTS)
                source.add_event_handler(CheckpointEvents.SAVED_CHECKPOINT, self._flush)
        return handle

    def attach_output_handler(
        self, engine: Engine[Any, Any], event_name: EventLike, *args: Any, **kwargs: Any
    ) -> RemovableEventHandle:
        """Attach an output handler, made from the remaining arguments; see :class:`BaseOutputHandler`."""
        return self.attach(engine, self._create_output_handler(*args, **kwargs), event_name)

    def attach_opt_params_handler(
        self, engine: Engine[Any, Any], event_name: EventLike, *args: Any, **kwargs: Any
    ) -> RemovableEventHandle:
        """Attach a handler of an optimizer, likewise; see :class:`BaseOptimizerParamsHandler`."""
        return self.attach(engine, self._create_opt_params_handler(*args, **kwargs), event_name)

    @property
    def writes_here(self) -> bool:
        """Whether this rank writes."""
        return self.ranks is None or get_rank() in self.ranks

    def write_values(self, values: Mapping[Path, Any], step: int) -> None:
        """Write numbers, and text if the logger supports it. Subclasses override this.

        Args:
            values: by path; most loggers join the components of a path with slashes.
            step: the step of all the values.
        """
        raise NotImplementedError(f"{type(self).__name__} must define write_values()")

    def _write(self, method: Callable[..., object], values: Any, step: int, trainer: Engine[Any, Any]) -> None:
        """Call :meth:`write_values` or :meth:`write_histograms` for values of a trainer, and warn once if it fails."""
        self.iteration = self._iterations[trainer] = trainer.state.iteration
        self._attempt(method, values, step)

    def write_histograms(self, tensors: Mapping[Path, Any], step: int) -> None:
        """Write histograms of tensors. Subclasses that can show histograms override this."""
        raise NotImplementedError(f"{type(self).__name__} shows no histograms")

    def close(self) -> None:
        """Finish writing."""

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        is_exit = isinstance(error, SystemExit) and error.code in (None, 0)
        self.has_failed = kind is not None and not is_exit
        self._attempt(self.close)

    def _create_output_handler(self, *args: Any, **kwargs: Any) -> Callable[..., object]:
        return BaseOutputHandler(*args, **kwargs)

    def _create_opt_params_handler(self, *args: Any, **kwargs: Any) -> Callable[..., object]:
        return BaseOptimizerParamsHandler(*args, **kwargs)

    def _rewind(self, iteration: int) -> None:
        """Remove or hide what was written after an iteration of the trainer, from which a run resumes."""

    def _begin(self) -> None:
        """Prepare for a job that does not resume an earlier one."""

    def _checkpoint_saved(self) -> None:
        """Put on disk what was written before a checkpoint."""

    def _attempt(self, function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """Call a function that writes; if it fails, warn once and continue."""
        try:
            function(*args, **kwargs)
        except NotImplementedError:
            raise
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                text = f"{type(self).__name__} cannot write, values are lost: {type(error).__name__}: {error}"
                warnings.warn(text, stacklevel=level_of_caller())
            # A library may raise the same error for each value. Its traceback would grow, and hold the frames of all.
            error.__traceback__ = None

    def _flush(self) -> None:
        self._attempt(self._checkpoint_saved)

    def _run_started(self, engine: Engine[Any, Any]) -> None:
        """Rewind the log if this run resumes an earlier one."""
        sources = self._sources()
        if engine not in sources or outermost_engine() is not engine:
            return  # all handlers were removed, or this is an evaluation in a handler
        iteration = engine.state.iteration
        if iteration > 0:
            # else the values were written in a run that this one extends, or by another trainer
            if not self._iterations or self._iterations.get(engine, 0) > iteration:
                self._attempt(self._rewind, iteration)
        elif not self._has_begun and not any(one.state.iteration for one in sources):
            self._attempt(self._begin)
        self._has_begun = True

    @cached_property
    def _iterations(self) -> WeakKeyDictionary[Engine[Any, Any], int]:
        """The iterations of the values that were written last, by trainer."""
        return WeakKeyDictionary()

    def _sources(self) -> list[Engine[Any, Any]]:
        """Return the engines that handlers are attached to, and those whose steps they write."""
        found: list[Engine[Any, Any] | None] = []
        for one in self._attached:
            source, handler = one.engine(), one.handler()
            if source is not None and handler is not None and source.has_event_handler(handler):
                found += [source, engine_followed(handler)]
        return [one for one in found if one is not None]


class ServiceLogger(BaseLogger):
    """A logger that looks up unknown attributes on an object of the library that it writes to.

    Private names are never looked up there, so that copying, unpickling and half-initialized loggers raise
    ``AttributeError`` as usual.
    """

    _forwards_to: ClassVar[str]

    def __getattr__(self, name: str) -> Any:
        target = self.__dict__.get(self._forwards_to)
        if name.startswith("_") or target is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(target, name)


class Silence:
    """Replaces the library on ranks that do not write: accepts any call and does nothing."""

    def __getattr__(self, name: str) -> Silence:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Silence:
        """Do nothing."""
        return self


def answers(url: str, seconds: float = 10.0) -> bool:
    """Return whether a server answers at a URL, even if with an error or an untrusted certificate."""
    try:
        urllib.request.urlopen(url, timeout=seconds).close()
    except urllib.error.HTTPError as error:
        error.close()
    except OSError as error:
        return isinstance(getattr(error, "reason", None), ssl.SSLError)
    return True


def engine_followed(handler: Any) -> Engine[Any, Any] | None:
    """Return the engine whose steps a handler writes by ``global_step_from_engine``, if it does."""
    transform = getattr(handler, "global_step_transform", None)
    return transform.engine if isinstance(transform, StepOf) else None
