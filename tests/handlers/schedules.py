"""Helpers for tests of schedulers: optimizers, every scheduler of torch, and runs that record the values in use."""

from __future__ import annotations

import io

import torch
from torch.optim import lr_scheduler as native

from camshaft.engine import Engine, Events


def sgd(*rates, momentum=0.9, **options):
    """Return an optimizer with one group for each rate."""
    groups = [{"params": [torch.zeros(1)], "lr": rate} for rate in rates or (0.5,)]
    return torch.optim.SGD(groups, lr=0.1, momentum=momentum, **options)


class Decay:
    """A function with a state, as LambdaLR saves it."""

    def __init__(self, rate=0.9):
        self.rate = rate

    def __call__(self, index):
        return self.rate**index


def sequential(optimizer):
    parts = [native.LinearLR(optimizer, total_iters=4), native.ExponentialLR(optimizer, 0.9)]
    return native.SequentialLR(optimizer, parts, milestones=[4])


def chained(optimizer):
    return native.ChainedScheduler([native.ConstantLR(optimizer, 0.1, 3), native.ExponentialLR(optimizer, 0.9)])


def nested(optimizer):
    return native.SequentialLR(
        optimizer, [native.ConstantLR(optimizer, 0.1, 2), native.CosineAnnealingLR(optimizer, 5)], milestones=[3]
    )


NATIVE = {
    "Lambda": lambda optimizer: native.LambdaLR(optimizer, lambda index: 0.9**index),
    "Lambda, with a state": lambda optimizer: native.LambdaLR(optimizer, Decay()),
    "Multiplicative": lambda optimizer: native.MultiplicativeLR(optimizer, lambda index: 0.9 + 0.01 * index),
    "Step": lambda optimizer: native.StepLR(optimizer, 3, 0.5),
    "MultiStep": lambda optimizer: native.MultiStepLR(optimizer, [2, 5, 5], 0.5),
    "Constant": lambda optimizer: native.ConstantLR(optimizer, 0.3, 4),
    "Linear": lambda optimizer: native.LinearLR(optimizer, 0.2, 1.0, 6),
    "Exponential": lambda optimizer: native.ExponentialLR(optimizer, 0.9),
    "Polynomial": lambda optimizer: native.PolynomialLR(optimizer, 8, 2.0),
    "CosineAnnealing": lambda optimizer: native.CosineAnnealingLR(optimizer, 5, 0.01),
    "CosineAnnealingWarmRestarts": lambda optimizer: native.CosineAnnealingWarmRestarts(optimizer, 3, 2),
    "Cyclic": lambda optimizer: native.CyclicLR(optimizer, 0.1, 0.5, 3, cycle_momentum=False),
    "Cyclic, momentum": lambda optimizer: native.CyclicLR(optimizer, 0.1, 0.5, 3, mode="exp_range", gamma=0.9),
    "Cyclic, own": lambda optimizer: native.CyclicLR(optimizer, 0.1, 0.5, 3, scale_fn=Decay()),
    "OneCycle": lambda optimizer: native.OneCycleLR(optimizer, 0.5, total_steps=40),
    "OneCycle, linear": lambda optimizer: native.OneCycleLR(
        optimizer, 0.5, total_steps=40, anneal_strategy="linear", three_phase=True
    ),
    "Sequential": sequential,
    "Sequential, nested": nested,
    "Chained": chained,
}


def seen(optimizer):
    """Return everything that schedulers of torch set."""
    return [(float(group["lr"]), group["momentum"]) for group in optimizer.param_groups]


def natively(make, optimizer, count):
    """Return what the steps use if the scheduler steps at the end of each iteration."""
    scheduler, rows = make(optimizer), []
    for _ in range(count):
        rows.append(seen(optimizer))
        optimizer.step()
        scheduler.step()
    return rows


def run_with(scheduler, optimizer, count, event=Events.ITERATION_STARTED, read=seen):
    """Return what the steps of an engine use."""
    rows = []

    def step(engine, batch):
        rows.append(read(optimizer))
        optimizer.step()

    trainer = Engine(step)
    trainer.add_event_handler(event, scheduler)
    trainer.run(range(count))
    return rows


def calls(scheduler, count, read):
    """Return what is read after each call."""
    rows = []
    for _ in range(count):
        scheduler(None)
        rows.append(read())
    return rows


def reread(state):
    """Save and load a state like a checkpoint."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def entries(optimizer):
    """Return a copy of the groups of an optimizer without the parameters."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
