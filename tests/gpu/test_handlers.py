"""Handlers that must not synchronize with the GPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from camshaft.engine import Events, create_supervised_trainer
from camshaft.handlers import Checkpoint, TerminateOnNan


@pytest.fixture
def waits_are_errors():
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def make():
    model = nn.Linear(8, 2).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, create_supervised_trainer(model, optimizer, nn.functional.cross_entropy, device="cuda")


def batches(count):
    return [(torch.randn(4, 8, device="cuda"), torch.zeros(4, dtype=torch.long, device="cuda")) for _ in range(count)]


@pytest.mark.usefixtures("waits_are_errors")
def test_checking_for_nan_does_not_synchronize():
    _, trainer = make()
    trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    trainer.run(batches(20))
    assert trainer.state.iteration == 20


def test_nan_is_found_one_iteration_later():
    _, trainer = make()
    trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    data = batches(10)
    data[4][0].fill_(math.nan)
    trainer.run(data)
    assert trainer.state.iteration == 6


def test_a_background_save_starts_without_synchronizing_and_has_the_weights_at_its_start(tmp_path):
    model, trainer = make()
    checkpoint = Checkpoint({"model": model}, tmp_path, asynchronous=True)
    weights = {}

    def save(engine):
        weights.update({name: tensor.clone() for name, tensor in model.state_dict().items()})
        torch.cuda.set_sync_debug_mode("error")
        try:
            checkpoint(engine)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), save)
    trainer.run(batches(20))
    saved = torch.load(tmp_path / "model_3.pt", weights_only=True)
    assert all(torch.equal(saved[name], tensor.cpu()) for name, tensor in weights.items())
