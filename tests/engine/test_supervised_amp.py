"""Mixed precision in steps: what is computed in it, what is not, and what a scaler does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from camshaft.engine import Events, create_supervised_evaluator, create_supervised_trainer

BATCH = (torch.ones(2, 4), torch.zeros(2, 1))
PRECISIONS = [(None, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)]


def here():
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


class Places:
    """Functions for a step that write down whether autocast is on where they are called."""

    def __init__(self):
        self.on = {}

    def note(self, name):
        enabled, dtype = here()
        self.on[name] = dtype if enabled else None

    def wrap(self, name, function):
        def noted(*arguments, **keywords):
            self.note(name)
            return function(*arguments, **keywords)

        return noted

    def options(self, output):
        return {
            "prepare_batch": self.wrap("prepare_batch", lambda batch, device, non_blocking: batch),
            "model_fn": self.wrap("model_fn", lambda model, x: model(x)),
            "model_transform": self.wrap("model_transform", lambda y_pred: y_pred),
            "output_transform": self.wrap("output_transform", output),
        }


def model_of(value=1.0):
    model = nn.Linear(4, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def squared(y_pred, y):
    return ((y_pred - y) ** 2).mean()


@pytest.mark.parametrize(("dtype", "used"), PRECISIONS)
@pytest.mark.parametrize("steps", [1, 2])
def test_forward_transform_and_loss_are_in_lower_precision_and_all_else_is_not(dtype, used, steps):
    places, model = Places(), model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.register_step_pre_hook(lambda *arguments: places.note("step"))
    model.weight.register_hook(lambda gradient: places.note("backward"))
    trainer = create_supervised_trainer(
        model,
        optimizer,
        places.wrap("loss_fn", squared),
        **places.options(lambda x, y, y_pred, loss: y_pred.dtype),
        amp_mode="amp",
        amp_dtype=dtype,
        gradient_accumulation_steps=steps,
    )
    assert trainer.run([BATCH] * 2).output == used
    inside, outside = ("model_fn", "model_transform", "loss_fn"), ("prepare_batch", "backward", "step")
    assert places.on == {**dict.fromkeys(inside, used), **dict.fromkeys((*outside, "output_transform"))}
    assert (model.weight.dtype, model.weight.grad.dtype) == (torch.float32, torch.float32)


@pytest.mark.parametrize(("dtype", "used"), PRECISIONS)
def test_in_evaluation_only_model_and_transform_are_in_lower_precision(dtype, used):
    places = Places()
    evaluator = create_supervised_evaluator(
        model_of(), **places.options(lambda x, y, y_pred: y_pred.dtype), amp_mode="amp", amp_dtype=dtype
    )
    assert evaluator.run([BATCH]).output == used
    assert places.on == {
        "prepare_batch": None,
        "model_fn": used,
        "model_transform": used,
        "output_transform": None,
    }


def test_without_amp_everything_is_in_the_precision_of_the_model():
    places, model = Places(), model_of()
    trainer = create_supervised_trainer(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        places.wrap("loss_fn", squared),
        **places.options(lambda x, y, y_pred, loss: y_pred.dtype),
    )
    assert trainer.run([BATCH]).output == torch.float32
    assert set(places.on.values()) == {None}


# --- scalers -------------------------------------------------------------------------------------------------------


def scaled_trainer(model, scaler, **options):
    optimizer = torch.optim.SGD(model.parameters(), 0.125)
    return create_supervised_trainer(
        model, optimizer, squared, amp_mode="amp", amp_dtype=torch.float16, scaler=scaler, **options
    )


def scaler_of(scale=8.0):
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1)


def test_a_scaler_of_the_user_is_used_but_not_kept_in_the_state():
    scaler, model = scaler_of(), model_of()
    trainer = scaled_trainer(model, scaler)
    trainer.run([BATCH])
    assert scaler.get_scale() == 16.0
    assert not hasattr(trainer.state, "scaler")
    assert model.weight.tolist() == [[0.0] * 4]  # 1 - 0.125 * 8: the scale is not in the step


def test_a_scaler_that_is_asked_for_is_made_for_the_device_and_kept_in_the_state():
    model = model_of()
    trainer = scaled_trainer(model, True)
    assert isinstance(trainer.state.scaler, torch.amp.GradScaler)
    assert (trainer.state.scaler._device, trainer.state.scaler.is_enabled()) == ("cpu", True)
    before = trainer.state.scaler.get_scale()
    trainer.run([BATCH])
    assert trainer.state.scaler.get_scale() == before / 2  # it begins too large for these gradients


def test_the_scale_makes_small_gradients_visible():
    """Gradients of 1e-9 vanish in float16."""
    weights = []
    for scaler in (False, scaler_of(2.0**24)):
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), 1e9)
        trainer = create_supervised_trainer(
            model, optimizer, lambda y_pred, y: y_pred.float().mean() * 1e-9, amp_mode="amp", amp_dtype=torch.float16,
            scaler=scaler,
        )  # fmt: skip
        trainer.run([BATCH])
        weights.append(model.weight[0, 0].item())
    assert weights[0] == 1.0
    assert weights[1] == pytest.approx(0.0, abs=0.01)


def test_a_step_out_of_range_is_left_out_and_the_scale_lowered():
    scaler, model = scaler_of(), model_of()
    trainer = scaled_trainer(model, scaler)
    weights = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: weights.append(model.weight[0, 0].item()))
    trainer.run([(BATCH[0] * float("inf"), BATCH[1]), BATCH])
    assert weights == [1.0, 0.0]
    assert scaler.get_scale() == 8.0  # halved, then doubled


def test_a_scaler_steps_once_in_a_window():
    scaler, model = scaler_of(), model_of()
    trainer = scaled_trainer(model, scaler, gradient_accumulation_steps=2)
    scales = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: scales.append(scaler.get_scale()))
    trainer.run([BATCH] * 5)
    assert scales == [8.0, 16.0, 16.0, 32.0, 64.0]
