"""A handler registered on an event: how it is called, decided once from its signature."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from camshaft.engine.events import Events
from camshaft.engine.filters import CountFilter
from camshaft.errors import described

if TYPE_CHECKING:
    from camshaft.engine.dispatch import Plan

Invocation = Callable[[Any], Any]
Wrapper = Callable[[Any, "Registration", Invocation], Invocation]
"""Wraps the call of a handler: takes the event, the registration and the function that calls the handler."""

EXTRA_ARGUMENTS: Mapping[Any, tuple[tuple[Any, ...], dict[str, Any]]] = {
    Events.EXCEPTION_RAISED: ((None,), {}),
    Events.TERMINATE_SINGLE_EPOCH: ((), {"iter_counter": 0}),
}
"""Placeholders of the arguments that an event passes besides the engine, positional and keyword."""

_serials = count(1)


class Registration:
    """One handler on one event, ready to be called.

    Args:
        plan: of the event.
        handler: any callable; decorators made with ``functools.wraps`` are seen through.
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
        self._plan = plan = weakref.proxy(plan)  # a strong reference would close a cycle

        def call_with_extra(engine: Any) -> Any:
            extra = (engine, *plan.extra) if takes_engine else plan.extra
            return handler(*extra, *args, **{**kwargs, **(plan.keywords if takes_keywords else {})})

        self._call: Invocation
        if plan.event in EXTRA_ARGUMENTS:
            self._call = call_with_extra
        elif not takes_engine:
            self._call = lambda engine: handler(*args, **kwargs)
        else:  # the handler itself where nothing is added, which saves a call
            self._call = (lambda engine: handler(engine, *args, **kwargs)) if args or kwargs else handler
        self.wrap(())

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


def check_process_function(process_function: Any) -> None:
    """Raise an error unless ``process_function`` can be called with an engine and a batch."""
    if process_function is None:
        raise ValueError("process_function must be given, got None")
    if not callable(process_function):
        raise TypeError(f"process_function must be callable, got {process_function!r}")
    try:
        inspect.signature(process_function).bind(None, None)
    except (TypeError, ValueError) as error:
        raise ValueError(f"process_function must take (engine, batch), got {process_function!r}: {error}") from error


def _find_form(
    handler: Callable[..., Any], event: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[bool, bool]:
    """Return whether a handler takes the engine, and whether it takes the keywords of the event."""
    if not callable(handler):
        raise TypeError(f"handler must be callable, got {described(handler)}{_alternative(handler)}")
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
    given = [*("the exception" for _ in extra), *map(repr, args), *(f"{name}={kwargs[name]!r}" for name in kwargs)]
    missing = [
        name
        for name, parameter in list(signature.parameters.items())[1 + len(extra) + len(args) :]
        if parameter.default is parameter.empty and name not in kwargs
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    hint = ""
    if missing:
        passed = ", ".join(f"{name}=..." for name in missing)
        hint = f"; it also requires {', '.join(missing)}: add_event_handler(event, handler, {passed})"
    raise ValueError(
        f"handler {handler!r} with the signature {signature} cannot be called on {event!r}: it is given the engine "
        f"(or not, if it does not take it) and {', '.join(given) or 'nothing more'}{hint}"
    )


def _alternative(handler: Any) -> str:
    """Return what to register instead of an object that is not callable, as the end of a message."""
    if isinstance(handler, ReduceLROnPlateau):
        return "; use camshaft.handlers.ReduceLROnPlateauScheduler, or write a function that calls step(metric)"
    if isinstance(handler, LRScheduler):
        return "; wrap it in camshaft.handlers.LRScheduler"
    if callable(getattr(handler, "attach", None)):
        return "; it registers its handlers itself: call its method attach(engine, ...)"
    return ""
