"""Precision, scaling, clipping, and the step of the optimizer."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from camshaft.engine.update import Update, autocast, device_type_of

INFINITY = float("inf")


class Weight(nn.Module):
    """One weight, in operations that autocast leaves alone, so that numbers are exact."""

    def __init__(self, value=1.0, device=None):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([value], device=device))

    def forward(self, x):
        return x * self.weight


def update_of(*gradients, rate=1.0, **options):
    """Return an update over weights of 0 with these gradients."""
    parameters = [nn.Parameter(torch.zeros(len(gradient))) for gradient in gradients]
    optimizer = torch.optim.SGD(parameters, rate)
    update = Update(optimizer, **options)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        update.backward((parameter * torch.tensor(gradient)).sum())
    return update, parameters


def values(parameters):
    return [parameter.tolist() for parameter in parameters]


# --- autocast ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "model", "kind"),
    [
        (None, Weight(), "cpu"),
        (None, Weight(device="meta"), "meta"),
        (None, nn.Identity(), "cpu"),
        (None, len, "cpu"),
        ("cuda:1", Weight(), "cuda"),
        (torch.device("xpu", 2), Weight(), "xpu"),
        ("cpu", Weight(device="meta"), "cpu"),
    ],
)
def test_what_computes_is_the_device_given_or_that_of_the_model(device, model, kind):
    assert device_type_of(device, model) == kind


@pytest.mark.parametrize(
    ("dtype", "used"), [(None, torch.bfloat16), *[(t, t) for t in (torch.bfloat16, torch.float16)]]
)
@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_autocast_is_that_of_the_device_in_the_precision_wanted(device, dtype, used):
    model = nn.Linear(2, 2)
    context = autocast(device, model, dtype)
    for _ in range(2):
        assert not torch.is_autocast_enabled("cpu")
        with context():
            assert torch.is_autocast_enabled("cpu")
            assert model(torch.ones(1, 2)).dtype == used
    assert model(torch.ones(1, 2)).dtype == torch.float32


def test_a_model_that_moves_before_the_first_step_is_followed():
    model = Weight()
    context = autocast(None, model)
    model.to("meta")
    with pytest.raises(ValueError, match="amp needs a device type that torch has autocast for, got 'meta'"):
        context()


# --- updates -------------------------------------------------------------------------------------------------------


def test_an_update_steps_the_optimizer_by_the_gradients():
    update, parameters = update_of([1.0, -2.0], [3.0])
    update.apply()
    assert values(parameters) == [[-1.0, 2.0], [-3.0]]


def test_another_function_may_do_the_step():
    calls = []
    update, parameters = update_of([1.0], clip_grad_norm=0.5, step=lambda: calls.append(values(parameters)))
    update.apply()
    assert calls == [[[0.0]]]
    assert values(parameters) == [[0.0]]  # nobody else stepped
    assert parameters[0].grad.item() == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"clip_grad_norm": 1.0}, [[-0.6, 0.0], [0.8]]),
        ({"clip_grad_norm": 50.0}, [[-3.0, 0.0], [4.0]]),
        ({"clip_grad_value": 3.5}, [[-3.0, 0.0], [3.5]]),
        ({"clip_grad_norm": 1.0, "clip_grad_value": 0.7}, [[-0.6, 0.0], [0.7]]),  # in this order
    ],
)
def test_gradients_are_clipped_together(options, expected):
    update, parameters = update_of([3.0, 0.0], [-4.0], **options)
    update.apply()
    for parameter, wanted in zip(values(parameters), expected, strict=True):
        assert parameter == pytest.approx(wanted, abs=1e-5)


def test_parameters_without_a_gradient_are_left_alone():
    update, parameters = update_of([3.0], clip_grad_norm=1.0)
    frozen = nn.Parameter(torch.ones(1))
    update.optimizer.add_param_group({"params": [frozen]})
    update.apply()
    assert frozen.item() == 1.0
    assert parameters[0].item() == pytest.approx(-1.0)
    update.optimizer.zero_grad()
    update.apply()


# --- scaled updates ------------------------------------------------------------------------------------------------


def scaler_of(**options):
    return torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1, **options)


@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 0.5}, {"clip_grad_value": 0.5}], ids=str)
def test_the_scale_is_in_the_gradients_but_not_in_the_step(options):
    scaler = scaler_of()
    update, parameters = update_of([2.0], scaler=scaler, **options)
    assert parameters[0].grad.item() == 16.0
    update.apply()
    assert parameters[0].item() == pytest.approx(-0.5 if options else -2.0)
    assert scaler.get_scale() == 16.0


@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 0.5}, {"clip_grad_value": 0.5}], ids=str)
@pytest.mark.parametrize("bad", [INFINITY, math.nan])
def test_gradients_out_of_range_make_no_step_and_lower_the_scale(options, bad):
    scaler = scaler_of()
    update, parameters = update_of([2.0, bad], scaler=scaler, **options)
    update.apply()
    assert values(parameters) == [[0.0, 0.0]]
    assert scaler.get_scale() == 4.0
