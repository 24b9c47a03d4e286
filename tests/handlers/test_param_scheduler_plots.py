"""Plots of schedules, drawn by matplotlib itself."""

from __future__ import annotations

import sys

import matplotlib
import pytest
from torch.optim import lr_scheduler as native

from camshaft.handlers import (
    ConcatScheduler,
    CosineAnnealingScheduler,
    ExpStateScheduler,
    LRScheduler,
    PiecewiseLinear,
    ReduceLROnPlateauScheduler,
)
from tests.handlers.schedules import sgd


@pytest.fixture(autouse=True)
def figures():
    matplotlib.use("agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def drawn(lines):
    return [list(map(tuple, line.get_xydata().tolist())) for line in lines]


def test_a_schedule_is_one_line(figures):
    lines = PiecewiseLinear.plot_values(3, param_name="momentum", milestones_values=[(0, 0.0), (2, 1.0)])
    assert drawn(lines) == [[(0.0, 0.0), (1.0, 0.5), (2.0, 1.0)]]
    assert [text.get_text() for text in figures.gca().get_legend().get_texts()] == ["momentum"]


def test_each_group_is_a_line():
    optimizer = sgd(0.5, 0.1)
    lines = LRScheduler.plot_values(2, lr_scheduler=native.ExponentialLR(optimizer, 0.5))
    assert drawn(lines) == [[(0.0, 0.5), (1.0, 0.25)], [(0.0, 0.1), (1.0, 0.05)]]


def test_other_schedulers_plot_too():
    optimizer = sgd()
    parts = [PiecewiseLinear(optimizer, "lr", [(0, 1.0)]), CosineAnnealingScheduler(optimizer, "lr", 0.5, 0.0, 4)]
    assert drawn(ConcatScheduler.plot_values(2, schedulers=parts, durations=[1])) == [[(0.0, 1.0), (1.0, 0.5)]]
    assert drawn(ExpStateScheduler.plot_values(2, initial_value=8, gamma=0.5, param_name="noise")) == [
        [(0.0, 4.0), (1.0, 2.0)]
    ]
    assert drawn(ReduceLROnPlateauScheduler.plot_values(2, metric_values=[1.0, 1.0], init_lr=0.5)) == [
        [(0.0, 0.5), (1.0, 0.5)]
    ]


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"PiecewiseLinear.plot_values needs .* pip install 'camshaft\[plot\]'"
    ):
        PiecewiseLinear.plot_values(3, param_name="lr", milestones_values=[(0, 0.0)])
