"""What a step is made of: batches weighed by samples or tokens, and clipped gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from camshaft.engine import Events
from tests.engine.traces import Sizeless, at
from tests.engine.windows import Weighted, batches_of, check, expected, samples, squared, trainer_of, weights_of

DATA = batches_of(4, 4, 4, 4, 4)

# --- weights -------------------------------------------------------------------------------------------------------


UNEVEN = batches_of(5, 1, 2, 3, 1)
WEIGHTS = {
    "number": samples,
    "tensor": lambda x, y: torch.tensor(len(y)),
    "tensor of one": lambda x, y: torch.tensor([float(len(y))]),
    "doubled": lambda x, y: 2.0 * len(y),
}


@pytest.mark.parametrize("weigh", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize(
    ("data", "size", "arguments", "windows"),
    [
        (UNEVEN, 5, {"max_epochs": 2}, [[0, 1, 2, 3, 4]] * 2),
        (UNEVEN, 2, {"max_epochs": 2}, [[0, 1], [2, 3], [4]] * 2),
        (UNEVEN, 1, {}, [[0], [1], [2], [3], [4]]),
        (Sizeless(*UNEVEN), 3, {"max_epochs": 2}, [[0, 1, 2], [3, 4]] * 2),
        (UNEVEN, 4, {"max_iters": 3}, [[0, 1, 2]]),
    ],
)
def test_weighed_by_samples_a_step_is_the_mean_over_all_samples_of_its_window(weigh, data, size, arguments, windows):
    model = Weighted()
    trainer, _ = trainer_of(model, size, batch_weight=weigh)
    trainer.run(data, **arguments)
    check(model, UNEVEN, windows)


def test_weighed_by_samples_a_window_that_is_cut_short_is_the_mean_over_its_samples():
    model = Weighted()
    trainer, _ = trainer_of(model, 4, batch_weight=samples)
    at(trainer, Events.ITERATION_COMPLETED, lambda engine: engine.terminate_epoch(), 3)
    trainer.run(UNEVEN)
    check(model, UNEVEN, [[0, 1, 2]])


def test_without_weights_all_batches_count_alike():
    model = Weighted()
    trainer, _ = trainer_of(model, 2)
    trainer.run(UNEVEN[:2])
    with pytest.raises(AssertionError):
        check(model, UNEVEN, [[0, 1]])


def test_weighed_by_tokens_a_step_is_the_mean_over_all_tokens_of_its_window():
    """A target of 0 is padding: the loss is the mean over the tokens that are none."""

    def loss_fn(y_pred, y):
        return ((y_pred - y) ** 2)[y != 0].mean()

    torch.manual_seed(0)
    data = [
        (x, y * torch.tensor(mask)[:, None]) for (x, y), mask in zip(DATA, ([1, 1, 1, 1], [0, 1, 0, 0]), strict=False)
    ]
    model = Weighted()
    trainer, _ = trainer_of(model, 2, loss_fn, batch_weight=lambda x, y: (y != 0).sum())
    outputs = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: outputs.append(engine.state.output))
    trainer.run(data)
    tokens = [(x[y[:, 0] != 0], y[y[:, 0] != 0]) for x, y in data]
    torch.testing.assert_close(weights_of(model), expected([tokens]))
    untrained = Weighted()
    assert outputs == pytest.approx([squared(untrained(x), y).item() for x, y in tokens])


# --- clipping ------------------------------------------------------------------------------------------------------


LIMIT = 0.3
CLIPS = {
    "clip_grad_norm": lambda parameters: nn.utils.clip_grad_norm_(parameters, LIMIT),
    "clip_grad_value": lambda parameters: nn.utils.clip_grad_value_(parameters, LIMIT),
}


def scaled():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return {"amp_mode": "amp", "scaler": scaler}


@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize(
    "make_options", [dict, scaled, lambda: {"batch_weight": samples}], ids=["plain", "scaled", "weighed"]
)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_clipping_applies_to_the_gradient_of_the_window(name, make_options, size):
    model = Weighted()
    trainer, _ = trainer_of(model, size, **make_options(), **{name: LIMIT})
    trainer.run(DATA)
    windows = [DATA[start : start + size] for start in range(0, 5, size)]
    clipped = expected(windows, CLIPS[name])
    torch.testing.assert_close(weights_of(model), clipped, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(clipped, expected(windows), atol=1e-2)  # the limit matters


@pytest.mark.parametrize("function", ["clip_grad_norm_", "clip_grad_value_"])
def test_gradients_are_clipped_once_a_step(monkeypatch, function):
    calls, clip = [], getattr(nn.utils, function)
    monkeypatch.setattr(nn.utils, function, lambda *arguments: (calls.append(1), clip(*arguments)))
    trainer, steps = trainer_of(Weighted(), 2, **{function.rstrip("_"): LIMIT})
    trainer.run(DATA)
    assert len(calls) == len(steps) == 3
