"""How a handler wants to be called, decided once, when it is registered."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from camshaft.errors import described


@dataclass(frozen=True)
class Call:
    """The form of the call of a handler."""

    takes_engine: bool
    takes_keywords: bool = False


def call_of(
    handler: Callable[..., Any],
    event: Any,
    extra: tuple[Any, ...],
    keywords: Mapping[str, Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Call:
    """Find the form of call that a handler's signature admits, with the engine first where that is possible.

    Args:
        handler: any callable; decorators made with ``functools.wraps`` are seen through.
        event: named in the error.
        extra: stand-ins for what the event hands over by position.
        keywords: stand-ins for what the event hands over by keyword, to handlers that take it.
        args: positional arguments given at registration.
        kwargs: keyword arguments given at registration.

    Raises:
        TypeError: ``handler`` is not callable.
        ValueError: no form fits, or the signature cannot be read.

    >>> call_of(lambda engine: None, "E", (), {}, (), {}).takes_engine
    True
    >>> call_of(lambda: None, "E", (), {}, (), {}).takes_engine
    False
    """
    if not callable(handler):
        raise TypeError(f"handler must be callable, got {described(handler)}{_alternative(handler)}")
    try:
        signature = inspect.signature(handler)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the signature of handler {handler!r} cannot be read: wrap it in a function") from error
    forms = [(keywords, True), ({}, False)] if keywords else [({}, False)]
    for offered, takes_keywords in forms:
        for engine, takes_engine in (((None,), True), ((), False)):
            if _binds(signature, (*engine, *extra, *args), {**kwargs, **offered}):
                return Call(takes_engine, takes_keywords)
    raise ValueError(_mismatch(handler, signature, event, extra, args, kwargs))


def _alternative(handler: Any) -> str:
    """Return what to register in place of an object that cannot be called, as the end of a message."""
    if isinstance(handler, ReduceLROnPlateau):
        return "; use camshaft.handlers.ReduceLROnPlateauScheduler, or write a function that calls step(metric)"
    if isinstance(handler, LRScheduler):
        return "; wrap it in camshaft.handlers.LRScheduler"
    if callable(getattr(handler, "attach", None)):
        return "; it registers its handlers itself: call its method attach(engine, ...)"
    return ""


def check_process_function(process_function: Any) -> None:
    """Refuse what cannot be called with an engine and a batch."""
    if process_function is None:
        raise ValueError("process_function must be given, got None")
    if not callable(process_function):
        raise TypeError(f"process_function must be callable, got {process_function!r}")
    try:
        inspect.signature(process_function).bind(None, None)
    except (TypeError, ValueError) as error:
        raise ValueError(f"process_function must take (engine, batch), got {process_function!r}: {error}") from error


def _binds(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _mismatch(
    handler: Callable[..., Any],
    signature: inspect.Signature,
    event: Any,
    extra: tuple[Any, ...],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> str:
    given = [
        *("the exception" for _ in extra),
        *map(repr, args),
        *(f"{name}={value!r}" for name, value in kwargs.items()),
    ]
    offered = ", ".join(given) or "nothing more"
    missing = [
        f"{name}=..."
        for name, parameter in list(signature.parameters.items())[1 + len(extra) + len(args) :]
        if parameter.default is parameter.empty and name not in kwargs
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    names = ", ".join(name.removesuffix("=...") for name in missing)
    hint = f"; it also requires {names}: add_event_handler(event, handler, {', '.join(missing)})" if missing else ""
    return (
        f"handler {handler!r} with the signature {signature} cannot be called on {event!r}: it is given the engine "
        f"(or not, if it does not take it) and {offered}{hint}"
    )
