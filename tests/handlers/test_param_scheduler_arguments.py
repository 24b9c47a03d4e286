"""Arguments of schedulers that are rejected."""

from __future__ import annotations

import math

import pytest
from torch.optim import lr_scheduler as native
from torch.utils.data import DataLoader

from camshaft.data.samplers import ExactBatchSampler
from camshaft.engine import Engine
from camshaft.handlers import (
    BatchSizeScheduler,
    ConcatScheduler,
    CosineAnnealingScheduler,
    ExpStateScheduler,
    LambdaStateScheduler,
    LinearCyclicalScheduler,
    LRScheduler,
    MultiStepStateScheduler,
    ParamGroupScheduler,
    PiecewiseLinear,
    PiecewiseLinearStateScheduler,
    ReduceLROnPlateauScheduler,
    StepStateScheduler,
    create_lr_scheduler_with_warmup,
)
from tests.handlers.schedules import entries, sgd

ONE, OTHER = sgd(0.5, 0.3), sgd(0.5, 0.3)


def line(optimizer=ONE, name="lr", pairs=((0, 1.0),), **options):
    return PiecewiseLinear(optimizer, name, pairs, **options)


def cosine(**options):
    arguments = {"param_name": "lr", "start_value": 0.0, "end_value": 1.0, "cycle_size": 4}
    return CosineAnnealingScheduler(ONE, **{**arguments, **options})


def plateau(**options):
    return ReduceLROnPlateauScheduler(**{"optimizer": ONE, "metric_name": "loss", **options})


def concat(durations, *schedulers):
    return ConcatScheduler([line(), *schedulers], durations)


def simulated(names):
    return ConcatScheduler.simulate_values(2, [line(), line()], [1], param_names=names)


def warm_up(scheduler=None, start=0.0, duration=3, **options):
    return create_lr_scheduler_with_warmup(scheduler or line(), start, duration, **options)


def sizes(loader, function=len):
    return BatchSizeScheduler(loader, function)


class Odd:
    def __init__(self, groups):
        self.param_groups = groups


STEP = native.StepLR(sgd(), 1)
PLATEAU = native.ReduceLROnPlateau(sgd())

WRONG_TYPES = [
    ("optimizer", lambda: line(None)),
    ("optimizer", lambda: line(Odd("abc"))),
    ("param_group_index", lambda: line(param_group_index="1")),
    ("param_name", lambda: line(name=1)),
    ("milestones_values", lambda: line(pairs={1: 2.0})),
    ("a milestone", lambda: line(pairs=[(0.5, 1.0)])),
    ("milestones_values", lambda: line(pairs=[(0, "1")])),
    ("cycle_size", lambda: cosine(cycle_size=2.5)),
    ("start_value", lambda: cosine(start_value="1")),
    ("end_value", lambda: cosine(end_value=None)),
    ("cycle_mult", lambda: cosine(cycle_mult="2")),
    ("start_value_mult", lambda: cosine(start_value_mult="2")),
    ("end_value_mult", lambda: cosine(end_value_mult="2")),
    ("torch.optim.lr_scheduler", lambda: LRScheduler(native.ExponentialLR)),
    ("ReduceLROnPlateauScheduler", lambda: LRScheduler(PLATEAU)),
    ("min_lr", lambda: plateau(min_lr=[0.1, 0.2], param_group_index=0)),
    ("metric_name", lambda: plateau(metric_name=1)),
    ("Optimizer", lambda: plateau(optimizer=Odd([]))),
    ("schedulers", lambda: ConcatScheduler(None, [1])),
    ("ParamGroupScheduler", lambda: concat([1], None)),
    ("wrap it in LRScheduler", lambda: concat([1], STEP)),
    ("durations", lambda: concat(1, line())),
    ("param_names", lambda: simulated("abc")),
    ("schedulers", lambda: ParamGroupScheduler(None)),
    ("names", lambda: ParamGroupScheduler([line()], "a")),
    ("lr_scheduler", lambda: warm_up(ParamGroupScheduler([line()]))),
    ("warmup_duration", lambda: warm_up(duration=2.0)),
    ("warmup_start_value", lambda: warm_up(start="0")),
    ("warmup_end_value", lambda: warm_up(warmup_end_value="0")),
    ("output_simulated_values", lambda: warm_up(output_simulated_values=(None,))),
    ("dataloader", lambda: sizes([1, 2])),
    ("scheduler_fn", lambda: sizes(DataLoader(range(4)), 3)),
    ("param_name", lambda: LambdaStateScheduler(abs, 3)),
    ("initial_value", lambda: ExpStateScheduler("2", 0.5, "noise")),
    ("gamma", lambda: ExpStateScheduler(2, None, "noise")),
    ("step_size", lambda: StepStateScheduler(2, 0.5, 1.5, "noise")),
    ("milestones", lambda: MultiStepStateScheduler(2, 0.5, 3, "noise")),
    ("a milestone", lambda: MultiStepStateScheduler(2, 0.5, [0.5], "noise")),
]

WRONG_VALUES = [
    ("param_group_index", lambda: line(param_group_index=2)),
    ("param_group_index", lambda: line(param_group_index=-3)),
    ("milestones_values", lambda: line(pairs=[])),
    ("milestones_values", lambda: line(pairs=[[0, 1.0]])),
    ("milestones_values", lambda: line(pairs=[0.5])),
    ("milestones_values", lambda: line(pairs=[(3, 1.0), (2, 1.0)])),
    ("milestones_values", lambda: line(pairs=[(0, math.nan)])),
    ("cycle_size", lambda: cosine(cycle_size=1)),
    ("warmup_duration", lambda: cosine(warmup_duration=-1)),
    ("monotonic=True", lambda: LinearCyclicalScheduler(ONE, "lr", 0.0, 1.0, 4, warmup_duration=2)),
    ("metric_values", lambda: ReduceLROnPlateauScheduler.simulate_values(3, [0.1], init_lr=0.5)),
    ("schedulers", lambda: ConcatScheduler([], [])),
    ("at least two", lambda: concat([])),
    ("durations", lambda: concat([1, 2], line())),
    ("durations", lambda: concat([0], line())),
    ("one optimizer", lambda: concat([1], line(OTHER))),
    ("one optimizer", lambda: concat([1], ParamGroupScheduler([line(), line(OTHER)]))),
    ("one param_name", lambda: concat([1], line(name="momentum"))),
    ("durations", lambda: ConcatScheduler.simulate_values(2, [line(), line()], [0])),
    ("param_names", lambda: simulated([1])),
    ("param_name", lambda: simulated(["rl"])),
    ("schedulers", lambda: ParamGroupScheduler([])),
    ("schedulers", lambda: ParamGroupScheduler([line(), 1])),
    ("schedulers", lambda: ParamGroupScheduler.simulate_values(1, [1])),
    ("names", lambda: ParamGroupScheduler([line()], [1])),
    ("names", lambda: ParamGroupScheduler([line()], ["a", "b"])),
    ("warmup_duration", lambda: warm_up(duration=1)),
    ("got None", lambda: sizes(DataLoader(range(4), batch_size=None))),
    ("pass batch_size", lambda: sizes(DataLoader(range(4), batch_sampler=[[0], [1]]))),
    ("call auto_dataloader", lambda: sizes(DataLoader(range(4), batch_sampler=ExactBatchSampler([[0], [1]], None)))),
    ("lambda_obj", lambda: LambdaStateScheduler(3, "noise")),
    ("milestones_values", lambda: PiecewiseLinearStateScheduler([], "noise")),
    ("step_size", lambda: StepStateScheduler(2, 0.5, 0, "noise")),
    ("iteration", lambda: ExpStateScheduler(1.0, 0.5, "iteration").attach(Engine(lambda engine, batch: None))),
]


@pytest.mark.parametrize(
    ("error", "name", "make"),
    [(TypeError, *row) for row in WRONG_TYPES] + [(ValueError, *row) for row in WRONG_VALUES],
)
def test_a_wrong_argument_is_named_and_changes_nothing(error, name, make):
    before = entries(ONE)
    with pytest.raises(error, match=name):
        make()
    assert entries(ONE) == before
