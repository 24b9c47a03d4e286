"""The small parts of a step: taking batches apart, switching modes, giving the loss."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from camshaft.engine import Engine, create_supervised_evaluator, create_supervised_trainer
from camshaft.engine.lazy import LazyNumber
from camshaft.engine.step import Mode, call_model, identity, loss_value, predictions_and_targets, prepare_batch


class Counting(nn.Sequential):
    """A model that counts its switches and notes the modes it is called in."""

    def __init__(self):
        super().__init__(nn.Linear(1, 1), nn.BatchNorm1d(1), nn.Dropout())
        self.switches = []
        self.modes = []

    def train(self, mode=True):
        self.switches.append(mode)
        return super().train(mode)

    def forward(self, x):
        self.modes.append(tuple(module.training for module in self.modules()))
        return super().forward(x)


DATA = [(torch.ones(2, 1), torch.zeros(2, 1))] * 3


def trainer_of(model):
    return create_supervised_trainer(model, torch.optim.SGD(model.parameters(), 0.1), nn.MSELoss())


# --- batches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [(1, 2, 3), (1,), ()], ids=repr)
def test_a_batch_that_is_no_pair_is_refused(batch):
    with pytest.raises(ValueError, match="unpack"):
        prepare_batch(batch)


def test_inputs_and_targets_are_moved_in_any_structure():
    x, y = {"a": [torch.ones(1), torch.ones(2)]}, (torch.zeros(1), "name")
    moved_x, moved_y = prepare_batch((x, y), device="meta", non_blocking=True)
    assert [tensor.device.type for tensor in (*moved_x["a"], moved_y[0])] == ["meta"] * 3
    assert moved_y[1] == "name"
    assert x["a"][0].device.type == "cpu"


def test_without_a_device_tensors_stay_as_they_are():
    x, y = torch.ones(1), torch.zeros(1)
    got_x, got_y = prepare_batch([x, y])
    assert got_x is x
    assert got_y is y


def test_what_cannot_be_moved_is_refused():
    with pytest.raises(TypeError):
        prepare_batch((torch.ones(1), object()), device="cpu")


# --- outputs -------------------------------------------------------------------------------------------------------


def test_the_defaults_give_what_they_are_named_for():
    assert identity(DATA) is DATA
    assert call_model(lambda x: x + 1, 1) == 2
    assert predictions_and_targets("x", "y", "y_pred") == ("y_pred", "y")


def test_a_loss_is_a_plain_number_on_the_cpu_and_a_lazy_one_elsewhere():
    assert type(loss_value(None, None, None, torch.tensor(1.5, requires_grad=True))) is float
    assert type(loss_value(None, None, None, torch.tensor(1.5, device="meta"))) is LazyNumber


# --- modes ---------------------------------------------------------------------------------------------------------


def test_a_model_is_switched_only_when_it_has_to_be():
    model = Counting()
    trainer, evaluator = trainer_of(model), create_supervised_evaluator(model)
    trainer.run(DATA, max_epochs=2)
    assert model.switches == [True]
    evaluator.run(DATA)
    evaluator.run(DATA)
    assert model.switches == [True, False]
    trainer.run(DATA)
    assert model.switches == [True, False, True]
    assert model.modes == [(True,) * 4] * 6 + [(False,) * 4] * 6 + [(True,) * 4] * 3


@pytest.mark.parametrize("training", [True, False])
def test_a_part_that_somebody_switched_alone_is_switched_back(training):
    model = Counting()
    engine = trainer_of(model) if training else create_supervised_evaluator(model)
    engine.run(DATA)
    model[1].train(not training)
    engine.run(DATA)
    assert model.modes == [(training,) * 4] * 6


def test_a_model_that_keeps_a_part_frozen_stays_so():
    class Frozen(Counting):
        def train(self, mode=True):
            super().train(mode)
            self[1].eval()
            return self

    model = Frozen()
    trainer_of(model).run(DATA)
    assert model.modes == [(True, True, False, True)] * 3


def test_modes_work_for_models_that_are_no_modules():
    class Plain:
        calls = ()

        def train(self):
            self.calls += ("train",)

        def eval(self):
            self.calls += ("eval",)

    model = Plain()
    train, evaluate = Mode(model, training=True), Mode(model, training=False)
    train(None)
    evaluate(None)
    train(None)
    assert model.calls == ("train", "eval", "train")


def test_evaluation_within_training_leaves_the_next_step_in_train_mode():
    model = Counting()
    trainer, evaluator = trainer_of(model), create_supervised_evaluator(model)

    @trainer.on("ITERATION_COMPLETED")
    def evaluate(engine: Engine) -> None:
        evaluator.run(DATA[:1])

    trainer.run(DATA)
    assert [mode[0] for mode in model.modes] == [True, False] * 3
