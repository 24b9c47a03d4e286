"""Errors in a run: note where they come from, and pass them to the handlers of ``EXCEPTION_RAISED``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from camshaft.engine.events import Events, FailureEvents
from camshaft.errors import annotate

THE_DATA = "the data"
_PLACED = "raised by "


def report(engine: Any, error: BaseException, in_iteration: bool = False) -> BaseException | None:
    """Pass an error to its handlers; return the error that must leave the run, or ``None`` if it was handled."""
    if in_iteration and not any(note.startswith(_PLACED) for note in getattr(error, "__notes__", ())):
        place(error, f"process function {name_of(engine._process_function)}", engine.state)
    _clean_up(engine)
    engine.logger.error("Engine met an exception: %r", error)
    plan = engine._dispatcher.plans[Events.EXCEPTION_RAISED]
    if not plan.registrations:
        return error
    try:
        plan.fire_with(engine, error)
    except BaseException as raised:
        return raised
    finally:
        del error  # a local reference would be a cycle through the traceback, whose frames hold the engine
    return None


def _clean_up(engine: Any) -> None:
    """Run cleanup handlers. An error in them must not hide the one that is reported."""
    event = engine.last_event_name
    try:
        engine._dispatcher.plans[FailureEvents.ERROR_MET].fire(engine)
    except Exception:
        engine.logger.exception("A handler of %s failed", FailureEvents.ERROR_MET)
    engine.last_event_name = event


def place(error: BaseException, source: str, state: Any) -> None:
    """Add a note to an error that names its source."""
    annotate(error, f"{_PLACED}{source}, epoch {state.epoch}, iteration {state.iteration}")


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function, or of another callable, and its location."""
    with suppress(ValueError):  # of a cycle of wrappers
        function = inspect.unwrap(function)  # such as one_rank_only makes
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", None) or repr(function)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


@contextmanager
def naming_the_data(engine: Any) -> Iterator[None]:
    """Name the data as the source of errors in the block."""
    try:
        yield
    except Exception as error:
        place(error, THE_DATA, engine.state)
        raise
