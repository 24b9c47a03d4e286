"""Handlers that must not synchronize with the GPU."""

from __future__ import annotations

import json
import math

import torch
from torch import nn

from camshaft.engine import Events, create_supervised_trainer
from camshaft.engine.events import Order
from camshaft.handlers import (
    BasicTimeProfiler,
    Checkpoint,
    CosineAnnealingScheduler,
    EMAHandler,
    EpochOutputStore,
    ExpStateScheduler,
    HandlersTimeProfiler,
    JSONLinesLogger,
    LRScheduler,
    RunningAverage,
    TerminateOnNan,
    Throughput,
    TimeLimit,
    attach_metrics,
)
from tests.gpu.devices import DEVICE, ON_GPU, no_synchronization, set_sync_debug_mode


def make():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, create_supervised_trainer(model, optimizer, nn.functional.cross_entropy, device=DEVICE)


def batches(count):
    return [(torch.randn(4, 8, device=DEVICE), torch.zeros(4, dtype=torch.long, device=DEVICE)) for _ in range(count)]


class Mean:
    """A metric that stays on the device until it is computed."""

    def reset(self):
        self.total = torch.zeros((), device=DEVICE)
        self.count = 0

    def update(self, loss):
        self.total += loss
        self.count += 1

    def compute(self):
        return self.total / self.count


def test_handlers_do_not_synchronize_between_logging_steps(tmp_path):
    """The logger reads its values every 10 iterations; in between, each operation that waits for the GPU raises."""
    model, optimizer, trainer = make()
    every = Events.ITERATION_COMPLETED(every=10)
    ema = EMAHandler(model, momentum=0.1)
    ema.attach(trainer)
    RunningAverage().attach(trainer, "average")
    attach_metrics(trainer, {"mean": Mean()})
    stored = EpochOutputStore()
    stored.attach(trainer, "losses")
    trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    trainer.add_event_handler(Events.ITERATION_COMPLETED, TimeLimit(3600))
    trainer.add_event_handler(Events.ITERATION_STARTED, CosineAnnealingScheduler(optimizer, "lr", 0.1, 0.01, 100))
    decay = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, LRScheduler(decay))
    ExpStateScheduler(1.0, 0.99, "noise", create_new=True).attach(trainer, Events.ITERATION_COMPLETED)
    Throughput(samples=lambda batch: len(batch[1]), window=5).attach(trainer)
    BasicTimeProfiler().attach(trainer)
    HandlersTimeProfiler().attach(trainer)
    logger = JSONLinesLogger(tmp_path)
    logger.attach_output_handler(trainer, every, "training", "all", output_transform=lambda loss: {"loss": loss})
    logger.attach_opt_params_handler(trainer, every, optimizer, "lr")
    logger.attach_output_handler(trainer, Events.EPOCH_COMPLETED, "epoch", ["mean"])
    objects = {"model": model, "optimizer": optimizer, "trainer": trainer, "ema": ema, "decay": decay}
    save = Checkpoint(objects, tmp_path / "saves", asynchronous=True)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=7), save)

    guarded = []

    def guard():
        set_sync_debug_mode("error")
        guarded.append(trainer.state.iteration)

    trainer.add_event_handler(Events.ITERATION_STARTED, guard, order=Order.TIME_FIRST)
    trainer.add_event_handler(every, set_sync_debug_mode, "default", order=Order.TIME_FIRST)
    try:
        trainer.run(batches(20), max_epochs=2)
    finally:
        set_sync_debug_mode("default")
    logger.close()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [one["step"] for one in records if "training/loss" in one] == [10, 20, 30, 40]
    assert len([one for one in records if math.isfinite(one.get("epoch/mean", math.nan))]) == 2
    assert len(stored.data) == 20
    assert all(isinstance(loss, float) for loss in stored.data)
    assert guarded == list(range(1, 41))
    saved = torch.load(tmp_path / "saves" / save.last_checkpoint, weights_only=True)
    assert saved["trainer"]["iteration"] == 35


def test_nan_is_found_at_most_one_iteration_later():
    _, _, trainer = make()
    trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    data = batches(10)
    data[4][0].fill_(math.nan)
    trainer.run(data)
    assert trainer.state.iteration == (6 if ON_GPU else 5)


def test_a_background_save_starts_without_synchronizing_and_has_the_weights_at_its_start(tmp_path):
    model, _, trainer = make()
    checkpoint = Checkpoint({"model": model}, tmp_path, asynchronous=True)
    weights = {}

    def save(engine):
        weights.update({name: tensor.clone() for name, tensor in model.state_dict().items()})
        with no_synchronization():
            checkpoint(engine)

    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), save)
    trainer.run(batches(20))
    saved = torch.load(tmp_path / "model_3.pt", weights_only=True)
    assert len(weights) == 9
    assert all(torch.equal(saved[name], tensor.cpu()) for name, tensor in weights.items())
