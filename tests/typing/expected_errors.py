"""Uses of the engine for a type checker: only the marked lines must be reported.

A mark is the code of the error that mypy reports on that line. This file is read by `tests/engine/test_engine.py`
and never run.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from camshaft import handlers
from camshaft.engine import CallableEventWithFilter, Engine, EventEnum, Events, EventsList, RemovableEventHandle, State


class Steps(EventEnum):
    STEPPED = "stepped"


def step(engine: Engine[int, float], batch: int) -> float:
    return batch / 2


def with_engine(engine: Engine[int, float]) -> None: ...
def with_any_engine(engine: Engine[Any, Any]) -> None: ...
def without_engine() -> None: ...
def with_engine_and_name(engine: Engine[int, float], name: str) -> None: ...
def with_engine_and_option(engine: Engine[int, float], *, option: int = 0) -> None: ...
def with_name(name: str) -> None: ...
def with_error(engine: Engine[int, float], error: Exception) -> None: ...
def with_error_alone(error: Exception) -> None: ...
def with_error_and_name(engine: Engine[int, float], error: Exception, name: str) -> None: ...
def with_count(engine: Engine[int, float], iter_counter: int) -> None: ...
def for_strings(engine: Engine[str, str]) -> None: ...
def returns_an_int(engine: Engine[int, float]) -> int:
    return 1


class Handler:
    def method(self, engine: Engine[int, float]) -> None: ...
    def named(self, engine: Engine[int, float], name: str) -> None: ...
    def __call__(self, engine: Engine[int, float]) -> None: ...


# --- engines and process functions -----------------------------------------------------------------------------

engine = Engine(step)
plain: Engine[int, float] = Engine(step)
loose: Engine[Any, Any] = Engine(lambda engine, batch: batch)


def without_batch(engine: Engine[int, float]) -> float: ...  # error: empty-body
def with_three(engine: Engine[int, float], batch: int, more: int) -> float:
    return batch / more


def for_text(engine: Engine[str, str], batch: str) -> str:
    return batch


def not_an_engine(engine: int, batch: int) -> int:
    return batch


Engine(without_batch)  # error: arg-type
Engine(with_three)  # error: arg-type
Engine(not_an_engine)  # error: arg-type
Engine(None)  # error: arg-type
Engine(3)  # error: arg-type
Engine()  # error: call-arg
mixed: Engine[int, str] = Engine(step)  # error: arg-type
other: Engine[str, float] = Engine(step)  # error: arg-type
text: Engine[str, str] = Engine(for_text)

# --- types of batch and output in the state --------------------------------------------------------------------------

output: float = engine.state.output
batch: int = engine.state.batch
iteration: int = engine.state.iteration
returned: State[int, float] = engine.run([1, 2, 3], max_epochs=2)
engine.state.learning_rate = 0.1  # attributes set by users have type Any
wrong_output: str = engine.state.output  # error: assignment
wrong_batch: str = engine.state.batch  # error: assignment
wrong_count: str = engine.state.iteration  # error: assignment
wrong_return: State[int, str] = engine.run([1])  # error: assignment

# --- running ---------------------------------------------------------------------------------------------------

engine.run()
engine.run(range(3), max_iters=5, epoch_length=2)
engine.run(iter([1, 2]))
engine.run(["a"])  # error: list-item
engine.run(3)  # error: arg-type
engine.run([1], max_epochs="2")  # error: arg-type
engine.run([1], max_epoch=2)  # error: call-arg
engine.set_data([1])
engine.set_data(3)  # error: arg-type

# --- events ----------------------------------------------------------------------------------------------------

filtered: CallableEventWithFilter = Events.EPOCH_COMPLETED(every=2, after=3)
Events.EPOCH_COMPLETED(once=[1, 2])
Events.EPOCH_COMPLETED(event_filter=lambda engine, count: count > 3)
joined: EventsList = Events.EPOCH_COMPLETED | Events.COMPLETED(once=1) | Steps.STEPPED | "foo"
engine.register_events("foo", Steps.STEPPED, event_to_attr={Steps.STEPPED: "steps"})
engine.fire_event(Steps.STEPPED)
misspelled = Events.EPOCH_COMPLETE  # error: attr-defined
Events.EPOCH_COMPLETED(every="2")  # error: arg-type
Events.EPOCH_COMPLETED(each=2)  # error: call-arg
Events.EPOCH_COMPLETED(event_filter=lambda: True)  # error: arg-type, misc
Events.EPOCH_COMPLETED | 3  # error: operator
engine.register_events(3)  # error: arg-type
Events.EPOCH_COMPLETED.filter = None  # error: misc

# --- handlers --------------------------------------------------------------------------------------------------

handle: RemovableEventHandle = engine.add_event_handler(Events.EPOCH_COMPLETED, with_engine)
engine.add_event_handler(Events.EPOCH_COMPLETED, with_any_engine)
engine.add_event_handler(Events.EPOCH_COMPLETED, without_engine)
engine.add_event_handler(Events.EPOCH_COMPLETED, returns_an_int)
engine.add_event_handler(Events.EPOCH_COMPLETED, lambda engine: engine.terminate())
engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: None)
engine.add_event_handler(Events.EPOCH_COMPLETED, Handler())
engine.add_event_handler(Events.EPOCH_COMPLETED, Handler().method)
engine.add_event_handler(Events.EPOCH_COMPLETED, partial(with_engine_and_name, name="a"))
engine.add_event_handler("EPOCH_COMPLETED", with_engine)
engine.add_event_handler(Events.EPOCH_COMPLETED(every=2), with_engine)
engine.add_event_handler(Events.EPOCH_COMPLETED | Events.COMPLETED, without_engine)
engine.add_event_handler(Steps.STEPPED, with_engine)

engine.add_event_handler(Events.EPOCH_COMPLETED, with_engine_and_name, "a")
engine.add_event_handler(Events.EPOCH_COMPLETED, with_engine_and_name, name="a")
engine.add_event_handler(Events.EPOCH_COMPLETED, with_engine_and_option)
engine.add_event_handler(Events.EPOCH_COMPLETED, with_engine_and_option, option=1)
engine.add_event_handler(Events.EPOCH_COMPLETED, with_name, "a")
engine.add_event_handler(Events.EPOCH_COMPLETED, Handler().named, "a")
engine.add_event_handler(Events.EPOCH_COMPLETED(every=2), with_engine_and_name, "a")
engine.add_event_handler(Events.EPOCH_COMPLETED, with_engine, order=-1)
engine.add_event_handler(Events.EPOCH_COMPLETED, with_engine_and_name, "a", order=1)
engine.add_event_handler(Events.EPOCH_COMPLETED, without_engine, order=1)

engine.add_event_handler(Events.EPOCH_COMPLETED, with_engine_and_name)  # error: call-overload
engine.add_event_handler(Events.EPOCH_COMPLETED, with_engine_and_name, 3)  # error: call-overload
engine.add_event_handler(Events.EPOCH_COMPLETED, with_engine_and_name, "a", "b")  # error: call-overload
engine.add_event_handler(Events.EPOCH_COMPLETED, with_engine_and_option, options=1)  # error: call-overload
engine.add_event_handler(Events.EPOCH_COMPLETED, without_engine, "a")  # error: call-overload
engine.add_event_handler(Events.EPOCH_COMPLETED, for_strings)  # error: call-overload
engine.add_event_handler(Events.EPOCH_COMPLETED, Handler().named)  # error: call-overload
engine.add_event_handler(Events.EPOCH_COMPLETED, with_error)  # error: call-overload
engine.add_event_handler(Events.EPOCH_COMPLETED, 3)  # error: call-overload
engine.add_event_handler(Events.EPOCH_COMPLETED)  # error: call-overload
engine.add_event_handler(3, with_engine)  # error: call-overload
engine.add_event_handler(None, with_engine)  # error: call-overload
engine.add_event_handler([Events.STARTED], with_engine)  # error: call-overload
engine.add_event_handler(Events.EPOCH_COMPLETE, with_engine)  # error: attr-defined
engine.add_event_handler(Events.EPOCH_COMPLETED, with_engine, order="first")  # error: call-overload

engine.add_event_handler(Events.EXCEPTION_RAISED, with_error)
engine.add_event_handler(Events.EXCEPTION_RAISED, with_error_alone)
engine.add_event_handler(Events.EXCEPTION_RAISED, with_error_and_name, "a")
engine.add_event_handler(Events.EXCEPTION_RAISED, with_error, order=1)
engine.add_event_handler(Events.TERMINATE_SINGLE_EPOCH, with_count)
engine.add_event_handler(Events.TERMINATE_SINGLE_EPOCH, with_engine)
engine.add_event_handler(Events.TERMINATE_SINGLE_EPOCH, without_engine)

engine.has_event_handler(with_engine, Events.STARTED | Events.COMPLETED)
engine.remove_event_handler(with_engine, Events.STARTED)
engine.remove_event_handler(with_engine)  # error: call-arg
engine.remove_event_handler(with_engine, 3)  # error: arg-type

# --- as a decorator --------------------------------------------------------------------------------------------


@engine.on(Events.EPOCH_COMPLETED)
def decorated(engine: Engine[int, float]) -> int:
    return engine.state.epoch


@engine.on(Events.EPOCH_COMPLETED | Events.STARTED(every=2), order=1)
def decorated_without_engine() -> None: ...


@engine.on(Events.EPOCH_COMPLETED, "a", order=1)
def decorated_with_name(engine: Engine[int, float], name: str) -> None: ...


@engine.on(Events.EXCEPTION_RAISED)
def decorated_with_error(engine: Engine[int, float], error: Exception) -> None: ...


@engine.on(Events.EXCEPTION_RAISED, order=1)
def decorated_with_error_alone(error: Exception) -> None: ...


@engine.on(Events.TERMINATE_SINGLE_EPOCH)
def decorated_with_count(engine: Engine[int, float], iter_counter: int) -> None: ...


stays: int = decorated(engine)  # the decorator leaves the function as it is
changes: str = decorated(engine)  # error: assignment


@engine.on(Events.EPOCH_COMPLETED)  # error: type-var
def decorated_with_more(engine: Engine[int, float], name: str) -> None: ...


@engine.on(Events.EPOCH_COMPLETED)  # error: type-var
def decorated_with_a_number(number: int) -> None: ...


@engine.on(3)  # error: call-overload, untyped-decorator
def decorated_on_a_number(engine: Engine[int, float]) -> None: ...


@engine.on(Events.EPOCH_COMPLETE)  # error: attr-defined
def decorated_on_a_misspelled_event(engine: Engine[int, float]) -> None: ...


# --- handles, stopping, saving ---------------------------------------------------------------------------------

with engine.add_event_handler(Events.EPOCH_COMPLETED, with_engine) as entered:
    entered.remove()
engine.terminate(skip_completed=True)
engine.terminate_epoch(skip_epoch_completed=True)
engine.load_state_dict(engine.state_dict())
engine.load_state_dict(3)  # error: arg-type
engine.terminate("now")  # error: arg-type
handlers.ProgresBar()  # error: attr-defined
