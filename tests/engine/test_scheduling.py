"""Counted filters are scheduled, not polled: at the same counts as polling would give, and without asking."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from camshaft.engine import Engine, Events
from camshaft.engine.dispatch import Plan
from camshaft.engine.filters import Every, Once, Window
from tests.engine.strategies import onces, windows
from tests.engine.traces import echo

EVENT = Events.ITERATION_COMPLETED
ITERATIONS = 40


def odd(engine, count):
    return count % 2


def triggers(event):
    """An event without filter, or with one by count, or with one that must be asked."""
    return st.just(event) | (windows | onces).map(lambda a: event(**a)) | st.just(event(event_filter=odd))


def polled(registered, counts):
    """What the handlers would do if each filter were asked at each count."""
    return [(c, n) for c in counts for n, e in enumerate(registered) if e.filter is None or e.filter(None, c)]


@settings(deadline=None)
@given(st.lists(triggers(EVENT), max_size=6), st.dictionaries(st.integers(1, ITERATIONS), st.integers(-2, 60)))
def test_handlers_run_as_if_polled_also_when_the_counter_jumps(registered, jumps):
    steps, counts, ran = iter(range(1, ITERATIONS + 1)), [], []

    def step(engine, batch):
        engine.state.iteration = jumps.get(next(steps), engine.state.iteration)
        counts.append(engine.state.iteration)

    engine = Engine(step)
    for number, event in enumerate(registered):
        engine.add_event_handler(event, lambda number: ran.append((engine.state.iteration, number)), number)
    engine.run(epoch_length=ITERATIONS)
    assert ran == polled(registered, counts)
    assert len(counts) == ITERATIONS


@settings(deadline=None)
@given(
    st.lists(st.tuples(triggers(EVENT), st.integers(0, ITERATIONS), st.integers(0, ITERATIONS)), max_size=6),
)
def test_handlers_run_as_if_polled_also_when_they_come_and_go(registered):
    handles, ran = {}, []

    def step(engine, batch):  # before the event fires, as handlers that come meanwhile would run last
        for number, (event, begin, end) in enumerate(registered):
            if engine.state.iteration == begin + 1:
                handles[number] = engine.add_event_handler(event, note, number, order=number)
            if engine.state.iteration == end + 1 and number in handles:
                handles[number].remove()

    def note(engine, number):
        ran.append((engine.state.iteration, number))

    Engine(step).run(epoch_length=ITERATIONS)
    expected = polled([event for event, _, _ in registered], range(1, ITERATIONS + 1))
    alive = [(begin + 1, end if end >= begin else ITERATIONS) for _, begin, end in registered]
    assert ran == [(count, n) for count, n in expected if alive[n][0] <= count <= alive[n][1]]


@pytest.mark.parametrize(
    "event", list(Events.__members__.values())[:6] + [Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED]
)
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_each_counted_event_runs_its_handlers_as_if_polled(event, data):
    registered = data.draw(st.lists(triggers(event), min_size=1, max_size=4))
    engine, counts, ran = Engine(echo), [], []
    engine.add_event_handler(event, lambda: counts.append(engine.state.get_event_attrib_value(event)))
    for number, one in enumerate(registered):
        engine.add_event_handler(one, lambda number: ran.append((counts[-1], number)), number)
    engine.run(range(4), max_epochs=5, epoch_length=6)
    assert ran == polled(registered, counts)
    assert counts


@pytest.mark.parametrize(
    ("event", "counts"),
    [
        (Events.GET_BATCH_STARTED(every=2), [0, 2, 4]),  # it sees the iterations that are finished
        (Events.GET_BATCH_COMPLETED(every=2), [0, 2, 4]),
        (Events.ITERATION_STARTED(every=2), [2, 4, 6]),
        (Events.GET_BATCH_STARTED(once=3), [3]),
        (Events.EPOCH_STARTED(every=1), [1, 2]),
        (Events.EPOCH_COMPLETED(every=2), [2]),
        (Events.STARTED(every=2), [0]),
        (Events.COMPLETED(once=2), [2]),
    ],
    ids=str,
)
def test_filters_see_the_counter_of_the_event(event, counts):
    engine, seen = Engine(echo), []
    engine.add_event_handler(event, lambda: seen.append(engine.state.get_event_attrib_value(event)))
    engine.run(range(3), max_epochs=2, epoch_length=3)
    assert seen == counts


def test_a_fetch_that_is_repeated_is_counted_twice():
    engine, seen = Engine(echo), []
    engine.add_event_handler(Events.GET_BATCH_STARTED(once=1), lambda: seen.append(engine.state.epoch))
    engine.add_event_handler(Events.GET_BATCH_COMPLETED(once=1), lambda: engine.terminate_epoch())
    engine.run(range(3), max_epochs=2)
    assert seen == [1, 2]


def test_new_counters_are_followed_from_run_to_run():
    engine, seen = Engine(echo), []
    engine.add_event_handler(EVENT(every=3), lambda: seen.append(engine.state.iteration))
    engine.run(range(4))
    engine.run(range(4))
    engine.load_state_dict({"iteration": 7, "epoch_length": 4, "max_epochs": 4})
    engine.run(range(4))
    assert seen == [3, 3, 9, 12, 15]


# --- nobody is asked --------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch):
    """Count the calls of filters, and the firings that the loop did not pass by."""
    calls = Counter()
    methods = [(kind, name) for kind in (Every, Once, Window) for name in ("__call__", "following")]
    for owner, name in (*methods, (Plan, "fire")):
        monkeypatch.setattr(owner, name, counting(calls, getattr(owner, name), owner.__name__))
    return calls


def counting(calls, method, name):
    def counted(self, *args):
        calls[name] += 1
        return method(self, *args)

    return counted


FIRINGS_PER_RUN = 4  # STARTED, EPOCH_STARTED, EPOCH_COMPLETED, COMPLETED


def test_filters_by_count_are_scheduled_and_not_polled(asked):
    engine, ran = Engine(echo), []
    for _ in range(100):
        engine.add_event_handler(EVENT(every=1000), lambda: ran.append(engine.state.iteration))
    engine.run(epoch_length=2000)
    assert ran == [1000] * 100 + [2000] * 100
    assert asked["Every"] <= 100 * 2 * 3  # at the first count, and at the two accepted ones
    assert asked["Plan"] - FIRINGS_PER_RUN <= 3


@pytest.mark.parametrize(
    ("arguments", "firings"),
    [({"once": 700}, 2), ({"before": 3}, 4), ({"after": 1998}, 3), ({"once": [5, 9]}, 3)],
    ids=str,
)
def test_the_loop_passes_by_where_no_handler_is_due(asked, arguments, firings):
    engine = Engine(echo)
    engine.add_event_handler(EVENT(**arguments), lambda: None)
    engine.run(range(2000))
    assert asked["Plan"] - FIRINGS_PER_RUN <= firings
    assert asked["Once"] + asked["Window"] <= 2 * firings


def test_events_without_handlers_do_not_fire_in_the_loop(asked):
    Engine(echo).run(range(500))
    assert asked["Plan"] == FIRINGS_PER_RUN


def test_handlers_without_filter_do_not_wake_those_with_one(asked):
    engine, ran = Engine(echo), []
    engine.add_event_handler(EVENT(every=100), lambda: ran.append("filtered"))
    engine.add_event_handler(EVENT, lambda: ran.append("each"))
    engine.run(range(300))
    assert (ran.count("filtered"), ran.count("each")) == (3, 300)
    assert asked["Every"] <= 2 * 4


def test_a_filter_of_the_users_own_is_asked_each_time_once():
    engine, counts = Engine(echo), []

    def ask(engine, count):
        counts.append(count)
        return [] if count < 3 else "yes"  # only its truth counts

    ran = []
    engine.add_event_handler(EVENT(event_filter=ask), lambda: ran.append(engine.state.iteration))
    engine.run(range(5))
    assert counts == [1, 2, 3, 4, 5]
    assert ran == [3, 4, 5]
