"""Registering handlers on events, and firing them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, overload

from camshaft.engine.dispatch import Dispatcher
from camshaft.engine.event import EventEnum, EventLike, Events, events_in
from camshaft.engine.handle import RemovableEventHandle
from camshaft.engine.state import Batch, Output, State

if TYPE_CHECKING:
    from camshaft.engine.engine import Engine

    Plain = TypeVar("Plain", bound=Callable[[Engine[Any, Any]], object] | Callable[[], object])
    OnError = TypeVar("OnError", bound=Callable[[Engine[Any, Any], Exception], object] | Callable[[Exception], object])
AnyHandler = TypeVar("AnyHandler", bound=Callable[..., object])
P = ParamSpec("P")


class EventSource(Generic[Batch, Output]):
    """Knows events, registers handlers on them, and calls these when an event fires.

    Attributes:
        last_event_name: the event fired last, ``None`` before the first.
        logger: where records about handlers and events go.
    """

    last_event_name: Any
    logger: logging.Logger
    state: State[Batch, Output]

    def __init__(self) -> None:
        super().__init__()
        self.last_event_name = None
        self._dispatcher = Dispatcher()

    def register_events(self, *event_names: str | EventEnum, event_to_attr: dict[Any, str] | None = None) -> None:
        """Make events of one's own known to this engine.

        Args:
            event_names: names, or members of an ``EventEnum``.
            event_to_attr: for each event that filters are to work on, the attribute of ``state`` that counts
                it. It begins at 0; whoever fires the event moves it on.

        Raises:
            TypeError: an event is neither a name nor a member of an ``EventEnum``.
            ValueError: ``event_to_attr`` is not a dict.

        >>> from camshaft.engine import Engine
        >>> engine = Engine(lambda engine, batch: None)
        >>> engine.register_events("token_made", event_to_attr={"token_made": "tokens"})
        >>> engine.state.tokens
        0
        """
        self._dispatcher.register(event_names, event_to_attr)
        if event_to_attr:
            self.state._add_counters(event_to_attr)

    def has_registered_events(self, event: Any) -> bool:
        """Say whether an event is known to this engine."""
        return self._dispatcher.knows(event)

    # fmt: off
    @overload
    def add_event_handler(
        self, event_name: Literal[Events.EXCEPTION_RAISED],
        handler: Callable[Concatenate[Engine[Batch, Output], Exception, P], object], *args: P.args, **kwargs: P.kwargs,
    ) -> RemovableEventHandle: ...
    @overload
    def add_event_handler(
        self, event_name: Literal[Events.EXCEPTION_RAISED],
        handler: Callable[Concatenate[Exception, P], object], *args: P.args, **kwargs: P.kwargs,
    ) -> RemovableEventHandle: ...
    @overload
    def add_event_handler(
        self, event_name: Literal[Events.TERMINATE_SINGLE_EPOCH],
        handler: Callable[..., object], *args: Any, **kwargs: Any,
    ) -> RemovableEventHandle: ...
    @overload
    def add_event_handler(
        self, event_name: EventLike, handler: Callable[..., object], *args: Any, order: int, **kwargs: Any,
    ) -> RemovableEventHandle: ...
    @overload
    def add_event_handler(
        self, event_name: EventLike,
        handler: Callable[Concatenate[Engine[Batch, Output], P], object], *args: P.args, **kwargs: P.kwargs,
    ) -> RemovableEventHandle: ...
    @overload
    def add_event_handler(
        self, event_name: EventLike, handler: Callable[P, object], *args: P.args, **kwargs: P.kwargs,
    ) -> RemovableEventHandle: ...
    # fmt: on
    def add_event_handler(  # type: ignore[misc]  # a ParamSpec leaves no room for a keyword of our own
        self, event_name: EventLike, handler: Callable[..., object], *args: Any, order: int = 0, **kwargs: Any
    ) -> RemovableEventHandle:
        """Call a handler whenever an event fires.

        It is called as ``handler(engine, *args, **kwargs)``, or without the engine if that is all it takes. A
        handler of ``EXCEPTION_RAISED`` also gets the exception, one of ``TERMINATE_SINGLE_EPOCH`` may take
        ``iter_counter``, the iterations done in the epoch.

        Args:
            event_name: an event, with or without a filter, the name of one, or several joined by ``|``.
            handler: any callable.
            args: handed to the handler.
            order: handlers with a smaller order run earlier, those with the same order as they were registered; see
                :class:`~camshaft.engine.order.Order` for the places of the library.
            kwargs: handed to the handler.

        Returns:
            A handle that removes what was registered.

        Raises:
            ValueError: the event is not known, or the handler cannot be called in any of these ways.
            RuntimeError: the event has a filter by count, and nothing counts it.

        >>> from camshaft.engine import Engine
        >>> engine = Engine(lambda engine, batch: batch * 2)
        >>> def show(engine: Engine[int, int], name: str) -> None:
        ...     print(name, engine.state.output)
        >>> handle = engine.add_event_handler(Events.ITERATION_COMPLETED(every=2), show, "output:")
        >>> _ = engine.run([1, 2, 3, 4])
        output: 4
        output: 8
        """
        numbers = self._dispatcher.add(self._checked(event_name), handler, args, kwargs, order)
        self.logger.debug("Handler added for event %s", event_name)
        return RemovableEventHandle(event_name, handler, self, numbers)

    # fmt: off
    @overload
    def on(  # type: ignore[overload-overlap]  # this event alone hands an exception over
        self, event_name: Literal[Events.EXCEPTION_RAISED], *, order: int = 0
    ) -> Callable[[OnError], OnError]: ...
    @overload
    def on(
        self, event_name: Literal[Events.TERMINATE_SINGLE_EPOCH], *args: Any, order: int = 0, **kwargs: Any
    ) -> Callable[[AnyHandler], AnyHandler]: ...
    @overload
    def on(self, event_name: EventLike, *, order: int = 0) -> Callable[[Plain], Plain]: ...
    @overload
    def on(
        self, event_name: EventLike, *args: Any, order: int = 0, **kwargs: Any
    ) -> Callable[[AnyHandler], AnyHandler]: ...
    # fmt: on
    def on(self, event_name: EventLike, *args: Any, order: int = 0, **kwargs: Any) -> Any:
        """Register the decorated function, which stays as it is; see :meth:`add_event_handler`.

        >>> from camshaft.engine import Engine
        >>> engine = Engine(lambda engine, batch: batch)
        >>> @engine.on(Events.EPOCH_COMPLETED | Events.COMPLETED)
        ... def show(engine: Engine[int, int]) -> None:
        ...     print(engine.last_event_name.name, engine.state.iteration)
        >>> _ = engine.run([1, 2, 3])
        EPOCH_COMPLETED 3
        COMPLETED 3
        """
        self._checked(event_name)

        def register(handler: AnyHandler) -> AnyHandler:
            self.add_event_handler(event_name, handler, *args, order=order, **kwargs)
            return handler

        return register

    def _checked(self, event_name: EventLike) -> EventLike:
        """Refuse events that are not known, before a handler is even looked at."""
        try:
            for event in events_in(event_name):
                self._dispatcher.plan(event)
        except ValueError as error:
            self.logger.error("%s", error)
            raise
        return event_name

    def has_event_handler(self, handler: Callable[..., object], event_name: EventLike | None = None) -> bool:
        """Say whether a handler is registered on an event, on any of several, or (``None``) on any at all."""
        return self._dispatcher.has(handler, event_name)

    def remove_event_handler(self, handler: Callable[..., object], event_name: EventLike) -> None:
        """Remove all registrations of a handler on an event, or on each of several.

        Raises:
            ValueError: there is none.
        """
        self._dispatcher.remove(handler, event_name)

    def fire_event(self, event_name: Any) -> None:
        """Fire an event: call its handlers now.

        Raises:
            ValueError: the event is not known.

        >>> from camshaft.engine import Engine
        >>> engine = Engine(lambda engine, batch: None)
        >>> engine.register_events("halfway")
        >>> handle = engine.add_event_handler("halfway", lambda: print("half of it"))
        >>> engine.fire_event("halfway")
        half of it
        """
        plan = self._dispatcher.plan(event_name)
        if not plan.traced and self.logger.isEnabledFor(logging.DEBUG):
            plan.record(self.logger, self)
        plan.fire(self)
