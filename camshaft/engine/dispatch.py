"""The events an engine knows and the handlers registered on them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import Any

import torch.distributed as dist

from camshaft.engine.event import (
    CallableEventWithFilter,
    EventEnum,
    EventLike,
    Events,
    FailureEvents,
    HandlerEvents,
    events_in,
    translated,
)
from camshaft.engine.plan import Plan, Registration, Wrapper
from camshaft.engine.signatures import call_of
from camshaft.engine.state import State
from camshaft.errors import described

_EXTRA: dict[Any, tuple[tuple[Any, ...], dict[str, Any]]] = {
    Events.EXCEPTION_RAISED: ((None,), {}),
    Events.TERMINATE_SINGLE_EPOCH: ((), {"iter_counter": 0}),
}
"""What an event hands to its handlers besides the engine, by position and by keyword; the values are stand-ins."""


_NO_COUNTERS = frozenset(
    {"epoch_length", "max_epochs", "max_iters", "output", "batch", "metrics", "dataloader", "seed", "times"}
)


class Dispatcher:
    """Keeps one plan for each event; it knows no engine, which is handed in at each firing."""

    def __init__(self) -> None:
        self.plans: dict[Any, Plan] = {}
        self.counters: dict[Any, str] = dict(State.event_to_attr)
        self._wrappers: tuple[Wrapper, ...] = ()
        self.register((*Events, *FailureEvents), None)

    def register(self, events: tuple[Any, ...], event_to_attr: dict[Any, str] | None) -> None:
        """Make events known, with the attributes that count them.

        Raises:
            TypeError: an event is neither a name nor a member of an ``EventEnum``.
            ValueError: ``event_to_attr`` is neither a dict nor ``None``.
        """
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
                self.plans[event] = Plan(event, self.counters.get(event), event in _EXTRA)
                self.plans[event].wrap(self._wrappers)
        for event in event_to_attr or {}:
            if event in self.plans:
                self.plans[event].counter = self.counters[event]

    def knows(self, event: Any) -> bool:
        """Say whether an event is registered; those of ready-made handlers are as soon as somebody asks."""
        event = translated(event)
        if not isinstance(event, (str, CallableEventWithFilter)):
            return False
        if event not in self.plans and isinstance(event, CallableEventWithFilter):
            family = event._family
            if family is not None and issubclass(family, HandlerEvents):
                self.register((family[event.name],), None)
        return event in self.plans

    def plan(self, event: Any) -> Plan:
        """Find the plan of an event.

        Raises:
            ValueError: the event is not registered.
        """
        if self.knows(event):
            return self.plans[translated(event)]
        raise ValueError(_unknown(event, [getattr(one, "name", one) for one in self.plans]))

    def add(
        self,
        event: EventLike,
        handler: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        order: int,
    ) -> tuple[int, ...]:
        """Register a handler on an event, or on each of a list; all are checked before the first is registered."""
        if not isinstance(order, int):
            raise TypeError(f"order must be an int, got {order!r}")
        if translated(event) is not event:  # one of PyTorch-Ignite
            _check_metric(getattr(handler, "__self__", None))
        made = [(plan, self._registration(plan, one, handler, args, kwargs, order)) for one, plan in self._each(event)]
        for plan, registration in made:
            plan.add(registration)
        return tuple(registration.serial for _, registration in made)

    def has(self, handler: Callable[..., Any], event: EventLike | None) -> bool:
        """Say whether a handler is registered on an event, on any of a list, or anywhere."""
        plans = self.plans.values() if event is None else [plan for _, plan in self._each(event, strict=False)]
        return any(one.handler == handler for plan in plans for one in plan.registrations)

    def remove(self, handler: Callable[..., Any], event: EventLike) -> None:
        """Remove all registrations of a handler on an event, or on each of a list.

        Raises:
            ValueError: the handler is not registered there.
        """
        plans = [plan for _, plan in self._each(event, strict=False)]
        if not any(one.handler == handler for plan in plans for one in plan.registrations):
            raise ValueError(f"handler {handler!r} is not registered on {event!r}")
        for plan in plans:
            plan.remove(lambda one: one.handler == handler)

    def discard(self, serials: tuple[int, ...]) -> None:
        """Remove the registrations of these numbers, those that are still there."""
        for plan in self.plans.values():
            if any(one.serial in serials for one in plan.registrations):
                plan.remove(lambda one: one.serial in serials)

    def trace(self, logger: logging.Logger | None) -> None:
        """Write a record for each event that fires from now on, or stop doing so."""
        for plan in self.plans.values():
            plan.trace(logger)

    def wrap(self, wrapper: Wrapper) -> None:
        """Put something around the calls of all handlers, also of those that are registered later."""
        self._wrap_in((*self._wrappers, wrapper))

    def unwrap(self, wrapper: Wrapper) -> None:
        """Take that away again, whatever was put around it since."""
        self._wrap_in(tuple(one for one in self._wrappers if one != wrapper))

    def _wrap_in(self, wrappers: tuple[Wrapper, ...]) -> None:
        self._wrappers = wrappers
        for plan in self.plans.values():
            plan.wrap(wrappers)

    def _each(self, event: EventLike, strict: bool = True) -> Iterator[tuple[Any, Plan]]:
        for one in events_in(event):
            if strict or self.knows(one):
                yield one, self.plan(one)

    def _registration(
        self,
        plan: Plan,
        event: Any,
        handler: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        order: int,
    ) -> Registration:
        event_filter = getattr(event, "filter", None)
        if event_filter is not None and plan.counter is None:
            raise RuntimeError(
                f"{event!r} has a filter, but nothing counts {plan.event!r}: "
                "give it a counter with register_events(..., event_to_attr={event: attribute})"
            )
        extra, keywords = _EXTRA.get(plan.event, ((), {}))
        call = call_of(handler, plan.event, extra, keywords, args, kwargs)
        return Registration(plan, handler, call, event_filter, args, kwargs, order)


def _check_metric(owner: Any) -> None:
    """Refuse metrics of PyTorch-Ignite that collect samples, as ``ROC_AUC``, in a job of several ranks.

    They gather the samples as if every rank had the same number. Where the numbers differ, gloo ends the process, and
    MPI leaves samples out.
    """
    inner = getattr(owner, "metrics", None)  # of a group
    for one in (owner, *(inner.values() if isinstance(inner, dict) else ())):
        collects = any(isinstance(getattr(one, name, None), list) for name in ("_predictions", "_y_pred"))
        if collects and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            name = type(one).__name__
            raise RuntimeError(
                f"{name} of PyTorch-Ignite must not be attached in a job of {dist.get_world_size()} ranks: it gathers "
                "samples as if every rank had the same number, and fails or leaves some out where they differ; use "
                "camshaft.handlers.attach_metrics with a metric of torchmetrics, such as BinaryAUROC instead of ROC_AUC"
            )


def _unknown(event: Any, known: list[str]) -> str:
    if not isinstance(event, (str, CallableEventWithFilter)):
        return f"event must be an event of camshaft, its name, or several joined by |, got {described(event)}"
    name = str(getattr(event, "name", event))
    folded = {one.casefold(): one for one in known}
    close = get_close_matches(name.casefold(), folded, n=1)
    hint = f"did you mean {folded[close[0]]}?" if close else "register it with register_events first."
    return f"unknown event {event!r}: {hint} Known are {', '.join(known)}"
