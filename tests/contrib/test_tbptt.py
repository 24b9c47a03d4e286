"""Test truncated backpropagation through time, also against PyTorch-Ignite."""

from __future__ import annotations

import copy
import importlib
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from camshaft.contrib.engines import Tbptt_Events, create_supervised_tbptt_trainer
from camshaft.engine.state import LazyNumber


class Recording(nn.Module):
    """A recurrent model that keeps the arguments of each call."""

    def __init__(self, kind=nn.RNN):
        super().__init__()
        torch.manual_seed(0)
        self.cell = kind(1, 1)
        self.calls = []

    def forward(self, x, hidden=None):
        self.calls.append((len(x), hidden))
        return self.cell(x, hidden)


def batch(steps, targets=None):
    return torch.ones(steps, 1, 1), torch.zeros(steps if targets is None else targets, 1, 1)


def trainer_of(model, step, create=create_supervised_tbptt_trainer, **options):
    return create(model, torch.optim.SGD(model.parameters(), 0.1), mse_loss, step, **options)


def test_the_last_chunk_may_be_smaller_and_the_hidden_state_is_passed_on_detached():
    model = Recording()
    trainer_of(model, 2).run([batch(5)] * 2)
    assert [(steps, hidden is None) for steps, hidden in model.calls] == [(2, True), (2, False), (1, False)] * 2
    assert not any(hidden.requires_grad for _, hidden in model.calls if hidden is not None)


def test_hidden_states_may_be_tuples():
    model = Recording(nn.LSTM)
    trainer_of(model, 2).run([batch(4)])
    assert [tensor.requires_grad for tensor in model.calls[1][1]] == [False, False]


def test_the_time_dimension_is_selected_by_dim():
    model = nn.RNN(1, 1, batch_first=True)
    chunks = []
    model.register_forward_pre_hook(lambda module, arguments: chunks.append(tuple(arguments[0].shape)))
    trainer_of(model, 3, dim=1).run([(torch.ones(2, 5, 1), torch.zeros(2, 5, 1))])
    assert chunks == [(2, 3, 1), (2, 2, 1)]


def test_events_of_chunks_have_the_loss_of_the_chunk_and_the_iteration_has_their_mean():
    trainer, events = trainer_of(Recording(), 2), []
    for event in Tbptt_Events:
        trainer.add_event_handler(event, lambda engine, event=event: events.append((event.value, trainer.state.output)))
    mean = trainer.run([batch(5)]).output
    assert [name for name, _ in events] == ["time_iteration_started", "time_iteration_completed"] * 3
    losses = [loss for name, loss in events if name == "time_iteration_completed"]
    assert mean == sum(losses) / 3
    assert events[2][1] == losses[0]


def test_a_handler_may_evaluate_the_model_between_chunks():
    model = Recording()
    modes = []
    model.register_forward_pre_hook(lambda module, arguments: modes.append(module.training))
    trainer = trainer_of(model, 1)
    trainer.add_event_handler(Tbptt_Events.TIME_ITERATION_COMPLETED, lambda: model.eval())
    trainer.run([batch(3)])
    assert modes == [True, True, True]


def test_losses_on_other_devices_are_read_when_they_are_used():
    def on_meta(y_pred, y):
        return mse_loss(y_pred, y).to("meta")

    model = nn.RNN(1, 1, device="meta")
    trainer = create_supervised_tbptt_trainer(
        model, torch.optim.SGD(model.parameters(), 0.1), on_meta, 2, device="meta"
    )
    trainer.run([batch(4)])  # reading a number of the meta device is an error
    assert isinstance(trainer.state._output, LazyNumber)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tbtt_step": 0}, ValueError, "tbtt_step must be at least 1, got 0"),
        ({"tbtt_step": 2.5}, TypeError, "tbtt_step must be an integer, got 2.5"),
        ({"loss_fn": nn.MSELoss}, TypeError, r"loss_fn must be an object, got the class .* pass MSELoss\(...\)"),
    ],
)
def test_invalid_arguments_are_rejected(options, error, message):
    model = Recording()
    arguments = {"loss_fn": mse_loss, "tbtt_step": 2, **options}
    with pytest.raises(error, match=message):
        create_supervised_tbptt_trainer(model, torch.optim.SGD(model.parameters(), 0.1), **arguments)


def test_targets_of_another_length_are_rejected():
    with pytest.raises(ValueError, match="the same number of time steps, got 5 and 2 in dimension 0"):
        trainer_of(Recording(), 2).run([batch(5, targets=2)])


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM])
def test_outputs_and_weights_are_those_of_ignite(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = importlib.import_module("ignite.contrib.engines.tbptt").create_supervised_tbptt_trainer
    model = Recording(kind)
    results = []
    for create in (create_supervised_tbptt_trainer, theirs):
        one = copy.deepcopy(model)
        output = trainer_of(one, 2, create).run([batch(5)] * 3, max_epochs=2).output
        results.append((output, [parameter.tolist() for parameter in one.parameters()]))
    assert results[0] == results[1]
