"""Events are values: what fires, with an optional filter; ``|`` makes a new list of them."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any, overload

from camshaft.engine.filters import NEVER, Every, Once, Window, at_least, counts_for_once
from camshaft.errors import ignite_class

EventFilter = Callable[[Any, int], Any]


class CallableEventWithFilter:
    """An event, optionally with a filter that decides at which counts its handlers run.

    Calling an event gives a new one with a filter and leaves the first as it was. Equality and hash are by
    name, whatever the filter: an event equals the string that is its name, and another event of that name
    unless the two come from different :class:`EventEnum` classes.

    Args:
        value: what the event carries; its name too, if ``name`` is not given.
        event_filter: called as ``event_filter(engine, count)``; a true answer lets the handlers run.
        name: the event's name.

    >>> Events.ITERATION_COMPLETED(every=10)
    Events.ITERATION_COMPLETED(every=10)
    >>> Events.ITERATION_COMPLETED(every=10) == Events.ITERATION_COMPLETED == "ITERATION_COMPLETED"
    True
    """

    _name_: str
    _value_: Any
    _filter: EventFilter | None
    _family: type[EventEnum] | None

    def __init__(self, value: Any, event_filter: EventFilter | None = None, name: str | None = None) -> None:
        self._value_ = value
        self._name_ = value if name is None else name
        self._filter = event_filter
        self._family = None

    @property
    def name(self) -> str:
        """The name, by which events are told apart."""
        return self._name_

    @property
    def value(self) -> Any:
        """The value given at definition."""
        return self._value_

    @property
    def filter(self) -> EventFilter | None:
        """The filter, or ``None`` when the handlers run each time."""
        return self._filter

    def __call__(
        self,
        event_filter: EventFilter | None = None,
        every: int | None = None,
        once: int | Iterable[int] | None = None,
        before: int | None = None,
        after: int | None = None,
    ) -> CallableEventWithFilter:
        """Give this event with a filter: ``event_filter``, ``once``, or any of ``every, before, after``.

        Args:
            event_filter: called with the engine and the count of the event.
            every: run at each multiple; together with ``after`` or ``before``, at every n-th count of the
                window, from its first one on.
            once: the one count, or the counts, at which to run.
            before: run at counts below it.
            after: run at counts above it.

        Raises:
            ValueError: not exactly one of the three groups is given, or a number is out of range.
            TypeError: ``event_filter`` is not callable.

        >>> Events.EPOCH_COMPLETED(every=2, after=3, before=10)
        Events.EPOCH_COMPLETED(every=2, after=3, before=10)
        """
        counted = not (every is None and before is None and after is None)
        if (event_filter is not None) + (once is not None) + counted != 1:
            raise ValueError(
                "give exactly one of event_filter, once, or any of every, before and after; got "
                f"event_filter={event_filter!r}, every={every!r}, once={once!r}, before={before!r}, after={after!r}"
            )
        if event_filter is not None:
            return self._filtered(_checked(event_filter))
        if once is not None:
            return self._filtered(self.once_event_filter(once))
        if before is None and after is None and every is not None:
            every = at_least("every", every, 1)
            return self._filtered(self.every_event_filter(every) if every > 1 else None)
        return self._filtered(self.every_before_and_after_event_filter(1 if every is None else every, before, after))

    def _filtered(self, event_filter: EventFilter | None) -> CallableEventWithFilter:
        event = CallableEventWithFilter(self._value_, event_filter, self._name_)
        event._family = self._family
        return event

    @staticmethod
    def every_event_filter(every: int) -> EventFilter:
        """Accept the multiples of ``every``."""
        return Every(at_least("every", every, 1))

    @staticmethod
    def once_event_filter(once: int | Iterable[int]) -> EventFilter:
        """Accept one count, or the counts of a sequence."""
        return Once(counts_for_once(once))

    @staticmethod
    def before_and_after_event_filter(before: int | None = None, after: int | None = None) -> EventFilter:
        """Accept the counts strictly between ``after`` and ``before``."""
        return CallableEventWithFilter.every_before_and_after_event_filter(1, before, after)

    @staticmethod
    def every_before_and_after_event_filter(
        every: int, before: int | None = None, after: int | None = None
    ) -> EventFilter:
        """Accept every n-th count strictly between ``after`` and ``before``, from ``after + 1`` on."""
        return Window(
            after=0 if after is None else at_least("after", after, 0),
            before=NEVER if before is None else at_least("before", before, 0),
            every=at_least("every", every, 1),
        )

    @staticmethod
    def default_event_filter(engine: Any, event: int) -> bool:
        """Accept everything (deprecated: an event without a filter does the same)."""
        warnings.warn("default_event_filter is deprecated: use the event without a filter", stacklevel=2)
        return True

    def __eq__(self, other: object) -> bool:
        if isinstance(other, CallableEventWithFilter):
            related = self._family is None or other._family is None or self._family is other._family
            return related and self._name_ == other._name_
        return self._name_ == other if isinstance(other, str) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._name_)

    def __or__(self, other: EventLike) -> EventsList:
        return EventsList((self,)) | other

    def __ror__(self, other: str) -> EventsList:
        return EventsList(_events_of(other)) | self

    def __repr__(self) -> str:
        name = f"{self._family.__name__ if self._family else 'Events'}.{self._name_}"
        if self._filter is None:
            return name
        by_count = isinstance(self._filter, (Every, Once, Window))
        return f"{name}({'' if by_count else 'event_filter='}{self._filter!r})"


class EventEnum(CallableEventWithFilter, Enum):
    """Base of enums of events, the built-in ones and a user's own.

    >>> class BackpropEvents(EventEnum):
    ...     BACKWARD_COMPLETED = "backward_completed"
    >>> BackpropEvents.BACKWARD_COMPLETED(every=2)
    BackpropEvents.BACKWARD_COMPLETED(every=2)
    """

    def __init__(self, value: Any) -> None:
        self._filter = None
        self._family = type(self)


class HandlerEvents(EventEnum):
    """Base of enums of events that ready-made handlers fire; every engine knows these without being told."""


class FailureEvents(EventEnum):
    """Fired when a run meets an error, before the handlers of errors; for what must be closed then, no more."""

    ERROR_MET = "error_met"


class Events(EventEnum):
    """The events that an engine fires by itself, in the order that :mod:`camshaft.engine.loop` shows."""

    EPOCH_STARTED = "epoch_started"
    EPOCH_COMPLETED = "epoch_completed"
    STARTED = "started"
    COMPLETED = "completed"
    ITERATION_STARTED = "iteration_started"
    ITERATION_COMPLETED = "iteration_completed"
    EXCEPTION_RAISED = "exception_raised"
    GET_BATCH_STARTED = "get_batch_started"
    GET_BATCH_COMPLETED = "get_batch_completed"
    DATALOADER_STOP_ITERATION = "dataloader_stop_iteration"
    TERMINATE = "terminate"
    TERMINATE_SINGLE_EPOCH = "terminate_single_epoch"
    INTERRUPT = "interrupt"


class EventsList:
    """Several events, for which a handler is registered once each; made by ``|`` and never changed.

    >>> stops = Events.TERMINATE | Events.INTERRUPT
    >>> len(stops | Events.COMPLETED(once=1)), len(stops)
    (3, 2)
    """

    __slots__ = ("_events",)

    def __init__(self, events: Iterable[CallableEventWithFilter | str] = ()) -> None:
        self._events = tuple(events)

    def __iter__(self) -> Iterator[CallableEventWithFilter | str]:
        return iter(self._events)

    def __len__(self) -> int:
        return len(self._events)

    @overload
    def __getitem__(self, index: int) -> CallableEventWithFilter | str: ...
    @overload
    def __getitem__(self, index: slice) -> EventsList: ...
    def __getitem__(self, index: int | slice) -> CallableEventWithFilter | str | EventsList:
        return EventsList(self._events[index]) if isinstance(index, slice) else self._events[index]

    def __or__(self, other: EventLike) -> EventsList:
        return EventsList((*self._events, *_events_of(other)))

    def __ror__(self, other: str) -> EventsList:
        return EventsList(_events_of(other)) | self

    def __eq__(self, other: object) -> bool:
        return self._events == other._events if isinstance(other, EventsList) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._events)

    def __repr__(self) -> str:
        return " | ".join(repr(event) for event in self._events) or "EventsList()"


EventLike = CallableEventWithFilter | EventsList | str
"""What names one event or several: an event, its name, or a list of them."""


def translated(event: Any) -> Any:
    """Return the event, or the list of events, that one of PyTorch-Ignite stands for; all else as it is."""
    if isinstance(event, (CallableEventWithFilter, EventsList, str)) or ignite_class(event) is None:
        return event
    if isinstance(getattr(event, "name", None), str) and hasattr(event, "filter"):
        return CallableEventWithFilter(event.value, event.filter, event.name)
    return EventsList(map(translated, event)) if isinstance(event, Iterable) else event


def events_in(events: EventLike) -> tuple[CallableEventWithFilter | str, ...]:
    """Return the events that are joined in a list, or the only one."""
    events = translated(events)
    return tuple(events) if isinstance(events, EventsList) else (events,)


def _events_of(events: EventLike) -> tuple[CallableEventWithFilter | str, ...]:
    found = events_in(events)
    if all(isinstance(event, (CallableEventWithFilter, str)) for event in found):
        return found
    raise TypeError(f"only events, their names and lists of them can be joined by |, got {events!r}")


def _checked(event_filter: EventFilter) -> EventFilter:
    if not callable(event_filter):
        raise TypeError(f"event_filter must be callable, got {event_filter!r}")
    try:
        inspect.signature(event_filter).bind(None, 0)
    except (TypeError, ValueError) as error:
        raise ValueError(f"event_filter must take (engine, count), got {event_filter!r}: {error}") from error
    return event_filter
