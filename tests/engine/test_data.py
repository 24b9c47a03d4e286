"""What a run does with its data: the life time of batch and output, and `set_data`."""

from __future__ import annotations

import pytest

from camshaft.engine import Engine, Events
from tests.engine.traces import IT, IT_AGAIN, IT_BARE, SHORT, at, at_position, echo, flat, traced, unsized

# --- batch and output -------------------------------------------------------------------------------------------


def test_batch_and_output_live_as_long_as_they_are_of_use():
    engine, seen = Engine(lambda engine, batch: batch * 10), []
    for event, name in SHORT.items():
        engine.add_event_handler(event, lambda name: seen.append((name, engine.state.batch, engine.state.output)), name)
    engine.run([1, 2], max_epochs=2)
    assert seen == [
        ("S", None, None), ("ES", None, None),
        ("GS", None, None), ("GC", 1, None), ("IS", 1, None), ("IC", 1, 10),
        ("GS", None, 10), ("GC", 2, None), ("IS", 2, None), ("IC", 2, 20),
        ("EC", 2, 20), ("ES", 2, 20),
        ("GS", None, 20), ("STOP", None, 20), ("GC", 1, None), ("IS", 1, None), ("IC", 1, 10),
        ("GS", None, 10), ("GC", 2, None), ("IS", 2, None), ("IC", 2, 20),
        ("EC", 2, 20), ("C", 2, 20),
    ]  # fmt: skip
    assert (engine.state.batch, engine.state.output) == (2, 20)


def test_where_the_data_ran_out_the_batch_is_gone_and_the_output_is_the_last():
    engine = Engine(lambda engine, batch: batch * 10)
    engine.run(unsized([1, 2]))
    assert (engine.state.batch, engine.state.output) == (None, 20)


def test_without_data_the_batch_is_none():
    seen = []
    engine = Engine(lambda engine, batch: seen.append(batch) or len(seen))
    engine.run(epoch_length=2)
    assert seen == [None, None]
    assert (engine.state.batch, engine.state.output, engine.state.dataloader) == (None, 2, None)


@pytest.mark.parametrize("event", [Events.GET_BATCH_COMPLETED, Events.ITERATION_STARTED])
def test_a_handler_may_change_the_batch(event):
    engine = Engine(echo)
    engine.add_event_handler(event, lambda: setattr(engine.state, "batch", engine.state.batch + 5))
    assert engine.run([1, 2]).output == 7


def test_a_batch_of_none_is_a_batch():
    engine, _ = traced()
    engine.run([None, None])
    assert engine.state.iteration == 2


# --- set_data ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "batches"),
    [
        (Events.STARTED, [7, 8, 9, 7, 8, 9]),
        (Events.EPOCH_STARTED, [7, 8, 9, 7, 8, 9]),
        (Events.GET_BATCH_STARTED, [7, 8, 9, 7, 8, 9]),
        (Events.GET_BATCH_COMPLETED, [1, 7, 8, 9, 7, 8]),
        (Events.ITERATION_STARTED, [1, 7, 8, 9, 7, 8]),
        (Events.ITERATION_COMPLETED, [1, 7, 8, 9, 7, 8]),
        (Events.EPOCH_COMPLETED, [1, 2, 3, 7, 8, 9]),
        (Events.DATALOADER_STOP_ITERATION, [1, 2, 3, 7, 8, 9]),
    ],
    ids=str,
)
def test_data_set_in_a_run_is_taken_from_the_next_fetch_on(event, batches):
    engine, trace = traced()
    at(engine, event, lambda engine: engine.set_data([7, 8, 9]))
    engine.run([1, 2, 3], max_epochs=2)
    assert trace.batches == batches
    assert engine.state.dataloader == [7, 8, 9]


def test_data_of_another_length_does_not_change_that_of_the_epochs():
    engine, trace = traced()
    at(engine, Events.ITERATION_COMPLETED, lambda engine: engine.set_data([7]))
    engine.run([1, 2, 3], max_epochs=2)
    assert trace.batches == [1, 7, 7, 7, 7, 7]
    assert engine.state.epoch_length == 3


def test_data_set_in_a_run_without_any_is_fetched_from_then_on():
    engine, trace = traced()
    at(engine, Events.ITERATION_COMPLETED, lambda engine: engine.set_data([7, 8]))
    engine.run(max_epochs=2, epoch_length=2)
    assert trace.batches == [None, 7, 8, 7]
    assert trace.take() == flat(f"S ES {IT_BARE} {IT} EC ES {IT} {IT_AGAIN} EC C")


def test_data_set_while_paused_is_used():
    engine, trace = traced()
    at(engine, Events.ITERATION_COMPLETED, lambda engine: engine.interrupt())
    engine.run([1, 2, 3])
    engine.set_data([7, 8])
    engine.run()
    assert trace.batches == [1, 7, 8]


def test_data_set_between_runs_waits_for_a_run_without_any():
    engine, trace = traced()
    engine.set_data([7, 8])
    assert engine.state.dataloader is None
    engine.run()
    assert trace.batches == [7, 8]
    assert (engine.state.epoch_length, engine.state.dataloader) == (2, [7, 8])


def test_data_given_to_run_wins_over_data_set_before():
    engine, trace = traced()
    engine.set_data([7, 8])
    engine.run([1, 2, 3])
    assert trace.batches == [1, 2, 3]
    engine.run(max_epochs=1, epoch_length=1)
    assert trace.batches == [1, 2, 3, None]  # it waited for one run only


def test_data_set_before_a_refused_run_is_still_there_for_the_next():
    engine, trace = traced()
    engine.set_data([7, 8])
    with pytest.raises(ValueError, match="max_epochs"):
        engine.run(max_epochs=0)
    engine.run()
    assert trace.batches == [7, 8]


@pytest.mark.parametrize("when", ["before", "inside"])
def test_data_that_cannot_be_iterated_over_is_refused(when):
    engine, trace = traced()

    def refuse(engine):
        with pytest.raises(TypeError, match="data.*3"):
            engine.set_data(3)

    if when == "before":
        refuse(engine)
    else:
        at_position(engine, 3, refuse)
    engine.run([1, 2])
    assert trace.batches == [1, 2]
