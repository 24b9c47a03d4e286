"""The mode of a model while engines share it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from camshaft.engine import Events, create_supervised_evaluator, create_supervised_trainer
from camshaft.engine.mode import Mode


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
def test_a_part_that_a_user_switched_alone_is_switched_back(training):
    model = Counting()
    engine = trainer_of(model) if training else create_supervised_evaluator(model)
    engine.run(DATA)
    model[1].train(not training)
    engine.run(DATA)
    assert model.modes == [(training,) * 4] * 6


def evaluating(trainer, part, event=Events.EPOCH_COMPLETED):
    evaluator = create_supervised_evaluator(part, model_fn=lambda model, x: x)
    trainer.add_event_handler(event, lambda: evaluator.run(DATA))


def by_hand(trainer, part, event=Events.EPOCH_COMPLETED):
    trainer.add_event_handler(event, lambda: part.eval())


BETWEEN = {
    "nothing": lambda trainer, model: None,
    "an evaluation": evaluating,
    "one in each iteration": lambda trainer, model: evaluating(trainer, model, Events.ITERATION_COMPLETED),
    "one of another part": lambda trainer, model: evaluating(trainer, model[3]),
    "one of the same part": lambda trainer, model: evaluating(trainer, model[1]),
    "one by hand": by_hand,
}
FREEZE = [
    Events.STARTED, Events.EPOCH_STARTED, Events.EPOCH_STARTED(once=1), Events.EPOCH_STARTED(once=2),
    Events.ITERATION_STARTED, Events.ITERATION_COMPLETED(once=1),
]  # fmt: skip


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
@pytest.mark.parametrize("freeze", FREEZE, ids=str)
def test_a_part_that_a_handler_switches_stays_so(between, freeze):
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.BatchNorm1d(1)), nn.ReLU(), nn.Dropout(0.5))
    trainer, modes = trainer_of(model), []
    trainer.add_event_handler(freeze, lambda: model[1].eval())
    between(trainer, model)
    model.register_forward_pre_hook(lambda *_: modes.append([one.training for one in model]))
    trainer.run(DATA, max_epochs=2)
    free = 1 if freeze.name == "ITERATION_COMPLETED" else 3 * (str(freeze) == "Events.EPOCH_STARTED(once=2)")
    assert modes == [[True] * 4] * free + [[True, False, True, True]] * (6 - free)


def test_a_part_that_a_handler_releases_trains_again():
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5))
    trainer, modes = trainer_of(model), []
    trainer.add_event_handler(Events.STARTED, lambda: model[1].eval())
    evaluating(trainer, model)
    trainer.add_event_handler(Events.EPOCH_STARTED(once=3), lambda: model[1].train())
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: modes.append(model[1].training))
    trainer.run(DATA[:1], max_epochs=4)
    assert modes == [False, False, True, True]


def test_a_module_that_is_added_in_another_mode_is_switched():
    model = nn.Sequential(nn.Linear(1, 1))
    trainer = trainer_of(model)
    trainer.add_event_handler(Events.EPOCH_STARTED(once=2), lambda: model.append(nn.Dropout().eval()))
    trainer.run(DATA, max_epochs=2)
    assert model[1].training


def test_a_part_that_a_handler_switches_in_evaluation_stays_so():  # dropout that is sampled
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5))
    evaluator, modes = create_supervised_evaluator(model), []
    evaluator.add_event_handler(Events.EPOCH_STARTED, lambda: model[1].train())
    model.register_forward_pre_hook(lambda *_: modes.append([one.training for one in model]))
    evaluator.run(DATA)
    evaluator.run(DATA)
    assert modes == [[False, True]] * 6


def test_a_model_that_keeps_a_part_frozen_stays_so():
    class Frozen(Counting):
        def train(self, mode=True):
            super().train(mode)
            self[1].eval()
            return self

    model = Frozen()
    trainer_of(model).run(DATA)
    assert model.modes == [(True, True, False, True)] * 3


def test_modes_work_for_models_that_are_not_modules():
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
