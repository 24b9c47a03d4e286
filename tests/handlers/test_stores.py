"""Test EpochOutputStore."""

from __future__ import annotations

import pytest
import torch

from camshaft.engine import Engine, Events
from camshaft.engine.state import LazyNumber
from camshaft.handlers import EpochOutputStore


def echo(engine, batch):
    return batch


def test_each_epoch_has_a_new_list():
    engine, store, lists = Engine(echo), EpochOutputStore(), []
    store.attach(engine, "outputs")
    engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: lists.append(engine.state.outputs))
    engine.run([1, 2, 3], max_epochs=2)
    assert lists == [[1, 2, 3], [1, 2, 3]]
    assert lists[0] is not lists[1]
    assert store.data is lists[1]


def test_without_a_name_the_state_is_unchanged():
    engine, store = Engine(echo), EpochOutputStore()
    before = set(vars(engine.state))
    store.attach(engine)
    engine.run([1, 2])
    assert store.data == [1, 2]
    assert set(vars(engine.state)) == before


def test_outputs_are_transformed():
    engine, store = Engine(echo), EpochOutputStore(lambda output: output["y"])
    store.attach(engine)
    engine.run([{"x": 1, "y": 2}, {"x": 3, "y": 4}])
    assert store.data == [2, 4]


def test_an_attribute_of_the_engine_may_be_replaced():
    engine = Engine(echo)
    EpochOutputStore().attach(engine, "output")
    assert engine.run([1, 2]).output == [1, 2]


def test_methods_may_be_used_without_attach():
    engine, store = Engine(echo), EpochOutputStore()
    engine.add_event_handler(Events.ITERATION_COMPLETED(every=2), store.update)
    engine.run([1, 2, 3, 4])
    assert store.store(engine) == store.data == [2, 4]
    store.reset()
    assert store.data == []


def test_tensors_are_kept_unchanged():
    tensors = [torch.zeros(2), torch.ones(3)]
    engine, store = Engine(echo), EpochOutputStore()
    store.attach(engine)
    engine.run(tensors)
    assert all(one is other for one, other in zip(store.data, tensors, strict=True))


def test_losses_are_fetched_at_the_end_of_the_epoch_only(monkeypatch):
    reads = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(LazyNumber, "read", lambda self: pytest.fail("a number was read alone"))
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(engine.last_event_name) or tolist(self))
    engine, store = Engine(lambda engine, batch: LazyNumber(torch.tensor(batch))), EpochOutputStore()
    store.attach(engine, "losses")
    state = engine.run([0.5, 0.25])
    assert reads == [Events.EPOCH_COMPLETED]
    assert state.losses == [0.5, 0.25]
    assert all(type(loss) is float for loss in state.losses)


def test_output_transform_must_be_callable():
    with pytest.raises(TypeError, match="output_transform must be callable"):
        EpochOutputStore(3)


def test_the_name_must_be_a_string():
    with pytest.raises(TypeError, match="name must be a str, got 3"):
        EpochOutputStore().attach(Engine(lambda engine, batch: None), 3)


def test_the_name_must_not_be_a_counter_of_the_engine():
    with pytest.raises(ValueError, match="name must not be 'iteration'"):
        EpochOutputStore().attach(Engine(lambda engine, batch: None), "iteration")


def test_losses_are_fetched_in_one_transfer(monkeypatch):
    """Fetched one by one, each would synchronize with the device."""
    transfers, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: transfers.append(tensor) or tolist(tensor))
    store = EpochOutputStore()
    engine = Engine(lambda engine, batch: LazyNumber(batch))
    store.attach(engine)
    engine.run([*(torch.tensor(float(number)) for number in range(100)), torch.tensor([7.0])])
    assert store.data == [*map(float, range(100)), 7.0]
    assert len(transfers) == 1
