"""Registration of handlers, and the forms in which they are called."""

from __future__ import annotations

import functools
import logging
import weakref

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from camshaft.engine import CallableEventWithFilter, Engine, EventEnum, Events
from tests.engine.traces import echo

# === Events, filters and process functions ===


EPOCH = Events.EPOCH_COMPLETED
GOT: list[tuple] = []


class Steps(EventEnum):
    STEPPED = "stepped"
    LOADED = "loaded"


def note(engine, *args):
    GOT.append(args)


def logged(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


@pytest.fixture(autouse=True)
def nothing_got():
    GOT.clear()


@pytest.mark.parametrize(
    "event", [*Events, "EPOCH_STARTED", EPOCH(every=2), EPOCH(event_filter=lambda engine, count: True)]
)
def test_the_built_in_events_are_registered(event):
    assert Engine(echo).has_registered_events(event)


@pytest.mark.parametrize("event", ["epoch_started", "FOO", Steps.STEPPED, CallableEventWithFilter("FOO"), 3, None])
def test_an_event_never_registered_is_rejected_everywhere(event, caplog):
    engine = Engine(echo)
    assert not engine.has_registered_events(event)
    with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match="event"):
        engine.add_event_handler(event, note)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    with pytest.raises(ValueError, match="event"):
        engine.on(event)(note)
    with pytest.raises(ValueError, match="event"):
        engine.fire_event(event)
    assert engine.last_event_name is None


@pytest.mark.parametrize(
    ("event", "hint"),
    [
        ("epoch_started", "did you mean EPOCH_STARTED"),
        ("EPOCH_COMPLETD", "did you mean EPOCH_COMPLETED"),
        ("FOO", "register_events"),
        (logging.INFO, "of type int"),
    ],
)
def test_the_message_about_an_unknown_event_reports_what_to_do(event, hint):
    with pytest.raises(ValueError, match=hint):
        Engine(echo).add_event_handler(event, note)


@pytest.mark.parametrize(
    ("registered", "used"),
    [
        ("FOO", "FOO"),
        ("FOO", CallableEventWithFilter("anything", name="FOO")),
        (Steps.STEPPED, Steps.STEPPED),
        (Steps.STEPPED, "STEPPED"),
    ],
)
def test_a_registered_event_can_be_used_by_each_of_its_names(registered, used):
    engine = Engine(echo)
    engine.register_events(registered, "another")
    assert engine.has_registered_events(used)
    engine.add_event_handler(used, note, 1)
    for event in (registered, used):
        engine.fire_event(event)
        assert engine.last_event_name == registered
    assert GOT == [(1,)] * 2


def test_registering_twice_keeps_the_handlers():
    engine = Engine(echo)
    engine.register_events("foo", Steps.STEPPED)
    engine.add_event_handler("foo", note)
    engine.register_events("foo", Steps.STEPPED, *Events)
    engine.fire_event("foo")
    assert GOT == [()]


@pytest.mark.parametrize(
    ("events", "counters", "error"),
    [
        ((3,), None, TypeError),
        (("foo", None), None, TypeError),
        ((CallableEventWithFilter("foo"),), None, TypeError),
        ((Steps.STEPPED(every=2),), None, TypeError),
        (("foo",), [("foo", "foos")], ValueError),
        (("foo",), "foos", ValueError),
    ],
)
def test_a_wrong_registration_changes_nothing(events, counters, error):
    engine = Engine(echo)
    with pytest.raises(error, match="got"):
        engine.register_events(*events, event_to_attr=counters)
    assert not engine.has_registered_events("foo")


COUNTLESS = [event for event in Events if event not in Engine(echo).state.event_to_attr]


@pytest.mark.parametrize("event", [*COUNTLESS, "foo", Steps.STEPPED])
def test_a_filter_on_an_event_that_nothing_counts_is_rejected_at_once(event):
    engine = Engine(echo)
    engine.register_events("foo", Steps.STEPPED)
    event = CallableEventWithFilter(event) if event == "foo" else event
    for filtered in (event(once=1), event(every=2), event(event_filter=lambda engine, count: True)):
        with pytest.raises(RuntimeError, match="event_to_attr"):
            engine.add_event_handler(filtered, note)
        with pytest.raises(RuntimeError, match="event_to_attr"):
            engine.add_event_handler(Events.STARTED | filtered, note)
    assert not engine.has_event_handler(note)
    engine.add_event_handler(event(every=1), note)  # no filter, no need to count


def test_a_filter_works_once_the_event_is_counted():
    engine = Engine(echo)
    engine.register_events(Steps.STEPPED)
    engine.register_events(Steps.STEPPED, event_to_attr={Steps.STEPPED: "steps"})
    engine.add_event_handler(Steps.STEPPED(every=2), lambda: GOT.append(engine.state.steps))
    for engine.state.steps in range(1, 6):
        engine.fire_event(Steps.STEPPED)
    assert GOT == [2, 4]


def test_a_counter_of_one_engine_does_not_apply_to_another():
    first, second = Engine(echo), Engine(echo)
    first.register_events(Steps.STEPPED, event_to_attr={Steps.STEPPED: "steps"})
    second.register_events(Steps.STEPPED)
    first.add_event_handler(Steps.STEPPED(every=2), note)
    with pytest.raises(RuntimeError, match="event_to_attr"):
        second.add_event_handler(Steps.STEPPED(every=2), note)


@pytest.mark.parametrize("unknown", ["foo", Steps.LOADED])
def test_a_list_with_one_wrong_event_registers_nothing(unknown):
    engine = Engine(echo)
    with pytest.raises(ValueError, match="unknown event"):
        engine.add_event_handler(Events.STARTED | unknown | Events.COMPLETED, note)
    assert not engine.has_event_handler(note)


@pytest.mark.parametrize(
    ("process_function", "error"),
    [
        (None, ValueError),
        (3, TypeError),
        ("step", TypeError),
        (lambda: None, ValueError),
        (lambda engine: None, ValueError),
        (lambda engine, batch, more: None, ValueError),
        (lambda engine, *, batch: None, ValueError),
    ],
)
def test_a_wrong_process_function_is_rejected(process_function, error):
    with pytest.raises(error, match="process_function"):
        Engine(process_function)


@pytest.mark.parametrize(
    "process_function",
    [
        echo,
        logged(echo),
        lambda *args: args[1],
        lambda engine, batch, more=None: batch,
        functools.partial(lambda more, engine, batch: batch, 1),
        type("Step", (), {"__call__": lambda self, engine, batch: batch})(),
    ],
)
def test_any_callable_of_engine_and_batch_is_a_process_function(process_function):
    assert Engine(process_function).run([1, 2]).output == 2


def test_a_new_engine_has_no_event_and_no_stop_request():
    engine = Engine(echo)
    flags = engine.should_terminate, engine.should_terminate_single_epoch, engine.should_interrupt
    assert flags == (False, False, False)
    assert (engine.last_event_name, engine.state_dict_user_keys) == (None, [])
    assert Engine.interrupt_resume_enabled is True


# === Calling forms ===


ERROR = ValueError("x")
EPOCH_EVENT, FAILED, CUT = Events.EPOCH_COMPLETED, Events.EXCEPTION_RAISED, Events.TERMINATE_SINGLE_EPOCH
SELF = "the engine"  # stands for it in the tables
KEPT: list[tuple] = []


class Plain:
    """Handlers of each kind that a class can have."""

    def method(self, engine):
        keep(engine)

    def bare(self):
        keep()

    @staticmethod
    def static(engine, a):
        keep(engine, a)

    @classmethod
    def of_class(cls, engine):
        keep(engine)

    def __call__(self, engine, a=1):
        keep(engine, a)


class Bare:
    def __call__(self):
        keep()


def keep(*args, **kwargs):
    args = tuple(SELF if isinstance(value, Engine) else value for value in args)
    KEPT.append((*args, kwargs) if kwargs else args)


def logged_binding(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


class Decorated:
    @logged_binding
    def method(self, engine, a):
        keep(engine, a)

    @logged_binding
    def bare(self):
        keep()


def two(engine, a, b=2):
    keep(engine, a, b)


@pytest.fixture(autouse=True)
def nothing_kept():
    KEPT.clear()


def fire(engine, event):
    """Let an event fire once, with what the engine hands over."""
    if event is CUT:
        engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: engine.terminate_epoch())
    engine.run([1, 2, 3])


def failing(engine, batch):
    raise ERROR


# (event, handler, arguments given at registration, what the handler gets)
BINDINGS = {
    "takes the engine": (EPOCH_EVENT, lambda engine: keep(engine), (), {}, (SELF,)),
    "takes nothing": (EPOCH_EVENT, lambda: keep(), (), {}, ()),
    "any first name": (EPOCH_EVENT, lambda x: keep(x), (), {}, (SELF,)),
    "an unused default": (EPOCH_EVENT, lambda x=5: keep(x), (), {}, (SELF,)),
    "*args": (EPOCH_EVENT, lambda *args: keep(*args), (), {}, (SELF,)),
    "*args and an argument": (EPOCH_EVENT, lambda *args: keep(*args), (1,), {}, (SELF, 1)),
    "only **kwargs": (EPOCH_EVENT, lambda **kwargs: keep(**kwargs), (), {"a": 1}, ({"a": 1},)),
    "only **kwargs, none given": (EPOCH_EVENT, lambda **kwargs: keep(**kwargs), (), {}, ()),
    "*args and **kwargs": (EPOCH_EVENT, lambda *a, **k: keep(*a, **k), (1,), {"b": 2}, (SELF, 1, {"b": 2})),
    "an argument": (EPOCH_EVENT, lambda engine, a: keep(engine, a), (1,), {}, (SELF, 1)),
    "an argument without engine": (EPOCH_EVENT, lambda a: keep(a), (1,), {}, (1,)),
    "an optional second one": (EPOCH_EVENT, lambda a, b=3: keep(a, b), (1,), {}, (SELF, 1)),
    "a keyword": (EPOCH_EVENT, lambda engine, a: keep(engine, a), (), {"a": 1}, (SELF, 1)),
    "a keyword without engine": (EPOCH_EVENT, lambda a: keep(a), (), {"a": 1}, (1,)),
    "keyword-only": (EPOCH_EVENT, lambda *, a: keep(a), (), {"a": 1}, (1,)),
    "positional-only": (EPOCH_EVENT, lambda engine, /: keep(engine), (), {}, (SELF,)),
    "the keyword named engine": (EPOCH_EVENT, lambda engine: keep(engine), (), {"engine": 1}, (1,)),
    "a partial": (EPOCH_EVENT, functools.partial(two, a=1), (), {}, (SELF, 1, 2)),
    "a full partial": (EPOCH_EVENT, functools.partial(two, "e", 1, 3), (), {}, ("e", 1, 3)),
    "a partial of the first": (
        EPOCH_EVENT,
        functools.partial(lambda a, engine: keep(a, engine), 1),
        (),
        {},
        (1, SELF),
    ),
    "a method": (EPOCH_EVENT, Plain().method, (), {}, (SELF,)),
    "a method without engine": (EPOCH_EVENT, Plain().bare, (), {}, ()),
    "a static method": (EPOCH_EVENT, Plain.static, (1,), {}, (SELF, 1)),
    "a class method": (EPOCH_EVENT, Plain.of_class, (), {}, (SELF,)),
    "a callable object": (EPOCH_EVENT, Plain(), (), {}, (SELF, 1)),
    "a callable object without engine": (EPOCH_EVENT, Bare(), (), {}, ()),
    "a decorated function": (EPOCH_EVENT, logged_binding(two), (1,), {"b": 4}, (SELF, 1, 4)),
    "a decorated function without engine": (EPOCH_EVENT, logged_binding(lambda: keep()), (), {}, ()),
    "a decorated method": (EPOCH_EVENT, Decorated().method, (1,), {}, (SELF, 1)),
    "a decorated method without engine": (EPOCH_EVENT, Decorated().bare, (), {}, ()),
    "a filtered event": (EPOCH_EVENT(once=1), lambda engine, a: keep(engine, a), (1,), {}, (SELF, 1)),
    "a filtered event, no engine": (EPOCH_EVENT(every=1), lambda: keep(), (), {}, ()),
    "a filter of one's own": (
        EPOCH_EVENT(event_filter=lambda engine, count: True),
        lambda: keep(),
        (),
        {},
        (),
    ),
    "a builtin with a signature": (EPOCH_EVENT, KEPT.append, (), {}, None),
    "the exception": (FAILED, lambda engine, error: keep(engine, error), (), {}, (SELF, ERROR)),
    "the exception alone": (FAILED, lambda error: keep(error), (), {}, (ERROR,)),
    "the exception alone, named engine": (FAILED, lambda engine: keep(engine), (), {}, (ERROR,)),
    "the exception and more": (
        FAILED,
        lambda engine, error, a: keep(engine, error, a),
        (1,),
        {},
        (SELF, ERROR, 1),
    ),
    "the exception and more, no engine": (FAILED, lambda error, a: keep(error, a), (), {"a": 1}, (ERROR, 1)),
    "the exception, *args": (FAILED, lambda *args: keep(*args), (), {}, (SELF, ERROR)),
    "cut, engine": (CUT, lambda engine: keep(engine), (), {}, (SELF,)),
    "cut, nothing": (CUT, lambda: keep(), (), {}, ()),
    "cut, both": (CUT, lambda engine, iter_counter: keep(engine, iter_counter), (), {}, (SELF, 2)),
    "cut, the count alone": (CUT, lambda iter_counter: keep(iter_counter), (), {}, (2,)),
    "cut, keyword-only": (CUT, lambda engine, *, iter_counter: keep(engine, iter_counter), (), {}, (SELF, 2)),
    "cut, optional": (CUT, lambda engine, iter_counter=None: keep(engine, iter_counter), (), {}, (SELF, 2)),
    "cut, **kwargs": (
        CUT,
        lambda engine, **k: keep(engine, **k),
        (),
        {"a": 1},
        (SELF, {"a": 1, "iter_counter": 2}),
    ),
    "cut, only **kwargs": (CUT, lambda **kwargs: keep(**kwargs), (), {}, ({"iter_counter": 2},)),
    "cut, *args": (CUT, lambda *args: keep(*args), (), {}, (SELF,)),
    "cut, an argument": (
        CUT,
        lambda engine, a, iter_counter: keep(engine, a, iter_counter),
        (1,),
        {},
        (SELF, 1, 2),
    ),
    "cut, an argument, no count": (CUT, lambda engine, a: keep(engine, a), (1,), {}, (SELF, 1)),
    "cut, the engine's count wins": (
        CUT,
        lambda iter_counter: keep(iter_counter),
        (),
        {"iter_counter": 9},
        (2,),
    ),
}


@pytest.mark.parametrize(("event", "handler", "args", "kwargs", "expected"), BINDINGS.values(), ids=BINDINGS.keys())
def test_a_handler_is_called_as_its_signature_requires(event, handler, args, kwargs, expected):
    engine = Engine(failing if event is FAILED else echo)
    engine.add_event_handler(event, handler, *args, **kwargs)
    fire(engine, event)
    assert KEPT == [engine if expected is None else expected]


@pytest.mark.parametrize(
    ("event", "handler", "args", "kwargs"),
    [
        (EPOCH_EVENT, lambda: None, (1,), {}),
        (EPOCH_EVENT, lambda engine, a: None, (), {}),
        (EPOCH_EVENT, lambda engine, a: None, (1, 2, 3), {}),
        (EPOCH_EVENT, lambda engine: None, (), {"b": 1}),
        (EPOCH_EVENT(once=1), lambda engine, a: None, (), {}),
        (EPOCH_EVENT, Plain().method, (1, 2), {}),
        (EPOCH_EVENT, functools.partial(two), (), {}),
        (EPOCH_EVENT, logged_binding(two), (), {}),
        (FAILED, lambda: None, (), {}),
        (FAILED, lambda engine, error: None, (1, 2), {}),
        (CUT, lambda engine, count: None, (), {}),
    ],
)
def test_a_handler_of_the_wrong_arity_is_rejected(event, handler, args, kwargs):
    engine = Engine(echo)
    with pytest.raises(ValueError, match="handler .* cannot be called"):
        engine.add_event_handler(event, handler, *args, **kwargs)
    assert not engine.has_event_handler(handler)


@pytest.mark.parametrize("handler", [max, type("Odd", (), {"__signature__": 3, "__call__": lambda self: None})()])
def test_a_handler_whose_signature_cannot_be_read_is_rejected(handler):
    with pytest.raises(ValueError, match="signature"):
        Engine(echo).add_event_handler(EPOCH_EVENT, handler)


OPTIMIZER = torch.optim.SGD([torch.zeros(1)], lr=0.1)


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (3, "3 of type int$"),
        (StepLR(OPTIMIZER, 1), r"of type StepLR; wrap it in camshaft\.handlers\.LRScheduler$"),
        (ReduceLROnPlateau(OPTIMIZER), "use camshaft.handlers.ReduceLROnPlateauScheduler, or"),
        (
            type("Clock", (), {"attach": echo})(),
            r"of type Clock; it registers its handlers itself: .*attach\(engine",
        ),
    ],
)
def test_a_handler_that_is_not_callable_is_rejected_and_the_message_reports_what_to_do(handler, message):
    with pytest.raises(TypeError, match=f"handler must be callable, got .*{message}"):
        Engine(echo).add_event_handler(EPOCH_EVENT, handler)


def test_a_weak_reference_as_an_argument_stays_one():
    engine = Engine(echo)
    for reference in (weakref.ref(engine), weakref.ref(Plain)):
        engine.add_event_handler(EPOCH_EVENT, lambda one: KEPT.append(one), reference)
    engine.run([1])
    assert KEPT == [weakref.ref(engine), weakref.ref(Plain)]


def test_keywords_at_firing_do_not_stay_in_those_of_the_registration():
    given, engine = {"a": 1}, Engine(echo)

    def spoil(engine, **kwargs):
        KEPT.append(dict(kwargs))
        kwargs.clear()

    engine.add_event_handler(CUT, spoil, **given)
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: engine.terminate_epoch())
    engine.run([1, 2], max_epochs=2)
    assert KEPT == [{"a": 1, "iter_counter": 1}] * 2
    assert given == {"a": 1}


@pytest.mark.parametrize("arguments", [(), (print,)])
def test_a_decorator_that_is_not_used_causes_a_warning_for_the_line(arguments):
    engine = Engine(lambda engine, batch: None)
    with pytest.warns(UserWarning, match=r"on\(Events.COMPLETED, \.\.\.\) registered nothing") as caught:
        engine.on(Events.COMPLETED, *arguments)
    assert [one.filename for one in caught] == [__file__]
    with pytest.raises(ValueError, match="unknown event"):  # and no warning
        engine.on("unknown")(print)


def test_the_decorator_registers_with_arguments_and_gives_the_function_back():
    engine = Engine(echo)

    def handler(engine, a, b):
        keep(engine, a, b)

    assert engine.on(EPOCH_EVENT | Events.COMPLETED(once=1), 1, b=2)(handler) is handler
    engine.run([1])
    assert KEPT == [(SELF, 1, 2)] * 2
