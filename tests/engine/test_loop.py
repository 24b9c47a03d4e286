"""The run: order of events, stop requests, pauses, unsized data, times."""

from __future__ import annotations

import gc
import itertools
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from camshaft.distributed import auto_dataloader
from camshaft.engine import Engine, Events
from tests.engine.traces import (
    IT,
    IT_AGAIN,
    IT_BARE,
    SHORT,
    Sizeless,
    Trace,
    at,
    at_position,
    echo,
    flat,
    traced,
    unsized,
)

DATA, EPOCHS = [1, 2], 3
RAN_OUT = "the data ran out"


def request(name, **options):
    return lambda engine: getattr(engine, name)(**options)


interrupt = request("interrupt")


def counts(engine):
    state = engine.state
    return state.epoch, state.iteration, state.epoch_length


# === Order of events ===


def modelled(size, length, epochs, iterations=None):
    """The events over sized data, written down a second time as naively as possible."""
    words, given, total = ["S"], 0, 0
    for _ in range(epochs):
        words.append("ES")
        for done in range(1, length + 1):
            words.append("GS")
            if given == size:
                words.append("STOP")
                given = 0
            given, total = given + 1, total + 1
            words.append("GC IS IC")
            if total == iterations and done < length:
                return flat(*words, "T C")
        words.append("EC")
        if total == iterations:
            break
    return flat(*words, "C")


def test_two_epochs_over_a_list_of_two():
    engine, trace = traced(counters=True)
    engine.run([10, 20], max_epochs=2)
    assert trace.take() == flat(
        "S 0/0 · ES 1/0 · GS 1/0 GC 1/0 IS 1/1 IC 1/1 · GS 1/1 GC 1/1 IS 1/2 IC 1/2 · EC 1/2",
        "ES 2/2 · GS 2/2 STOP 2/2 GC 2/2 IS 2/3 IC 2/3 · GS 2/3 GC 2/3 IS 2/4 IC 2/4 · EC 2/4 · C 2/4",
    )
    assert trace.batches == [10, 20, 10, 20]


@pytest.mark.parametrize(
    ("data", "arguments", "events", "batches"),
    [
        (None, {"epoch_length": 1, "max_epochs": 2}, f"S ES {IT_BARE} EC ES {IT_BARE} EC C", [None] * 2),
        (None, {"epoch_length": 2, "max_iters": 3}, f"S ES {IT_BARE} {IT_BARE} EC ES {IT_BARE} T C", [None] * 3),
        # data of unknown length
        (unsized("ab"), {"epoch_length": 2}, f"S ES {IT} {IT} EC C", ["a", "b"]),
        (Sizeless(1, 2), {"epoch_length": 3}, f"S ES {IT} {IT} {IT_AGAIN} EC C", [1, 2, 1]),
        (
            Sizeless(1, 2),
            {"max_epochs": 3},
            f"S ES {IT} {IT} GS EC · ES {IT_AGAIN} {IT} EC · ES {IT_AGAIN} {IT} EC · C",
            [1, 2] * 3,
        ),
    ],
)  # fmt: skip
def test_the_events_of_a_run(data, arguments, events, batches):
    engine, trace = traced()
    engine.run(data, **arguments)
    assert trace.take() == flat(events)
    assert trace.batches == batches


sizes = st.integers(1, 6)


@settings(deadline=None)
@given(sizes, sizes, sizes)
def test_any_run_over_sized_data_has_the_events_of_the_model(size, length, epochs):
    engine, trace = traced()
    engine.run(range(size), max_epochs=epochs, epoch_length=length)
    words = trace.take()
    assert words == modelled(size, length, epochs)
    assert words.split().count("STOP") == (epochs * length - 1) // size
    assert trace.batches == [number % size for number in range(epochs * length)]
    assert counts(engine) == (epochs, epochs * length, length)


@settings(deadline=None)
@given(sizes, sizes, st.integers(1, 20))
def test_any_number_of_iterations_has_the_events_of_the_model(size, length, iterations):
    engine, trace = traced()
    engine.run(range(size), max_iters=iterations, epoch_length=length)
    assert trace.take() == modelled(size, length, iterations, iterations)
    assert (engine.state.iteration, engine.state.max_iters, engine.state.max_epochs) == (iterations, iterations, None)
    assert engine.should_terminate is (iterations % length != 0)


def test_a_pass_begins_after_epoch_started_and_only_when_the_last_one_is_over():
    engine, seen = Engine(echo), []

    class Data(list):
        def __iter__(self):
            seen.append(engine.last_event_name.name)
            return super().__iter__()

    engine.run(Data([1, 2]), max_epochs=2, epoch_length=3)
    assert seen == ["EPOCH_STARTED", "DATALOADER_STOP_ITERATION", "DATALOADER_STOP_ITERATION"]


@pytest.mark.parametrize("make", [list, iter])
@pytest.mark.parametrize("event", [Events.DATALOADER_STOP_ITERATION, Events.ITERATION_COMPLETED(every=2)])
def test_a_handler_may_replace_the_data(make, event):
    engine, trace = traced()
    new = iter([[30, 40], [50, 60], []])
    engine.add_event_handler(event, lambda: setattr(engine.state, "dataloader", make(next(new))))
    engine.run(make([1, 2]), max_epochs=3)
    assert trace.batches == [1, 2, 30, 40, 50, 60]


# === Data of unknown length, and data that run out ===


def test_the_first_pass_over_unsized_data_reports_the_length():
    engine, trace = traced(counters=True)
    seen = []
    engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: seen.append(engine.state.epoch_length))
    engine.run(unsized("ab"))
    assert trace.take() == flat(
        "S 0/0 · ES 1/0 · GS 1/0 GC 1/0 IS 1/1 IC 1/1 · GS 1/1 GC 1/1 IS 1/2 IC 1/2 · GS 1/2 · EC 1/2 · C 1/2"
    )
    assert seen == [2]
    assert counts(engine) == (1, 2, 2)


@pytest.mark.parametrize(
    ("arguments", "events"),
    [
        ({"max_epochs": 2}, f"S ES {IT} {IT} {IT} GS EC · ES GS STOP EC · C"),
        ({"max_epochs": 3}, f"S ES {IT} {IT} {IT} GS EC · ES GS STOP EC · ES GS STOP EC · C"),
        ({"epoch_length": 9}, f"S ES {IT} {IT} {IT} GS STOP EC C"),
        ({"max_iters": 7}, f"S ES {IT} {IT} {IT} GS EC · ES GS STOP EC · ES GS STOP EC · C"),
        ({"max_iters": 7, "epoch_length": 2}, f"S ES {IT} {IT} EC · ES {IT} GS STOP EC · ES GS STOP EC · C"),
        ({"max_iters": 7, "epoch_length": 9}, f"S ES {IT} {IT} {IT} GS STOP EC · ES GS STOP EC · C"),
    ],
)
def test_an_iterator_that_ran_dry_warns_once_in_each_run(arguments, events):
    engine, trace = traced()
    for _ in range(2):
        engine.state.max_epochs = engine.state.max_iters = None
        with pytest.warns(UserWarning, match=RAN_OUT) as caught:
            engine.run(unsized("abc"), **arguments)
        assert len(caught) == 1
        assert trace.take() == flat(events)
        assert engine.state.iteration == 3
        engine.state.epoch_length = None


@pytest.mark.parametrize("more", [0, 3])
def test_an_iterator_that_is_long_enough_does_not_warn(more):
    engine = Engine(echo)
    engine.run(unsized(range(4 + more)), max_epochs=2, epoch_length=2)
    assert counts(engine) == (2, 4, 2)


@pytest.mark.parametrize("arguments", [{}, {"max_epochs": 1}], ids=str)
def test_an_iterator_that_was_read_before_is_rejected_as_an_empty_list_is(arguments):
    engine, data = Engine(echo), iter([1, 2])
    engine.run(data)
    for one in ([], data):  # the second evaluation over an iterator
        with pytest.raises(ValueError, match="data must hold at least one batch, got an empty"):
            engine.run(one, **arguments)
    assert engine.state.epoch_length in (None, 2)


def test_another_iterator_without_batches_warns_if_there_were_any_before():
    engine, data = Engine(echo), iter([1, 2])
    engine.run(map(abs, data))
    with pytest.warns(UserWarning, match="empty or exhausted map; results in the state are those of an earlier run"):
        engine.run(map(abs, data))
    assert engine.state.epoch_length is None


def test_a_rank_without_batches_has_the_epochs_of_the_others():
    engine, trace = traced()
    engine.run(iter([]), max_epochs=2)
    assert trace.take() == "S ES GS EC ES GS EC C"
    assert counts(engine) == (2, 0, None)
    with pytest.warns(UserWarning, match=RAN_OUT):
        Engine(echo).run(iter([]), max_iters=7)


def test_iterations_over_unsized_data_derive_the_epochs_for_this_target_only():
    engine, trace = traced()
    engine.run(Sizeless(1, 2, 3), max_iters=7)
    assert trace.take() == flat(f"S ES {IT} {IT} {IT} GS EC · ES {IT_AGAIN} {IT} {IT} EC · ES {IT_AGAIN} T C")
    assert (engine.state.max_iters, engine.state.max_epochs) == (7, 3)
    engine.run(Sizeless(1, 2, 3), max_iters=10)  # what is derived is no change of the kind of target
    assert (engine.state.iteration, engine.state.max_iters, engine.state.max_epochs) == (10, 10, 4)
    engine.state.max_iters = None
    engine.run([1, 2], max_epochs=2)
    assert counts(engine) == (2, 4, 2)


def test_a_length_that_was_found_does_not_apply_to_other_data_but_a_given_one_stays():
    engine = Engine(echo)
    for data, length in [(unsized(range(11)), 11), ([1, 2, 3], 3), (unsized("abcde"), 5)]:
        engine.run(data)
        assert counts(engine) == (1, length, length)
    engine.run(unsized(range(5)), epoch_length=3)
    for arguments in ({"data": unsized(range(5))}, {}):
        engine.run(**arguments)
        assert counts(engine) == (1, 3, 3)


# === Terminating a run or an epoch ===


def whole(epochs=EPOCHS):
    engine, trace = traced(counters=True)
    engine.run(DATA, max_epochs=epochs)
    return trace.words


EVENTS = whole()  # what fires without any wish to stop, each with its counters
NAMES = [event.split()[0] for event in EVENTS]
INSIDE = [position for position, name in enumerate(NAMES) if name not in ("S", "EC", "C")]


@pytest.mark.parametrize(("options", "rest"), [({}, "T C"), ({"skip_completed": True}, "T")], ids=["whole", "skip"])
def test_a_run_ends_after_the_event_in_which_it_was_requested(options, rest):
    for position in range(len(EVENTS) - 1):
        engine, trace = traced(counters=True)
        at_position(engine, position, request("terminate", **options))
        state = engine.run(DATA, max_epochs=EPOCHS)
        counters = EVENTS[position].split()[1]
        assert trace.words == [*EVENTS[: position + 1], *(f"{word} {counters}" for word in rest.split())]
        assert state is engine.state
        assert engine.should_terminate == ("skip_completed" if options else True)
        assert state.max_epochs == EPOCHS


@pytest.mark.parametrize(
    ("options", "end"), [({}, ["EC"]), ({"skip_epoch_completed": True}, [])], ids=["whole", "skip"]
)
def test_an_epoch_ends_after_the_event_and_the_next_one_begins_a_pass(options, end):
    for position in INSIDE:
        engine, trace = traced()
        at_position(engine, position, request("terminate_epoch", **options))
        engine.run(DATA, max_epochs=EPOCHS)
        epoch = int(EVENTS[position].split()[1].split("/")[0])
        done = sum(event.startswith(f"IS {epoch}/") for event in EVENTS[: position + 1])
        rest = [event.split()[0] for event in whole(EPOCHS - epoch)[1:]] if epoch < EPOCHS else ["C"]
        assert trace.words == [*NAMES[: position + 1], f"TSE:{done}", *end, *rest]
        assert (engine.state.epoch, engine.state.iteration) == (EPOCHS, (EPOCHS - 1) * len(DATA) + done)
        assert engine.should_terminate_single_epoch is False


@pytest.mark.parametrize(
    ("wish", "rest"),
    [
        (request("terminate"), "T C"),
        (request("terminate", skip_completed=True), "T"),
        (request("terminate_epoch"), f"TSE:1 EC ES {IT} {IT} EC C"),
        (interrupt, "INT"),
    ],
)
def test_asked_by_the_process_function_the_iteration_is_finished_first(wish, rest):
    engine, trace = traced(lambda engine, batch: wish(engine) if engine.state.iteration == 3 else None)
    engine.run(DATA, max_epochs=EPOCHS)
    assert trace.take() == flat(f"S ES {IT} {IT} EC ES {IT_AGAIN}", rest)


@pytest.mark.parametrize("kind", ["terminate", "interrupt"])
def test_asked_in_completed_nothing_is_left_to_stop(kind):
    engine, trace = traced()
    at(engine, Events.COMPLETED, request(kind))
    engine.run(DATA, max_epochs=EPOCHS)
    assert trace.take().split() == NAMES
    assert engine.should_terminate is (kind == "terminate")


@pytest.mark.parametrize("firing", [1, 3])
@pytest.mark.parametrize("event", [Events.EPOCH_COMPLETED, Events.COMPLETED], ids=str)
@pytest.mark.parametrize("options", [{}, {"skip_epoch_completed": True}], ids=str)
def test_asked_to_end_an_epoch_that_is_over_it_has_no_effect(event, firing, options):
    engine, trace = traced()
    at(engine, event, request("terminate_epoch", **options), firing=firing)
    engine.run(DATA, max_epochs=EPOCHS)
    assert trace.take().split() == NAMES


def test_asked_to_end_an_epoch_in_started_there_is_none():
    engine, trace = traced()
    at(engine, Events.STARTED, request("terminate_epoch"))
    with pytest.raises(RuntimeError, match="terminate_epoch.*STARTED"):
        engine.run(DATA)
    assert trace.take() == "S"
    engine.run(DATA)
    assert trace.take() == flat(f"S ES {IT} {IT} EC C")


A_RUN, AN_EPOCH = Events.ITERATION_COMPLETED, Events.TERMINATE_SINGLE_EPOCH


@pytest.mark.parametrize(
    ("wishes", "events"),
    [  # the strongest of several wishes wins
        ([(A_RUN, "terminate_epoch", {}), (A_RUN, "terminate", {})], f"S ES {IT} T C"),
        ([(A_RUN, "terminate", {}), (A_RUN, "terminate_epoch", {}), (A_RUN, "interrupt", {})], f"S ES {IT} T C"),
        ([(A_RUN, "interrupt", {}), (A_RUN, "terminate", {})], f"S ES {IT} T C"),
        ([(A_RUN, "interrupt", {}), (A_RUN, "terminate_epoch", {})], f"S ES {IT} TSE:1 EC INT"),
        (
            [(A_RUN, "terminate_epoch", {"skip_epoch_completed": True}), (A_RUN, "interrupt", {})],
            f"S ES {IT} TSE:1 INT",
        ),
        # the last of one kind counts
        ([(Events.STARTED, "terminate", {"skip_completed": True}), (Events.TERMINATE, "terminate", {})], "S T C"),
        ([(A_RUN, "terminate", {}), (Events.TERMINATE, "terminate", {"skip_completed": True})], f"S ES {IT} T"),
        (
            [(A_RUN, "terminate_epoch", {}), (AN_EPOCH, "terminate_epoch", {"skip_epoch_completed": True})],
            f"S ES {IT} TSE:1 ES {IT} {IT} EC C",
        ),
        ([(A_RUN, "terminate_epoch", {}), (AN_EPOCH, "terminate", {})], f"S ES {IT} TSE:1 EC T C"),
        # a pause on the way out
        ([(A_RUN, "terminate", {}), (Events.TERMINATE, "interrupt", {})], f"S ES {IT} T C"),
        ([(A_RUN, "terminate_epoch", {}), (AN_EPOCH, "interrupt", {})], f"S ES {IT} TSE:1 EC INT"),
        ([(A_RUN, "interrupt", {}), (Events.INTERRUPT, "interrupt", {})], f"S ES {IT} INT"),
    ],
    ids=str,
)
def test_several_requests(wishes, events):
    engine, trace = traced()
    for event, kind, options in wishes:
        at(engine, event, request(kind, **options))
    engine.run(DATA, max_epochs=2)
    assert trace.take() == flat(events)
    if events.endswith("INT"):
        engine.run()
        assert trace.take() == flat(
            "" if "TSE" in events else f"{IT} EC", f"ES {IT if 'TSE' in events else IT_AGAIN} {IT} EC C"
        )


def test_all_handlers_of_the_event_still_run():
    engine, ran = Engine(echo), []
    engine.add_event_handler(Events.ITERATION_STARTED(once=2), lambda: engine.terminate())
    engine.add_event_handler(Events.ITERATION_STARTED, lambda: ran.append(engine.state.iteration))
    engine.run(DATA, max_epochs=EPOCHS)
    assert ran == [1, 2]


def test_the_flags_restart_with_each_run():
    engine = Engine(echo)
    engine.terminate(skip_completed=True)
    engine.terminate_epoch()
    engine.should_interrupt = True
    assert engine.run(DATA, max_epochs=2).iteration == 4
    flags = engine.should_terminate, engine.should_terminate_single_epoch, engine.should_interrupt
    assert flags == (False, False, False)


FLAGS = ["should_terminate", "should_terminate_single_epoch", "should_interrupt"]


@pytest.mark.parametrize(
    ("attribute", "value", "rest"),
    [
        ("should_terminate", True, "T C"),
        ("should_terminate", "skip_completed", "T"),
        ("should_terminate_single_epoch", True, f"TSE:1 EC ES {IT} {IT} EC C"),
        ("should_terminate_single_epoch", "skip_epoch_completed", f"TSE:1 ES {IT} {IT} EC C"),
        ("should_interrupt", True, "INT"),
    ],
)
def test_a_flag_set_by_hand_does_what_the_method_does_unless_it_is_taken_back(attribute, value, rest):
    for is_taken_back in (False, True):
        engine, trace = traced()
        at(engine, Events.ITERATION_STARTED, lambda engine: setattr(engine, attribute, value), firing=3)
        if is_taken_back:
            at(engine, Events.ITERATION_STARTED, lambda engine: setattr(engine, attribute, False), firing=3)
        engine.run(DATA, max_epochs=EPOCHS)
        expected = " ".join(NAMES) if is_taken_back else flat(f"S ES {IT} {IT} EC ES GS STOP GC IS", rest)
        assert trace.take() == expected


@pytest.mark.parametrize("attribute", FLAGS)
@pytest.mark.parametrize("value", ["soon", None, 2])
def test_a_flag_of_another_kind_is_rejected(attribute, value):
    engine = Engine(echo)
    with pytest.raises(TypeError, match=attribute):
        setattr(engine, attribute, value)
    assert getattr(engine, attribute) is False


def test_the_counters_are_not_moved_to_the_nominal_end_of_an_epoch_that_was_cut():
    engine, trace = traced(counters=True)
    at(engine, Events.ITERATION_COMPLETED, request("terminate_epoch"))
    engine.run([1, 2, 3], max_epochs=2)
    assert trace.take() == flat(
        "S 0/0 · ES 1/0 · GS 1/0 GC 1/0 IS 1/1 IC 1/1 · TSE:1 1/1 EC 1/1 · ES 2/1 · GS 2/1 GC 2/1 IS 2/2 IC 2/2",
        "GS 2/2 GC 2/2 IS 2/3 IC 2/3 · GS 2/3 GC 2/3 IS 2/4 IC 2/4 · EC 2/4 · C 2/4",
    )
    assert trace.batches == [1, 1, 2, 3]


def test_an_iterator_continues_in_the_epoch_after_one_that_was_cut():
    engine, trace = traced()
    at(engine, Events.ITERATION_COMPLETED, request("terminate_epoch"))
    engine.run(unsized("abc"), max_epochs=2, epoch_length=2)
    assert trace.batches == ["a", "b", "c"]


def test_an_epoch_of_a_resumed_run_counts_what_was_done_before():
    engine, trace = traced()
    engine.load_state_dict({"iteration": 5, "epoch_length": 4, "max_epochs": 2})
    at(engine, Events.ITERATION_COMPLETED, request("terminate_epoch"))
    engine.run(range(4))
    assert trace.take() == flat(f"S ES {IT} TSE:2 EC C")


# === Pausing and continuing ===

RUNS = {
    "sized": lambda: {"data": [1, 2], "max_epochs": 3},
    "long epochs": lambda: {"data": [1, 2, 3], "max_epochs": 2, "epoch_length": 5},
    "no data": lambda: {"max_epochs": 2, "epoch_length": 2},
    "iterations": lambda: {"data": [1, 2, 3], "max_iters": 5},
    "unsized iterations": lambda: {"data": Sizeless(1, 2, 3), "max_iters": 7},
    "dry": lambda: {"data": unsized("ab"), "max_epochs": 2},
}


def outcome(engine, trace):
    """What a run did, without its pauses."""
    words = trace.take().split()
    kept = [pair for pair in zip(words[::2], words[1::2], strict=True) if pair[0] != "INT"]
    state = engine.state
    return kept, trace.batches, state.iteration, state.epoch, state.epoch_length, state.output


@pytest.fixture(autouse=True)
def dry_data_are_no_matter_here():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=RAN_OUT)
        yield


@pytest.mark.parametrize("arguments", RUNS.values(), ids=RUNS.keys())
def test_a_run_continues_after_any_event_as_if_nothing_had_been(arguments):
    def make(is_enabled=True):
        engine, trace = traced(counters=True)
        engine.interrupt_resume_enabled = is_enabled
        return engine, trace

    engine, trace = make(is_enabled=False)
    engine.run(**arguments())
    expected = outcome(engine, trace)
    positions = [number for number, (name, _) in enumerate(expected[0]) if name not in ("T", "C")]
    for position in positions:  # once
        engine, trace = make()
        at_position(engine, position, interrupt)
        state = engine.run(**arguments())
        assert state is engine.state
        assert trace.words[-1].startswith("INT")
        assert len(trace.words) == position + 2
        assert engine.should_interrupt is False
        assert engine.run() is state
        assert outcome(engine, trace) == expected
    engine, trace = make()
    for event in SHORT:  # at every event
        if event not in (Events.INTERRUPT, Events.COMPLETED, Events.TERMINATE):
            engine.add_event_handler(event, interrupt)
    engine.run(**arguments())
    for _ in positions:
        assert engine.last_event_name == Events.INTERRUPT
        engine.run()
    assert outcome(engine, trace) == expected


def test_a_paused_run_is_seen_as_unfinished():
    engine, _ = traced()
    at(engine, Events.ITERATION_COMPLETED, interrupt, firing=3)
    state = engine.run(DATA, max_epochs=EPOCHS)
    assert (state.iteration, state.epoch, state.batch, state.output) == (3, 2, 1, 1)
    assert engine.last_event_name == Events.INTERRUPT
    progress = {"epochs_completed": 1, "iterations_in_epoch": 1, "data_length": 2}
    assert engine.state_dict() == {"epoch_length": 2, "iteration": 3, "max_epochs": EPOCHS, **progress}


@pytest.mark.parametrize(
    ("first", "then", "iterations"),
    [
        ({"max_epochs": 2}, {"max_epochs": 5}, 10),
        ({"max_epochs": 3}, {"max_epochs": 2}, 4),
        ({"max_epochs": 3}, {"epoch_length": 2}, 6),
        ({"max_iters": 4}, {"max_iters": 7}, 7),
        ({"max_iters": 7}, {"max_iters": 3}, 3),
    ],
    ids=str,
)
def test_the_target_may_change_while_paused(first, then, iterations):
    engine, trace = traced()
    at(engine, Events.ITERATION_COMPLETED, interrupt, firing=2)
    engine.run(DATA, **first)
    assert engine.run(**then).iteration == iterations
    assert trace.take().split().count("S") == 1


def test_data_given_while_paused_are_used_unless_the_pass_has_begun():
    for position in range(12):
        engine, trace = traced()
        at_position(engine, position, interrupt)
        engine.run(DATA, max_epochs=2)
        engine.run([7, 8, 9])
        assert trace.batches == ([7, 8, 9, 7] if position < 2 else DATA * 2), position


@pytest.mark.parametrize(
    ("wish", "rest"),
    [
        (request("terminate"), "GS T C"),
        (request("terminate", skip_completed=True), "GS T"),
        (request("terminate_epoch"), f"GS TSE:1 EC ES {IT} {IT} EC C"),
        (interrupt, "GS INT"),
    ],
)
def test_a_request_while_paused_is_obeyed_after_one_more_event_and_before_more_data_are_taken(wish, rest):
    engine, trace = traced()
    data = unsized([*DATA, *DATA])
    at(engine, Events.ITERATION_COMPLETED, interrupt)
    engine.run(data, max_epochs=2, epoch_length=2)
    trace.take()
    wish(engine)
    engine.run()
    assert trace.take() == flat(rest)
    assert len(list(data)) == (1 if "ES" in rest else 3)


@pytest.mark.parametrize("end", ["new run", "freed", "loaded"])
def test_a_paused_run_is_discarded_without_a_trace(end, caplog):
    for position in range(16):
        engine, trace = traced()
        errors = []
        engine.add_event_handler(Events.EXCEPTION_RAISED, lambda error: errors.append(error))  # noqa: B023
        at_position(engine, position, interrupt)
        engine.run(DATA, max_epochs=EPOCHS)
        trace.take()
        trace.batches.clear()
        if end == "freed":
            del engine
            gc.collect()
            assert trace.take() == ""
        else:
            if end == "loaded":
                engine.load_state_dict({"iteration": 4, "epoch_length": 2, "max_epochs": 3})
            engine.state.max_epochs = 3 if end == "loaded" else None
            engine.run([7, 8])
            assert trace.take() == flat(f"S ES {IT} {IT} EC C")
            assert trace.batches == [7, 8]
        assert errors == []
        assert caplog.records == []


def test_a_rejected_state_does_not_discard_the_paused_run():
    engine, trace = traced()
    at(engine, Events.ITERATION_COMPLETED, interrupt)
    engine.run(DATA, max_epochs=EPOCHS)
    with pytest.raises(ValueError, match="epoch_length"):
        engine.load_state_dict({})
    engine.run()
    assert trace.batches == DATA * EPOCHS


def test_an_event_of_the_user_where_the_data_ran_out_does_not_repeat_the_fetch():
    engine, trace = traced()
    engine.register_events("foo")
    engine.add_event_handler(Events.DATALOADER_STOP_ITERATION, lambda: engine.fire_event("foo"))
    engine.run(DATA, max_epochs=2)
    assert trace.take() == flat(f"S ES {IT} {IT} EC ES {IT_AGAIN} {IT} EC C")


@pytest.mark.parametrize("owner", ["class", "instance"])
def test_interrupting_can_be_switched_off(owner):
    class Steady(Engine):
        interrupt_resume_enabled = owner == "instance"

    engine = Steady(echo)
    engine.interrupt_resume_enabled = False
    trace, refused = Trace(engine), []

    @engine.on(Events.ITERATION_STARTED(once=2))
    def ask(engine):
        with pytest.raises(RuntimeError, match="interrupt_resume_enabled"):
            engine.interrupt()
        refused.append(engine.should_interrupt)

    engine.run(DATA)
    assert refused == [False]
    assert trace.take() == flat(f"S ES {IT} {IT} EC C")


def test_two_engines_may_be_paused_at_once():
    engines = [traced() for _ in range(2)]
    for engine, _ in engines:
        engine.add_event_handler(Events.ITERATION_COMPLETED, interrupt)
    engines[0][0].run(DATA)
    engines[1][0].run([7, 8])
    for (engine, _), _ in itertools.product(engines, range(2)):
        engine.run()
    assert [trace.batches for _, trace in engines] == [[1, 2], [7, 8]]


# === Changing the length of epochs ===


@pytest.mark.parametrize("make", [list, auto_dataloader], ids=["list", "loader"])
def test_iterations_are_counted_on_when_epochs_change_their_length(make):
    lengths, seen = iter([4, 2, 3]), []
    engine = Engine(lambda engine, batch: seen.append((engine.state.epoch, engine.state.iteration)))
    engine.add_event_handler(Events.EPOCH_STARTED, lambda: engine.change_epoch_length(next(lengths)))
    engine.run(make(range(4)), max_epochs=3)
    assert seen == [(1, 1), (1, 2), (1, 3), (1, 4), (2, 5), (2, 6), (3, 7), (3, 8), (3, 9)]


def test_the_place_in_the_data_stays_when_an_epoch_changes_its_length():
    places, loader = [], auto_dataloader(list(range(6)), batch_size=2)
    engine = Engine(lambda engine, batch: None)
    engine.add_event_handler(Events.GET_BATCH_STARTED, lambda: places.append(engine.state_dict().get("position")))
    engine.add_event_handler(Events.EPOCH_STARTED(once=2), lambda: engine.change_epoch_length(4))
    engine.run(loader, max_epochs=2)
    assert [(place["epoch"], place["consumed"]) for place in places] == [
        (0, 0), (0, 2), (0, 4), (1, 0), (1, 2), (1, 4), (2, 0)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("event", "length", "error", "named"),
    [
        (Events.STARTED, 3, RuntimeError, "EPOCH_STARTED"),
        (Events.ITERATION_STARTED, 3, RuntimeError, "EPOCH_STARTED"),
        (Events.EPOCH_COMPLETED, 3, RuntimeError, "EPOCH_STARTED"),
        (Events.EPOCH_STARTED, 0, ValueError, "length"),
        (Events.EPOCH_STARTED, 2.5, TypeError, "length"),
    ],
)
def test_the_length_is_changed_only_where_an_epoch_starts_to_a_positive_integer(event, length, error, named):
    engine = Engine(lambda engine, batch: None)
    with pytest.raises(RuntimeError, match="EPOCH_STARTED"):
        engine.change_epoch_length(3)
    engine.add_event_handler(event, lambda: engine.change_epoch_length(length))
    with pytest.raises(error, match=named):
        engine.run(range(2))


# === Times ===


@pytest.fixture
def clock(monkeypatch):
    """A clock that only moves when told to."""
    now = [1000.0]
    monkeypatch.setattr("camshaft.engine.loop.perf_counter", lambda: now[0])
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def timed(clock):
    """Make an engine in which each event takes its own time, and the times that each event sees."""
    seconds = {Events.STARTED: 10_000, Events.EPOCH_STARTED: 1, Events.EPOCH_COMPLETED: 100, Events.COMPLETED: 1000}
    engine, seen = Engine(lambda engine, batch: clock(10)), []
    for event, delay in seconds.items():
        engine.add_event_handler(event, lambda: seen.append(tuple(engine.state.times.values())))
        engine.add_event_handler(event, lambda delay: clock(delay), delay)
    return engine, seen


def test_times_cover_the_epoch_and_the_run_each_with_its_handlers(clock):
    engine, seen = timed(clock)
    assert engine.state.times == {"EPOCH_COMPLETED": None, "COMPLETED": None}
    engine.run([1, 2], max_epochs=2)
    assert list(engine.state.times) == ["EPOCH_COMPLETED", "COMPLETED"]
    assert seen == [(0.0, 0.0), (0.0, 0.0), (21.0, 0.0), (121.0, 0.0), (21.0, 0.0), (121.0, 10_242.0)]
    assert engine.state.times == {"EPOCH_COMPLETED": 121.0, "COMPLETED": 11_242.0}


def test_the_time_of_the_run_is_there_also_where_completed_is_skipped(clock):
    engine, _ = timed(clock)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=1), lambda: engine.terminate(skip_completed=True))
    engine.run([1, 2])
    assert engine.state.times["COMPLETED"] == 10_011.0


def test_times_restart_with_a_run_but_not_after_a_pause(clock):
    engine, _ = timed(clock)
    at(engine, Events.EPOCH_COMPLETED, interrupt)
    engine.run([1], max_epochs=2)
    assert engine.state.times == {"EPOCH_COMPLETED": 111.0, "COMPLETED": 0.0}
    engine.run()
    assert engine.state.times["COMPLETED"] == 11_222.0
    engine.run([1])
    assert engine.state.times["COMPLETED"] == 11_111.0
