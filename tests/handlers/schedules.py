"""Schedules with what they must equal, and helpers that run them."""

from __future__ import annotations

import io
import math

import torch
from torch.optim import lr_scheduler as native

from camshaft.engine import Engine, Events
from camshaft.handlers import (
    ConcatScheduler,
    CosineAnnealingScheduler,
    LinearCyclicalScheduler,
    LRScheduler,
    ParamGroupScheduler,
    PiecewiseLinear,
    create_lr_scheduler_with_warmup,
)


def sgd(*rates, momentum=0.9):
    """Return an optimizer with one group for each rate."""
    groups = [{"params": [torch.zeros(1)], "lr": rate} for rate in rates or (0.5,)]
    return torch.optim.SGD(groups, lr=0.1, momentum=momentum)


def lr(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


def seen(optimizer):
    """Return everything that the schedulers below set."""
    return [(float(group["lr"]), group["momentum"]) for group in optimizer.param_groups]


def entries(optimizer):
    """Return a copy of the groups of an optimizer without the parameters."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


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


# --- schedulers of torch, and what the steps use if they step at the end of each iteration ---------------------------


class Decay:
    """A function with a state, as LambdaLR saves it."""

    def __init__(self, rate=0.9):
        self.rate = rate

    def __call__(self, index):
        return self.rate**index


def sequential(optimizer):
    parts = [native.LinearLR(optimizer, total_iters=4), native.CosineAnnealingLR(optimizer, 5)]
    return native.SequentialLR(optimizer, parts, milestones=[4])


def chained(optimizer):
    return native.ChainedScheduler([native.ConstantLR(optimizer, 0.1, 3), native.ExponentialLR(optimizer, 0.9)])


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
    "OneCycle": lambda optimizer: native.OneCycleLR(optimizer, 0.5, total_steps=25),
    "Sequential": sequential,
    "Chained": chained,
}


def natively(make):
    def reference(rates, count):
        optimizer = sgd(*rates)
        scheduler, rows = make(optimizer), []
        for _ in range(count):
            rows.append(seen(optimizer))
            optimizer.step()
            scheduler.step()
        return rows

    return lambda optimizer: LRScheduler(make(optimizer)), reference


# --- formulas --------------------------------------------------------------------------------------------------------


def formula(make, value):
    return make, lambda rates, count: [[(value(index), 0.9) for _ in rates] for index in range(count)]


def piecewise(pairs):
    def value(index):
        before = [pair for pair in pairs if pair[0] <= index]
        after = [pair for pair in pairs if pair[0] > index]
        if not before or not after:
            return before[-1][1] if before else after[0][1]
        (begin, first), (end, last) = before[-1], after[0]
        return first + (last - first) * (index - begin) / (end - begin)

    return formula(lambda optimizer, name="lr", **more: PiecewiseLinear(optimizer, name, pairs, **more), value)


TRIANGLE, SAW, COSINE = "triangle", "saw", "cosine"


def cycles(shape, start, end, size, mult=1.0, start_mult=1.0, end_mult=1.0, warmup=0):
    def make(optimizer, name="lr", **more):
        kind = CosineAnnealingScheduler if shape == COSINE else LinearCyclicalScheduler
        if shape == SAW:
            more["monotonic"] = True
        return kind(optimizer, name, start, end, size, mult, start_mult, end_mult, warmup, **more)

    def value(index):
        cycle, length, tail = 0, size, warmup
        while index >= length + tail:
            index -= length + tail
            length, tail, cycle = max(1, int(length * mult)), int(tail * mult), cycle + 1
        first, last, following = start * start_mult**cycle, end * end_mult**cycle, start * start_mult ** (cycle + 1)
        if index >= length:
            return last + (following - last) * (index - length) / tail
        share = index / length
        moved = {SAW: share, TRIANGLE: 1 - abs(1 - 2 * share), COSINE: (1 - math.cos(math.pi * share)) / 2}[shape]
        return first + (last - first) * moved

    return formula(make, value)


# --- combinations of cases -------------------------------------------------------------------------------------------


def chain(*parts):
    """Combine cases with their durations, of which the last one is ignored."""

    def make(optimizer, **more):
        return ConcatScheduler([case[0](optimizer) for case, _ in parts], [count for _, count in parts[:-1]], **more)

    def reference(rates, count):
        return [row for (_, rows_of), length in (*parts[:-1], (parts[-1][0], count)) for row in rows_of(rates, length)][
            :count
        ]

    return make, reference


def per_group(*cases, momentum):
    """Combine a case for the rate of each group, and one for the momentum."""

    def make(optimizer, **more):
        parts = [case[0](optimizer, param_group_index=index) for index, case in enumerate(cases)]
        return ParamGroupScheduler([*parts, momentum[0](optimizer, "momentum")], **more)

    def reference(rates, count):
        columns = [case[1]((0.0,), count) for case in (*cases, momentum)]
        rows = zip(*([one for ((one, _),) in column] for column in columns), strict=True)
        return [[(rate, row[-1]) for rate in row[:-1]] for row in rows]

    return make, reference


def after_warm_up(main, duration=4, end=None):
    """Combine a line from 0 to ``end``, by default the first value of a case, with the case; no value is repeated."""

    def make(optimizer, **more):
        return create_lr_scheduler_with_warmup(main[0](optimizer), 0.0, duration, end, **more)

    def reference(rates, count):
        rows = main[1](rates, count)
        ends = [(rate if end is None else end, momentum) for rate, momentum in rows[0]]
        line = [[(last * index / (duration - 1), momentum) for last, momentum in ends] for index in range(duration)]
        return ([*line[:-1], *rows] if ends == rows[0] else [*line, *rows])[:count]

    return make, reference


RAMP = piecewise([(1, 1.0), (3, 0.8), (5, 0.2), (5, 0.5), (9, 0.0)])
WAVES = cycles(COSINE, 0.3, 0.1, 5, 1.5, end_mult=0.5, warmup=2)
TEETH = cycles(SAW, 1.0, 0.5, 4, 1.5, 0.5, 0.8, 3)
DECAY = natively(NATIVE["Exponential"])

CASES = {
    **{name: natively(make) for name, make in NATIVE.items()},
    "piecewise": RAMP,
    "triangles": cycles(TRIANGLE, 1.0, 0.1, 4, 1.5, 0.5),
    "teeth": TEETH,
    "waves": WAVES,
    "chain": chain((RAMP, 6), (DECAY, 1), (TEETH, 4), (WAVES, 0)),
    "chain within a chain": chain((chain((RAMP, 3), (TEETH, 0)), 5), (DECAY, 0)),
    "groups": per_group(RAMP, WAVES, momentum=TEETH),
    **{f"warm-up, {name}": after_warm_up(natively(make)) for name, make in NATIVE.items()},
    "warm-up to the first value of the first group": after_warm_up(DECAY, end=0.5),
    "warm-up to another value": after_warm_up(WAVES, end=0.8),
}
