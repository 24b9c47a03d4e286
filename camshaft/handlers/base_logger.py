"""What all loggers have in common: attaching, and reading the values they write."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from numbers import Integral
from types import TracebackType
from typing import Any, TypeVar

from camshaft.engine.engine import Engine
from camshaft.engine.event import EventLike, EventsList
from camshaft.engine.handle import RemovableEventHandle
from camshaft.handlers.checks import check_callable
from camshaft.handlers.values import Values

Self = TypeVar("Self", bound="BaseLogger")


class BaseHandler(ABC):
    """Writes something of an engine to a logger when an event fires."""

    @abstractmethod
    def __call__(self, engine: Engine[Any, Any], logger: Any, event_name: Any) -> None:
        """Write.

        Args:
            engine: whose event fired.
            logger: where to.
            event_name: the event, as it was given to ``attach``.
        """


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
        TypeError: ``metric_names`` is neither a list nor ``"all"``, or a transform is not callable.
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
        values = Values(metric_names, output_transform, state_attributes)
        if not values:
            raise ValueError("give at least one of metric_names, output_transform and state_attributes, got none")
        check_callable("global_step_transform", global_step_transform)
        self.tag = tag
        self.metric_names = metric_names
        self.output_transform = output_transform
        self.global_step_transform = global_step_transform or _count_of
        self.state_attributes = state_attributes
        self._values = values

    def global_step(self, engine: Engine[Any, Any], event_name: Any) -> int:
        """Give the step to write.

        Raises:
            TypeError: ``global_step_transform`` does not give an integer.
        """
        step = self.global_step_transform(engine, event_name)
        if not isinstance(step, Integral):
            raise TypeError(f"global_step_transform must give an integer, got {step!r} of type {type(step).__name__}")
        return int(step)

    def _setup_output_metrics_state_attrs(
        self, engine: Engine[Any, Any], log_text: bool = False, key_tuple: bool = True
    ) -> dict[Any, Any]:
        """Read the values, by tag and path: as tuples, or joined with slashes."""
        paths = {(self.tag, *path): value for path, value in self._values.read(engine, text=log_text).items()}
        return paths if key_tuple else {"/".join(path): value for path, value in paths.items()}


class BaseLogger(ABC):
    """Writes what handlers read from engines; at the end of a ``with`` block it is closed.

    None of the loggers asks for the rank: each process that attaches one writes.
    """

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
            engine: whose events count.
            log_handler: usually one of the handlers in the module of the logger.
            event_name: an event, or several joined by ``|``, of which each is handed over by itself.
            args: handed to the handler.
            kwargs: handed to the handler.

        Raises:
            RuntimeError: nothing counts the event, so there is no step to write.
        """
        events = list(event_name) if isinstance(event_name, EventsList) else [event_name]
        for event in events:
            if event not in engine.state.event_to_attr:
                known = ", ".join(str(getattr(one, "name", one)) for one in engine.state.event_to_attr)
                raise RuntimeError(f"event_name must be an event that is counted, got {event!r}; counted are {known}")
        handles = [engine.add_event_handler(event, log_handler, self, event, *args, **kwargs) for event in events]
        return joined(handles, event_name, log_handler, engine)

    def attach_output_handler(
        self, engine: Engine[Any, Any], event_name: EventLike, *args: Any, **kwargs: Any
    ) -> RemovableEventHandle:
        """Attach the logger's ``OutputHandler``, made from the remaining arguments."""
        return self.attach(engine, self._create_output_handler(*args, **kwargs), event_name)

    def attach_opt_params_handler(
        self, engine: Engine[Any, Any], event_name: EventLike, *args: Any, **kwargs: Any
    ) -> RemovableEventHandle:
        """Attach the logger's ``OptimizerParamsHandler``, made from the remaining arguments."""
        return self.attach(engine, self._create_opt_params_handler(*args, **kwargs), event_name)

    def close(self) -> None:  # noqa: B027  # most loggers have nothing to close
        """Finish writing."""

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def _create_output_handler(self, *args: Any, **kwargs: Any) -> Callable[..., object]: ...

    @abstractmethod
    def _create_opt_params_handler(self, *args: Any, **kwargs: Any) -> Callable[..., object]: ...


def _count_of(engine: Engine[Any, Any], event_name: Any) -> int:
    return engine.state.get_event_attrib_value(event_name)


def joined(
    handles: list[RemovableEventHandle], event_name: Any, handler: Callable[..., object], engine: Engine[Any, Any]
) -> RemovableEventHandle:
    """Make one handle of several on the same engine."""
    registrations = tuple(number for handle in handles for number in handle.registrations)
    return RemovableEventHandle(event_name, handler, engine, registrations)
