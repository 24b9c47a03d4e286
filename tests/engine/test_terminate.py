"""Ending a run or an epoch early, from every event."""

from __future__ import annotations

import pytest

from camshaft.engine import Engine, Events
from tests.engine.traces import IT, at, at_position, echo, flat, traced, unsized

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
def test_a_run_ends_after_the_event_in_which_it_was_asked_to(position, options, rest):
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


def test_a_later_plain_wish_fires_completed_again():
    engine, trace = traced()
    at(engine, Events.STARTED, terminate(skip_completed=True))
    at(engine, Events.TERMINATE, terminate())
    engine.run(DATA)
    assert trace.take() == "S T C"


def test_the_flags_begin_anew_with_each_run():
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


@pytest.mark.parametrize("attribute", ["should_terminate", "should_terminate_single_epoch"])
def test_a_flag_of_another_kind_is_refused(attribute):
    with pytest.raises(ValueError, match="skip"):
        setattr(Engine(echo), attribute, "soon")


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


def test_an_iterator_goes_on_in_the_next_epoch():
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
def test_the_strongest_of_several_wishes_wins(wishes, events):
    engine, trace = traced()
    for wish in wishes:
        at(engine, Events.ITERATION_COMPLETED, lambda engine, wish=wish: getattr(engine, wish)())
    engine.run(DATA, max_epochs=EPOCHS)
    assert trace.take() == flat(events)


def test_a_run_asked_to_end_in_terminate_single_epoch_ends_after_the_epoch():
    engine, trace = traced()
    at(engine, Events.ITERATION_COMPLETED, terminate_epoch())
    at(engine, Events.TERMINATE_SINGLE_EPOCH, terminate())
    engine.run(DATA, max_epochs=EPOCHS)
    assert trace.take() == flat(f"S ES {IT} TSE:1 EC T C")
