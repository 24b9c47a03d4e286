"""Arguments of the factories that cannot be what they are given for are refused before anything runs."""

from __future__ import annotations

import pytest
from torch import nn, optim

from camshaft.engine import create_supervised_evaluator, create_supervised_trainer

MODEL = nn.Linear(1, 1)
OPTIMIZER = optim.SGD(MODEL.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((OPTIMIZER, MODEL, nn.MSELoss()), "optimizer must have"),
        ((5, OPTIMIZER, nn.MSELoss()), "model must be"),
        ((MODEL, OPTIMIZER, "mse"), "loss_fn must be callable"),
    ],
)
def test_a_trainer_of_the_wrong_parts_is_refused(arguments, named):
    with pytest.raises(TypeError, match=named):
        create_supervised_trainer(*arguments)


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"output_transform": 3}, TypeError, "output_transform must be callable"),
        ({"gradient_accumulation_steps": 2.5}, TypeError, "gradient_accumulation_steps must be an int"),
        ({"clip_grad_norm": "1"}, TypeError, "clip_grad_norm must be a number"),
        ({"clip_grad_value": -1}, ValueError, "clip_grad_value must be above 0"),
    ],
)
def test_a_trainer_with_wrong_options_is_refused(options, error, named):
    with pytest.raises(error, match=named):
        create_supervised_trainer(MODEL, OPTIMIZER, nn.MSELoss(), **options)


@pytest.mark.parametrize(
    ("metrics", "named"),
    [
        ([1], "metrics must be a mapping"),
        ({"size": len}, r"metrics\['size'\]"),
        (
            {"size": type("Size", (), {"attach": len})},
            "must be an object, got the class .*: pass Size",
        ),
        ({"size": type("Sum", (), {"compute": len})()}, "use camshaft.handlers.attach_metrics"),
    ],
)
def test_metrics_that_cannot_be_attached_are_refused(metrics, named):
    with pytest.raises(TypeError, match=named):
        create_supervised_evaluator(MODEL, metrics)
