"""What all loggers have in common: attaching to engines, on one rank, and going on after a resume.

What is read from an engine is up to handlers (:mod:`camshaft.handlers.log_handlers`); where it goes is up to two
methods of the logger.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Set
from types import TracebackType
from typing import Any, ClassVar, TypeVar

from camshaft.distributed import get_rank
from camshaft.engine.engine import Engine
from camshaft.engine.event import EventLike, Events, events_in
from camshaft.engine.handle import RemovableEventHandle
from camshaft.engine.order import Order
from camshaft.handlers.log_handlers import (
    BaseHandler,
    BaseOptimizerParamsHandler,
    BaseOutputHandler,
    BaseWeightsHandler,
    BaseWeightsScalarHandler,
)
from camshaft.handlers.log_steps import Attached, Reached, engine_followed
from camshaft.handlers.utils import check_engine, joined
from camshaft.handlers.values import Path

__all__ = [
    "BaseHandler",
    "BaseLogger",
    "BaseOptimizerParamsHandler",
    "BaseOutputHandler",
    "BaseWeightsHandler",
    "BaseWeightsScalarHandler",
]

Self = TypeVar("Self", bound="BaseLogger")


class BaseLogger(ABC):
    """Writes what handlers read from engines; at the end of a ``with`` block it is closed.

    One rank writes. On the others a logger takes the same calls, checks their arguments, and does nothing.

    Attributes:
        ranks: which ranks write, ``None`` for all of them; for a subclass to set.
    """

    ranks: ClassVar[tuple[int, ...] | None] = (0,)
    _already_written: Set[tuple[str, int]] = frozenset()  # names and steps, where a run goes on

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
        check_engine("engine", engine)
        events = events_in(event_name)
        for event in events:
            if event not in engine.state.event_to_attr:
                known = ", ".join(str(getattr(one, "name", one)) for one in engine.state.event_to_attr)
                raise RuntimeError(f"event_name must be an event that is counted, got {event!r}; counted are {known}")
        handles = [engine.add_event_handler(event, log_handler, self, event, *args, **kwargs) for event in events]
        # before the handlers, which may write at STARTED
        handles.append(engine.add_event_handler(Events.STARTED, self._run_started, order=Order.RESULTS))
        handle = joined(handles, event_name, log_handler, engine)
        if self.writes_here:
            attached = self.__dict__.setdefault("_attached", [])  # subclasses need not call __init__
            attached.extend(Attached.of(engine, log_handler, event) for event in events)
            # an evaluator's points are the trainer's steps: what is beyond goes when that goes on
            if (followed := engine_followed(log_handler)) is not None and followed is not engine:
                followed.add_event_handler(
                    Events.STARTED, self._follow, weakref.ref(engine), log_handler, order=Order.RESULTS
                )
        else:
            handle.remove()
        return handle

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

    @property
    def writes_here(self) -> bool:
        """Whether this rank is one of those that write."""
        return self.ranks is None or get_rank() in self.ranks

    def write_values(self, values: Mapping[Path, Any], step: int) -> None:
        """Write numbers, and text where the logger takes it; for subclasses that use the handlers of the library.

        Args:
            values: by path; the names of most loggers are the path joined with slashes.
            step: whose values they are.
        """
        raise NotImplementedError(f"{type(self).__name__} must define write_values()")

    def write_new_values(self, values: Mapping[Path, Any], step: int) -> None:
        """Write numbers but for those that an earlier job had written already, just before it was killed."""
        if self._already_written:
            values = {path: one for path, one in values.items() if ("/".join(path), step) not in self._already_written}
            if not values:
                return
        self.write_values(values, step)

    def write_histograms(self, tensors: Mapping[Path, Any], step: int) -> None:
        """Write how the elements of tensors are distributed; for subclasses that can show that."""
        raise NotImplementedError(f"{type(self).__name__} shows no histograms")

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

    def _rewind(self, reached: Reached) -> None:  # noqa: B027  # not all have something to take back
        """Take back what was written beyond the place where a run is taken up."""

    def _begin(self) -> None:  # noqa: B027  # most loggers are given a new place by their users
        """Prepare for a job that does not go on with an earlier one."""

    def _run_started(self, engine: Engine[Any, Any]) -> None:
        """Find out whether this run goes on with an earlier one, and from which steps."""
        state: dict[str, Any] = self.__dict__
        if state.get("_run") is engine.state.times:  # made anew for each run, and each attachment asks
            return
        state["_run"] = engine.state.times
        reached = Reached(engine, state["_attached"])
        if engine.state.iteration > 0:
            self._rewind(reached)
            if self._already_written:
                self._write_all_from(engine)
        elif not state.get("_begun") and not reached.any:
            self._begin()
        state["_begun"] = True

    def _follow(
        self,
        trainer: Engine[Any, Any],
        evaluator: weakref.ref[Engine[Any, Any]],
        log_handler: Callable[..., object],
    ) -> None:
        """Go back with the trainer whose steps an evaluator's points are, as long as the handler is attached."""
        engine = evaluator()
        if engine is not None and engine.has_event_handler(log_handler):
            self._run_started(trainer)

    def _write_all_from(self, engine: Engine[Any, Any]) -> None:
        """Write everything again from the first iteration on: what comes before may be there."""

        def begin() -> None:
            self._already_written = frozenset()
            handle.remove()

        handle = engine.add_event_handler(Events.ITERATION_STARTED, begin)


class Forwarding:
    """Looks up unknown attributes on something that the logger holds.

    What is private is never looked up there, so that copying, unpickling and half-made loggers fail as any object
    does.
    """

    _forwards_to: ClassVar[str]

    def __getattr__(self, name: str) -> Any:
        target = self.__dict__.get(self._forwards_to)
        if name.startswith("_") or target is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(target, name)


class Silence:
    """Stands in for a service on ranks that do not write: takes any call, and does nothing."""

    def __getattr__(self, name: str) -> Silence:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Silence:
        return self

    def __bool__(self) -> bool:
        return False
