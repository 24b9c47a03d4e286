"""Training on one GPU: precision, losses that are fetched when they are read, and deterministic algorithms."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from camshaft.data import prefetch_to_device
from camshaft.engine import DeterministicEngine, Events, create_supervised_trainer
from camshaft.utils import manual_seed
from tests.gpu.devices import DEVICE, ON_GPU, no_synchronization

PRECISIONS = {
    "float32": {},
    "bfloat16": {"amp_mode": "amp", "amp_dtype": torch.bfloat16},
    "float16": {"amp_mode": "amp", "amp_dtype": torch.float16},
}


def batches(count):
    """Return batches in host memory, whose classes a linear model finds."""
    generator = torch.Generator().manual_seed(1)
    xs = torch.randn(count, 32, 16, generator=generator)
    return [(x, (x[:, 0] > 0).long()) for x in (xs.pin_memory() if ON_GPU else xs)]


def make(fused=True, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    trainer = create_supervised_trainer(
        model, optimizer, nn.functional.cross_entropy, device=DEVICE, non_blocking=True, **options
    )
    return model, trainer


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_step_does_not_synchronize_and_learns(precision):
    options = dict(PRECISIONS[precision])
    if precision == "float16":
        options["scaler"] = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**30)  # overflows at first
    model, trainer = make(**options)
    losses = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state._output))
    data = prefetch_to_device(batches(100), DEVICE)
    with no_synchronization():
        trainer.run(data)
    assert float(losses[-1]) < 0.5 * float(losses[0])
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    if precision == "float16":
        assert 1 < options["scaler"].get_scale() < 2.0**30


def test_a_scaler_skips_a_step_whose_gradients_overflow_without_a_fused_optimizer_too():
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=8.0)
    model, trainer = make(fused=False, scaler=scaler, clip_grad_norm=1.0, **PRECISIONS["float16"])
    data = batches(2)
    data[0][0][0, 0] = torch.inf
    before = [parameter.clone() for parameter in model.parameters()]
    trainer.run(data[:1])
    assert scaler.get_scale() == 4.0
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    trainer.run(data[1:], max_epochs=2)
    assert not any(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.skipif(not ON_GPU, reason="on a CPU, a loss is a number")
def test_the_loss_is_fetched_when_it_is_read():
    _, trainer = make()
    with no_synchronization():
        trainer.run(batches(3))
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
            float(trainer.state.output)
    assert isinstance(trainer.state.output, float)


def test_accumulation_weights_and_clipping_do_not_synchronize():
    weighted = {"batch_weight": lambda x, y: (y >= 0).sum(), "clip_grad_norm": 1.0, "gradient_accumulation_steps": 2}
    _, trainer = make(**weighted)
    with no_synchronization():
        trainer.run(batches(5))


class Convolutions(nn.Module):
    """Layers with algorithms that are not deterministic by default."""

    def __init__(self):
        super().__init__()
        self.embed, self.convolve = nn.Embedding(4, 8), nn.Conv1d(8, 2, 3)

    def forward(self, x):
        return self.convolve(self.embed(x).transpose(1, 2)).mean(dim=2)


def test_a_deterministic_engine_sets_flags_for_the_run_only_and_repeats_it_exactly():
    def settings():
        return torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark

    def trained():
        manual_seed(3)
        model = Convolutions().to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = create_supervised_trainer(
            model, optimizer, nn.functional.cross_entropy, device=DEVICE, deterministic=True
        )
        assert isinstance(trainer, DeterministicEngine)
        seen = []
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: seen.append(settings()))
        data = [(torch.arange(4096).reshape(8, 512) * n % 4, torch.arange(8) % 2) for n in range(1, 6)]
        trainer.run(data)
        assert seen == [(True, False) if ON_GPU else before] * 5
        return [parameter.detach().cpu() for parameter in model.parameters()]

    torch.backends.cudnn.benchmark, restored = True, torch.backends.cudnn.benchmark
    try:
        before = settings()
        assert all(torch.equal(one, other) for one, other in zip(trained(), trained(), strict=True))
        assert settings() == before == (False, True)
    finally:
        torch.backends.cudnn.benchmark = restored
