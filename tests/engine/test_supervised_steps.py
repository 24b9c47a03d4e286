"""The training step and the evaluation step, in order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from camshaft.engine import create_supervised_evaluator, create_supervised_trainer
from camshaft.engine.state import LazyNumber
from camshaft.engine.supervised import loss_value, prepare_batch

# --- batches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [torch.ones(2, 3), np.ones((2, 3)), "ab", b"ab", {"x": 1, "y": 2}], ids=repr)
def test_only_tuples_and_lists_are_split(batch):
    with pytest.raises(TypeError, match="must be a pair of inputs and targets, got .*pass prepare_batch"):
        prepare_batch(batch)


@pytest.mark.parametrize("batch", [(1, 2, 3), (1,), ()], ids=repr)
def test_a_batch_that_is_not_a_pair_is_rejected(batch):
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


def test_what_cannot_be_moved_is_rejected():
    with pytest.raises(TypeError):
        prepare_batch((torch.ones(1), object()), device="cpu")


# --- outputs -------------------------------------------------------------------------------------------------------


def test_a_loss_is_a_plain_number_on_the_cpu_and_a_lazy_one_elsewhere():
    assert type(loss_value(None, None, None, torch.tensor(1.5, requires_grad=True))) is float
    assert type(loss_value(None, None, None, torch.tensor(1.5, device="meta"))) is LazyNumber


class Model(nn.Module):
    """One weight, which begins at 1; writes down what is done with it."""

    def __init__(self, log, device=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, device=device))
        self.log = log

    def train(self, mode=True):
        self.log.append("train" if mode else "eval")
        return super().train(mode)

    def forward(self, x):
        self.log.append("forward")
        y = x * self.weight
        if y.requires_grad:
            y.register_hook(lambda gradient: self.log.append("backward"))
        return y


class SGD(torch.optim.SGD):
    """An optimizer that writes down what it is asked for."""

    def __init__(self, model, rate=0.5):
        super().__init__(model.parameters(), rate)
        self.log = model.log

    def zero_grad(self, *arguments, **options):
        self.log.append("zero_grad")
        super().zero_grad(*arguments, **options)

    def step(self, *arguments, **options):
        self.log.append("step")
        return super().step(*arguments, **options)


def noting(log, name, function):
    def noted(*arguments, **options):
        log.append(name)
        return function(*arguments, **options)

    return noted


def pair(batch, device, non_blocking):
    return batch


def functions(log, output_transform, **loss_fn):
    """Return functions of the user's own, which write down when they are called."""
    own = {
        "prepare_batch": pair,
        "model_fn": lambda model, x: model(x),
        "model_transform": lambda output: output,
        "output_transform": output_transform,
        **loss_fn,
    }
    return {name: noting(log, name, function) for name, function in own.items()}


def mean_squared_error(y_pred, y):
    return ((y_pred - y) ** 2).mean()


def trainer_of_steps(log, **options):
    model = Model(log)
    own = functions(log, lambda x, y, y_pred, loss: loss.item(), loss_fn=mean_squared_error)
    return create_supervised_trainer(model, SGD(model), **{**own, **options})


BATCH = (torch.full((2, 1), 2.0), torch.zeros(2, 1))
BEFORE = ["prepare_batch", "model_fn", "forward", "model_transform"]
STEP = ["zero_grad", *BEFORE, "loss_fn", "backward", "step", "output_transform"]


# --- the training step ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("amp_mode", [None, "amp"])
def test_a_training_step_does_everything_in_order(amp_mode):
    log = []
    trainer_of_steps(log, amp_mode=amp_mode).run([BATCH] * 2)
    assert log == ["zero_grad", "train", *STEP[1:], *STEP]


@pytest.mark.parametrize("amp_mode", [None, "amp"])
def test_accumulating_steps_zero_at_the_beginning_of_a_window_and_step_at_its_end(amp_mode):
    log = []
    trainer_of_steps(log, amp_mode=amp_mode, gradient_accumulation_steps=2).run([BATCH] * 4)
    window = [*STEP[:-2], STEP[-1], *STEP[1:]]
    assert [word for word in log if word != "train"] == window * 2


def test_every_function_is_called_as_documented():
    calls = {}

    def noted(name, result):
        def function(*arguments, **keywords):
            calls[name] = (arguments, keywords)
            return result(*arguments) if callable(result) else result

        return function

    model = Model([])
    x, y, batch = torch.full((1,), 3.0), torch.ones(1), object()
    trainer = create_supervised_trainer(
        model,
        SGD(model),
        noted("loss_fn", mean_squared_error),
        "cpu",
        True,
        noted("prepare_batch", (x, y)),
        noted("model_transform", lambda output: output + 10),
        noted("output_transform", "output"),
        model_fn=noted("model_fn", lambda model, x: model(x)),
    )
    assert trainer.run([batch]).output == "output"
    assert calls["prepare_batch"] == ((batch,), {"device": "cpu", "non_blocking": True})
    assert calls["model_fn"] == ((model, x), {})
    assert [one.item() for one in calls["model_transform"][0]] == [3.0]
    assert [one.item() for one in calls["loss_fn"][0]] == [13.0, 1.0]
    assert [one.item() for one in calls["output_transform"][0]] == [3.0, 1.0, 13.0, 144.0]
    assert all(keywords == {} for name, (_, keywords) in calls.items() if name != "prepare_batch")


@pytest.mark.parametrize("size", [1, 3])
def test_the_output_has_the_whole_loss_also_in_a_window(size):
    trainer = trainer_of_steps([], gradient_accumulation_steps=size)
    outputs = []
    trainer.add_event_handler("ITERATION_COMPLETED", lambda engine: outputs.append(engine.state.output))
    trainer.run([BATCH] * 3, epoch_length=1)
    assert outputs == [4.0]


def test_the_model_stays_where_it_is_and_the_batches_go_to_the_device():
    model = Model([], device="meta")
    trainer = create_supervised_trainer(model, SGD(model), mean_squared_error, "meta")
    trainer.run([BATCH])
    assert trainer.state.batch[0].device.type == "cpu"
    model = Model([])
    with pytest.raises((RuntimeError, NotImplementedError)):
        create_supervised_trainer(model, SGD(model), mean_squared_error, "meta", output_transform=max).run([BATCH])
    assert model.weight.device.type == "cpu"


# --- the loss as output --------------------------------------------------------------------------------------------


class Elsewhere(torch.Tensor):
    """A tensor that says it is on another device, and counts how often it is read."""

    reads = 0
    is_cpu = False

    def item(self):
        Elsewhere.reads += 1
        return super().item()


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}, {"clip_grad_norm": 1.0}], ids=str)
def test_the_loss_is_read_from_a_device_only_when_a_user_reads_it(monkeypatch, options):
    monkeypatch.setattr(Elsewhere, "reads", 0)
    model = Model([])
    trainer = create_supervised_trainer(
        model, SGD(model, 0.0), lambda y_pred, y: mean_squared_error(y_pred, y).as_subclass(Elsewhere), **options
    )
    trainer.run([BATCH] * 4)
    assert Elsewhere.reads == 0
    assert [trainer.state.output, trainer.state.output] == [4.0, 4.0]
    assert type(trainer.state.output) is float
    assert Elsewhere.reads == 1


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_grad_norm": 1.0, "clip_grad_value": 0.5},
        {"gradient_accumulation_steps": 2, "clip_grad_norm": 1.0},
        {"gradient_accumulation_steps": 2, "batch_weight": lambda x, y: (y > 0).sum()},
    ],
    ids=["plain", "clipped", "accumulated", "weighted"],
)
def test_no_step_waits_for_its_device(options):
    """A tensor on the meta device has no value: reading one raises."""
    model = Model([], device="meta")
    data = [(torch.ones(2, 1, device="meta"), torch.zeros(2, 1, device="meta"))] * 3
    trainer = create_supervised_trainer(model, SGD(model), mean_squared_error, **options)
    trainer.run(data, max_epochs=2)
    with pytest.raises(RuntimeError, match="meta"):
        float(trainer.state.output)


# --- the evaluation step -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("amp_mode", [None, "amp", "apex"])
def test_an_evaluation_step_does_everything_in_order_and_without_gradients(amp_mode):
    log, gradients = [], []
    own = functions(log, lambda x, y, y_pred: gradients.append(torch.is_grad_enabled()))
    own["prepare_batch"] = lambda batch, device, non_blocking: (gradients.append(torch.is_grad_enabled()), batch)[1]
    evaluator = create_supervised_evaluator(Model(log), **own, amp_mode=amp_mode)
    evaluator.run([BATCH] * 2)
    step = ["model_fn", "forward", "model_transform", "output_transform"]
    assert log == ["eval", *step * 2]
    assert gradients == [False] * 4
    assert torch.is_grad_enabled()


def test_evaluation_calls_every_function_as_documented():
    calls = []
    x, y, batch = torch.full((1,), 3.0), torch.ones(1), object()

    def prepare(*arguments, **keywords):
        calls.append((arguments, keywords))
        return x, y

    evaluator = create_supervised_evaluator(
        Model([]), None, "cpu", True, prepare, lambda output: output + 10, lambda *arguments: arguments
    )
    output = evaluator.run([batch]).output
    assert calls == [((batch,), {"device": "cpu", "non_blocking": True})]
    assert [one.item() for one in output] == [3.0, 1.0, 13.0]


def test_an_error_in_evaluation_leaves_gradients_enabled():
    with pytest.raises(ValueError, match="unpack"):
        create_supervised_evaluator(Model([])).run([(1, 2, 3)])
    assert torch.is_grad_enabled()
