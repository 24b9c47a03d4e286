"""Firing: which handlers run, in which order and at which counts."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from camshaft.engine import Engine, EventEnum, Events, State
from camshaft.engine.dispatch import Plan
from camshaft.engine.events import Every, Once, Window
from tests.engine.strategies import onces, windows
from tests.engine.traces import echo

# === Order of handlers, and changes during a firing ===


EVENT = Events.EPOCH_COMPLETED


class Steps(EventEnum):
    STEPPED = "stepped"


@pytest.fixture
def engine():
    return Engine(echo)


def names(engine, event=EVENT):
    """Fire an event whose handlers append their names to `engine.log`."""
    engine.log = []
    engine.fire_event(event)
    return "".join(engine.log)


def append(engine, name):
    engine.log.append(name)


def test_handlers_run_in_the_order_of_registration(engine):
    for name in "abc":
        engine.add_event_handler(EVENT, append, name)
    assert names(engine) == "abc"


def test_handlers_of_a_smaller_order_run_earlier(engine):
    for name, order in zip("abcdef", (0, 5, -1, 0, -7, 5), strict=True):
        engine.add_event_handler(EVENT, append, name, order=order)
    engine.on(EVENT, "g", order=-1)(append)
    engine.add_event_handler(EVENT, append, "h")
    assert names(engine) == "ecgadhbf"


@settings(deadline=None)
@given(st.lists(st.integers(-3, 3), max_size=12))
def test_the_order_is_a_stable_sort(orders):
    engine = Engine(echo)
    engine.log = []
    for place, order in enumerate(orders):
        engine.add_event_handler(EVENT, append, (order, place), order=order)
    engine.fire_event(EVENT)
    assert engine.log == sorted((order, place) for place, order in enumerate(orders))


def test_order_counts_among_filtered_handlers_and_in_lists(engine):
    engine.state.epoch = 2
    engine.add_event_handler(EVENT, append, "a")
    engine.add_event_handler(
        Events.STARTED | EVENT(every=2) | EVENT(event_filter=lambda e, c: c == 2), append, "b", order=-1
    )
    engine.add_event_handler(EVENT(once=2), append, "c", order=-2)
    assert names(engine) == "cbba"
    assert names(engine, Events.STARTED) == "b"


@pytest.mark.parametrize("order", [1.5, "first", None])
def test_an_order_that_is_no_integer_is_rejected(engine, order):
    with pytest.raises(TypeError, match="order must be"):
        engine.add_event_handler(EVENT, append, "a", order=order)
    assert not engine.has_event_handler(append)


def test_order_is_not_handed_to_the_handler(engine):
    engine.log = []
    engine.add_event_handler(EVENT, lambda engine, **kwargs: engine.log.append(kwargs), order=1, a=2)
    engine.fire_event(EVENT)
    assert engine.log == [{"a": 2}]


# --- change while an event fires --------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [0, 5, -5])
def test_a_handler_added_during_a_firing_runs_at_the_end_of_it(engine, order):
    def add(engine):
        append(engine, "+")
        engine.add_event_handler(EVENT, append, "n", order=order)

    with engine.add_event_handler(EVENT, add):
        engine.add_event_handler(EVENT, append, "a")
        assert names(engine) == "+an"
    assert names(engine) == ("na" if order < 0 else "an")


def test_a_handler_added_by_an_added_one_runs_too(engine):
    def add(engine, left):
        append(engine, str(left))
        if left:
            engine.add_event_handler(EVENT, add, left - 1)

    engine.add_event_handler(EVENT, add, 3)
    assert names(engine) == "3210"


def test_an_added_handler_with_a_filter_runs_only_at_its_counts(engine):
    def add(engine):
        engine.add_event_handler(EVENT(once=1), append, "1")
        engine.add_event_handler(EVENT(once=2), append, "2")
        engine.add_event_handler(EVENT(event_filter=lambda engine, count: count == 2), append, "3")

    engine.state.epoch = 2
    with engine.add_event_handler(EVENT, add):
        assert names(engine) == "23"
    engine.state.epoch = 1
    assert names(engine) == "1"


def test_a_handler_added_to_another_event_waits_for_that(engine):
    engine.add_event_handler(EVENT, lambda: engine.add_event_handler(Events.COMPLETED, append, "c"))
    assert names(engine) == ""
    assert names(engine, Events.COMPLETED) == "c"


def test_a_handler_added_during_a_run_fires_in_that_run():
    engine, seen = Engine(echo), []

    @engine.on(Events.ITERATION_COMPLETED(once=3))
    def add(engine):
        for event in (Events.ITERATION_STARTED, Events.ITERATION_COMPLETED(every=5), Events.GET_BATCH_STARTED(once=8)):
            engine.add_event_handler(event, lambda name: seen.append((name, engine.state.iteration)), event.name)

    engine.run(range(5), max_epochs=2)
    expected = {("ITERATION_STARTED", n) for n in range(4, 11)} | {("ITERATION_COMPLETED", n) for n in (5, 10)}
    assert set(seen) == expected | {("GET_BATCH_STARTED", 8)}
    assert len(seen) == 10


def test_a_handler_removed_during_a_firing_still_runs_to_its_end(engine):
    handles = []
    engine.add_event_handler(EVENT, lambda: handles[0].remove())
    handles.append(engine.add_event_handler(EVENT, append, "a"))
    engine.add_event_handler(EVENT, append, "b")
    assert names(engine) == "ab"
    assert names(engine) == "b"


def test_a_handler_that_removes_itself_disturbs_no_other(engine):
    def once(engine):
        append(engine, "o")
        engine.remove_event_handler(once, EVENT)

    for name, handler in (("a", append), ("", once), ("b", append)):
        engine.add_event_handler(EVENT, handler, *name)
    assert names(engine) == "aob"
    assert names(engine) == "ab"


def test_a_handler_added_and_removed_during_a_firing_does_not_run(engine):
    engine.add_event_handler(EVENT, lambda: engine.add_event_handler(EVENT, append, "a").remove())
    assert names(engine) == ""


def test_an_error_keeps_the_other_handlers_from_running(engine):
    def fail(engine):
        raise KeyError("no")

    for name, handler in (("a", append), ("", fail), ("b", append)):
        engine.add_event_handler(EVENT, handler, *name)
    with pytest.raises(KeyError):
        names(engine)
    assert engine.log == ["a"]
    with pytest.raises(KeyError):
        names(engine)
    assert engine.log == ["a"]


# --- events inside events ---------------------------------------------------------------------------------------


def test_a_handler_sees_the_event_it_is_called_for(engine):
    seen = []
    engine.register_events(Steps.STEPPED)
    engine.add_event_handler(EVENT, lambda engine: engine.fire_event(Steps.STEPPED))
    engine.add_event_handler(EVENT | Steps.STEPPED, lambda engine: seen.append(engine.last_event_name))
    engine.fire_event(EVENT)
    assert seen == [Steps.STEPPED, EVENT]


def test_the_last_event_is_known_also_without_handlers(engine):
    engine.register_events("foo")
    engine.fire_event("foo")
    assert engine.last_event_name == "foo"
    engine.run([1])
    assert engine.last_event_name == Events.COMPLETED


def test_an_event_can_fire_inside_itself(engine):
    def again(engine):
        append(engine, "a")
        if len(engine.log) < 3:
            engine.fire_event(EVENT)

    engine.add_event_handler(EVENT, again)
    engine.add_event_handler(EVENT, append, "b")
    assert names(engine) == "aaabbb"


def test_user_defined_events_fire_from_the_process_function_and_from_handlers():
    seen = []

    def step(engine, batch):
        engine.state.steps += 1
        engine.fire_event(Steps.STEPPED)

    engine = Engine(step)
    engine.register_events(Steps.STEPPED, "rested", event_to_attr={Steps.STEPPED: "steps"})
    engine.add_event_handler(Steps.STEPPED(every=2), lambda: seen.append(engine.state.steps))
    engine.add_event_handler(EVENT, lambda: engine.fire_event("rested"))
    engine.add_event_handler("rested", lambda: seen.append("rested"))
    engine.run([1, 2, 3], max_epochs=2)
    assert seen == [2, "rested", 4, 6, "rested"]


# === Scheduling of filters by count ===


EVENT_SCHEDULING = Events.ITERATION_COMPLETED
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
@given(
    st.lists(triggers(EVENT_SCHEDULING), max_size=6), st.dictionaries(st.integers(1, ITERATIONS), st.integers(-2, 60))
)
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
    st.lists(st.tuples(triggers(EVENT_SCHEDULING), st.integers(0, ITERATIONS), st.integers(0, ITERATIONS)), max_size=6),
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


def test_new_counters_are_followed_from_run_to_run():
    engine, seen = Engine(echo), []
    engine.add_event_handler(EVENT_SCHEDULING(every=3), lambda: seen.append(engine.state.iteration))
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
        engine.add_event_handler(EVENT_SCHEDULING(every=1000), lambda: ran.append(engine.state.iteration))
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
    engine.add_event_handler(EVENT_SCHEDULING(**arguments), lambda: None)
    engine.run(range(2000))
    assert asked["Plan"] - FIRINGS_PER_RUN <= firings
    assert asked["Once"] + asked["Window"] <= 2 * firings


def test_events_without_handlers_do_not_fire_in_the_loop(asked):
    Engine(echo).run(range(500))
    assert asked["Plan"] == FIRINGS_PER_RUN


def test_handlers_without_filter_do_not_wake_those_with_one(asked):
    engine, ran = Engine(echo), []
    engine.add_event_handler(EVENT_SCHEDULING(every=100), lambda: ran.append("filtered"))
    engine.add_event_handler(EVENT_SCHEDULING, lambda: ran.append("each"))
    engine.run(range(300))
    assert (ran.count("filtered"), ran.count("each")) == (3, 300)
    assert asked["Every"] <= 2 * 4


def test_a_filter_of_the_user_is_asked_each_time_once():
    engine, counts = Engine(echo), []

    def ask(engine, count):
        counts.append(count)
        return [] if count < 3 else "yes"  # only its truth counts

    ran = []
    engine.add_event_handler(EVENT_SCHEDULING(event_filter=ask), lambda: ran.append(engine.state.iteration))
    engine.run(range(5))
    assert counts == [1, 2, 3, 4, 5]
    assert ran == [3, 4, 5]


# === Counters of events ===


def counts_of(engine, event, steps=6):
    """Fire a custom event whose first handler counts it; return the counts at which handlers of filters run."""
    engine.state.steps = 0
    seen = {"every": [], "function": [], "once": [], "after": []}
    engine.add_event_handler(event, lambda: setattr(engine.state, "steps", engine.state.steps + 1))
    filters = {
        "every": event(every=2), "function": event(lambda engine, count: count % 2 == 0),
        "once": event(once=[1, 4]), "after": event(after=4),
    }  # fmt: skip
    for name, filtered in filters.items():
        engine.add_event_handler(filtered, lambda engine, name: seen[name].append(engine.state.steps), name)
    for _ in range(steps):
        engine.fire_event(event)
    return seen


EXPECTED = {"every": [2, 4, 6], "function": [2, 4, 6], "once": [1, 4], "after": [5, 6]}


def test_filters_see_what_handlers_of_the_same_event_have_counted(engine):
    engine.register_events(*Steps, event_to_attr={Steps.STEPPED: "steps"})
    assert counts_of(engine, Steps.STEPPED) == EXPECTED


@pytest.mark.parametrize("is_registered_first", [True, False])
def test_counters_that_users_add_to_the_class_have_an_effect_on_existing_engines(
    engine, monkeypatch, is_registered_first
):
    monkeypatch.setattr(State, "event_to_attr", dict(State.event_to_attr))
    other = Engine(echo)
    other.register_events("own", event_to_attr={"own": "owns"})  # whose state has counters of its own
    for one in (engine, other):
        if is_registered_first:
            one.register_events(*Steps)
    State.event_to_attr[Steps.STEPPED] = "steps"
    for one in (engine, other):
        one.register_events(*Steps)
        assert counts_of(one, Steps.STEPPED) == EXPECTED
        assert one.state.get_event_attrib_value(Steps.STEPPED) == 6


@pytest.mark.parametrize("event", [Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED], ids=str)
@pytest.mark.parametrize("filtering", [{"once": 3}, {"every": 3}, {"after": 2, "before": 4}], ids=str)
def test_a_batch_that_is_fetched_again_is_counted_once(event, filtering):
    engine, counts, left = Engine(echo), [], [1]

    def end_epoch(engine):
        if engine.state.iteration == 3 and left:
            left.pop()
            engine.terminate_epoch()

    engine.add_event_handler(event, end_epoch)
    engine.add_event_handler(event(**filtering), lambda: counts.append(engine.state.iteration))
    engine.run(range(5), max_epochs=2)
    expected = [count for count in (0, 3, 6) if "every" in filtering or count == 3]
    assert counts == expected
    engine.run(range(5), max_epochs=2)  # a new run counts from 0
    assert counts == [*expected, *expected, *([9] if "every" in filtering else [])]


def test_each_run_of_one_iteration_fetches_its_batch(engine):
    counts = []
    engine.add_event_handler(Events.GET_BATCH_STARTED(every=2), lambda: counts.append(engine.state.iteration))
    for _ in range(3):
        engine.run([1])
    assert counts == [0, 0, 0]
