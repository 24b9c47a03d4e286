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

# === Order of events ===


def counts(engine):
    state = engine.state
    return state.epoch, state.iteration, state.epoch_length


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


# --- sized data -------------------------------------------------------------------------------------------------


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
        ([1, 2, 3], {}, f"S ES {IT} {IT} {IT} EC C", [1, 2, 3]),
        ([1, 2], {"epoch_length": 1}, f"S ES {IT} EC C", [1]),
        ([1, 2], {"epoch_length": 1, "max_epochs": 2}, f"S ES {IT} EC ES {IT} EC C", [1, 2]),
        (
            [1, 2, 3],
            {"epoch_length": 2, "max_epochs": 3},
            f"S ES {IT} {IT} EC ES {IT} {IT_AGAIN} EC ES {IT} {IT} EC C",
            [1, 2, 3, 1, 2, 3],
        ),
        ([1, 2], {"epoch_length": 3}, f"S ES {IT} {IT} {IT_AGAIN} EC C", [1, 2, 1]),
        (
            [1, 2],
            {"epoch_length": 3, "max_epochs": 2},
            f"S ES {IT} {IT} {IT_AGAIN} EC ES {IT} {IT_AGAIN} {IT} EC C",
            [1, 2, 1, 2, 1, 2],
        ),
        ([1], {"epoch_length": 2}, f"S ES {IT} {IT_AGAIN} EC C", [1, 1]),
        (None, {"epoch_length": 1, "max_epochs": 2}, f"S ES {IT_BARE} EC ES {IT_BARE} EC C", [None] * 2),
        (None, {"epoch_length": 2, "max_iters": 3}, f"S ES {IT_BARE} {IT_BARE} EC ES {IT_BARE} T C", [None] * 3),
        # data of unknown length, whose epochs are given one
        (unsized("ab"), {"epoch_length": 2}, f"S ES {IT} {IT} EC C", ["a", "b"]),
        (Sizeless(1, 2), {"epoch_length": 3}, f"S ES {IT} {IT} {IT_AGAIN} EC C", [1, 2, 1]),
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


@pytest.mark.parametrize("switch", [True, False])
def test_a_pass_is_begun_once_and_only_when_the_last_one_is_over(switch, monkeypatch):
    class Passes(list):
        begun = 0

        def __iter__(self):
            Passes.begun += 1
            return super().__iter__()

    monkeypatch.setattr(Engine, "interrupt_resume_enabled", switch)
    Engine(echo).run(Passes([1, 2, 3]), max_epochs=3, epoch_length=2)
    assert Passes.begun == 2


def test_a_pass_begins_after_epoch_started():
    engine, seen = Engine(echo), []

    class Data(list):
        def __iter__(self):
            seen.append(engine.last_event_name.name)
            return super().__iter__()

    engine.run(Data([1, 2]), max_epochs=2, epoch_length=3)
    assert seen == ["EPOCH_STARTED", "DATALOADER_STOP_ITERATION", "DATALOADER_STOP_ITERATION"]


def test_a_handler_may_replace_the_data_where_it_ran_out():
    engine, trace = traced()
    new = iter([[30, 40], [50, 60]])
    engine.add_event_handler(Events.DATALOADER_STOP_ITERATION, lambda: setattr(engine.state, "dataloader", next(new)))
    engine.run([1, 2], max_epochs=3)
    assert trace.batches == [1, 2, 30, 40, 50, 60]


# --- iterations as the target -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_iters", "events", "terminated"),
    [
        (2, f"S ES {IT} {IT} T C", True),
        (3, f"S ES {IT} {IT} {IT} EC C", False),
        (4, f"S ES {IT} {IT} {IT} EC ES {IT_AGAIN} T C", True),
        (6, f"S ES {IT} {IT} {IT} EC ES {IT_AGAIN} {IT} {IT} EC C", False),
    ],
)
def test_a_number_of_iterations_is_reached_on_and_off_the_end_of_an_epoch(max_iters, events, terminated):
    engine, trace = traced()
    engine.run([1, 2, 3], max_iters=max_iters)
    assert trace.take() == flat(events)
    assert engine.should_terminate is terminated
    assert (engine.state.iteration, engine.state.max_iters, engine.state.max_epochs) == (max_iters, max_iters, None)


@settings(deadline=None)
@given(sizes, sizes, st.integers(1, 20))
def test_any_number_of_iterations_has_the_events_of_the_model(size, length, iterations):
    engine, trace = traced()
    engine.run(range(size), max_iters=iterations, epoch_length=length)
    assert trace.take() == modelled(size, length, iterations, iterations)
    assert engine.state.iteration == iterations
    assert engine.should_terminate is (iterations % length != 0)


@pytest.mark.parametrize("target", ["max_epochs", "max_iters"])
def test_only_the_target_requested_is_set(target):
    state = Engine(echo).run([1, 2], **{target: 4})
    assert {"max_epochs": state.max_epochs, "max_iters": state.max_iters} == {
        "max_epochs": None, "max_iters": None, target: 4
    }  # fmt: skip


def test_the_end_of_the_run_is_reached_with_and_without_interruption_support():
    texts = []
    for enabled in (True, False):
        engine, trace = traced(counters=True)
        engine.interrupt_resume_enabled = enabled
        at(engine, Events.ITERATION_COMPLETED, lambda engine: engine.terminate_epoch(), firing=2)
        at(engine, Events.ITERATION_STARTED, lambda engine: engine.terminate(), firing=7)
        engine.run([1, 2, 3], max_epochs=5)
        texts.append(trace.take())
    assert texts[0] == texts[1]


# === Data of unknown length, and data that run out ===


RAN_OUT = "the data ran out"


def counts_unsized(engine):
    state = engine.state
    return state.epoch, state.iteration, state.epoch_length


def test_the_first_pass_over_unsized_data_reports_the_length():
    engine, trace = traced(counters=True)
    seen = []
    engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: seen.append(engine.state.epoch_length))
    engine.run(unsized("ab"))
    assert trace.take() == flat(
        "S 0/0 · ES 1/0 · GS 1/0 GC 1/0 IS 1/1 IC 1/1 · GS 1/1 GC 1/1 IS 1/2 IC 1/2 · GS 1/2 · EC 1/2 · C 1/2"
    )
    assert seen == [2]
    assert counts_unsized(engine) == (1, 2, 2)


@pytest.mark.parametrize(
    ("epochs", "events"),
    [
        (2, f"S ES {IT} {IT} GS EC · ES GS STOP EC · C"),
        (3, f"S ES {IT} {IT} GS EC · ES GS STOP EC · ES GS STOP EC · C"),
    ],
)
def test_an_iterator_that_ran_dry_warns_once_also_for_a_last_epoch(epochs, events):
    engine, trace = traced()
    with pytest.warns(UserWarning, match=RAN_OUT) as caught:
        engine.run(unsized("ab"), max_epochs=epochs)
    assert len(caught) == 1
    assert trace.take() == flat(events)
    assert counts_unsized(engine) == (epochs, 2, 2)


def test_an_iterator_shorter_than_its_epoch_warns_also_in_the_only_one():
    engine, trace = traced()
    with pytest.warns(UserWarning, match=RAN_OUT):
        engine.run(unsized("ab"), epoch_length=3)
    assert trace.take() == flat(f"S ES {IT} {IT} GS STOP EC C")


def test_each_run_warns_for_itself():
    engine = Engine(echo)
    for _ in range(2):
        with pytest.warns(UserWarning, match=RAN_OUT):
            engine.run(unsized("ab"), epoch_length=3, max_epochs=2)


@pytest.mark.parametrize("more", [1, 3])
def test_an_iterator_that_is_long_enough_does_not_warn(more):
    engine = Engine(echo)
    engine.run(unsized(range(4 + more)), max_epochs=2, epoch_length=2)
    assert counts_unsized(engine) == (2, 4, 2)


def test_data_without_length_that_begins_again_has_epochs_like_sized_data():
    engine, trace = traced()
    engine.run(Sizeless(1, 2), max_epochs=3)
    assert trace.take() == flat(f"S ES {IT} {IT} GS EC · ES {IT_AGAIN} {IT} EC · ES {IT_AGAIN} {IT} EC · C")
    assert trace.batches == [1, 2, 1, 2, 1, 2]


@pytest.mark.parametrize("event", [Events.DATALOADER_STOP_ITERATION, Events.ITERATION_COMPLETED(every=2)])
def test_an_iterator_is_restarted_by_hand(event):
    engine, trace = traced()
    engine.add_event_handler(event, lambda: setattr(engine.state, "dataloader", unsized("ab")))
    engine.run(unsized("ab"), max_epochs=3)
    assert trace.batches == list("ababab")


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
    assert counts_unsized(engine) == (2, 0, None)
    engine.run(unsized([]), max_epochs=3)
    with pytest.warns(UserWarning, match=RAN_OUT):
        Engine(echo).run(iter([]), max_iters=7)


def test_iterations_over_unsized_data_derive_the_epochs():
    engine, trace = traced()
    engine.run(Sizeless(1, 2, 3), max_iters=7)
    assert trace.take() == flat(f"S ES {IT} {IT} {IT} GS EC · ES {IT_AGAIN} {IT} {IT} EC · ES {IT_AGAIN} T C")
    assert (engine.state.max_iters, engine.state.max_epochs) == (7, 3)
    engine.run(Sizeless(1, 2, 3), max_iters=9)  # what is derived is no change of the kind of target
    assert (engine.state.iteration, engine.state.max_iters, engine.state.max_epochs) == (9, 9, 3)


def test_a_derived_number_of_epochs_does_not_outlive_its_target():
    engine = Engine(echo)
    engine.run(Sizeless(1, 2, 3), max_iters=7)
    engine.state.max_iters = None
    engine.run([1, 2], max_epochs=2)
    assert counts_unsized(engine) == (2, 4, 2)


@pytest.mark.parametrize(
    ("arguments", "events"),
    [
        ({}, f"S ES {IT} {IT} {IT} GS EC · ES GS STOP EC · ES GS STOP EC · C"),
        ({"epoch_length": 2}, f"S ES {IT} {IT} EC · ES {IT} GS STOP EC · ES GS STOP EC · C"),
        ({"epoch_length": 9}, f"S ES {IT} {IT} {IT} GS STOP EC · ES GS STOP EC · C"),
    ],
)
def test_iterations_that_a_dry_iterator_cannot_reach_end_the_run(arguments, events):
    engine, trace = traced()
    with pytest.warns(UserWarning, match=RAN_OUT) as caught:
        engine.run(unsized("abc"), max_iters=7, **arguments)
    assert len(caught) == 1
    assert trace.take() == flat(events)
    assert engine.state.iteration == 3


def test_a_length_that_was_found_does_not_apply_to_other_data():
    engine, _ = traced()
    for size in (11, 20, 3):
        engine.run(unsized(range(size)))
        assert counts_unsized(engine) == (1, size, size)


def test_the_length_of_sized_data_does_not_apply_to_unsized_data():
    engine = Engine(echo)
    engine.run([1, 2, 3])
    engine.run(unsized("abcde"))
    assert counts_unsized(engine) == (1, 5, 5)


def test_a_length_that_the_user_gave_is_kept():
    engine = Engine(echo)
    engine.run(unsized(range(5)), epoch_length=3)
    engine.run(unsized(range(5)))
    assert counts_unsized(engine) == (1, 3, 3)
    engine.run()
    assert counts_unsized(engine) == (1, 3, 3)


# === Terminating a run or an epoch ===


DATA, EPOCHS = [1, 2], 3


def whole(epochs=EPOCHS, counters=False):
    engine, trace = traced(counters=counters)
    engine.run(DATA, max_epochs=epochs)
    return trace.take().split(" " if not counters else None)


def pairs(words):
    """Join each event with the counters behind it."""
    return [" ".join(pair) for pair in zip(words[::2], words[1::2], strict=True)]


EVENTS = pairs(whole(counters=True))  # what fires without any wish to stop
NAMES = [event.split()[0] for event in EVENTS]
BUT_COMPLETED = range(len(EVENTS) - 1)
OF_EPOCHS = [position for position, name in enumerate(NAMES) if name not in ("S", "C")]
INSIDE = [position for position in OF_EPOCHS if NAMES[position] != "EC"]


def terminate(**options):
    return lambda engine: engine.terminate(**options)


def terminate_epoch(**options):
    return lambda engine: engine.terminate_epoch(**options)


def done_in_epoch(position):
    epoch = EVENTS[position].split()[1].split("/")[0]
    return sum(event.startswith("IS ") and event.split()[1].startswith(epoch) for event in EVENTS[: position + 1])


# --- terminate --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", BUT_COMPLETED, ids=lambda position: EVENTS[position])
@pytest.mark.parametrize(("options", "rest"), [({}, "T C"), ({"skip_completed": True}, "T")], ids=["whole", "skip"])
def test_a_run_ends_after_the_event_in_which_it_was_requested(position, options, rest):
    engine, trace = traced(counters=True)
    at_position(engine, position, terminate(**options))
    state = engine.run(DATA, max_epochs=EPOCHS)
    counters = EVENTS[position].split()[1]
    assert trace.words == [*EVENTS[: position + 1], *(f"{word} {counters}" for word in rest.split())]
    assert state is engine.state
    assert engine.should_terminate == ("skip_completed" if options else True)
    assert state.max_epochs == EPOCHS


@pytest.mark.parametrize("options", [{}, {"skip_completed": True}], ids=str)
def test_asked_by_the_process_function_the_iteration_is_finished_first(options):
    def step(engine, batch):
        if engine.state.iteration == 3:
            engine.terminate(**options)

    engine, trace = traced(step)
    engine.run(DATA, max_epochs=EPOCHS)
    assert trace.take() == flat(f"S ES {IT} {IT} EC ES GS STOP GC IS IC T", "" if options else "C")


def test_asked_in_completed_only_the_flag_is_left():
    engine, trace = traced()
    at(engine, Events.COMPLETED, terminate())
    engine.run(DATA, max_epochs=EPOCHS)
    assert trace.take().split() == NAMES
    assert engine.should_terminate is True


@pytest.mark.parametrize(("options", "last"), [({}, "T C"), ({"skip_completed": True}, "T")], ids=str)
def test_asked_in_terminate_completed_can_still_be_skipped(options, last):
    engine, trace = traced()
    at(engine, Events.ITERATION_STARTED, terminate())
    at(engine, Events.TERMINATE, terminate(**options))
    engine.run(DATA)
    assert trace.take() == flat("S ES GS GC IS", last)


def test_all_handlers_of_the_event_still_run():
    engine, ran = Engine(echo), []
    engine.add_event_handler(Events.ITERATION_STARTED(once=2), lambda: engine.terminate())
    engine.add_event_handler(Events.ITERATION_STARTED, lambda: ran.append(engine.state.iteration))
    engine.run(DATA, max_epochs=EPOCHS)
    assert ran == [1, 2]


def test_a_later_plain_request_fires_completed_again():
    engine, trace = traced()
    at(engine, Events.STARTED, terminate(skip_completed=True))
    at(engine, Events.TERMINATE, terminate())
    engine.run(DATA)
    assert trace.take() == "S T C"


def test_the_flags_restart_with_each_run():
    engine = Engine(echo)
    engine.terminate(skip_completed=True)
    engine.terminate_epoch()
    engine.should_interrupt = True
    assert engine.run(DATA, max_epochs=2).iteration == 4
    flags = engine.should_terminate, engine.should_terminate_single_epoch, engine.should_interrupt
    assert flags == (False, False, False)


@pytest.mark.parametrize(
    ("attribute", "value", "events"),
    [
        ("should_terminate", True, f"S ES {IT} {IT} EC ES GS STOP GC IS T C"),
        ("should_terminate", "skip_completed", f"S ES {IT} {IT} EC ES GS STOP GC IS T"),
        ("should_terminate_single_epoch", True, f"S ES {IT} {IT} EC ES GS STOP GC IS TSE:1 EC ES {IT} {IT} EC C"),
        (
            "should_terminate_single_epoch",
            "skip_epoch_completed",
            f"S ES {IT} {IT} EC ES GS STOP GC IS TSE:1 ES {IT} {IT} EC C",
        ),
        ("should_interrupt", True, f"S ES {IT} {IT} EC ES GS STOP GC IS INT"),
    ],
)
def test_a_flag_set_by_hand_does_what_the_method_does(attribute, value, events):
    engine, trace = traced()
    at(engine, Events.ITERATION_STARTED, lambda engine: setattr(engine, attribute, value), firing=3)
    engine.run(DATA, max_epochs=EPOCHS)
    assert trace.take() == flat(events)


@pytest.mark.parametrize("attribute", ["should_terminate", "should_terminate_single_epoch", "should_interrupt"])
def test_a_flag_taken_back_in_the_same_event_has_no_effect(attribute):
    engine, trace = traced()
    at(engine, Events.ITERATION_STARTED, lambda engine: setattr(engine, attribute, True))
    at(engine, Events.ITERATION_STARTED, lambda engine: setattr(engine, attribute, False))
    engine.run(DATA, max_epochs=EPOCHS)
    assert trace.take().split() == NAMES


@pytest.mark.parametrize("attribute", ["should_terminate", "should_terminate_single_epoch", "should_interrupt"])
@pytest.mark.parametrize("value", ["soon", None, 2, "skip"])
def test_a_flag_of_another_kind_is_rejected(attribute, value):
    engine = Engine(echo)
    with pytest.raises(TypeError, match=f"{attribute} must be one of .False, True.*got {value!r}"):
        setattr(engine, attribute, value)
    assert getattr(engine, attribute) is False


# --- terminate_epoch --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", INSIDE, ids=lambda position: EVENTS[position])
@pytest.mark.parametrize(
    ("options", "end"), [({}, ["EC"]), ({"skip_epoch_completed": True}, [])], ids=["whole", "skip"]
)
def test_an_epoch_ends_and_the_next_one_begins_a_pass(position, options, end):
    engine, trace = traced()
    at_position(engine, position, terminate_epoch(**options))
    engine.run(DATA, max_epochs=EPOCHS)
    epoch = int(EVENTS[position].split()[1].split("/")[0])
    rest = whole(EPOCHS - epoch)[1:] if epoch < EPOCHS else ["C"]
    cut = f"TSE:{done_in_epoch(position)}"
    assert trace.words == [*NAMES[: position + 1], cut, *end, *rest]
    assert engine.state.epoch == EPOCHS
    assert engine.state.iteration == EPOCHS * len(DATA) - (len(DATA) - done_in_epoch(position))
    assert engine.should_terminate_single_epoch is False


def test_the_counters_are_not_moved_to_the_nominal_end_of_the_epoch():
    engine, trace = traced(counters=True)
    at(engine, Events.ITERATION_COMPLETED, terminate_epoch())
    engine.run([1, 2, 3], max_epochs=2)
    assert trace.take() == flat(
        "S 0/0 · ES 1/0 · GS 1/0 GC 1/0 IS 1/1 IC 1/1 · TSE:1 1/1 EC 1/1 · ES 2/1 · GS 2/1 GC 2/1 IS 2/2 IC 2/2",
        "GS 2/2 GC 2/2 IS 2/3 IC 2/3 · GS 2/3 GC 2/3 IS 2/4 IC 2/4 · EC 2/4 · C 2/4",
    )
    assert trace.batches == [1, 1, 2, 3]


def test_asked_by_the_process_function_the_iteration_of_the_epoch_is_finished_first():
    def step(engine, batch):
        if engine.state.iteration == 3:
            engine.terminate_epoch()

    engine, trace = traced(step)
    engine.run(DATA, max_epochs=EPOCHS)
    assert trace.take() == flat(f"S ES {IT} {IT} EC ES GS STOP GC IS IC TSE:1 EC ES {IT} {IT} EC C")


@pytest.mark.parametrize("firing", [1, 2, 3])
@pytest.mark.parametrize("event", [Events.EPOCH_COMPLETED, Events.COMPLETED], ids=str)
@pytest.mark.parametrize("options", [{}, {"skip_epoch_completed": True}], ids=str)
def test_asked_when_the_epoch_is_over_it_has_no_effect(event, firing, options):
    engine, trace = traced()
    at(engine, event, terminate_epoch(**options), firing=firing)
    engine.run(DATA, max_epochs=EPOCHS)
    assert trace.take().split() == NAMES


def test_asked_in_started_there_is_no_epoch_to_end():
    engine, trace = traced()
    at(engine, Events.STARTED, terminate_epoch())
    with pytest.raises(RuntimeError, match="terminate_epoch.*STARTED"):
        engine.run(DATA)
    assert trace.take() == "S"
    engine.run(DATA)
    assert trace.take() == flat(f"S ES {IT} {IT} EC C")


def test_asked_in_terminate_single_epoch_completed_can_still_be_skipped():
    engine, trace = traced()
    at(engine, Events.ITERATION_COMPLETED, terminate_epoch())
    at(engine, Events.TERMINATE_SINGLE_EPOCH, terminate_epoch(skip_epoch_completed=True))
    engine.run(DATA, max_epochs=2)
    assert trace.take() == flat(f"S ES {IT} TSE:1 ES {IT} {IT} EC C")


def test_an_interrupt_is_not_delayed_by_an_epoch_that_ends_without_epoch_completed():
    engine, trace = traced()
    at(engine, Events.ITERATION_COMPLETED, terminate_epoch(skip_epoch_completed=True))
    at(engine, Events.ITERATION_COMPLETED, lambda engine: engine.interrupt())
    engine.run(DATA, max_epochs=2)
    assert trace.take() == flat(f"S ES {IT} TSE:1 INT")
    engine.run()
    assert trace.take() == flat(f"ES {IT} {IT} EC C")


def test_an_iterator_continues_in_the_next_epoch():
    engine, trace = traced()
    at(engine, Events.ITERATION_COMPLETED, terminate_epoch())
    engine.run(unsized("abc"), max_epochs=2, epoch_length=2)
    assert trace.batches == ["a", "b", "c"]


def test_every_epoch_can_be_cut_at_its_first_event():
    engine, trace = traced()
    engine.add_event_handler(Events.EPOCH_STARTED, lambda: engine.terminate_epoch())
    engine.run(DATA, max_epochs=2)
    assert trace.take() == "S ES TSE:0 EC ES TSE:0 EC C"


def test_an_epoch_of_a_resumed_run_counts_what_was_done_before():
    engine, trace = traced()
    engine.load_state_dict({"iteration": 5, "epoch_length": 4, "max_epochs": 2})
    at(engine, Events.ITERATION_COMPLETED, terminate_epoch())
    engine.run(range(4))
    assert trace.take() == flat(f"S ES {IT} TSE:2 EC C")


# --- together ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wishes", "events"),
    [
        (["terminate_epoch", "terminate"], f"S ES {IT} T C"),
        (["terminate", "terminate_epoch", "interrupt"], f"S ES {IT} T C"),
        (["interrupt", "terminate"], f"S ES {IT} T C"),
        (["interrupt", "terminate_epoch"], f"S ES {IT} TSE:1 EC INT"),
    ],
    ids=" ".join,
)
def test_the_strongest_of_several_requests_wins(wishes, events):
    engine, trace = traced()
    for wish in wishes:
        at(engine, Events.ITERATION_COMPLETED, lambda engine, wish=wish: getattr(engine, wish)())
    engine.run(DATA, max_epochs=EPOCHS)
    assert trace.take() == flat(events)


def test_a_run_requested_end_in_terminate_single_epoch_ends_after_the_epoch():
    engine, trace = traced()
    at(engine, Events.ITERATION_COMPLETED, terminate_epoch())
    at(engine, Events.TERMINATE_SINGLE_EPOCH, terminate())
    engine.run(DATA, max_epochs=EPOCHS)
    assert trace.take() == flat(f"S ES {IT} TSE:1 EC T C")


# === Pausing and continuing ===


DATA_INTERRUPT, EPOCHS_INTERRUPT = [1, 2], 3

# name: what makes the arguments of the first call of run
RUNS = {
    "sized": lambda: {"data": [1, 2], "max_epochs": 3},
    "short epochs": lambda: {"data": [1, 2, 3], "max_epochs": 3, "epoch_length": 2},
    "long epochs": lambda: {"data": [1, 2, 3], "max_epochs": 2, "epoch_length": 5},
    "no data": lambda: {"max_epochs": 2, "epoch_length": 2},
    "iterations": lambda: {"data": [1, 2, 3], "max_iters": 5},
    "unsized": lambda: {"data": Sizeless(1, 2, 3), "max_epochs": 3},
    "unsized iterations": lambda: {"data": Sizeless(1, 2, 3), "max_iters": 7},
    "dry": lambda: {"data": unsized("ab"), "max_epochs": 2},
}


def interrupt(engine):
    engine.interrupt()


def outcome(engine, trace):
    state = engine.state
    return trace.take(), trace.batches, state.iteration, state.epoch, state.epoch_length, state.output


def uninterrupted(arguments):
    engine, trace = traced(counters=True)
    engine.run(**arguments)
    return outcome(engine, trace)


@pytest.fixture(autouse=True)
def dry_data_is_no_matter_here():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the data ran out")
        yield


def without_interrupts(found):
    words = found[0].split()
    kept = [pair for pair in zip(words[::2], words[1::2], strict=True) if pair[0] != "INT"]
    return (" ".join(" ".join(pair) for pair in kept), *found[1:])


@pytest.mark.parametrize("arguments", RUNS.values(), ids=RUNS.keys())
def test_a_run_continues_after_any_event_as_if_nothing_had_been(arguments):
    expected = uninterrupted(arguments())
    positions = [number for number, name in enumerate(expected[0].split()[::2]) if name not in ("T", "C")]
    for position in positions:
        engine, trace = traced(counters=True)
        at_position(engine, position, interrupt)
        state = engine.run(**arguments())
        assert state is engine.state
        assert trace.words[-1].startswith("INT")
        assert len(trace.words) == position + 2
        assert engine.should_interrupt is False
        assert engine.run() is state
        assert without_interrupts(outcome(engine, trace)) == expected
        assert trace.words == []


@pytest.mark.parametrize("arguments", RUNS.values(), ids=RUNS.keys())
def test_a_run_can_be_interrupted_at_every_event(arguments):
    expected = uninterrupted(arguments())
    engine, trace = traced(counters=True)
    for event in SHORT:
        if event not in (Events.INTERRUPT, Events.COMPLETED, Events.TERMINATE):
            engine.add_event_handler(event, interrupt)
    engine.run(**arguments())
    calls = 1
    while engine.last_event_name != Events.COMPLETED:
        engine.run()
        calls += 1
    assert trace.words.count("INT") == 0
    assert sum(word.startswith("INT") for word in trace.words) == calls - 1
    assert calls > 2
    assert without_interrupts(outcome(engine, trace)) == expected


def test_asked_by_the_process_function_the_iteration_is_finished_first_interrupt():
    def step(engine, batch):
        if engine.state.iteration == 1:
            engine.interrupt()

    engine, trace = traced(step)
    engine.run(DATA_INTERRUPT)
    assert trace.take() == flat(f"S ES {IT} INT")
    engine.run()
    assert trace.take() == flat(f"{IT} EC C")


@pytest.mark.parametrize("event", [Events.COMPLETED, Events.TERMINATE, Events.TERMINATE_SINGLE_EPOCH, Events.INTERRUPT])
def test_asked_where_nothing_is_left_to_pause_it_has_no_effect(event):
    engine, trace = traced()
    wishes = {
        Events.TERMINATE: (lambda engine: engine.terminate(), "T C"),
        Events.TERMINATE_SINGLE_EPOCH: (lambda engine: engine.terminate_epoch(), "TSE:1 EC INT"),
        Events.INTERRUPT: (interrupt, "INT"),
        Events.COMPLETED: (lambda engine: None, f"{IT} EC C"),
    }
    wish, rest = wishes[event]
    at(engine, Events.ITERATION_COMPLETED, wish)
    at(engine, event, interrupt)
    engine.run(DATA_INTERRUPT)
    assert trace.take() == flat(f"S ES {IT}", rest)


def test_asked_in_interrupt_it_is_not_asked_again_after_resumption():
    engine, trace = traced()
    at(engine, Events.ITERATION_COMPLETED, interrupt)
    at(engine, Events.INTERRUPT, interrupt)
    engine.run(DATA_INTERRUPT)
    trace.take()
    engine.run()
    assert trace.take() == flat(f"{IT} EC C")


def test_a_paused_run_is_seen_as_unfinished():
    engine, _ = traced()
    at(engine, Events.ITERATION_COMPLETED, interrupt, firing=3)
    state = engine.run(DATA_INTERRUPT, max_epochs=EPOCHS_INTERRUPT)
    assert (state.iteration, state.epoch, state.batch, state.output) == (3, 2, 1, 1)
    assert engine.last_event_name == Events.INTERRUPT
    counts = {"epochs_completed": 1, "iterations_in_epoch": 1, "data_length": 2}
    assert engine.state_dict() == {"epoch_length": 2, "iteration": 3, "max_epochs": EPOCHS_INTERRUPT, **counts}


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
    engine.run(DATA_INTERRUPT, **first)
    assert engine.run(**then).iteration == iterations
    assert trace.take().split().count("S") == 1


@pytest.mark.parametrize("position", range(2, 12))
def test_data_given_while_paused_is_ignored_once_the_pass_has_begun(position):
    engine, trace = traced()
    at_position(engine, position, interrupt)
    engine.run(DATA_INTERRUPT, max_epochs=EPOCHS_INTERRUPT)
    engine.run([7, 8, 9])
    assert trace.batches == DATA_INTERRUPT * EPOCHS_INTERRUPT


@pytest.mark.parametrize("position", [0, 1])
def test_data_given_before_the_pass_has_begun_is_used(position):
    engine, trace = traced()
    at_position(engine, position, interrupt)
    engine.run(DATA_INTERRUPT, max_epochs=2)
    engine.run([7, 8, 9])
    assert trace.batches == [7, 8, 9, 7]
    assert engine.state.dataloader == [7, 8, 9]


def test_no_batch_is_lost():
    engine, trace = traced()
    engine.add_event_handler(Events.GET_BATCH_COMPLETED(every=3) | Events.ITERATION_STARTED(every=2), interrupt)
    engine.run(unsized(range(20)), epoch_length=20)
    while engine.last_event_name != Events.COMPLETED:
        engine.run()
    assert trace.batches == list(range(20))


def test_a_pause_where_the_data_ran_out_does_not_repeat_the_fetch():
    engine, trace = traced()
    at(engine, Events.DATALOADER_STOP_ITERATION, interrupt)
    engine.run(DATA_INTERRUPT, max_epochs=2)
    assert trace.take() == flat(f"S ES {IT} {IT} EC ES GS STOP INT")
    engine.run()
    assert trace.take() == flat(f"GC IS IC {IT} EC C")


def test_an_event_of_the_user_where_the_data_ran_out_does_not_repeat_the_fetch():
    engine, trace = traced()
    engine.register_events("foo")
    engine.add_event_handler(Events.DATALOADER_STOP_ITERATION, lambda: engine.fire_event("foo"))
    engine.run(DATA_INTERRUPT, max_epochs=2)
    assert trace.take() == flat(f"S ES {IT} {IT} EC ES GS STOP GC IS IC {IT} EC C")


# --- switched off -----------------------------------------------------------------------------------------------


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

    engine.run(DATA_INTERRUPT)
    assert refused == [False]
    assert trace.take() == flat(f"S ES {IT} {IT} EC C")


@pytest.mark.parametrize("arguments", RUNS.values(), ids=RUNS.keys())
def test_switching_it_off_changes_nothing_else(arguments):
    engine, trace = traced(counters=True)
    engine.interrupt_resume_enabled = False
    engine.run(**arguments())
    assert outcome(engine, trace) == uninterrupted(arguments())


def test_two_engines_may_be_paused_at_once():
    engines = [traced() for _ in range(2)]
    for engine, _ in engines:
        engine.add_event_handler(Events.ITERATION_COMPLETED, interrupt)
    engines[0][0].run(DATA_INTERRUPT)
    engines[1][0].run([7, 8])
    for (engine, _), _ in itertools.product(engines, range(2)):
        engine.run()
    assert [trace.batches for _, trace in engines] == [[1, 2], [7, 8]]


# === Stop requests for a paused run, and discarding it ===


DATA_PAUSED, EPOCHS_PAUSED = [1, 2], 3


def interrupt_paused(engine):
    engine.interrupt()


# --- other wishes while paused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wish", "rest"),
    [
        (lambda engine: engine.terminate(), "GS T C"),
        (lambda engine: engine.terminate(skip_completed=True), "GS T"),
        (lambda engine: engine.terminate_epoch(), f"GS TSE:1 EC ES {IT} {IT} EC C"),
        (lambda engine: engine.interrupt(), "GS INT"),
    ],
)
def test_a_request_while_paused_is_obeyed_after_one_more_event(wish, rest):
    engine, trace = traced()
    at(engine, Events.ITERATION_COMPLETED, interrupt_paused)
    engine.run(DATA_PAUSED, max_epochs=2)
    trace.take()
    wish(engine)
    engine.run()
    assert trace.take() == flat(rest)


def test_a_request_while_paused_is_obeyed_before_more_data_is_taken_also_without_handlers():
    data = unsized("abc")
    engine = Engine(echo)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=1), interrupt_paused)
    engine.run(data, epoch_length=3)
    engine.terminate()
    engine.run()
    assert list(data) == ["b", "c"]


# --- given up ---------------------------------------------------------------------------------------------------


def paused(position=4):
    """Make a paused engine, and the list of what its handlers of errors see."""
    engine, trace = traced()
    errors = []
    engine.add_event_handler(Events.EXCEPTION_RAISED, lambda error: errors.append(error))
    at_position(engine, position, interrupt_paused)
    engine.run(DATA_PAUSED, max_epochs=EPOCHS_PAUSED)
    trace.take()
    trace.batches.clear()
    return engine, trace, errors


@pytest.mark.parametrize("position", range(16))
def test_a_paused_run_is_discarded_without_a_trace(position, caplog):
    engine, trace, errors = paused(position)
    engine.state.max_epochs = None
    engine.run([7, 8])
    assert trace.take() == flat(f"S ES {IT} {IT} EC C")
    assert trace.batches == [7, 8]
    assert errors == []
    assert caplog.records == []


@pytest.mark.parametrize("position", range(16))
def test_a_paused_engine_is_freed_without_a_trace(position, caplog):
    engine, trace, errors = paused(position)
    del engine
    gc.collect()
    assert trace.take() == ""
    assert errors == []
    assert caplog.records == []


@pytest.mark.parametrize("position", range(16))
def test_loading_a_state_discards_the_paused_run(position, caplog):
    engine, trace, errors = paused(position)
    engine.load_state_dict({"iteration": 4, "epoch_length": 2, "max_epochs": 3})
    engine.run([7, 8])
    assert trace.take() == flat(f"S ES {IT} {IT} EC C")
    assert trace.batches == [7, 8]
    assert errors == []
    assert caplog.records == []


def test_a_rejected_state_does_not_discard_the_paused_run():
    engine, trace, _ = paused()
    with pytest.raises(ValueError, match="epoch_length"):
        engine.load_state_dict({})
    engine.run()
    assert trace.batches == [2, *DATA_PAUSED, *DATA_PAUSED]


# === Changing the length of epochs ===


@pytest.mark.parametrize("make", [list, auto_dataloader], ids=["list", "loader"])
def test_iterations_are_counted_on_when_epochs_change_their_length(make):
    lengths, seen = iter([4, 2, 3]), []
    engine = Engine(lambda engine, batch: seen.append((engine.state.epoch, engine.state.iteration)))
    engine.add_event_handler(Events.EPOCH_STARTED, lambda: engine.change_epoch_length(next(lengths)))
    engine.run(make(range(4)), max_epochs=3)
    assert seen == [(1, 1), (1, 2), (1, 3), (1, 4), (2, 5), (2, 6), (3, 7), (3, 8), (3, 9)]


def test_the_place_in_the_data_stays():
    places, loader = [], auto_dataloader(list(range(6)), batch_size=2)
    engine = Engine(lambda engine, batch: None)
    engine.add_event_handler(Events.GET_BATCH_STARTED, lambda: places.append(engine.state_dict().get("position")))
    engine.add_event_handler(Events.EPOCH_STARTED(once=2), lambda: engine.change_epoch_length(4))
    engine.run(loader, max_epochs=2)
    assert [(place["epoch"], place["consumed"]) for place in places] == [
        (0, 0), (0, 2), (0, 4), (1, 0), (1, 2), (1, 4), (2, 0)
    ]  # fmt: skip


@pytest.mark.parametrize("event", [Events.STARTED, Events.ITERATION_STARTED, Events.EPOCH_COMPLETED, Events.COMPLETED])
def test_elsewhere_it_is_rejected(event):
    engine = Engine(lambda engine, batch: None)
    engine.add_event_handler(event, lambda: engine.change_epoch_length(3))
    with pytest.raises(RuntimeError, match="must be called in EPOCH_STARTED"):
        engine.run(range(2))


def test_outside_of_a_run_it_is_rejected():
    with pytest.raises(RuntimeError, match="must be called in EPOCH_STARTED"):
        Engine(lambda engine, batch: None).change_epoch_length(3)


@pytest.mark.parametrize(("length", "error"), [(0, ValueError), (2.5, TypeError)])
def test_an_invalid_length_is_rejected(length, error):
    engine = Engine(lambda engine, batch: None)
    engine.add_event_handler(Events.EPOCH_STARTED, lambda: engine.change_epoch_length(length))
    with pytest.raises(error, match="length must be"):
        engine.run(range(2))


# === Times ===


class Clock:
    """A clock that only moves when told to."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def later(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("camshaft.engine.loop.perf_counter", clock)
    return clock


def timed(clock):
    """Make an engine in which each event takes its own time, and the times that each event sees."""
    seconds = {Events.STARTED: 10_000, Events.EPOCH_STARTED: 1, Events.EPOCH_COMPLETED: 100, Events.COMPLETED: 1000}
    engine, seen = Engine(lambda engine, batch: clock.later(10)), []
    for event, delay in seconds.items():
        engine.add_event_handler(event, lambda: seen.append(tuple(engine.state.times.values())))
        engine.add_event_handler(event, lambda delay: clock.later(delay), delay)
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
    engine, _seen = timed(clock)
    at(engine, Events.EPOCH_COMPLETED, lambda engine: engine.interrupt())
    engine.run([1], max_epochs=2)
    assert engine.state.times == {"EPOCH_COMPLETED": 111.0, "COMPLETED": 0.0}
    engine.run()
    assert engine.state.times["COMPLETED"] == 11_222.0
    engine.run([1])
    assert engine.state.times["COMPLETED"] == 11_111.0
