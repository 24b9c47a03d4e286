"""Training steps on a real XLA device (the CPU with PJRT_DEVICE=CPU)."""

from __future__ import annotations

import pytest
import torch
import torch_xla.core.xla_model as xla_model
from torch import nn

from camshaft.engine import (
    Engine,
    create_supervised_evaluator,
    create_supervised_trainer,
    supervised_training_step_tpu,
)


@pytest.fixture
def device():
    return torch.device("xla")


def model_on(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)).to(device)


def batches(count=4, size=8):
    """Return batches on the CPU, with the sum of two numbers as the target; the step moves them."""
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(size, 2, generator=generator) for _ in range(count)]
    return [(x, x.sum(1, keepdim=True)) for x in inputs]


def collect(trainer):
    losses = []
    trainer.add_event_handler("ITERATION_COMPLETED", lambda engine: losses.append(engine.state.output))
    return losses


def weights_of(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).cpu()


def plain(model, optimizer, **options):
    return Engine(supervised_training_step_tpu(model, optimizer, nn.MSELoss(), "xla", **options))


def made(model, optimizer, **options):
    return create_supervised_trainer(model, optimizer, nn.MSELoss(), "xla", **options)


@pytest.mark.parametrize("make", [plain, made])
@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2, "clip_grad_norm": 5.0}], ids=str)
def test_training_on_xla_matches_the_cpu(device, make, options):
    model, reference = model_on(device), model_on("cpu")
    losses = []
    for one, make_trainer in ((model, make), (reference, on_the_cpu)):
        trainer = make_trainer(one, torch.optim.SGD(one.parameters(), 0.1), **options)
        losses.append(collect(trainer))
        trainer.run(batches(), max_epochs=5)
    assert losses[0][-1] < losses[0][0] / 4
    assert {type(loss) for loss in losses[0]} == {float}
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    torch.testing.assert_close(weights_of(model), weights_of(reference), rtol=1e-3, atol=1e-4)


def on_the_cpu(model, optimizer, **options):
    return create_supervised_trainer(model, optimizer, nn.MSELoss(), "cpu", **options)


def test_a_step_does_not_wait_for_the_loss(device, monkeypatch):
    reads = []
    read = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: (reads.append(1), read(tensor))[1])
    model = model_on(device)
    trainer = made(model, torch.optim.SGD(model.parameters(), 0.1))
    trainer.run(batches())
    assert reads == []
    assert trainer.state.output > 0
    assert reads == [1]


def test_the_optimizer_steps_through_xla(device, monkeypatch):
    calls, step = [], xla_model.optimizer_step
    monkeypatch.setattr(xla_model, "optimizer_step", lambda *a, **options: (calls.append(options), step(*a, **options)))
    model = model_on(device)
    made(model, torch.optim.SGD(model.parameters(), 0.1), gradient_accumulation_steps=3).run(batches())
    assert calls == [{"barrier": True}] * 2


def test_a_model_is_evaluated_on_xla(device):
    model = model_on(device)
    y_pred, y = create_supervised_evaluator(model, device="xla").run(batches()).output
    assert (y_pred.device.type, y.device.type) == ("xla", "xla")
    assert not model.training
    torch.testing.assert_close(y_pred.cpu(), model_on("cpu")(batches()[-1][0]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("amp_mode", ["amp", "apex"])
def test_mixed_precision_is_refused(device, amp_mode):
    model = model_on(device)
    with pytest.raises(ValueError, match=f"amp_mode must be None on xla, got '{amp_mode}'"):
        made(model, torch.optim.SGD(model.parameters(), 0.1), amp_mode=amp_mode)
    with pytest.raises(ValueError, match="amp_mode must be None on xla"):
        create_supervised_evaluator(model, device=device, amp_mode=amp_mode)
