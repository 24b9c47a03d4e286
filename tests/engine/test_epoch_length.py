"""Epochs that get another length on the way."""

from __future__ import annotations

import pytest

from camshaft.distributed import auto_dataloader
from camshaft.engine import Engine, Events


@pytest.mark.parametrize("make", [list, auto_dataloader], ids=["list", "loader"])
def test_iterations_are_counted_as_if_all_epochs_had_had_the_new_length(make):
    lengths, seen = iter([4, 2, 3]), []
    engine = Engine(lambda engine, batch: seen.append((engine.state.epoch, engine.state.iteration)))
    engine.add_event_handler(Events.EPOCH_STARTED, lambda: engine.change_epoch_length(next(lengths)))
    engine.run(make(range(4)), max_epochs=3)
    assert seen == [(1, 1), (1, 2), (1, 3), (1, 4), (2, 3), (2, 4), (3, 7), (3, 8), (3, 9)]


def test_the_place_in_the_data_stays():
    places, loader = [], auto_dataloader(list(range(6)), batch_size=2)
    engine = Engine(lambda engine, batch: places.append(engine.state_dict()["position"]))
    engine.add_event_handler(Events.EPOCH_STARTED(once=2), lambda: engine.change_epoch_length(4))
    engine.run(loader, max_epochs=2)
    assert [(place["epoch"], place["consumed"]) for place in places] == [
        (0, 0), (0, 2), (0, 4), (1, 0), (1, 2), (1, 4), (2, 0)
    ]  # fmt: skip


@pytest.mark.parametrize("event", [Events.STARTED, Events.ITERATION_STARTED, Events.EPOCH_COMPLETED, Events.COMPLETED])
def test_elsewhere_it_is_refused(event):
    engine = Engine(lambda engine, batch: None)
    engine.add_event_handler(event, lambda: engine.change_epoch_length(3))
    with pytest.raises(RuntimeError, match="must be called in EPOCH_STARTED"):
        engine.run(range(2))


def test_outside_of_a_run_it_is_refused():
    with pytest.raises(RuntimeError, match="must be called in EPOCH_STARTED"):
        Engine(lambda engine, batch: None).change_epoch_length(3)


@pytest.mark.parametrize(("length", "error"), [(0, ValueError), (2.5, TypeError)])
def test_a_length_that_is_none_is_refused(length, error):
    engine = Engine(lambda engine, batch: None)
    engine.add_event_handler(Events.EPOCH_STARTED, lambda: engine.change_epoch_length(length))
    with pytest.raises(error, match="length must be"):
        engine.run(range(2))
