"""Who is called when an event fires: a plan for each event, made when handlers come and go."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from itertools import count as counting
from typing import Any

from camshaft.engine.failures import name_of, place
from camshaft.engine.filters import NEVER, CountFilter
from camshaft.engine.signatures import Call

_serials = counting(1)

Invocation = Callable[[Any], Any]
Wrapper = Callable[[Any, "Registration", Invocation], Invocation]
"""Puts something around the calls of a handler: takes the event, the registration and what calls the handler."""


class Registration:
    """One handler on one event, ready to be called."""

    __slots__ = ("_asks", "_calls", "filter", "handler", "invoke", "order", "serial")

    def __init__(
        self,
        plan: Plan,
        handler: Callable[..., Any],
        call: Call,
        event_filter: Callable[[Any, int], Any] | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        order: int,
    ) -> None:
        self.serial = next(_serials)
        self.handler = handler
        self.order = order
        self.filter = event_filter if isinstance(event_filter, CountFilter) else None
        plan = weakref.proxy(plan)  # else it would hold itself, and the handler, in a cycle
        self._calls = _invocation(plan, handler, call, args, kwargs)
        self._asks = (plan, event_filter) if event_filter is not None and self.filter is None else None
        self.wrap(None, ())

    def wrap(self, event: Any, wrappers: Iterable[Wrapper]) -> None:
        """Put these wrappers and no others around the calls of the handler, inside of what asks its filter."""
        invoke = self._calls
        for wrapper in wrappers:
            invoke = wrapper(event, self, invoke)
        self.invoke = invoke if self._asks is None else _asking(*self._asks, invoke)

    def accepts(self, engine: Any, count: int) -> bool:
        """Say whether the handler runs at ``count``, as far as its count decides that."""
        return self.filter is None or self.filter(engine, count)


def _invocation(
    plan: Plan, handler: Callable[..., Any], call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Callable[[Any], Any]:
    """Make the function of the engine that calls a handler in its form; the handler itself where it is one."""
    if plan.hands_over:
        return _invocation_with_extra(plan, handler, call, args, kwargs)
    if call.takes_engine:
        return (lambda engine: handler(engine, *args, **kwargs)) if args or kwargs else handler
    return lambda engine: handler(*args, **kwargs)


def _invocation_with_extra(
    plan: Plan, handler: Callable[..., Any], call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Callable[[Any], Any]:
    def invoke(engine: Any) -> Any:
        first = (engine,) if call.takes_engine else ()
        return handler(*first, *plan.extra, *args, **{**kwargs, **(plan.keywords if call.takes_keywords else {})})

    return invoke


def _asking(plan: Plan, event_filter: Callable[[Any, int], Any], invoke: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def ask(engine: Any) -> None:
        if event_filter(engine, plan.count(engine)):
            invoke(engine)

    return ask


class Plan:
    """The registrations of one event, and when any of them can be due.

    While the counter is strictly between ``since`` and ``due``, no handler has anything to do. The loop
    compares by itself, and calls :meth:`fire` only outside of that range. A counter that jumps leaves the range
    or skips nothing, so nobody has to watch it.
    """

    __slots__ = ("event", "counter", "registrations", "extra", "keywords", "hands_over", "since", "due", "_wrappers",
                 "_counted_since", "_counted_due", "_uncounted", "_newest", "_trace", "__weakref__")  # fmt: skip

    def __init__(self, event: Any, counter: str | None, hands_over: bool = False) -> None:
        self.event = event
        self.counter = counter
        self.hands_over = hands_over
        self.extra: tuple[Any, ...] = ()
        self.keywords: Mapping[str, Any] = {}
        self.registrations: tuple[Registration, ...] = ()
        self._newest = 0
        self._counted_since = self._counted_due = NEVER
        self._trace: logging.Logger | None = None
        self._wrappers: tuple[Wrapper, ...] = ()
        self._renew()

    def add(self, registration: Registration) -> None:
        """Add a registration behind those of the same or a smaller order."""
        if self._wrappers:
            registration.wrap(self.event, self._wrappers)
        self.registrations = tuple(sorted((*self.registrations, registration), key=lambda one: one.order))
        self._newest = registration.serial
        self._renew()

    def remove(self, unwanted: Callable[[Registration], bool]) -> bool:
        """Remove registrations, and say whether there were any to remove."""
        kept = tuple(one for one in self.registrations if not unwanted(one))
        found = len(kept) < len(self.registrations)
        self.registrations = kept
        self._renew()
        return found

    def wrap(self, wrappers: tuple[Wrapper, ...]) -> None:
        """Put these wrappers and no others around the calls of all handlers, also of those that come later."""
        self._wrappers = wrappers
        for one in self.registrations:
            one.wrap(self.event, wrappers)

    def trace(self, logger: logging.Logger | None) -> None:
        """Write a record each time the event fires, handlers or not; ``None`` ends that."""
        self._trace = logger
        self._renew()

    @property
    def traced(self) -> bool:
        """Whether each firing is recorded."""
        return self._trace is not None

    def record(self, logger: logging.Logger, engine: Any) -> None:
        """Write a record of a firing."""
        state = engine.state
        logger.debug("%d | %d, firing handlers for event %s", state.epoch, state.iteration, self.event)

    def count(self, engine: Any) -> int:
        """Give the counter of the event."""
        assert self.counter is not None, "registration refuses filters on events without a counter"
        count: int = getattr(engine.state, self.counter)
        return count

    def fire(self, engine: Any) -> None:
        """Call the handlers whose turn it is, in order."""
        event = engine.last_event_name = self.event
        if self._trace is not None:
            self.record(self._trace, engine)
        newest = self._newest
        one = None
        try:
            for one in self._ready(engine):
                engine.last_event_name = event  # a handler may have fired another one meanwhile
                one.invoke(engine)
            while self._newest != newest:  # handlers added meanwhile run too
                added = [one for one in self.registrations if one.serial > newest]
                newest = self._newest
                for one in added:
                    if self.counter is None or one.accepts(engine, self.count(engine)):
                        one.invoke(engine)
        except BaseException as error:
            if one is not None:
                place(error, f"handler {name_of(one.handler)} on {event!r}", engine.state)
            raise

    def fire_with(self, engine: Any, *extra: Any, **keywords: Any) -> None:
        """Fire, and hand something over to the handlers besides the engine."""
        outer = self.extra, self.keywords
        self.extra, self.keywords = extra, keywords
        try:
            self.fire(engine)
        finally:
            self.extra, self.keywords = outer
            del extra, keywords  # an error in them must not be held by the frames of its own traceback

    def _ready(self, engine: Any) -> Iterable[Registration]:
        if len(self._uncounted) == len(self.registrations):
            return self.registrations
        count = self.count(engine)
        if self._counted_since < count < self._counted_due:
            return self._uncounted
        self._counted_since = count
        self._counted_due = min(one.filter.following(count) for one in self.registrations if one.filter is not None)
        self._show_range()
        return [one for one in self.registrations if one.accepts(engine, count)]

    def _renew(self) -> None:
        """Forget what was planned; the next firing plans anew."""
        self._uncounted = tuple(one for one in self.registrations if one.filter is None)
        self._counted_since = self._counted_due = NEVER
        self._show_range()

    def _show_range(self) -> None:
        """Tell the loop between which counts it can pass by."""
        if self._uncounted or self._trace is not None:
            self.since = self.due = NEVER
        elif not self.registrations:
            self.since, self.due = -NEVER, NEVER
        else:
            self.since, self.due = self._counted_since, self._counted_due
