"""What registering a handler gives back."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any


class RemovableEventHandle:
    """Undoes one registration, by :meth:`remove` or at the end of a ``with`` block.

    It keeps neither the handler nor the engine alive; when one of them is gone there is nothing to remove.

    Args:
        event_name: the event, or the list of events, of the registration.
        handler: the registered handler.
        engine: the engine it was registered on.
        registrations: numbers of the registrations to undo. Without them all registrations of ``handler`` on
            ``event_name`` are.

    Attributes:
        event_name: as given.
        handler: weak reference to the handler.
        engine: weak reference to the engine.
        registrations: as given.

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
        self.handler = _reference(handler)
        self.engine: weakref.ref[Any] = weakref.ref(engine)
        self.registrations = registrations

    def remove(self) -> None:
        """Take the handler off the engine; does nothing when that has happened already."""
        handler, engine = self.handler(), self.engine()
        if handler is None or engine is None:
            return
        if self.registrations:
            engine._dispatcher.discard(self.registrations)
        elif engine.has_event_handler(handler, self.event_name):
            engine.remove_event_handler(handler, self.event_name)

    def __enter__(self) -> RemovableEventHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


def _reference(handler: Callable[..., Any]) -> Callable[[], Callable[..., Any] | None]:
    """Refer to a handler without keeping it alive, as far as its type allows that."""
    try:
        if hasattr(handler, "__self__") and hasattr(handler, "__func__"):
            return weakref.WeakMethod(handler)
        return weakref.ref(handler)
    except TypeError:  # an instance of a class with __slots__ and no room for weak references
        return _gone_or(handler)


def _gone_or(handler: Callable[..., Any]) -> Callable[[], Callable[..., Any] | None]:
    return lambda: handler
