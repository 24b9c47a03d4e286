"""The curve of a search, drawn by matplotlib itself."""

from __future__ import annotations

import sys
import warnings

import matplotlib
import pytest
import torch

from camshaft.engine import Engine
from camshaft.handlers import FastaiLRFinder

LOSSES = [9.0, 8.9, 8.8, 8.0, 5.0, 3.0, 2.0, 1.5, 1.4, 1.6, 3.0, 9.0]


@pytest.fixture
def pyplot():
    matplotlib.use("agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def searched(rates=(1.0,), losses=LOSSES):
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": rate} for rate in rates])
    trainer = Engine(lambda engine, batch: batch)
    finder = FastaiLRFinder()
    ends = [rate * 2048 for rate in rates]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the search ended")
        with finder.attach(trainer, {"optimizer": optimizer}, end_lr=ends, smooth_f=0, diverge_th=100):
            trainer.run(losses)
    return finder


def points(line):
    return [tuple(point) for point in line.get_xydata().tolist()]


def test_losses_are_drawn_over_rates(pyplot):
    finder = searched()
    ax = finder.plot(skip_start=2, skip_end=1)
    results = finder.get_results()
    assert points(ax.lines[0]) == list(zip(results["lr"], results["loss"], strict=True))[2:-1]
    assert (ax.get_xscale(), ax.get_xlabel(), ax.get_ylabel()) == ("log", "Learning rate", "Loss")
    [marked] = ax.collections
    assert marked.get_offsets().tolist() == [[finder.lr_suggestion(), 5.0]]


def test_nothing_is_left_out_and_nothing_marked_if_asked_so(pyplot):
    ax = searched().plot(skip_start=0, skip_end=0, log_lr=False, display_suggestion=False)
    assert len(points(ax.lines[0])) == len(LOSSES)
    assert ax.get_xscale() == "linear"
    assert not ax.collections
    assert ax.get_legend() is None


def test_it_draws_into_given_axes_or_makes_some(pyplot):
    _, ax = pyplot.subplots()
    assert searched().plot(2, 0, ax=ax) is ax
    assert searched().plot(2, 0, figsize=(3, 4)).figure.get_size_inches().tolist() == [3, 4]


def test_each_group_has_a_line(pyplot):
    ax = searched(rates=(1.0, 10.0)).plot(2, 0)
    assert len(ax.lines) == len(ax.collections) == 2
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert [label for label in labels if label.startswith("group")] == ["group 0", "group 1"]


def test_a_suggestion_that_is_not_drawn_is_named(pyplot):
    with pytest.warns(UserWarning, match="point 4, among the first 10"):
        searched().plot()


def test_more_may_be_left_out_than_there_is(pyplot):
    with pytest.warns(UserWarning, match="not drawn"):
        assert points(searched().plot(10, 10).lines[0]) == []


def test_a_search_without_a_suggestion_can_be_drawn(pyplot):
    finder = searched(losses=[1.0, 2.0, 3.0])
    assert len(points(finder.plot(0, 0, display_suggestion=False).lines[0])) == 3


@pytest.mark.parametrize("name", ["skip_start", "skip_end"])
def test_negative_numbers_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} must not be negative, got -1"):
        searched().plot(**{name: -1})


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    for finder in (searched(), FastaiLRFinder()):
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'camshaft\[plot\]'"):
            finder.plot()


def test_without_a_search_there_is_nothing_to_draw(pyplot):
    with pytest.raises(RuntimeError, match="no search yet"):
        FastaiLRFinder().plot()
