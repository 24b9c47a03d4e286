"""Dispatch: one plan per event; which handler runs at which count is decided when handlers are registered."""

from __future__ import annotations

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from camshaft.arguments import check_type, described, shortened, without_annotations
from camshaft.engine.events import (
    NEVER,
    CallableEventWithFilter,
    CountFilter,
    EventEnum,
    EventLike,
    Events,
    FailureEvents,
    HandlerEvents,
    OptimizerEvents,
    Order,
    events_in,
    meant,
    translated,
)
from camshaft.engine.state import State
from camshaft.errors import annotate
from camshaft.interop import check_metric

Invocation = Callable[[Any], Any]
Wrapper = Callable[[Any, "Registration", Invocation], Invocation]
"""Wraps the call of a handler: takes the event, the registration and the function that calls the handler."""


EXTRA_ARGUMENTS: Mapping[Any, tuple[tuple[Any, ...], dict[str, Any]]] = {
    Events.EXCEPTION_RAISED: ((None,), {}),
    Events.TERMINATE_SINGLE_EPOCH: ((), {"iter_counter": 0}),
}
"""Placeholders of the arguments that an event passes besides the engine, positional and keyword."""

_AFTER_STEPS = (Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED, Events.COMPLETED)
# These fire again with the same count if no iteration follows, as in an epoch that was terminated.
_FETCHES = (Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED)
_FILTERS = list(inspect.signature(Events.STARTED).parameters)
_serials = itertools.count(1)


# --- registrations ----------------------------------------------------------------------------------------------------


class Registration:
    """One handler on one event, ready to be called.

    Args:
        plan: of the event.
        handler: any callable; its signature is that of the function wrapped with ``functools.wraps``, if any.
        event_filter: of the event, or ``None``.
        args: positional arguments for the handler.
        kwargs: keyword arguments for the handler.
        order: handlers of a smaller order run earlier.

    Attributes:
        serial: number of the registration; later ones have larger numbers.
        filter: filter by count that decides when it is due, or ``None``.
        is_filtered: whether it has a filter of any kind.
        invoke: calls the handler, given the engine.

    Raises:
        TypeError: ``handler`` is not callable.
        ValueError: it cannot be called with the arguments, or its signature cannot be read.
    """

    __slots__ = ("_asks", "_call", "_plan", "filter", "handler", "invoke", "is_filtered", "order", "serial")

    def __init__(
        self,
        plan: Plan,
        handler: Callable[..., Any],
        event_filter: Callable[[Any, int], Any] | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        order: int,
    ) -> None:
        takes_engine, takes_keywords = _find_form(handler, plan.event, args, kwargs)
        self.serial = next(_serials)
        self.handler = handler
        self.order = order
        self.is_filtered = event_filter is not None
        self.filter = event_filter if isinstance(event_filter, CountFilter) else None
        self._asks = None if self.filter is not None else event_filter
        self._plan = plan = weakref.proxy(plan)  # a strong reference would create a cycle

        def call_with_extra(engine: Any) -> Any:
            extra = (engine, *plan.extra) if takes_engine else plan.extra
            return handler(*extra, *args, **{**kwargs, **(plan.keywords if takes_keywords else {})})

        self._call: Invocation
        if plan.event in EXTRA_ARGUMENTS:
            self._call = call_with_extra
        elif not takes_engine:
            self._call = lambda engine: handler(*args, **kwargs)
        else:  # the handler itself if there are no arguments, which saves a call
            self._call = (lambda engine: handler(engine, *args, **kwargs)) if args or kwargs else handler

    def wrap(self, wrappers: Iterable[Wrapper]) -> None:
        """Wrap the calls of the handler, and undo earlier wrapping. The filter runs outside of the wrappers."""
        call, accepts, plan = self._call, self._asks, self._plan
        for wrapper in wrappers:
            call = wrapper(plan.event, self, call)
        self.invoke = call
        if accepts is not None:

            def call_if_accepted(engine: Any) -> None:
                if accepts(engine, plan.count(engine)):
                    call(engine)

            self.invoke = call_if_accepted

    def accepts(self, engine: Any, count: int) -> bool:
        """Return whether the filter by count, if any, accepts ``count``."""
        return self.filter is None or self.filter(engine, count)


def _find_form(
    handler: Callable[..., Any], event: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[bool, bool]:
    """Return whether a handler takes the engine, and whether it takes the keywords of the event."""
    if not callable(handler):
        raise TypeError(f"handler must be callable, got {described(handler)}{_alternative(handler)}")
    if isinstance(owner := getattr(handler, "__self__", None), LRScheduler):  # its epoch would be the engine
        problem = f"handler must not be a method of a torch scheduler, got {described(handler)}"
        raise TypeError(f"{problem}{_alternative(owner)}")
    if isinstance(handler, type) and any("__call__" in vars(base) for base in handler.__mro__):
        raise _class_for_object(handler)
    try:
        signature = inspect.signature(handler)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the signature of handler {handler!r} cannot be read: wrap it in a function") from error
    extra, keywords = EXTRA_ARGUMENTS.get(event, ((), {}))
    for takes_keywords in (True, False) if keywords else (False,):
        for takes_engine in (True, False):
            engine = (None,) if takes_engine else ()
            try:
                signature.bind(*engine, *extra, *args, **{**kwargs, **(keywords if takes_keywords else {})})
            except TypeError:
                continue
            return takes_engine, takes_keywords
    if isinstance(handler, type):
        raise _class_for_object(handler)
    given = [*("exception" for _ in extra), *map(shortened, args), *(f"{name}=..." for name in kwargs)]
    missing = [
        name
        for name, parameter in list(signature.parameters.items())[1 + len(extra) + len(args) :]
        if parameter.default is parameter.empty and name not in kwargs
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    passed = ", ".join(f"{name}=..." for name in missing)
    hint = f"; it requires {', '.join(missing)}: add_event_handler(event, handler, {passed})" if missing else ""
    if missing in (["batch"], ["output"]):
        hint = f"; read engine.state.{missing[0]} instead of an argument"
    unknown = [name for name in kwargs if name not in signature.parameters and not isinstance(event, str)]
    if filters := [f"{close}=..." for name in unknown for close in get_close_matches(name, _FILTERS, n=1)]:
        hint += f"; did you mean {event!r}({', '.join(filters)})?"
    raise ValueError(
        f"handler {name_of(handler)}{without_annotations(signature)} cannot be called on {event!r}, which passes "
        f"({', '.join(['engine', *given])}) or ({', '.join(given)}){hint}"
    )


def _class_for_object(handler: type) -> ValueError:
    return ValueError(f"handler must be an object, got {described(handler)}: pass {handler.__name__}(...) instead")


def _alternative(handler: Any) -> str:
    """Return what to register instead of an object that is not callable, as the end of a message."""
    if isinstance(handler, ReduceLROnPlateau):
        return "; use camshaft.handlers.ReduceLROnPlateauScheduler, or write a function that calls step(metric)"
    if isinstance(handler, LRScheduler):
        return "; wrap it in camshaft.handlers.LRScheduler"
    if handler is None:
        return "; pass a function, not what it returns"
    if callable(getattr(handler, "attach", None)):
        return "; it registers its handlers itself: call its method attach(engine, ...)"
    if callable(getattr(handler, "run", None)):
        return "; call its method run(data, ...) in a function"
    return ""


def name_of(handler: Any) -> str:
    """Return the qualified name of a handler, of its class, or of the function of a partial.

    >>> name_of(functools.partial(sorted, reverse=True)), name_of([].append), name_of(object())
    ('sorted', 'list.append', 'object')
    """
    while isinstance(handler, functools.partial):
        handler = handler.func
    return getattr(handler, "__qualname__", None) or type(handler).__qualname__


# --- plans ------------------------------------------------------------------------------------------------------------


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
    """

    __slots__ = ("event", "counter", "registrations", "extra", "keywords", "since", "due", "_counted_since",
                 "_counted_due", "_counts_once", "_uncounted", "_is_counted", "_newest", "__weakref__")  # fmt: skip

    def __init__(self, event: Any, counter: str | None) -> None:
        self.event = event
        self.counter = counter
        self.extra: tuple[Any, ...] = ()
        self.keywords: Mapping[str, Any] = {}
        self.registrations: tuple[Registration, ...] = ()
        self._newest = 0
        self._counts_once = event in _FETCHES
        self.replan()

    def add(self, *registrations: Registration) -> None:
        """Insert registrations; those of the same order run as they were made."""
        self.registrations = tuple(
            sorted((*self.registrations, *registrations), key=lambda one: (one.order, one.serial))
        )
        self._newest = max((one.serial for one in self.registrations), default=0)
        self.replan()

    def remove(self, unwanted: Callable[[Registration], bool]) -> None:
        """Remove registrations."""
        self.registrations = tuple(one for one in self.registrations if not unwanted(one))
        self.replan()

    def count(self, engine: Any) -> int:
        """Return the count of the event."""
        assert self.counter is not None, "filters on events without a counter are rejected at registration"
        count: int = getattr(engine.state, self.counter, 0)
        return count

    def fire(self, engine: Any) -> None:
        """Call the handlers that are due, in order."""
        event = engine.last_event_name = self.event
        if engine._is_traced:
            state = engine.state
            engine.logger.debug("%d | %d, firing handlers for event %s", state.epoch, state.iteration, event)
        registrations, newest, invoke = self.registrations, self._newest, None
        try:
            for invoke in self._due_now(engine) if self._is_counted else self._uncounted:
                engine.last_event_name = event  # a handler may have fired another event
                invoke(engine)
            while self._newest != newest:  # handlers added by handlers run too
                registrations = tuple(one for one in self.registrations if one.serial > newest)
                newest = self._newest
                for one in registrations:
                    if self.counter is None or one.accepts(engine, self.count(engine)):
                        invoke = one.invoke
                        invoke(engine)
        except BaseException as error:
            for one in registrations:
                if one.invoke is invoke:
                    annotate(error, f"in handler {name_of(one.handler)!r} on {event!r}")
                    break
            is_of_none = isinstance(error, (AttributeError, TypeError)) and "NoneType" in str(error)
            if is_of_none and event in _AFTER_STEPS and engine.state._output is None:
                annotate(error, "engine.state.output is None: return a value from the process function")
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

    def _due_now(self, engine: Any) -> Iterable[Invocation]:
        """Return what calls the handlers that are due, of an event with filters by count."""
        if not isinstance(self.event, Events):  # a handler may count it, so later filters see what earlier handlers did
            return (one.invoke for one in self.registrations if one.accepts(engine, self.count(engine)))
        count = self.count(engine)
        if self._counted_since < count < self._counted_due:
            return self._uncounted
        since = count - self._counts_once
        self._set_range(since, min(one.filter.following(count) for one in self.registrations if one.filter is not None))
        return [one.invoke for one in self.registrations if one.accepts(engine, count)]

    def replan(self) -> None:
        """Discard the planned range after a change of the registrations; the next firing computes it again."""
        self._uncounted = tuple(one.invoke for one in self.registrations if one.filter is None)
        self._is_counted = len(self._uncounted) < len(self.registrations)
        self._set_range(NEVER, NEVER)

    def _set_range(self, since: int, due: int) -> None:
        """Set the range in which no filter by count accepts; handlers without one are due at any count."""
        self._counted_since, self._counted_due = since, due
        if not self.registrations:
            since, due = -NEVER, NEVER
        elif self._uncounted:
            since = due = NEVER
        self.since, self.due = since, due


class Dispatcher:
    """The events that an engine knows, each with its plan. The engine is passed in when an event fires.

    Attributes:
        plans: the plan of each event.
        counters: the attribute of the state that counts each event that was registered with one.
    """

    def __init__(self) -> None:
        self.plans: dict[Any, Plan] = {}
        self.counters: dict[Any, str] = {}
        self._wrappers: list[Wrapper] = []
        self.register((*Events, *OptimizerEvents, *FailureEvents), None)

    def register(self, events: tuple[Any, ...], event_to_attr: dict[Any, str] | None) -> None:
        """Add events, and the attributes that count them; see ``Engine.register_events``."""
        if event_to_attr is not None and not isinstance(event_to_attr, dict):
            raise ValueError(f"event_to_attr must be a dict or None, got {event_to_attr!r}")
        for event in (*events, *(event_to_attr or {})):
            if not isinstance(event, (str, EventEnum)):
                raise TypeError(
                    f"an event to register must be a str or a member of an EventEnum, got {described(event)}"
                )
        self.counters.update(event_to_attr or {})
        for event in events:
            if event not in self.plans:
                self.plans[event] = Plan(event, self._counter_of(event))
        for event in event_to_attr or {}:
            if event in self.plans:
                self.plans[event].counter = self.counters[event]

    def knows(self, event: Any) -> bool:
        """Return whether an event is registered. Events of this package's handlers are registered on first use."""
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
        names = [str(getattr(one, "name", one)) for one in self.plans if one is not FailureEvents.ERROR_MET]
        close = meant(str(getattr(event, "name", event)), names)
        hint = f"did you mean {close}?" if close else "register it with register_events first."
        raise ValueError(f"unknown event {event!r}: {hint} Known are {', '.join(names)}")

    def add(
        self, events: EventLike, handler: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], order: int
    ) -> tuple[int, ...]:
        """Register a handler on each event; return the serial numbers. On an error nothing is registered."""
        check_type("order", order, int, "an int")
        check_metric(getattr(handler, "__self__", None))
        added = []
        for event in events_in(events):
            plan, event_filter = self.plan(event), getattr(event, "filter", None)
            plan.counter = self._counter_of(plan.event)
            if event_filter is not None and plan.counter is None:
                raise RuntimeError(
                    f"{event!r} has a filter, but nothing counts {plan.event!r}: "
                    "give it a counter with register_events(..., event_to_attr={event: attribute})"
                )
            added.append((plan, Registration(plan, handler, event_filter, args, kwargs, order)))
        for plan, registration in added:
            registration.wrap(self._wrappers)
            plan.add(registration)
        return tuple(registration.serial for _, registration in added)

    def _counter_of(self, event: Any) -> str | None:
        """Return the attribute that counts an event; users may add theirs to those of ``State`` at any time."""
        return self.counters.get(event, State.event_to_attr.get(event))

    def has(self, handler: Callable[..., Any], events: EventLike | None) -> bool:
        """Return whether a handler is registered on any of the events, or (``None``) on any event."""
        return any(one.handler == handler for plan in self._plans_of(events) for one in plan.registrations)

    def remove(self, handler: Callable[..., Any], events: EventLike) -> None:
        """Remove all registrations of a handler on each event.

        Raises:
            ValueError: the handler is not registered there.
        """
        if not self.has(handler, events):
            raise ValueError(f"handler is not registered on {events!r}, got {described(handler)}")
        for plan in self._plans_of(events):
            plan.remove(lambda one: one.handler == handler)

    def discard(self, serials: tuple[int, ...]) -> None:
        """Remove the registrations with these numbers, if they are still there."""
        for plan in self.plans.values():
            if any(one.serial in serials for one in plan.registrations):
                plan.remove(lambda one: one.serial in serials)

    def wrap(self, wrapper: Wrapper) -> None:
        """Wrap the calls of all handlers, including those registered later."""
        self._wrappers.append(wrapper)
        self._rewrap()

    def unwrap(self, wrapper: Wrapper) -> None:
        """Remove a wrapper."""
        self._wrappers.remove(wrapper)
        self._rewrap()

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Set aside the handlers that are registered now, except those that complete a step."""
        aside = {plan: [one for one in plan.registrations if one.order != Order.STEP] for plan in self.plans.values()}
        for plan, registrations in aside.items():
            plan.remove(registrations.__contains__)
        try:
            yield
        finally:
            for plan, registrations in aside.items():
                plan.add(*registrations)

    def _rewrap(self) -> None:
        for plan in self.plans.values():
            for one in plan.registrations:
                one.wrap(self._wrappers)
            plan.replan()

    def _plans_of(self, events: EventLike | None) -> Iterator[Plan]:
        if events is None:
            yield from self.plans.values()
        else:
            yield from (self.plan(one) for one in events_in(events) if self.knows(one))
