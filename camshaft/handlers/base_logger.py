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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral, Number
from typing import Any, ClassVar, TypeVar
from weakref import ReferenceType, ref

import torch
from torch import nn

from camshaft import activity
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
    # defaults on the class: subclasses need not call __init__
    global_step_transform: Callable[[Engine[Any, Any], Any], int] | None = None
    _followed: Engine[Any, Any] | None = None  # whose steps are written

    @abstractmethod
    def __call__(self, engine: Engine[Any, Any], logger: Any, event_name: Any) -> None:
        """Write.

        Args:
            engine: the engine whose event fired.
            logger: the logger to write to.
            event_name: the event, as passed to ``attach``.
        """

    def global_step(self, engine: Engine[Any, Any], event_name: Any) -> int:
        """Return the step to write: that of ``global_step_transform``, by default the count of the event.

        Raises:
            TypeError: ``global_step_transform`` does not return an integer.
        """
        if self.global_step_transform is None:
            return engine.state.get_event_attrib_value(event_name)
        step = self.global_step_transform(engine, event_name)
        if not isinstance(step, Integral):
            raise TypeError(f"global_step_transform must return an integer, got {described(step)}")
        return int(step)

    def _announce(self, engine: Engine[Any, Any], logger: Any) -> None:
        """Check that the logger is of the right class, and set the iteration that its next values belong to.

        It is that of the engine whose steps are written, or else of the trainer that runs ``engine`` in a handler.
        """
        if self.logger_class is not None and not isinstance(logger, self.logger_class):
            needed = self.logger_class.__name__
            raise self.wrong_logger(f"{type(self).__name__} needs a {needed} as its logger, got {described(logger)}")
        trainer = self._followed or next(iter(activity.in_thread()), engine)
        logger._trainer, logger.iteration = ref(trainer), trainer.state.iteration


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
        self.global_step_transform = global_step_transform
        self._followed = global_step_transform.engine if isinstance(global_step_transform, StepOf) else None
        self.state_attributes = state_attributes

    def __call__(self, engine: Engine[Any, Any], logger: Any, event_name: Any) -> None:
        """Write all values at once."""
        self._announce(engine, logger)
        values = self._setup_output_metrics_state_attrs(engine, log_text=logger.logs_text)
        logger._attempt(logger.write_values, values, self.global_step(engine, event_name))

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
        state = engine.state
        names: Iterable[str] = state.metrics if self.metric_names == "all" else self.metric_names or ()
        for name in names:
            if name not in state.metrics:
                text = f"metric {name!r} is not logged, as engine.state.metrics has {list(state.metrics)}"
                hint = "attach it to this engine, or correct metric_names"
                warnings.warn(f"{text}: {hint}", stacklevel=level_of_caller())
        metrics = {name: state.metrics[name] for name in names if name in state.metrics}
        outputs: Mapping[Any, Any] = {}
        if self.output_transform is not None:
            try:
                output = self.output_transform(state.output)
            except Exception as error:
                check_has_output("output_transform", state, error)
                raise
            outputs = output if isinstance(output, Mapping) else {"output": output}
        attributes = {name: getattr(state, name, None) for name in self.state_attributes or ()}
        values: dict[Path, Any] = {}
        for named, hint in (
            (metrics, "list the metrics that are numbers in metric_names"),
            (outputs, "in output_transform, reduce it to a number, for example with .mean(), or leave it out"),
            (attributes, "set the attribute of engine.state to a number, or remove it from state_attributes"),
        ):
            if named is outputs and state._output is None:
                hint = "return a value from the process function, and log after the first iteration"
            for name, value in named.items():
                values.update(_flat((self.tag, str(name)), value, log_text, hint))
        fetch(values)
        return values if key_tuple else {"/".join(path): value for path, value in values.items()}


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
        self._announce(engine, logger)
        groups = enumerate(self.optimizer.param_groups)
        values = {self.path(number): group[self.param_name] for number, group in groups}
        fetch(values)
        values = {path: float(value) for path, value in values.items()}
        logger._attempt(logger.write_values, values, self.global_step(engine, event_name))

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
        prefix: the paths without the names of the parameters.

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
        self.prefix: Path = (*_tagged(tag), "grads" if self.of_gradients else "weights")
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
        function = getattr(reduction, "func", reduction)  # of functools.partial
        *tags, title = self.prefix
        self.prefix = (*tags, f"{title}_{getattr(function, '__name__', type(function).__name__)}")

    def __call__(self, engine: Engine[Any, Any], logger: Any, event_name: Any) -> None:
        """Write all numbers, with one synchronization."""
        self._announce(engine, logger)
        values: dict[Any, Any] = {self.path(name): self.reduction(tensor) for name, tensor in self.tensors()}
        fetch(values)
        if logger.writes_here:
            logger._attempt(logger.write_values, values, self.global_step(engine, event_name))


class BaseWeightsHistHandler(BaseWeightsHandler):
    """Writes a histogram for each parameter of a model, or for its gradient; see :class:`BaseWeightsHandler`."""

    def __call__(self, engine: Engine[Any, Any], logger: Any, event_name: Any) -> None:
        """Write the histograms."""
        self._announce(engine, logger)
        writes, gathers = logger.writes_here, self.needs_all_ranks
        # one gathered parameter at a time is in the memory of the device
        tensors = {self.path(name): one.cpu() if gathers else one for name, one in self.tensors() if writes}
        if writes:
            logger._attempt(logger.write_histograms, tensors, self.global_step(engine, event_name))


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
    if isinstance(value, LazyNumber):
        yield path, value.read()
    elif isinstance(value, Number) or (text and isinstance(value, str)):
        yield path, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _flat((*path, str(key)), one, text, hint)
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        yield from _flat(path, dict(enumerate(value)), text, hint)
    else:
        kind = type(value).__name__
        if needs_all_ranks(value):  # other ranks may not be here
            kind, hint = "sharded DTensor", "return its full_tensor()"
        elif isinstance(value, torch.Tensor):
            value = full_value(value.detach())
            if value.ndim == 0:
                yield path, value  # fetched together with the others
                return
            if value.ndim == 1:
                yield from _flat(path, value.tolist(), text, hint)
                return
            kind = f"tensor of shape {tuple(value.shape)}"
        warnings.warn(f"{'/'.join(path)} is not logged because it is a {kind}: {hint}", stacklevel=level_of_caller())


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
    _trainer: ReferenceType[Engine[Any, Any]] | None = None  # whose values were written last
    _has_warned = False

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
        followed = getattr(log_handler, "_followed", None)
        for source, trainer in ((engine, followed), (followed, None)):
            if source is not None and not source.has_event_handler(self._run_started):
                # before handlers that write at STARTED
                source.add_event_handler(Events.STARTED, self._run_started, trainer, order=Order.RESULTS)
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
        """Remove or hide what was written after an iteration, from which the trainer resumes."""

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

    def _run_started(self, engine: Engine[Any, Any], followed: Engine[Any, Any] | None) -> None:
        """Continue the log at the iteration of the trainer: before its first run, and where its state was set back."""
        if outermost_engine() is not engine:
            return  # an evaluation in a handler
        trainer, before = followed or engine, self._trainer
        iteration = trainer.state.iteration
        # later, a run extends what was written, or is that of another trainer, whose iterations say nothing about it
        if before is None or (before() is trainer and 0 < iteration < self.iteration):
            self._trainer, self.iteration = ref(trainer), iteration
            if iteration > 0:
                self._attempt(self._rewind, iteration)
            else:
                self._attempt(self._begin)


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
