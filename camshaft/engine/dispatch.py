"""Dispatch: a plan per event, which decides when handlers are registered who runs at which count."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from camshaft.engine.events import (
    CallableEventWithFilter,
    EventEnum,
    EventLike,
    Events,
    FailureEvents,
    HandlerEvents,
    events_in,
    translated,
)
from camshaft.engine.failures import name_of, place
from camshaft.engine.filters import NEVER
from camshaft.engine.registration import Registration, Wrapper
from camshaft.engine.state import State
from camshaft.errors import check_metric, described

_NO_COUNTERS = frozenset(
    {"epoch_length", "max_epochs", "max_iters", "output", "batch", "metrics", "dataloader", "seed", "times"}
)


class Plan:
    """The registrations of one event, and the range of counts at which none of them is due.

    While the counter is strictly between ``since`` and ``due``, no handler has to run. The loop compares the counter
    itself and calls :meth:`fire` only outside of that range. A counter that jumps either leaves the range or skips
    nothing, so nothing has to be updated when it does.

    Attributes:
        event: the event.
        counter: attribute of the state that counts it, or ``None``.
        registrations: in the order in which they run.
        extra: positional arguments that the current firing passes to handlers besides the engine.
        keywords: keyword arguments, likewise.
        tracer: logs each firing, even without handlers; ``None`` for no log.
    """

    __slots__ = ("event", "counter", "registrations", "extra", "keywords", "since", "due", "_wrappers",
                 "_counted_since", "_counted_due", "_uncounted", "_newest", "tracer", "__weakref__")  # fmt: skip

    def __init__(self, event: Any, counter: str | None) -> None:
        self.event = event
        self.counter = counter
        self.extra: tuple[Any, ...] = ()
        self.keywords: Mapping[str, Any] = {}
        self.registrations: tuple[Registration, ...] = ()
        self._newest = 0
        self._counted_since = self._counted_due = NEVER  # the range of the filters by count
        self.tracer: logging.Logger | None = None
        self._wrappers: tuple[Wrapper, ...] = ()
        self._replan()

    def add(self, registration: Registration) -> None:
        """Add a registration, behind those of the same or a smaller order."""
        if self._wrappers:
            registration.wrap(self._wrappers)
        self.registrations = tuple(sorted((*self.registrations, registration), key=lambda one: one.order))
        self._newest = registration.serial
        self._replan()

    def remove(self, unwanted: Callable[[Registration], bool]) -> None:
        """Remove registrations."""
        self.registrations = tuple(one for one in self.registrations if not unwanted(one))
        self._replan()

    def wrap(self, wrappers: tuple[Wrapper, ...]) -> None:
        """Wrap the calls of all handlers, including those registered later, and undo earlier wrapping."""
        self._wrappers = wrappers
        for one in self.registrations:
            one.wrap(wrappers)

    def trace(self, logger: logging.Logger | None) -> None:
        """Set the tracer."""
        self.tracer = logger
        self._replan()

    def log(self, logger: logging.Logger, engine: Any) -> None:
        """Log a firing."""
        state = engine.state
        logger.debug("%d | %d, firing handlers for event %s", state.epoch, state.iteration, self.event)

    def count(self, engine: Any) -> int:
        """Return the count of the event."""
        assert self.counter is not None, "filters on events without a counter are rejected at registration"
        count: int = getattr(engine.state, self.counter)
        return count

    def fire(self, engine: Any) -> None:
        """Call the handlers that are due, in order."""
        event = engine.last_event_name = self.event
        if self.tracer is not None:
            self.log(self.tracer, engine)
        newest = self._newest
        one = None
        try:
            for one in self._due_now(engine):
                engine.last_event_name = event  # a handler may have fired another event
                one.invoke(engine)
            while self._newest != newest:  # handlers added by handlers run too
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
        """Fire, passing arguments to the handlers besides the engine."""
        outer = self.extra, self.keywords
        self.extra, self.keywords = extra, keywords
        try:
            self.fire(engine)
        finally:
            self.extra, self.keywords = outer
            del extra, keywords  # an error among them would be part of a cycle through its own traceback

    def _due_now(self, engine: Any) -> Iterable[Registration]:
        if len(self._uncounted) == len(self.registrations):
            return self.registrations
        count = self.count(engine)
        if self._counted_since < count < self._counted_due:
            return self._uncounted
        self._counted_since = count
        self._counted_due = min(one.filter.following(count) for one in self.registrations if one.filter is not None)
        self._publish_range()
        return [one for one in self.registrations if one.accepts(engine, count)]

    def _replan(self) -> None:
        """Drop what was planned; the next firing plans again."""
        self._uncounted = tuple(one for one in self.registrations if one.filter is None)
        self._counted_since = self._counted_due = NEVER
        self._publish_range()

    def _publish_range(self) -> None:
        if self._uncounted or self.tracer is not None:
            self.since = self.due = NEVER
        elif not self.registrations:
            self.since, self.due = -NEVER, NEVER
        else:
            self.since, self.due = self._counted_since, self._counted_due


class Dispatcher:
    """The events that an engine knows, each with its plan. The engine is passed in when an event fires.

    Attributes:
        plans: the plan of each event.
        counters: the attribute of the state that counts each event.
    """

    def __init__(self) -> None:
        self.plans: dict[Any, Plan] = {}
        self.counters: dict[Any, str] = dict(State.event_to_attr)
        self._wrappers: tuple[Wrapper, ...] = ()
        self.register((*Events, *FailureEvents), None)

    def register(self, events: tuple[Any, ...], event_to_attr: dict[Any, str] | None) -> None:
        """Add events, and the attributes that count them; see ``Engine.register_events``."""
        if event_to_attr is not None and not isinstance(event_to_attr, dict):
            raise ValueError(f"event_to_attr must be a dict or None, got {event_to_attr!r}")
        for event in (*events, *(event_to_attr or {})):
            if not isinstance(event, (str, EventEnum)):
                raise TypeError(
                    f"an event to register must be a str or a member of an EventEnum, got {described(event)}"
                )
        for attribute in (event_to_attr or {}).values():
            if not isinstance(attribute, str) or attribute in _NO_COUNTERS:
                raise ValueError(
                    f"event_to_attr must name attributes that can count, got {attribute!r}; not {sorted(_NO_COUNTERS)}"
                )
        self.counters.update(event_to_attr or {})
        for event in events:
            if event not in self.plans:
                self.plans[event] = Plan(event, self.counters.get(event))
                self.plans[event].wrap(self._wrappers)
        for event in event_to_attr or {}:
            if event in self.plans:
                self.plans[event].counter = self.counters[event]

    def knows(self, event: Any) -> bool:
        """Return whether an event is registered. Events of handlers of this package are registered by asking."""
        event = translated(event)
        if not isinstance(event, (str, CallableEventWithFilter)):
            return False
        if event not in self.plans and isinstance(event, CallableEventWithFilter):
            family = event._family
            if family is not None and issubclass(family, HandlerEvents):
                self.register((family[event.name],), None)
        return event in self.plans

    def plan(self, event: Any) -> Plan:
        """Return the plan of an event.

        Raises:
            ValueError: the event is not registered.
        """
        if self.knows(event):
            return self.plans[translated(event)]
        if not isinstance(event, (str, CallableEventWithFilter)):
            raise ValueError(
                f"event must be an event of camshaft, its name, or several joined by |, got {described(event)}"
            )
        names = {name.casefold(): name for name in (str(getattr(one, "name", one)) for one in self.plans)}
        close = get_close_matches(str(getattr(event, "name", event)).casefold(), names, n=1)
        hint = f"did you mean {names[close[0]]}?" if close else "register it with register_events first."
        raise ValueError(f"unknown event {event!r}: {hint} Known are {', '.join(names.values())}")

    def add(
        self, events: EventLike, handler: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], order: int
    ) -> tuple[int, ...]:
        """Register a handler on each event; return the serial numbers. On an error nothing is registered."""
        if not isinstance(order, int):
            raise TypeError(f"order must be an int, got {order!r}")
        if translated(events) is not events:
            check_metric(getattr(handler, "__self__", None))
        added = []
        for event in events_in(events):
            plan, event_filter = self.plan(event), getattr(event, "filter", None)
            if event_filter is not None and plan.counter is None:
                raise RuntimeError(
                    f"{event!r} has a filter, but nothing counts {plan.event!r}: "
                    "give it a counter with register_events(..., event_to_attr={event: attribute})"
                )
            added.append((plan, Registration(plan, handler, event_filter, args, kwargs, order)))
        for plan, registration in added:
            plan.add(registration)
        return tuple(registration.serial for _, registration in added)

    def has(self, handler: Callable[..., Any], events: EventLike | None) -> bool:
        """Return whether a handler is registered on any of the events, or (``None``) on any event."""
        return any(one.handler == handler for plan in self._plans_of(events) for one in plan.registrations)

    def remove(self, handler: Callable[..., Any], events: EventLike) -> None:
        """Remove all registrations of a handler on each event.

        Raises:
            ValueError: there are none.
        """
        if not self.has(handler, events):
            raise ValueError(f"handler {handler!r} is not registered on {events!r}")
        for plan in self._plans_of(events):
            plan.remove(lambda one: one.handler == handler)

    def discard(self, serials: tuple[int, ...]) -> None:
        """Remove the registrations with these numbers, if they are still there."""
        for plan in self.plans.values():
            if any(one.serial in serials for one in plan.registrations):
                plan.remove(lambda one: one.serial in serials)

    def trace(self, logger: logging.Logger | None) -> None:
        """Log each firing from now on; ``None`` stops this."""
        for plan in self.plans.values():
            plan.trace(logger)

    def wrap(self, wrapper: Wrapper) -> None:
        """Wrap the calls of all handlers, including those registered later."""
        self._rewrap((*self._wrappers, wrapper))

    def unwrap(self, wrapper: Wrapper) -> None:
        """Remove a wrapper."""
        self._rewrap(tuple(one for one in self._wrappers if one != wrapper))

    def _rewrap(self, wrappers: tuple[Wrapper, ...]) -> None:
        self._wrappers = wrappers
        for plan in self.plans.values():
            plan.wrap(wrappers)

    def _plans_of(self, events: EventLike | None) -> Iterator[Plan]:
        if events is None:
            yield from self.plans.values()
        else:
            yield from (self.plan(one) for one in events_in(events) if self.knows(one))
