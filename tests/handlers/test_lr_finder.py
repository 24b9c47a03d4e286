"""The learning rate search: its rates, its end, its results, and the restored objects."""

from __future__ import annotations

import contextlib
import functools
import math
import random
import sys
import warnings

import matplotlib
import pytest
import torch
from torch import nn

from camshaft import distributed as idist
from camshaft.engine import (
    DeterministicEngine,
    Engine,
    Events,
    create_supervised_evaluator,
    create_supervised_trainer,
)
from camshaft.handlers import (
    Checkpoint,
    CosineAnnealingScheduler,
    EarlyStopping,
    EMAHandler,
    FastaiLRFinder,
    LRScheduler,
    RunningAverage,
)
from tests.handlers.schedules import lr, sgd
from tests.ranks import on_ranks


class Search:
    """A trainer with given losses, and a finder for its rate."""

    def __init__(self, losses=(), rates=(0.1,), kind=Engine, **options):
        self.optimizer = sgd(*rates)
        self.losses, self.used, self.options = iter(losses), [], options
        self.trainer, self.finder = kind(self.step), FastaiLRFinder()
        self.to_save = {"optimizer": self.optimizer}

    def step(self, engine, batch):
        self.used.append(lr(self.optimizer))
        return next(self.losses, 1.0)

    def run(self, data=range(5), **target):
        with self.finder.attach(self.trainer, self.to_save, **self.options) as trainer:
            assert trainer is self.trainer
            trainer.run(data, **target)
        return self.finder.get_results()


pytestmark = pytest.mark.filterwarnings("ignore:the search ended before the loss diverged")


# --- rates, losses and the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rates", "options", "expected"),
    [
        ((0.1,), {"start_lr": 1.0, "end_lr": 16.0}, [[1.0], [2.0], [4.0], [8.0], [16.0]]),
        ((0.1,), {"start_lr": 0, "end_lr": 4, "step_mode": "linear"}, [[0.0], [1.0], [2.0], [3.0], [4.0]]),
        ((0.001,), {"num_iter": 3, "end_lr": 0.1}, [[0.001], [0.01], [0.1]]),
        ((0.5,), {"num_iter": 1}, [[0.5]]),
        ((1.0, 10.0), {"num_iter": 3, "end_lr": [4.0, 1000.0]}, [[1.0, 10.0], [2.0, 100.0], [4.0, 1000.0]]),
        ((1.0, 1.0), {"num_iter": 2, "start_lr": [1.0, 2.0], "end_lr": 3.0}, [[1.0, 2.0], [3.0, 3.0]]),
    ],
)
def test_rates_grow_from_start_to_end(rates, options, expected):
    search = Search(rates=rates, **options)
    results = search.run()
    assert search.used == [pytest.approx(row) for row in expected]
    assert results["lr"] == [row[0] if len(rates) == 1 else row for row in search.used]


DATA = list(range(5))


class Unsized:
    """Data that can be iterated over repeatedly, without a length."""

    def __iter__(self):
        return iter(range(5))


@pytest.mark.parametrize("kind", [Engine, DeterministicEngine])
@pytest.mark.parametrize(
    ("num_iter", "data", "target", "count"),
    [
        (None, DATA, {}, 5),
        (None, DATA, {"max_epochs": 2}, 10),
        (None, DATA, {"max_iters": 7}, 7),
        (3, DATA, {"max_epochs": 2}, 3),
        (12, DATA, {"max_iters": 7}, 12),
        (12, Unsized(), {}, 12),
        (None, Unsized(), {"max_iters": 3}, 3),
        (None, None, {"epoch_length": 4}, 4),
    ],
)
def test_it_runs_num_iter_iterations_or_those_of_the_run(kind, num_iter, data, target, count):
    search = Search(kind=kind, num_iter=num_iter)
    if not isinstance(data, list):
        search.trainer = Engine(search.step)
    for _ in range(2):  # a second search starts from the beginning
        results = search.run(data, **target)
        assert len(results["lr"]) == len(results["loss"]) == count
        assert results["lr"][-1] == pytest.approx(10.0)
    assert len(search.used) == 2 * count


def test_data_without_a_length_need_num_iter():
    with pytest.raises(ValueError, match="num_iter"):
        Search().run(Unsized())


@pytest.mark.parametrize(
    ("losses", "threshold", "smooth", "recorded"),
    [
        ([4.0, 2.0, 6.0, 6.1], 3, 0, [4.0, 2.0, 6.0, 6.1]),
        ([-1.0, -2.0, -1.5, -0.5, 3.0], 2, 0, [-1.0, -2.0, -1.5, -0.5, 3.0]),  # as far from -2 as 2 is from 1
        ([-1.0, -2.0, 0.0, 0.1], 2, 0, [-1.0, -2.0, 0.0, 0.1]),
        ([1.0, 1.0, 1.1], 1, 0, [1.0, 1.0, 1.1]),
        ([4.0, 2.0, 2.0, 40.0], 3, 0.5, [4.0, 3.0, 2.5, 21.25]),
        ([3.0, 2.0, 1.0, math.nan], 5, 0.5, [3.0, 2.5, 1.75]),
        ([3.0, math.inf], 5, 0.5, [3.0]),
    ],
)
def test_the_search_stops_when_the_smoothed_loss_diverges_or_is_not_finite(losses, threshold, smooth, recorded, caplog):
    search = Search(losses, smooth_f=smooth, diverge_th=threshold)
    with caplog.at_level("INFO"), warnings.catch_warnings():
        warnings.simplefilter("error")
        results = search.run(range(100))
    assert len(search.used) == len(losses)
    assert (results["loss"], results["lr"]) == (recorded, [rate for (rate,) in search.used[: len(recorded)]])
    assert "diverged" in caplog.text


def test_an_infinite_threshold_draws_the_whole_curve():
    losses = [3.0, 1.0, math.inf, math.nan, 1e30, -1e30, 2.0]
    search = Search(losses, smooth_f=0, start_lr=1.0, end_lr=64.0, diverge_th=math.inf)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = search.run(range(7))
    assert results["loss"] == [3.0, 1.0, 1e30, -1e30, 2.0]
    assert results["lr"] == pytest.approx([1.0, 2.0, 16.0, 32.0, 64.0])


def test_a_search_without_a_divergence_warns():
    with pytest.warns(UserWarning, match="before the loss diverged"):
        Search().run()


@pytest.mark.parametrize("output", [2, torch.tensor([[2.0]])])
def test_a_loss_must_be_a_number_or_a_tensor_with_one_element(output):
    search = Search([{"loss": output}], num_iter=1, output_transform=lambda one: one["loss"])
    assert search.run()["loss"] == [2.0]
    for wrong, error in ((torch.zeros(2), ValueError), ("2", TypeError), (None, TypeError)):
        with pytest.raises(error, match="output_transform"):
            Search([wrong]).run()


@pytest.mark.parametrize("late", [False, True])
def test_a_schedule_of_the_trainer_does_not_interfere(late):
    search = Search(start_lr=1.0, end_lr=16.0, run_handlers=True)
    scheduler = LRScheduler(torch.optim.lr_scheduler.StepLR(search.optimizer, 1))
    search.to_save["scheduler"] = scheduler
    if late:
        search.trainer.add_event_handler(Events.STARTED, scheduler.attach)
    else:
        scheduler.attach(search.trainer)
    search.run()
    assert search.used == [[pytest.approx(rate)] for rate in (1.0, 2.0, 4.0, 8.0, 16.0)]
    assert scheduler.event_index == 0


def test_a_tensor_rate_is_updated_in_place():
    search, kinds = Search(num_iter=2, end_lr=1), set()
    group = search.optimizer.param_groups[0]
    group["lr"] = rate = torch.tensor(0.5)
    search.trainer = Engine(lambda engine, batch: kinds.add(search.optimizer.param_groups[0]["lr"] is rate) or 1.0)
    search.run()
    assert (kinds, rate.item(), lr(search.optimizer)) == ({True}, 1.0, [0.5])


@on_ranks(2)
def test_losses_are_averaged_over_ranks_and_all_ranks_stop_together():
    search = Search([[4.0, 2.0, 100.0], [2.0, 2.0, 0.0]][idist.get_rank()], smooth_f=0)
    assert search.run(range(50))["loss"] == [3.0, 2.0, 50.0]
    assert len(search.used) == 3


# --- results --------------------------------------------------------------------------------------------------------


def test_the_suggestion_is_the_steepest_descent_before_the_minimum_and_is_applied_to_each_group():
    losses = [9.0, 8.5, 7.0, 3.0, 2.5, 2.0, 9.0, 0.0]
    search = Search(losses, (1.0, 10.0), end_lr=[64.0, 640.0], num_iter=7, smooth_f=0)
    search.run()
    suggestion = search.finder.lr_suggestion()
    assert suggestion == pytest.approx([4.0, 40.0])  # between 8.5 and 3
    search.finder.apply_suggested_lr(search.optimizer)
    assert lr(search.optimizer) == suggestion
    with pytest.raises(RuntimeError, match="must have 2 parameter groups"):
        search.finder.apply_suggested_lr(sgd(0.1))


def test_too_few_points_make_no_suggestion():
    search = Search([2.0, 1.0, 3.0], num_iter=3, smooth_f=0)
    search.run()
    with pytest.raises(RuntimeError, match="too few"):
        search.finder.lr_suggestion()


# --- restoring ------------------------------------------------------------------------------------------------------


def everything(search):
    """Return the states of the engine, its handlers, the optimizer, and the random number generators."""
    engine = search.trainer
    own = {name: repr(value) for name, value in vars(engine).items() if name != "_state"}
    handlers = [len(plan.registrations) for plan in engine._dispatcher.plans.values()]
    state = id(engine.state), repr(vars(engine.state)), repr(search.optimizer.state_dict())
    return own, handlers, state, random.getstate(), torch.get_rng_state().tolist()


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("where", [None, "before the run", "step", "data", "handler", "after the run"])
def test_everything_is_restored_also_after_an_error(trained, where):
    search = Search(end_lr=1e6, num_iter=4)
    if trained:
        search.trainer.run(range(4), max_epochs=3)
        search.trainer.state.param_history = {"lr": [0.1]}
        search.trainer.state.metrics["loss"] = 1.0
    before = everything(search)

    def fail(at):
        if at == where:
            raise KeyboardInterrupt

    def passing(at):
        yield 1.0
        fail(at)
        yield from [1.0] * 5

    search.losses = passing("step")
    with (
        pytest.raises(KeyboardInterrupt) if where else contextlib.nullcontext(),
        search.finder.attach(search.trainer, search.to_save, **search.options) as trainer,
    ):
        random.random()
        torch.rand(1)
        fail("before the run")
        with trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: fail("handler")):
            trainer.run(passing("data"), max_epochs=5)
        trainer.state.metrics["loss"] = 2.0
        trainer.state.noise = 3.0
        fail("after the run")
        assert everything(search) != before
    assert everything(search) == before


def test_a_run_interrupted_in_the_block_is_discarded():
    search = Search(run_handlers=True)
    search.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), search.trainer.interrupt)
    search.trainer.interrupt_resume_enabled = True
    search.run()
    assert search.trainer.run(range(5)).iteration == 2
    with (
        pytest.raises(RuntimeError, match="in the middle of a run"),
        search.finder.attach(search.trainer, search.to_save),
    ):
        pytest.fail("should not start")


class Own:
    """An object of the user's with a state."""

    def __init__(self, saving=None, loading=None):
        self.count, self.saving, self.loading = 0, saving, loading

    def state_dict(self):
        if self.saving:
            raise self.saving
        return {"count": self.count}

    def load_state_dict(self, state_dict):
        if self.loading:
            raise self.loading
        self.count = state_dict["count"]


def test_gradients_are_set_aside():
    search = Search()
    [parameter] = search.optimizer.param_groups[0]["params"]
    parameter.requires_grad_().grad = torch.ones(1)
    search.trainer = Engine(lambda engine, batch: parameter.sum().backward() or float(parameter.grad))
    assert search.run()["loss"][0] == 1.0
    assert parameter.grad.tolist() == [1.0]


def test_an_error_while_restoring_does_not_prevent_the_rest():
    search = Search(rates=(0.5,))
    search.to_save = {"first": Own(loading=OSError()), **search.to_save, "last": Own(loading=OSError())}
    with pytest.raises(OSError):  # noqa: PT011
        search.run()
    assert (lr(search.optimizer), search.trainer.state.iteration) == ([0.5], 0)


@pytest.mark.parametrize("errors", [{"saving": OSError("needs more ranks")}, {"loading": OSError("needs more ranks")}])
def test_an_object_that_was_found_and_cannot_be_restored_only_warns(errors):
    search, broken = Search(), Own(**errors)
    search.trainer = Engine(lambda engine, batch: (broken, 1.0)[1])
    with pytest.warns(UserWarning, match="Own is not restored after the search: needs more ranks"):
        search.run()


class Holder:
    """An object without a state that holds others."""

    def __init__(self, **parts):
        vars(self).update(parts)

    def step(self, engine, batch):
        return self.take_step(engine, batch)


named_by_the_step = Own()


def count_by_name():
    return [setattr(named_by_the_step, "count", named_by_the_step.count + 1) for _ in range(1)]


def ways_to_refer(one):
    """Return steps that refer to an object with a counter."""

    def count(engine=None, batch=None, one=None):
        one.count += 1
        return 1.0

    holder = Holder(parts={"deep": [(one,)]}, take_step=lambda engine, batch: count(one=holder.parts["deep"][0][0]))
    return {
        "closure": lambda engine, batch: count(one=one),
        "partial": functools.partial(count, one=one),
        "default": lambda engine, batch, one=one: count(one=one),
        "method": holder.step,
        "global": lambda engine, batch: len(count_by_name()),
        "state": lambda engine, batch: count(one=engine.state.one),
        "decorated": functools.wraps(count)(lambda *arguments: count(one=one)),
    }


@pytest.mark.parametrize("way", ways_to_refer(None))
def test_objects_that_the_step_refers_to_are_restored(way):
    one = named_by_the_step if way == "global" else Own()
    search = Search(diverge_th=math.inf)
    search.trainer = Engine(ways_to_refer(one)[way])
    if way == "state":
        search.trainer.state.one = one
    one.count = 7
    with search.finder.attach(search.trainer, search.to_save) as trainer:
        trainer.run(range(5))
        assert one.count == 12
    assert one.count == 7


# --- handlers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"), [({}, ["inside"] * 5), ({"run_handlers": True}, ["outside", "inside"] * 5)]
)
def test_handlers_do_not_run_in_a_search_unless_asked_for(options, expected):
    search, called = Search(), []
    search.trainer.register_events("own")
    search.trainer.add_event_handler(Events.ITERATION_COMPLETED(every=1), lambda: called.append("outside"))
    search.trainer.add_event_handler("own", lambda: called.append("own"))
    with search.finder.attach(search.trainer, search.to_save, **options) as trainer:
        handle = trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: called.append("inside"))
        trainer.run(range(5))
    handle.remove()
    assert called == expected
    called.clear()
    search.trainer.run(range(2))
    search.trainer.fire_event("own")
    assert called == ["outside", "outside", "own"]


def test_a_handler_of_errors_that_does_not_run_swallows_none():
    search, handled = Search(["not a loss"]), []
    search.trainer.add_event_handler(Events.EXCEPTION_RAISED, handled.append)
    with pytest.raises(TypeError):
        search.run()
    assert handled == []
    search.trainer.add_event_handler(Events.STARTED, lambda: 1 / 0)
    search.trainer.run(range(3))
    assert len(handled) == 1


@pytest.mark.parametrize("run_handlers", [False, True])
def test_a_search_leaves_no_trace_in_a_whole_training(tmp_path, run_handlers):
    """The run after a search is that without one: scaler, accumulation, averages, schedules, order of data, records."""

    def train(searches):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
        teacher = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).requires_grad_(False)
        teacher.register_buffer("calls", torch.zeros(()), persistent=False)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu")

        def loss_of(y_pred, y):
            teacher.calls.add_(1)
            return nn.functional.mse_loss(y_pred, y) + nn.functional.mse_loss(y_pred, teacher(y))

        trainer = create_supervised_trainer(
            model, optimizer, loss_of, amp_mode="amp", scaler=scaler, gradient_accumulation_steps=3
        )
        ema = EMAHandler(model, 0.1)
        ema.attach(trainer)
        RunningAverage(alpha=0.5).attach(trainer, "loss")
        scheduler = CosineAnnealingScheduler(optimizer, "lr", 0.01, 0.1, 8, save_history=True)
        scheduler.attach(trainer)
        evaluator = create_supervised_evaluator(model)
        stopping = EarlyStopping(50, lambda engine: -trainer.state.metrics["loss"], trainer)
        stopping.attach(evaluator)
        evaluator_data = [(torch.ones(2, 2), torch.ones(2, 2))]
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(evaluator_data))
        folder = tmp_path / str(searches)
        checkpoint = Checkpoint({"model": model}, folder, score_function=lambda engine: engine.state.iteration)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, checkpoint)
        data = torch.utils.data.TensorDataset(torch.randn(10, 2), torch.randn(10, 2))
        loader = torch.utils.data.DataLoader(data, 2, shuffle=True, generator=torch.Generator().manual_seed(1))
        if searches:
            teacher.eval()
            to_save = {"model": model, "optimizer": optimizer}
            options = {"end_lr": 1e6, "num_iter": 17, "diverge_th": math.inf, "run_handlers": run_handlers}
            with FastaiLRFinder().attach(trainer, to_save, **options) as searching:
                searching.add_event_handler(Events.STARTED, lambda: teacher.train())
                searching.run(loader)
            assert not teacher.training
            assert any(folder.iterdir()) == run_handlers
        teacher.train()
        trainer.run(loader, max_epochs=2)
        return [
            *(one.state_dict() for one in (model, teacher, optimizer, trainer, scaler, ema.ema_model)),
            (scheduler.event_index, stopping.counter, stopping.best_score, evaluator.state.iteration),
            (trainer.state.metrics, trainer.state.param_history, teacher.calls),
        ]

    torch.testing.assert_close(train(searches=1), train(searches=0), rtol=0, atol=0)


# --- invalid arguments ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "name", "arguments"),
    [
        (TypeError, "to_save", {"to_save": [1]}),
        (TypeError, r"to_save\['model'\]", {"to_save": {"optimizer": sgd(), "model": 3}}),
        (ValueError, "to_save", {"to_save": {"model": nn.Linear(1, 1)}}),
        (TypeError, "torch.optim.Optimizer", {"to_save": {"optimizer": nn.Linear(1, 1)}}),
        (TypeError, "output_transform", {"output_transform": 3}),
        (TypeError, "num_iter", {"num_iter": 2.0}),
        (TypeError, "start_lr", {"start_lr": "0.1"}),
        (TypeError, "end_lr", {"end_lr": [1.0, "2"]}),
        (ValueError, "start_lr", {"start_lr": [0.1, 0.2]}),
        (ValueError, "start_lr must be below end_lr", {"start_lr": 10, "end_lr": 10}),
        (ValueError, "start_lr must be above 0", {"start_lr": 0}),
        (ValueError, "step_mode", {"step_mode": "cosine"}),
        (ValueError, "smooth_f", {"smooth_f": 1}),
        (ValueError, "diverge_th", {"diverge_th": math.nan}),
        (ValueError, "diverge_th", {"diverge_th": 0.9}),
    ],
)
def test_invalid_arguments_are_rejected_before_the_block(error, name, arguments):
    trainer = Engine(lambda engine, batch: 1.0)
    with (
        pytest.raises(error, match=name),
        FastaiLRFinder().attach(trainer, **{"to_save": {"optimizer": sgd()}, **arguments}),
    ):
        pytest.fail("the block was entered")


# --- the plot -------------------------------------------------------------------------------------------------------

LOSSES = [9.0, 8.9, 8.8, 8.0, 5.0, 3.0, 2.0, 1.5, 1.4, 1.6, 3.0, 9.0]


@pytest.fixture
def pyplot():
    matplotlib.use("agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def searched(rates=(1.0,), losses=LOSSES):
    search = Search(losses, rates, end_lr=[rate * 2048 for rate in rates], smooth_f=0, diverge_th=100)
    search.run(losses)
    return search.finder


def points(line):
    return [tuple(point) for point in line.get_xydata().tolist()]


def test_losses_of_each_group_are_plotted_over_its_rates(pyplot):
    finder = searched(rates=(1.0, 10.0))
    ax = finder.plot(skip_start=2, skip_end=1, figsize=(3, 4))
    results = finder.get_results()
    for group in range(2):
        rates = [row[group] for row in results["lr"]]
        assert points(ax.lines[group]) == list(zip(rates, results["loss"], strict=True))[2:-1]
        assert ax.collections[group].get_offsets().tolist() == [[finder.lr_suggestion()[group], 5.0]]
    assert (ax.get_xscale(), ax.get_xlabel(), ax.get_ylabel()) == ("log", "Learning rate", "Loss")
    assert ax.figure.get_size_inches().tolist() == [3, 4]
    assert [text.get_text() for text in ax.get_legend().get_texts()][::2] == ["group 0", "group 1"]


def test_skipping_and_the_suggestion_can_be_turned_off_and_axes_be_given(pyplot):
    _, ax = pyplot.subplots()
    losses = [1.0, 2.0, 3.0]  # without a suggestion
    options = {"skip_start": 0, "skip_end": 0, "log_lr": False, "display_suggestion": False, "ax": ax}
    assert searched(losses=losses).plot(**options) is ax
    assert [loss for _, loss in points(ax.lines[0])] == losses
    assert (ax.get_xscale(), len(ax.collections), ax.get_legend()) == ("linear", 0, None)


def test_a_suggestion_in_the_skipped_start_warns_and_all_points_may_be_skipped(pyplot):
    with pytest.warns(UserWarning, match="that of point 4, is not drawn"):
        assert points(searched().plot(10, 10).lines[0]) == []


def test_a_plot_needs_a_search_and_skips_of_at_least_0_and_matplotlib(pyplot, monkeypatch):
    for method in ("plot", "lr_suggestion"):
        with pytest.raises(RuntimeError, match="no search"):
            getattr(FastaiLRFinder(), method)()
    for name in ("skip_start", "skip_end"):
        with pytest.raises(ValueError, match=name):
            searched().plot(**{name: -1})
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'camshaft\[plot\]'"):
        searched().plot()
