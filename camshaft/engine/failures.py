"""Errors in a run: named, told to their handlers once, and carried out of the loop unchanged."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from camshaft.engine.event import Events, FailureEvents
from camshaft.errors import annotate

THE_DATA = "the data"
_PLACED = "raised by "


class Reported(BaseException):
    """Carries an error out of the loop that the handlers of errors have seen already."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class Shielded(Exception):
    """Carries a ``StopIteration`` of a handler through generators, which would turn it into something else."""

    def __init__(self, error: StopIteration) -> None:
        self.error = error


def report(engine: Any, error: BaseException, in_iteration: bool = False) -> BaseException | None:
    """Hand an error to its handlers; give back what must leave the run, if anything must."""
    error = error.error if isinstance(error, Shielded) else error
    if in_iteration and not _is_placed(error):
        place(error, f"process function {name_of(engine._process_function)}", engine.state)
    _announce(engine)
    engine.logger.error("Engine met an exception: %r", error)
    plan = engine._dispatcher.plans[Events.EXCEPTION_RAISED]
    if not plan.registrations:
        return error
    try:
        plan.fire_with(engine, error)
    except BaseException as raised:
        return raised
    finally:
        del error  # the traceback of an error must not hold the error: nobody would free the engine in its frames
    return None


def _announce(engine: Any) -> None:
    """Let what must be closed be closed; its own errors must not hide the one that was met."""
    event = engine.last_event_name
    try:
        engine._dispatcher.plans[FailureEvents.ERROR_MET].fire(engine)
    except Exception:
        engine.logger.exception("A handler of %s failed", FailureEvents.ERROR_MET)
    engine.last_event_name = event


def carry_out(error: BaseException | None) -> None:
    """Leave the loop with an error, if there is one."""
    if error is not None:
        raise Reported(error) from None


def place(error: BaseException, source: str, state: Any) -> None:
    """Note on an error where it comes from."""
    annotate(error, f"{_PLACED}{source}, epoch {state.epoch}, iteration {state.iteration}")


def name_of(function: Callable[..., Any]) -> str:
    """Name a function, or whatever else is called, and its place, for a message."""
    with suppress(ValueError):  # of wrappers without end
        function = inspect.unwrap(function)  # of what decorators such as one_rank_only made of it
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", None) or repr(function)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def _is_placed(error: BaseException) -> bool:
    return any(note.startswith(_PLACED) for note in getattr(error, "__notes__", ()))


@contextmanager
def naming_the_data(engine: Any) -> Iterator[None]:
    """Note on errors in the block that they come from the data, and shield those that a generator would change."""
    try:
        yield
    except StopIteration as error:
        place(error, THE_DATA, engine.state)
        raise Shielded(error) from None
    except Exception as error:
        place(error, THE_DATA, engine.state)
        raise
