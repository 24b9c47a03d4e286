"""Test EpochOutputStore."""

from __future__ import annotations

import pytest
import torch

from camshaft.engine import Engine, Events
from camshaft.engine.state import LazyNumber
from camshaft.handlers import EpochOutputStore


def echo(engine, batch):
    return batch


def test_each_epoch_has_a_new_list_of_transformed_outputs():
    engine, store, lists = Engine(echo), EpochOutputStore(lambda output: output["y"]), []
    store.attach(engine, "outputs")
    engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: lists.append(engine.state.outputs))
    engine.run([{"x": 1, "y": 2}, {"x": 3, "y": torch.ones(3)}], max_epochs=2)
    assert lists[0] is not lists[1]
    assert store.data is lists[1]
    assert [len(one) for one in lists] == [2, 2]
    assert lists[0][0] == 2
    assert lists[0][1] is lists[1][1]  # tensors are kept as they are


def test_the_name_may_be_left_out_or_replace_an_attribute_of_the_engine():
    engine, store = Engine(echo), EpochOutputStore()
    before = set(vars(engine.state))
    store.attach(engine)
    engine.run([1, 2])
    assert store.data == [1, 2]
    assert set(vars(engine.state)) == before
    EpochOutputStore().attach(engine, "output")
    assert engine.run([1, 2]).output == [1, 2]


def test_methods_may_be_used_without_attach():
    engine, store = Engine(echo), EpochOutputStore()
    engine.add_event_handler(Events.ITERATION_COMPLETED(every=2), store.update)
    engine.run([1, 2, 3, 4])
    assert store.store(engine) == store.data == [2, 4]
    store.reset()
    assert store.data == []


def test_losses_are_fetched_in_one_transfer_at_the_end_of_the_epoch(monkeypatch):
    """Fetched one by one, each would synchronize with the device."""
    transfers, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(LazyNumber, "read", lambda self: pytest.fail("a number was read alone"))
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: transfers.append(engine.last_event_name) or tolist(self))
    engine, store = Engine(lambda engine, batch: LazyNumber(batch)), EpochOutputStore()
    store.attach(engine)
    engine.run([*(torch.tensor(float(number)) for number in range(10)), torch.tensor([7.0])])
    assert transfers == [Events.EPOCH_COMPLETED]
    assert store.data == [*map(float, range(10)), 7.0]
    assert all(type(loss) is float for loss in store.data)


def test_invalid_arguments_are_rejected():
    with pytest.raises(TypeError, match="output_transform"):
        EpochOutputStore(3)
    with pytest.raises(TypeError, match="name must be a str"):
        EpochOutputStore().attach(Engine(echo), 3)
    with pytest.raises(ValueError, match="name must not be 'iteration'"):
        EpochOutputStore().attach(Engine(echo), "iteration")
