"""How a handler is called, decided by its signature when it is registered."""

from __future__ import annotations

import functools
import weakref

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from camshaft.engine import Engine, Events
from tests.engine.traces import echo

ERROR = ValueError("x")
EPOCH, FAILED, CUT = Events.EPOCH_COMPLETED, Events.EXCEPTION_RAISED, Events.TERMINATE_SINGLE_EPOCH
SELF = "the engine"  # stands for it in the tables
GOT: list[tuple] = []


class Plain:
    """Handlers of each kind that a class can have."""

    def method(self, engine):
        note(engine)

    def bare(self):
        note()

    @staticmethod
    def static(engine, a):
        note(engine, a)

    @classmethod
    def of_class(cls, engine):
        note(engine)

    def __call__(self, engine, a=1):
        note(engine, a)


class Bare:
    def __call__(self):
        note()


def note(*args, **kwargs):
    args = tuple(SELF if isinstance(value, Engine) else value for value in args)
    GOT.append((*args, kwargs) if kwargs else args)


def logged(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


class Decorated:
    @logged
    def method(self, engine, a):
        note(engine, a)

    @logged
    def bare(self):
        note()


def two(engine, a, b=2):
    note(engine, a, b)


@pytest.fixture(autouse=True)
def nothing_got():
    GOT.clear()


def fire(engine, event):
    """Let an event fire once, with what the engine hands over."""
    if event is CUT:
        engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: engine.terminate_epoch())
    engine.run([1, 2, 3])


def failing(engine, batch):
    raise ERROR


# (event, handler, arguments given at registration, what the handler gets)
BINDINGS = {
    "takes the engine": (EPOCH, lambda engine: note(engine), (), {}, (SELF,)),
    "takes nothing": (EPOCH, lambda: note(), (), {}, ()),
    "any first name": (EPOCH, lambda x: note(x), (), {}, (SELF,)),
    "an unused default": (EPOCH, lambda x=5: note(x), (), {}, (SELF,)),
    "*args": (EPOCH, lambda *args: note(*args), (), {}, (SELF,)),
    "*args and an argument": (EPOCH, lambda *args: note(*args), (1,), {}, (SELF, 1)),
    "only **kwargs": (EPOCH, lambda **kwargs: note(**kwargs), (), {"a": 1}, ({"a": 1},)),
    "only **kwargs, none given": (EPOCH, lambda **kwargs: note(**kwargs), (), {}, ()),
    "*args and **kwargs": (EPOCH, lambda *a, **k: note(*a, **k), (1,), {"b": 2}, (SELF, 1, {"b": 2})),
    "an argument": (EPOCH, lambda engine, a: note(engine, a), (1,), {}, (SELF, 1)),
    "an argument without engine": (EPOCH, lambda a: note(a), (1,), {}, (1,)),
    "an optional second one": (EPOCH, lambda a, b=3: note(a, b), (1,), {}, (SELF, 1)),
    "a keyword": (EPOCH, lambda engine, a: note(engine, a), (), {"a": 1}, (SELF, 1)),
    "a keyword without engine": (EPOCH, lambda a: note(a), (), {"a": 1}, (1,)),
    "keyword-only": (EPOCH, lambda *, a: note(a), (), {"a": 1}, (1,)),
    "positional-only": (EPOCH, lambda engine, /: note(engine), (), {}, (SELF,)),
    "the keyword named engine": (EPOCH, lambda engine: note(engine), (), {"engine": 1}, (1,)),
    "a partial": (EPOCH, functools.partial(two, a=1), (), {}, (SELF, 1, 2)),
    "a full partial": (EPOCH, functools.partial(two, "e", 1, 3), (), {}, ("e", 1, 3)),
    "a partial of the first": (EPOCH, functools.partial(lambda a, engine: note(a, engine), 1), (), {}, (1, SELF)),
    "a method": (EPOCH, Plain().method, (), {}, (SELF,)),
    "a method without engine": (EPOCH, Plain().bare, (), {}, ()),
    "a static method": (EPOCH, Plain.static, (1,), {}, (SELF, 1)),
    "a class method": (EPOCH, Plain.of_class, (), {}, (SELF,)),
    "a callable object": (EPOCH, Plain(), (), {}, (SELF, 1)),
    "a callable object without engine": (EPOCH, Bare(), (), {}, ()),
    "a decorated function": (EPOCH, logged(two), (1,), {"b": 4}, (SELF, 1, 4)),
    "a decorated function without engine": (EPOCH, logged(lambda: note()), (), {}, ()),
    "a decorated method": (EPOCH, Decorated().method, (1,), {}, (SELF, 1)),
    "a decorated method without engine": (EPOCH, Decorated().bare, (), {}, ()),
    "a filtered event": (EPOCH(once=1), lambda engine, a: note(engine, a), (1,), {}, (SELF, 1)),
    "a filtered event, no engine": (EPOCH(every=1), lambda: note(), (), {}, ()),
    "a filter of one's own": (EPOCH(event_filter=lambda engine, count: True), lambda: note(), (), {}, ()),
    "a builtin with a signature": (EPOCH, GOT.append, (), {}, None),
    "the exception": (FAILED, lambda engine, error: note(engine, error), (), {}, (SELF, ERROR)),
    "the exception alone": (FAILED, lambda error: note(error), (), {}, (ERROR,)),
    "the exception alone, named engine": (FAILED, lambda engine: note(engine), (), {}, (ERROR,)),
    "the exception and more": (FAILED, lambda engine, error, a: note(engine, error, a), (1,), {}, (SELF, ERROR, 1)),
    "the exception and more, no engine": (FAILED, lambda error, a: note(error, a), (), {"a": 1}, (ERROR, 1)),
    "the exception, *args": (FAILED, lambda *args: note(*args), (), {}, (SELF, ERROR)),
    "cut, engine": (CUT, lambda engine: note(engine), (), {}, (SELF,)),
    "cut, nothing": (CUT, lambda: note(), (), {}, ()),
    "cut, both": (CUT, lambda engine, iter_counter: note(engine, iter_counter), (), {}, (SELF, 2)),
    "cut, the count alone": (CUT, lambda iter_counter: note(iter_counter), (), {}, (2,)),
    "cut, keyword-only": (CUT, lambda engine, *, iter_counter: note(engine, iter_counter), (), {}, (SELF, 2)),
    "cut, optional": (CUT, lambda engine, iter_counter=None: note(engine, iter_counter), (), {}, (SELF, 2)),
    "cut, **kwargs": (CUT, lambda engine, **k: note(engine, **k), (), {"a": 1}, (SELF, {"a": 1, "iter_counter": 2})),
    "cut, only **kwargs": (CUT, lambda **kwargs: note(**kwargs), (), {}, ({"iter_counter": 2},)),
    "cut, *args": (CUT, lambda *args: note(*args), (), {}, (SELF,)),
    "cut, an argument": (CUT, lambda engine, a, iter_counter: note(engine, a, iter_counter), (1,), {}, (SELF, 1, 2)),
    "cut, an argument, no count": (CUT, lambda engine, a: note(engine, a), (1,), {}, (SELF, 1)),
    "cut, the engine's count wins": (CUT, lambda iter_counter: note(iter_counter), (), {"iter_counter": 9}, (2,)),
}


@pytest.mark.parametrize(("event", "handler", "args", "kwargs", "expected"), BINDINGS.values(), ids=BINDINGS.keys())
def test_a_handler_is_called_as_its_signature_asks_for(event, handler, args, kwargs, expected):
    engine = Engine(failing if event is FAILED else echo)
    engine.add_event_handler(event, handler, *args, **kwargs)
    fire(engine, event)
    assert GOT == [engine if expected is None else expected]


@pytest.mark.parametrize(
    ("event", "handler", "args", "kwargs"),
    [
        (EPOCH, lambda: None, (1,), {}),
        (EPOCH, lambda engine, a: None, (), {}),
        (EPOCH, lambda engine, a: None, (1, 2, 3), {}),
        (EPOCH, lambda engine: None, (), {"b": 1}),
        (EPOCH(once=1), lambda engine, a: None, (), {}),
        (EPOCH, Plain().method, (1, 2), {}),
        (EPOCH, functools.partial(two), (), {}),
        (EPOCH, logged(two), (), {}),
        (FAILED, lambda: None, (), {}),
        (FAILED, lambda engine, error: None, (1, 2), {}),
        (CUT, lambda engine, count: None, (), {}),
    ],
)
def test_a_handler_of_the_wrong_arity_is_refused(event, handler, args, kwargs):
    engine = Engine(echo)
    with pytest.raises(ValueError, match="handler .* cannot be called"):
        engine.add_event_handler(event, handler, *args, **kwargs)
    assert not engine.has_event_handler(handler)


@pytest.mark.parametrize("handler", [max, type("Odd", (), {"__signature__": 3, "__call__": lambda self: None})()])
def test_a_handler_whose_signature_cannot_be_read_is_refused(handler):
    with pytest.raises(ValueError, match="signature"):
        Engine(echo).add_event_handler(EPOCH, handler)


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
def test_a_handler_that_is_not_callable_is_refused_and_the_message_says_what_to_do(handler, message):
    with pytest.raises(TypeError, match=f"handler must be callable, got .*{message}"):
        Engine(echo).add_event_handler(EPOCH, handler)


def test_a_weak_reference_as_an_argument_stays_one():
    engine = Engine(echo)
    for reference in (weakref.ref(engine), weakref.ref(Plain)):
        engine.add_event_handler(EPOCH, lambda one: GOT.append(one), reference)
    engine.run([1])
    assert GOT == [weakref.ref(engine), weakref.ref(Plain)]


def test_keywords_at_firing_do_not_stay_in_those_of_the_registration():
    given, engine = {"a": 1}, Engine(echo)

    def spoil(engine, **kwargs):
        GOT.append(dict(kwargs))
        kwargs.clear()

    engine.add_event_handler(CUT, spoil, **given)
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: engine.terminate_epoch())
    engine.run([1, 2], max_epochs=2)
    assert GOT == [{"a": 1, "iter_counter": 1}] * 2
    assert given == {"a": 1}


def test_the_decorator_registers_with_arguments_and_gives_the_function_back():
    engine = Engine(echo)

    def handler(engine, a, b):
        note(engine, a, b)

    assert engine.on(EPOCH | Events.COMPLETED(once=1), 1, b=2)(handler) is handler
    engine.run([1])
    assert GOT == [(SELF, 1, 2)] * 2
