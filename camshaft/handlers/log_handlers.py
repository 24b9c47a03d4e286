"""What loggers write: metrics, outputs, parameters of optimizers, weights and gradients, read when an event fires."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral, Number
from typing import Any, ClassVar

import torch
from torch import nn

from camshaft.engine.engine import Engine
from camshaft.handlers.utils import check_callable, check_entries, check_text
from camshaft.handlers.values import Path, Values, fetch

Whitelist = list[str] | Callable[[str, nn.Parameter], bool]


class BaseHandler(ABC):
    """Writes something of an engine to a logger when an event fires."""

    logger_class: ClassVar[type | None] = None
    wrong_logger: ClassVar[type[Exception]] = RuntimeError
    has_own_steps = False

    @abstractmethod
    def __call__(self, engine: Engine[Any, Any], logger: Any, event_name: Any) -> None:
        """Write.

        Args:
            engine: whose event fired.
            logger: where to.
            event_name: the event, as it was given to ``attach``.
        """

    def global_step(self, engine: Engine[Any, Any], event_name: Any) -> int:
        """Give the step to write: the count of the event."""
        return _count_of(engine, event_name)

    def claim(self, path: Path) -> int:
        """Say whether what is logged under a path comes from here: 0 for no, 1 for perhaps, 2 for yes."""
        return 0

    def check(self, logger: Any) -> None:
        """Refuse loggers that this handler is not for."""
        if self.logger_class is not None and not isinstance(logger, self.logger_class):
            needed, kind = self.logger_class.__name__, type(logger).__name__
            raise self.wrong_logger(f"{type(self).__qualname__} needs a {needed} as its logger, got one of type {kind}")


class BaseOutputHandler(BaseHandler):
    """Writes metrics, outputs and attributes of the state.

    Args:
        tag: first part of all names.
        metric_names: metrics to write, or ``"all"``.
        output_transform: called with the engine's output; gives a dict, or what is to be called ``output``.
        global_step_transform: called with the engine and the event, gives the step; by default the count of
            the event. See ``global_step_from_engine``.
        state_attributes: attributes of the engine's state to write.

    Raises:
        TypeError: ``metric_names`` is neither a list nor ``"all"``, a transform is not callable, or ``tag`` no text.
        ValueError: there is nothing to write.
    """

    logs_text: ClassVar[bool] = False

    def __init__(
        self,
        tag: str,
        metric_names: list[str] | str | None = None,
        output_transform: Callable[[Any], Any] | None = None,
        global_step_transform: Callable[[Engine[Any, Any], Any], int] | None = None,
        state_attributes: list[str] | None = None,
    ) -> None:
        values = Values(metric_names, output_transform, state_attributes)
        if not values:
            raise ValueError("give at least one of metric_names, output_transform and state_attributes, got none")
        check_callable("global_step_transform", global_step_transform)
        check_text("tag", tag)
        self.tag = tag
        self.metric_names = metric_names
        self.output_transform = output_transform
        self.global_step_transform = global_step_transform or _count_of
        self.state_attributes = state_attributes
        self.has_own_steps = global_step_transform is not None
        self._values = values

    def __call__(self, engine: Engine[Any, Any], logger: Any, event_name: Any) -> None:
        """Write the values, all at once."""
        self.check(logger)
        values = self._setup_output_metrics_state_attrs(engine, log_text=self.logs_text)
        logger.write_new_values(values, self.global_step(engine, event_name))

    def global_step(self, engine: Engine[Any, Any], event_name: Any) -> int:
        """Give the step to write.

        Raises:
            TypeError: ``global_step_transform`` does not give an integer.
        """
        step = self.global_step_transform(engine, event_name)
        if not isinstance(step, Integral):
            raise TypeError(f"global_step_transform must give an integer, got {step!r} of type {type(step).__name__}")
        return int(step)

    def claim(self, path: Path) -> int:
        """Tell values of this handler by the tag, and surely by the name of a metric or an attribute."""
        if len(path) < 2 or path[0] != self.tag:
            return 0
        named = [*(self.metric_names if isinstance(self.metric_names, list) else ()), *(self.state_attributes or ())]
        if path[1] in named:
            return 2
        return 0 if self.metric_names != "all" and self.output_transform is None else 1

    def _setup_output_metrics_state_attrs(
        self, engine: Engine[Any, Any], log_text: bool = False, key_tuple: bool = True
    ) -> dict[Any, Any]:
        """Read the values, by tag and path: as tuples, or joined with slashes."""
        paths = {(self.tag, *path): value for path, value in self._values.read(engine, text=log_text).items()}
        return paths if key_tuple else {"/".join(path): value for path, value in paths.items()}


class BaseOptimizerParamsHandler(BaseHandler):
    """Writes a parameter of each group of an optimizer.

    Args:
        optimizer: an optimizer, or what has a sequence ``param_groups``.
        param_name: the parameter, such as ``lr``.
        tag: first part of all names.

    Raises:
        TypeError: ``optimizer`` is neither, ``tag`` no text, or the parameter no number.
        ValueError: it has no such parameter.
    """

    def __init__(self, optimizer: Any, param_name: str = "lr", tag: str | None = None) -> None:
        if not isinstance(getattr(optimizer, "param_groups", None), Sequence):
            kind = type(optimizer).__name__
            raise TypeError(f"optimizer must be an optimizer, or have a sequence param_groups, got one of type {kind}")
        check_entries(param_name, optimizer.param_groups)
        for value in (group[param_name] for group in optimizer.param_groups):
            if not isinstance(value, (Number, torch.Tensor)):
                raise TypeError(f"param_name must be that of a number, got {param_name!r}, which is {value!r}")
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
        numbers = {path: float(value) for path, value in values.items()}
        logger.write_new_values(numbers, self.global_step(engine, event_name))

    def path(self, group: int) -> Path:
        """Name the parameter of a group."""
        return (*_prefix(self.tag), self.param_name, f"group_{group}")

    def claim(self, path: Path) -> int:
        """Tell values of this handler by all parts but the group."""
        return 2 * (path[:-1] == self.path(0)[:-1])


class BaseWeightsHandler(BaseHandler):
    """Writes something of the parameters of a model, or of their gradients.

    Args:
        model: the model.
        tag: first part of all names.
        whitelist: which parameters: prefixes of their names, or a function of a name and a parameter. By default
            all; decided here, once.

    Attributes:
        weights: pairs of names and parameters.

    Raises:
        TypeError: ``model`` is no module, or ``whitelist`` neither a list nor callable.
    """

    of_gradients: ClassVar[bool] = False

    def __init__(self, model: nn.Module, tag: str | None = None, whitelist: Whitelist | None = None) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        check_text("tag", tag, optional=True)
        self.model = model
        self.tag = tag
        accepts = _accepting(whitelist)
        self.weights = tuple(pair for pair in model.named_parameters() if accepts(*pair))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Give the parameters, or those gradients that there are, by name."""
        for name, parameter in self.weights:
            tensor = parameter.grad if self.of_gradients else parameter
            if tensor is not None:
                yield name, tensor.detach()

    @property
    def title(self) -> str:
        """What stands before the names of the parameters."""
        return "grads" if self.of_gradients else "weights"

    def path(self, name: str) -> Path:
        """Name what is written of a parameter."""
        return (*_prefix(self.tag), self.title, *name.split("."))

    def claim(self, path: Path) -> int:
        """Tell values of this handler by what stands before the names of the parameters."""
        title = (*_prefix(self.tag), self.title)
        return 2 * (path[: len(title)] == title)


class BaseWeightsScalarHandler(BaseWeightsHandler):
    """Writes a number for each parameter of a model, or for its gradient.

    Args:
        model: the model.
        reduction: gives a number, or a tensor without dimensions, of a tensor.
        tag: first part of all names.
        whitelist: which parameters; see :class:`BaseWeightsHandler`.

    Raises:
        TypeError: ``reduction`` does not do so, or one of the others is of another kind.
    """

    def __init__(
        self,
        model: nn.Module,
        reduction: Callable[[torch.Tensor], Number | torch.Tensor] = torch.norm,
        tag: str | None = None,
        whitelist: Whitelist | None = None,
    ) -> None:
        super().__init__(model, tag, whitelist)
        if not callable(reduction):
            raise TypeError(f"reduction must be callable, got {reduction!r}")
        result = reduction(torch.ones(4, 2))
        if not (isinstance(result, Number) or (isinstance(result, torch.Tensor) and result.ndim == 0)):
            raise TypeError(f"reduction must give a number or a tensor without dimensions, got {result!r}")
        self.reduction = reduction
        self._title = f"{super().title}_{_name_of(reduction)}"

    @property
    def title(self) -> str:
        """What stands before the names of the parameters."""
        return self._title

    def __call__(self, engine: Engine[Any, Any], logger: Any, event_name: Any) -> None:
        """Write all the numbers; the device is waited for once."""
        self.check(logger)
        values: dict[Any, Any] = {self.path(name): self.reduction(tensor) for name, tensor in self.tensors()}
        fetch(values)
        logger.write_new_values(values, self.global_step(engine, event_name))


class WeightsHistHandler(BaseWeightsHandler):
    """Writes how the elements of each parameter are distributed, or those of its gradient."""

    def __call__(self, engine: Engine[Any, Any], logger: Any, event_name: Any) -> None:
        """Write the histograms."""
        self.check(logger)
        tensors: Mapping[Path, Any] = {self.path(name): tensor for name, tensor in self.tensors()}
        logger.write_histograms(tensors, self.global_step(engine, event_name))


def _count_of(engine: Engine[Any, Any], event_name: Any) -> int:
    return engine.state.get_event_attrib_value(event_name)


def _prefix(tag: str | None) -> Path:
    return (tag,) if tag else ()


def _accepting(whitelist: Whitelist | None) -> Callable[[str, nn.Parameter], Any]:
    if whitelist is None:
        return lambda name, parameter: True
    if callable(whitelist):
        return whitelist
    if not isinstance(whitelist, list) or not all(isinstance(prefix, str) for prefix in whitelist):
        raise TypeError(f"whitelist must be a list of names or callable, got {whitelist!r}")
    prefixes = tuple(whitelist)
    return lambda name, parameter: name.startswith(prefixes)


def _name_of(reduction: Any) -> str:
    """Name a function, also one that functools.partial made, and objects by their class."""
    inner = getattr(reduction, "func", reduction)
    return str(getattr(inner, "__name__", type(inner).__name__))
