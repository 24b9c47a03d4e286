"""Events, their filters, lists of events, the order of handlers, and the handle of a registration.

An event is a value: calling it returns a new event with a filter, and ``|`` returns a new list.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum, EnumMeta, IntEnum
from typing import TYPE_CHECKING, Any

from camshaft.arguments import check_takes
from camshaft.engine.state import State
from camshaft.interop import ignite_class
from camshaft.types import is_integer

__all__ = [
    "CallableEventWithFilter",
    "EventEnum",
    "Events",
    "EventsList",
    "OptimizerEvents",
    "RemovableEventHandle",
    "State",
]

EventFilter = Callable[[Any, int], Any]


# --- filters by count --------------------------------------------------------------------------------------------

NEVER = sys.maxsize
"""A count that no counter reaches."""


@dataclass(frozen=True)
class Every:
    """Accepts the multiples of ``every``; separate from :class:`Window`, as it is by far the most frequent filter.

    Like the other filters by count, it knows the next count that it accepts, and is not called in between.

    >>> [count for count in range(1, 7) if Every(3)(None, count)]
    [3, 6]
    """

    every: int

    def __call__(self, engine: Any, count: int) -> bool:
        """Return whether handlers run at ``count``."""
        return count % self.every == 0

    def following(self, count: int) -> int:
        """Return the smallest accepted count above ``count``."""
        return (count // self.every + 1) * self.every

    def __repr__(self) -> str:
        return f"every={self.every}"


@dataclass(frozen=True)
class Window:
    """Accepts every n-th count from ``first`` on and below ``before``.

    >>> [count for count in range(30) if Window(first=1, every=5, before=25)(None, count)]
    [1, 6, 11, 16, 21]
    """

    first: int
    every: int
    before: int = NEVER

    def __call__(self, engine: Any, count: int) -> bool:
        """Return whether handlers run at ``count``."""
        return (count - self.first) % self.every == 0 and self.first <= count < self.before

    def following(self, count: int) -> int:
        """Return the smallest accepted count above ``count``, or ``NEVER``."""
        first, every = self.first, self.every
        found = first if count < first else count + every - (count - first) % every
        return found if found < self.before else NEVER

    def __repr__(self) -> str:
        parts = {"every": (self.every, 1), "after": (self.first - 1, 0), "before": (self.before, NEVER)}
        return ", ".join(f"{name}={value}" for name, (value, default) in parts.items() if value != default)


@dataclass(frozen=True)
class Once:
    """Accepts the listed counts, which are in ascending order.

    >>> [count for count in range(1, 7) if Once((2, 5))(None, count)]
    [2, 5]
    """

    counts: tuple[int, ...]

    def __call__(self, engine: Any, count: int) -> bool:
        """Return whether handlers run at ``count``."""
        return count in self.counts

    def following(self, count: int) -> int:
        """Return the smallest accepted count above ``count``, or ``NEVER``."""
        place = bisect_right(self.counts, count)
        return self.counts[place] if place < len(self.counts) else NEVER

    def __repr__(self) -> str:
        return f"once={self.counts[0] if len(self.counts) == 1 else list(self.counts)}"


CountFilter = Every | Window | Once


def _at_least(name: str, value: Any, lowest: int) -> int:
    if not is_integer(value) or value < lowest:
        raise ValueError(f"{name} must be an integer >= {lowest}, got {value!r}")
    return int(value)


# --- events ------------------------------------------------------------------------------------------------------


class _Joinable:
    __slots__ = ()

    def __or__(self, other: EventLike) -> EventsList:
        return EventsList((*_events_of(self), *_events_of(other)))

    def __ror__(self, other: str) -> EventsList:
        return EventsList((*_events_of(other), *_events_of(self)))


class CallableEventWithFilter(_Joinable):
    """An event, optionally with a filter that decides at which counts its handlers run.

    Calling an event returns a new event with a filter. Equality and hash depend on the name alone: an event equals
    the string that is its name, and any event of that name unless the two belong to different :class:`EventEnum`
    classes.

    Args:
        value: value of the event; also its name if ``name`` is not given.
        event_filter: called as ``event_filter(engine, count)``; handlers run if the result is true.
        name: name of the event.

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
        """Name of the event."""
        return self._name_

    @property
    def value(self) -> Any:
        """Value of the event."""
        return self._value_

    @property
    def filter(self) -> EventFilter | None:
        """The filter, or ``None`` if handlers always run."""
        return self._filter

    def __call__(
        self,
        event_filter: EventFilter | None = None,
        every: int | None = None,
        once: int | Iterable[int] | None = None,
        before: int | None = None,
        after: int | None = None,
    ) -> CallableEventWithFilter:
        """Return this event with a filter: ``event_filter``, ``once``, or any of ``every, before, after``.

        Args:
            event_filter: called with the engine and the count of the event.
            every: run at each multiple; with ``after`` or ``before``, at every n-th count of the window, starting
                with its first.
            once: the count, or the counts, at which to run.
            before: run at counts below this one.
            after: run at counts above this one.

        Raises:
            ValueError: not exactly one of the three groups was given, or a number is out of range.
            TypeError: ``event_filter`` is not callable.

        >>> Events.EPOCH_COMPLETED(every=2, after=3, before=10)
        Events.EPOCH_COMPLETED(every=2, after=3, before=10)
        """
        counted = not (every is None and before is None and after is None)
        if (event_filter is not None) + (once is not None) + counted != 1:
            raise ValueError(
                "pass exactly one of event_filter, once, or any of every, before and after; got "
                f"event_filter={event_filter!r}, every={every!r}, once={once!r}, before={before!r}, after={after!r}"
            )
        chosen: EventFilter | None
        if is_integer(event_filter):
            raise TypeError(
                f"event_filter must be callable, got {event_filter!r}: did you mean every={event_filter!r}?"
            )
        if event_filter is not None:
            check_takes("event_filter", event_filter, "(engine, count)")
            chosen = event_filter
        elif once is not None:
            chosen = self.once_event_filter(once)
        elif before is None and after is None and every is not None:
            chosen = self.every_event_filter(every)
            if every == 1:
                chosen = None
        else:
            chosen = self.every_before_and_after_event_filter(1 if every is None else every, before, after)
        event = CallableEventWithFilter(self._value_, chosen, self._name_)
        event._family = self._family
        return event

    @staticmethod
    def every_event_filter(every: int) -> EventFilter:
        """Accept the multiples of ``every``."""
        return Every(_at_least("every", every, 1))

    @staticmethod
    def once_event_filter(once: int | Iterable[int]) -> EventFilter:
        """Accept one count, or the counts of a sequence."""
        given = tuple(once) if isinstance(once, Sequence) and not isinstance(once, str) else (once,)
        if not given or not all(is_integer(count) and count > 0 for count in given):
            raise ValueError(f"once must be an integer above 0, or a non-empty sequence of such integers, got {once!r}")
        return Once(tuple(sorted({int(count) for count in given})))

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
            first=1 if after is None else _at_least("after", after, 0) + 1,
            every=_at_least("every", every, 1),
            before=NEVER if before is None else _at_least("before", before, 0),
        )

    @staticmethod
    def default_event_filter(engine: Any, event: int) -> bool:
        """Accept every count. Deprecated: use the event without a filter."""
        warnings.warn("default_event_filter is deprecated: use the event without a filter", stacklevel=2)
        return True

    def __eq__(self, other: object) -> bool:
        if isinstance(other, CallableEventWithFilter):
            related = self._family is None or other._family is None or self._family is other._family
            return related and self._name_ == other._name_
        return self._name_ == other if isinstance(other, str) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._name_)

    def __repr__(self) -> str:
        name = f"{self._family.__name__ if self._family else 'Events'}.{self._name_}"
        if self._filter is None:
            return name
        return f"{name}({'' if isinstance(self._filter, CountFilter) else 'event_filter='}{self._filter!r})"


# How other libraries name what the built-in events stand for.
_MEANT = {
    **dict.fromkeys(("begin", "start"), "started"),
    **dict.fromkeys(("complete", "done", "end", "ended", "finished"), "completed"),
    **dict.fromkeys(("batch", "step"), "iteration"),
    **dict.fromkeys(("of", "on", "fit", "train", "training"), ""),
}


def meant(name: str, names: Iterable[str]) -> str | None:
    """Return the name of an event that resembles another name, or ``None``.

    >>> [
    ...     meant(name, Events.__members__)
    ...     for name in ("epoch_end", "on_train_batch_start", "EPOCH_STRTED", "forward")
    ... ]
    ['EPOCH_COMPLETED', 'ITERATION_STARTED', 'EPOCH_STARTED', None]
    """

    def words(one: str) -> set[str]:
        return {_MEANT.get(word, word) for word in one.split("_")} - {""}

    known, name = {one.casefold(): one for one in names}, name.casefold()
    close = [one for one in known if words(one) == words(name)] or get_close_matches(name, known, n=1)
    return known[close[0]] if close else None


class _EventEnumType(EnumMeta):
    if not TYPE_CHECKING:  # for which a metaclass with this method has every attribute

        def __getattr__(cls, name):
            if not name.startswith("_"):  # of Python's own look-ups, some before there are members
                if name in cls._member_map_:  # before Python 3.11
                    return cls._member_map_[name]
                close = meant(name, cls._member_map_)
                hint = f"did you mean {cls.__name__}.{close}?" if close else f"it has {', '.join(cls._member_map_)}"
                message = f"{cls.__name__} has no event {name!r}: {hint}"
                raise AttributeError(message, name=name, obj=None)  # in obj, Python looks for a suggestion of its own
            raise AttributeError(name)


class EventEnum(CallableEventWithFilter, Enum, metaclass=_EventEnumType):
    """Base class of enums of events, both built-in and user-defined.

    >>> class BackpropEvents(EventEnum):
    ...     BACKWARD_COMPLETED = "backward_completed"
    >>> BackpropEvents.BACKWARD_COMPLETED(every=2)
    BackpropEvents.BACKWARD_COMPLETED(every=2)
    """

    def __init__(self, value: Any) -> None:
        self._filter = None
        self._family = type(self)


class HandlerEvents(EventEnum):
    """Base class of events that handlers of this package fire; engines register them on first use."""


class OptimizerEvents(EventEnum):
    """Event of a training step: the optimizer has stepped. ``state.optimizer_steps`` counts it.

    Supervised trainers fire it once per step of the optimizer, however many batches that takes, also if a gradient
    scaler skips the step. A step of your own fires it with one call, which also counts it; if it has several
    optimizers, after the last of them. Handlers run inside of the step: after an error in one of them, a resumed run
    repeats the iteration.

    >>> from camshaft.engine import Engine
    >>> def step(engine: Engine[int, None], batch: int) -> None:
    ...     if batch % 2 == 0:  # here, the optimizer steps
    ...         engine.fire_event(OptimizerEvents.STEP_COMPLETED)
    >>> trainer = Engine(step)
    >>> @trainer.on(OptimizerEvents.STEP_COMPLETED(every=2))
    ... def show(engine: Engine[int, None]) -> None:
    ...     print(engine.state.optimizer_steps, engine.state.iteration)
    >>> state = trainer.run([1, 2, 3, 4, 5, 6, 7, 8])
    2 4
    4 8
    """

    STEP_COMPLETED = "step_completed"


class FailureEvents(EventEnum):
    """Event for cleanup, fired when an error reaches the engine, before ``EXCEPTION_RAISED``."""

    ERROR_MET = "error_met"


class Events(EventEnum):
    """The events that an engine fires, in the order shown in :mod:`camshaft.engine.loop`."""

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


State.event_to_attr = {
    Events.GET_BATCH_STARTED: "iteration",
    Events.GET_BATCH_COMPLETED: "iteration",
    Events.ITERATION_STARTED: "iteration",
    Events.ITERATION_COMPLETED: "iteration",
    Events.EPOCH_STARTED: "epoch",
    Events.EPOCH_COMPLETED: "epoch",
    Events.STARTED: "epoch",
    Events.COMPLETED: "epoch",
    OptimizerEvents.STEP_COMPLETED: "optimizer_steps",
}


class EventsList(_Joinable):
    """An immutable list of events, created by ``|``. A handler is registered once for each event in it.

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

    def __getitem__(self, index: int) -> CallableEventWithFilter | str:
        return self._events[index]

    def __eq__(self, other: object) -> bool:
        return self._events == other._events if isinstance(other, EventsList) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._events)

    def __repr__(self) -> str:
        return " | ".join(repr(event) for event in self._events) or "EventsList()"


EventLike = CallableEventWithFilter | EventsList | str
"""An event, the name of one, or a list of events."""


def translated(event: Any) -> Any:
    """Convert an event, or a list of events, of PyTorch-Ignite; return anything else unchanged."""
    if isinstance(event, (CallableEventWithFilter, EventsList, str)) or ignite_class(event) is None:
        return event
    if isinstance(getattr(event, "name", None), str) and hasattr(event, "filter"):
        return CallableEventWithFilter(event.value, event.filter, event.name)
    return EventsList(map(translated, event)) if isinstance(event, Iterable) else event


def events_in(events: EventLike) -> tuple[CallableEventWithFilter | str, ...]:
    """Return the events of a list, or a tuple of the single event."""
    events = translated(events)
    return tuple(events) if isinstance(events, EventsList) else (events,)


def _events_of(events: Any) -> tuple[CallableEventWithFilter | str, ...]:
    found = events_in(events)
    if all(isinstance(event, (CallableEventWithFilter, str)) for event in found):
        return found
    raise TypeError(f"| joins events, names of events, and lists of events, got {events!r}")


class Order(IntEnum):
    """The orders with which the library adds handlers.

    ``add_event_handler(..., order=...)`` takes any integer. Handlers with a smaller order run earlier, those with the
    same order as they were added. The default is 0, also for the library's handlers that users add themselves, such as
    checkpoints and schedulers.

    Attributes:
        TIME_FIRST: time profilers start the clock. They also measure the handlers with the orders below.
        MEASURE_FIRST: throughput and traces end an iteration, which excludes the handlers that follow.
        STEP: accumulated gradients are applied, so that handlers see the final weights of the epoch.
        RESULTS: metrics and averages are computed, and loggers resume, before other handlers use them.
        DEFAULT: handlers of users.
        MEASURE_LAST: throughput and traces start an iteration.
        LAST: handlers that must have the last word: the rate search sets the rate, and ranks agree on stopping.
        TIME_LAST: time profilers stop the clock.
    """

    TIME_FIRST = -(2**100)  # beyond sys.maxsize, which users may pass
    MEASURE_FIRST = -(2**40)
    STEP = -(10**9)
    RESULTS = -1
    DEFAULT = 0
    MEASURE_LAST = 2**40
    LAST = sys.maxsize
    TIME_LAST = 2**100


class RemovableEventHandle:
    """Removes a registration, by :meth:`remove` or at the end of a ``with`` block.

    It holds weak references to the handler and the engine.

    Args:
        event_name: the event, or the list of events, of the registration.
        handler: the registered handler.
        engine: the engine that it is registered on.
        registrations: serial numbers of the registrations to remove; by default, all registrations of ``handler`` on
            ``event_name``.

    Attributes:
        event_name: as passed.
        handler: weak reference to the handler.
        engine: weak reference to the engine.
        registrations: as passed.

    >>> from camshaft.engine import Engine, Events
    >>> engine = Engine(lambda engine, batch: batch)
    >>> def report() -> None:
    ...     print("done")
    >>> with engine.add_event_handler(Events.COMPLETED, report):
    ...     _ = engine.run([1, 2])
    done
    >>> engine.has_event_handler(report)
    False
    """

    def __init__(
        self, event_name: Any, handler: Callable[..., Any], engine: Any, registrations: tuple[int, ...] = ()
    ) -> None:
        self.event_name = event_name
        self.handler: Callable[[], Callable[..., Any] | None]
        try:
            is_method = hasattr(handler, "__self__") and hasattr(handler, "__func__")
            self.handler = weakref.WeakMethod(handler) if is_method else weakref.ref(handler)
        except TypeError:  # its type has no room for weak references
            self.handler = lambda: handler
        self.engine: weakref.ref[Any] = weakref.ref(engine)
        self.registrations = registrations

    def remove(self) -> None:
        """Remove the handler from the engine. Does nothing if it has been removed already."""
        handler, engine = self.handler(), self.engine()
        if handler is None or engine is None:
            return
        if self.registrations:
            engine._dispatcher.discard(self.registrations)
        elif engine.has_event_handler(handler, self.event_name):
            engine.remove_event_handler(handler, self.event_name)

    def __enter__(self) -> RemovableEventHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def joined(
    handles: Iterable[RemovableEventHandle], event_name: Any, handler: Callable[..., object], engine: Any
) -> RemovableEventHandle:
    """Return one handle that removes everything that several handles of an engine would."""
    registrations = tuple(number for handle in handles for number in handle.registrations)
    return RemovableEventHandle(event_name, handler, engine, registrations)
