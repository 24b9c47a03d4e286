"""The learning rate search: its rates, its end, its results, and the restored objects."""

from __future__ import annotations

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
from tests.ranks import on_ranks


class Search:
    """A trainer with given losses, and a finder for its rate."""

    def __init__(self, losses=(), rates=(0.1,), kind=Engine):
        self.parameters = [torch.zeros(1, requires_grad=True) for _ in rates]
        self.optimizer = torch.optim.SGD(
            [{"params": [one], "lr": rate} for one, rate in zip(self.parameters, rates, strict=True)]
        )
        self.losses = iter(losses)
        self.used = []
        self.trainer = kind(self.step)
        self.finder, self.options = FastaiLRFinder(), {}
        self.to_save = {"optimizer": self.optimizer}

    def step(self, engine, batch):
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.used.append(rates[0] if len(rates) == 1 else rates)
        return next(self.losses, 1.0)

    def run(self, data=range(5), max_epochs=None, max_iters=None, epoch_length=None, **options):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the search ended before")
            with self.finder.attach(self.trainer, self.to_save, **self.options, **options) as trainer:
                assert trainer is self.trainer
                trainer.run(data, max_epochs=max_epochs, max_iters=max_iters, epoch_length=epoch_length)
        return self.finder.get_results()


# --- the rates ---------------------------------------------------------------------------------------------


def test_rates_grow_exponentially_from_start_to_end():
    search = Search()
    results = search.run(start_lr=1.0, end_lr=16.0)
    assert search.used == pytest.approx([1.0, 2.0, 4.0, 8.0, 16.0])
    assert results["lr"] == search.used
    assert results["loss"] == [1.0] * 5


def test_rates_grow_linearly():
    search = Search()
    search.run(start_lr=0, end_lr=4, step_mode="linear")
    assert search.used == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_the_search_starts_at_the_rate_of_the_optimizer():
    search = Search(rates=(0.001,))
    search.run(num_iter=3, end_lr=0.1)
    assert search.used == pytest.approx([0.001, 0.01, 0.1])


def test_each_group_has_its_own_rates():
    search = Search(rates=(1.0, 10.0))
    results = search.run(num_iter=3, end_lr=[4.0, 1000.0])
    assert results["lr"] == search.used
    assert [[round(one, 9) for one in rates] for rates in search.used] == [[1.0, 10.0], [2.0, 100.0], [4.0, 1000.0]]


@pytest.mark.parametrize("late", [False, True])
def test_a_schedule_of_the_trainer_does_not_interfere(late):
    search = Search()
    search.options["run_handlers"] = True
    scheduler = LRScheduler(torch.optim.lr_scheduler.StepLR(search.optimizer, 1))
    search.to_save["scheduler"] = scheduler
    if late:
        search.trainer.add_event_handler(Events.STARTED, scheduler.attach)
    else:
        scheduler.attach(search.trainer)
    search.run(start_lr=1.0, end_lr=16.0)
    assert search.used == pytest.approx([1.0, 2.0, 4.0, 8.0, 16.0])
    assert scheduler.event_index == 0


def test_a_tensor_rate_is_updated_in_place():
    search = Search()
    search.options["run_handlers"] = True
    search.optimizer.param_groups[0]["lr"] = rate = torch.tensor(0.5)
    kinds = set()
    search.trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda: kinds.add(search.optimizer.param_groups[0]["lr"] is rate)
    )
    search.run(num_iter=2, end_lr=1)
    assert kinds == {True}
    assert search.optimizer.param_groups[0]["lr"].item() == 0.5


# --- how long ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_iter", [1, 3, 5, 12])
@pytest.mark.parametrize("target", [{}, {"max_epochs": 2}, {"max_iters": 7}])
@pytest.mark.parametrize("kind", [Engine, DeterministicEngine])
def test_it_runs_num_iter_iterations(num_iter, target, kind):
    search = Search(kind=kind)
    data = list(range(5))
    results = search.run(data, num_iter=num_iter, **target)
    assert len(search.used) == len(results["lr"]) == len(results["loss"]) == num_iter
    if num_iter > 1:
        assert results["lr"][-1] == pytest.approx(10.0)


@pytest.mark.parametrize(("target", "count"), [({}, 5), ({"max_epochs": 2}, 10), ({"max_iters": 7}, 7)])
def test_num_iter_defaults_to_the_iterations_of_the_run(target, count):
    search = Search()
    assert len(search.run(**target)["lr"]) == count
    assert search.used[-1] == pytest.approx(10.0)


class Unsized:
    """Data that can be iterated over repeatedly, without a length."""

    def __iter__(self):
        return iter(range(5))


@pytest.mark.parametrize("num_iter", [3, 12])
def test_data_may_have_no_length(num_iter):
    assert len(Search().run(Unsized(), num_iter=num_iter)["lr"]) == num_iter


def test_data_without_a_length_need_num_iter():
    search = Search()
    with pytest.raises(ValueError, match="num_iter must be given"):
        search.run(Unsized())
    assert len(search.run(Unsized(), max_iters=3)["lr"]) == 3


def test_it_runs_without_data():
    assert len(Search().run(None, epoch_length=4)["lr"]) == 4


# --- losses and the end ------------------------------------------------------------------------------------


def test_losses_are_smoothed_from_the_second_iteration_on():
    results = Search([4.0, 2.0, 2.0]).run(num_iter=3, smooth_f=0.5)
    assert results["loss"] == [4.0, 3.0, 2.5]


def test_smooth_f_0_keeps_the_losses():
    assert Search([4.0, 2.0, 3.0]).run(num_iter=3, smooth_f=0)["loss"] == [4.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("losses", "threshold", "count"),
    [
        ([4.0, 2.0, 6.0, 6.1], 3, 4),
        ([-1.0, -2.0, -1.5, -0.5, 3.0], 2, 5),  # as far from -2 as 2 is from 1
        ([-1.0, -2.0, 0.0, 0.1], 2, 4),
        ([1.0, 1.0, 1.1], 1, 3),
    ],
)
def test_the_search_stops_when_the_loss_diverges(losses, threshold, count, caplog):
    search = Search(losses)
    with caplog.at_level("INFO"), warnings.catch_warnings():
        warnings.simplefilter("error")
        with search.finder.attach(search.trainer, search.to_save, smooth_f=0, diverge_th=threshold) as trainer:
            trainer.run(range(100))
    assert len(search.used) == count
    assert search.finder.get_results()["loss"] == losses
    assert "diverged" in caplog.text


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_non_finite_loss_stops_the_search_and_is_not_recorded(loss):
    search = Search([3.0, 2.0, 1.0, loss])
    results = search.run(range(100), smooth_f=0.5)
    assert len(search.used) == 4
    assert results["loss"] == [3.0, 2.5, 1.75]
    assert len(results["lr"]) == 3
    assert search.finder.lr_suggestion() == results["lr"][1]


def test_an_infinite_threshold_draws_the_whole_curve():
    losses = [3.0, 1.0, math.inf, math.nan, 1e30, -1e30, 2.0]
    search = Search(losses)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with search.finder.attach(
            search.trainer, search.to_save, smooth_f=0, start_lr=1.0, end_lr=64.0, diverge_th=math.inf
        ) as trainer:
            trainer.run(range(7))
    assert len(search.used) == 7
    results = search.finder.get_results()
    assert results["loss"] == [3.0, 1.0, 1e30, -1e30, 2.0]
    assert results["lr"] == pytest.approx([1.0, 2.0, 16.0, 32.0, 64.0])


def test_a_search_without_a_divergence_warns():
    search = Search()
    with (
        pytest.warns(UserWarning, match="before the loss diverged"),
        search.finder.attach(search.trainer, search.to_save) as trainer,
    ):
        trainer.run(range(3))


@pytest.mark.parametrize("output", [2, 2.0, torch.tensor(2.0), torch.tensor([[2.0]])])
def test_a_loss_is_a_number_or_a_tensor_with_one_element(output):
    assert Search([{"loss": output}]).run(num_iter=1, output_transform=lambda one: one["loss"])["loss"] == [2.0]


@pytest.mark.parametrize(
    ("output", "error", "message"),
    [(torch.zeros(2), ValueError, r"shape \(2,\)"), ("2", TypeError, "got '2'"), (None, TypeError, "got None")],
)
def test_other_outputs_are_rejected(output, error, message):
    with pytest.raises(error, match=message):
        Search([output]).run()


# --- results ------------------------------------------------------------------------------------------


def test_the_suggestion_is_the_steepest_descent_before_the_minimum():
    search = Search([9.0, 8.5, 7.0, 3.0, 2.5, 2.0, 9.0, 0.0])
    search.run(start_lr=1.0, end_lr=128.0, num_iter=7, smooth_f=0)
    assert search.finder.lr_suggestion() == pytest.approx(128 ** (2 / 6))  # between 8.5 and 3


def test_the_suggestion_is_applied_to_each_group():
    search = Search([5.0, 3.0, 2.0, 1.9], rates=(1.0, 10.0))
    search.run(num_iter=4, end_lr=[8.0, 80.0], smooth_f=0)
    suggestion = search.finder.lr_suggestion()
    assert suggestion == pytest.approx([2.0, 20.0])
    search.finder.apply_suggested_lr(search.optimizer)
    assert [group["lr"] for group in search.optimizer.param_groups] == suggestion
    with pytest.raises(RuntimeError, match="must have 2 parameter groups"):
        search.finder.apply_suggested_lr(torch.optim.SGD([torch.zeros(1)], lr=0.1))


@pytest.mark.parametrize("losses", [[1.0, 2.0, 3.0], [2.0, 1.0, 3.0]])
def test_too_few_points_make_no_suggestion(losses):
    search = Search(losses)
    search.run(num_iter=3, smooth_f=0)
    with pytest.raises(RuntimeError, match="too few"):
        search.finder.lr_suggestion()


@pytest.mark.parametrize("method", ["lr_suggestion", "plot"])
def test_results_need_a_search(method):
    with pytest.raises(RuntimeError, match="no search"):
        getattr(FastaiLRFinder(), method)()
    assert FastaiLRFinder().get_results() == {"lr": [], "loss": []}


def test_a_second_search_starts_from_the_beginning():
    search = Search()
    first = search.run(num_iter=3)
    assert len(search.run(num_iter=4)["lr"]) == 4
    assert len(first["lr"]) == 3


# --- restoring ----------------------------------------------------------------------------------


class Training:
    """A real trainer."""

    def __init__(self, optimizer=torch.optim.Adam):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.optimizer = optimizer(self.model.parameters(), lr=0.01)
        self.trainer = create_supervised_trainer(self.model, self.optimizer, nn.MSELoss())
        self.data = [(torch.randn(3, 2), torch.randn(3, 2)) for _ in range(4)]
        self.to_save = {"model": self.model, "optimizer": self.optimizer}

    def everything(self):
        engine = self.trainer
        return {
            "model": {name: one.tolist() for name, one in self.model.state_dict().items()},
            "optimizer": repr(self.optimizer.state_dict()),
            "state": repr(vars(engine.state)),
            "engine": {name: repr(value) for name, value in vars(engine).items() if name != "_state"},
            "handlers": [len(plan.registrations) for plan in engine._dispatcher.plans.values()],
            "random": [random.getstate(), torch.get_rng_state().tolist()],
        }


@pytest.mark.parametrize("trained", [False, True])
def test_everything_is_restored(trained):
    training = Training()
    if trained:
        training.trainer.run(training.data, max_epochs=3)
        training.trainer.state.param_history = {"lr": [0.1]}
        training.trainer.state.metrics["loss"] = 1.0
    before, state = training.everything(), training.trainer.state
    weights = [one.data_ptr() for one in training.model.parameters()]
    finder = FastaiLRFinder()
    with finder.attach(training.trainer, training.to_save, end_lr=100.0, diverge_th=1.0) as trainer:
        trainer.run(training.data, max_epochs=5 if trained else None)
        trainer.state.metrics["loss"] = 2.0
        trainer.state.noise = 3.0
        random.random()
        torch.rand(1)
        assert training.everything() != before
    assert training.everything() == before
    assert training.trainer.state is state
    assert [one.data_ptr() for one in training.model.parameters()] == weights


def test_a_search_does_not_affect_training():
    plain, searched = Training(torch.optim.SGD), Training(torch.optim.SGD)
    plain.trainer.run(plain.data, max_epochs=2)
    torch.manual_seed(0)
    with FastaiLRFinder().attach(searched.trainer, searched.to_save, end_lr=1e6) as trainer:
        trainer.run(searched.data, max_epochs=50)
    assert searched.trainer.run(searched.data, max_epochs=2).iteration == 8
    assert searched.trainer.state.epoch == 2
    assert torch.equal(plain.model[0].weight, searched.model[0].weight)


@pytest.mark.parametrize("where", ["block", "step", "handler", "before the run"])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_everything_is_restored_after_an_error(where, error):
    training = Training()
    training.trainer.run(training.data)
    before = training.everything()
    data = list(training.data)

    def fail():
        raise error("on purpose")

    def batches():
        yield from data[:2]
        fail()

    with (
        pytest.raises(error),
        FastaiLRFinder().attach(training.trainer, training.to_save, end_lr=1e6, num_iter=4) as trainer,
    ):
        if where == "before the run":
            fail()
        if where == "handler":
            with trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), fail):
                trainer.run(data)
        trainer.run(batches() if where == "step" else data, max_epochs=3)
        fail()
    assert training.everything() == before


def test_a_run_interrupted_in_the_block_is_discarded():
    search = Search()
    search.options["run_handlers"] = True
    search.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), search.trainer.interrupt)
    search.trainer.interrupt_resume_enabled = True
    search.run()
    assert search.trainer.run(range(5)).iteration == 2
    with (
        pytest.raises(RuntimeError, match="in the middle of a run"),
        search.finder.attach(search.trainer, search.to_save),
    ):
        pytest.fail("should not start")


def test_an_error_while_restoring_does_not_prevent_the_rest():
    class Stubborn:
        def state_dict(self):
            return {}

        def load_state_dict(self, state_dict):
            raise ZeroDivisionError

    search = Search(rates=(0.5,))
    search.to_save = {"first": Stubborn(), **search.to_save, "last": Stubborn()}
    with pytest.raises(ZeroDivisionError):
        search.run()
    assert search.optimizer.param_groups[0]["lr"] == 0.5
    assert search.trainer.state.iteration == 0


# --- handlers and what else the step changes -----------------------------------------------------------------------


class Own:
    """An object of the user's with a state, and one without that holds others."""

    def __init__(self, **parts):
        self.count = 0
        vars(self).update(parts)

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]


class Holder:
    def __init__(self, **parts):
        vars(self).update(parts)

    def step(self, engine, batch):
        return self.take_step(engine, batch)


named_by_the_step = Own()


def count_by_name():
    return [setattr(named_by_the_step, "count", named_by_the_step.count + 1) for _ in range(1)]


def ways_to_refer(one):
    """Return steps that refer to an object with a counter."""

    def count(engine=None, batch=None, one=None, scale=1):
        one.count += 1
        return 1.0

    def by_name(engine, batch):
        count_by_name()
        return 1.0

    def from_state(engine, batch):
        return count(one=engine.state.one)

    holder = Holder(parts={"deep": [(one,)]}, take_step=lambda engine, batch: count(one=one))
    return {
        "closure": (one, lambda engine, batch: count(one=one)),
        "partial": (one, functools.partial(count, one=one)),
        "default": (one, lambda engine, batch, one=one: count(one=one)),
        "method": (one, holder.step),
        "global": (named_by_the_step, by_name),
        "state": (one, from_state),
        "decorated": (one, functools.wraps(count)(lambda *arguments: count(one=one))),
    }


@pytest.mark.parametrize("way", ways_to_refer(None))
def test_objects_that_the_step_refers_to_are_restored(way):
    one, step = ways_to_refer(Own())[way]
    search = Search()
    search.trainer = Engine(step)
    if way == "state":
        search.trainer.state.one = one
    one.count = 7
    seen = []
    with search.finder.attach(search.trainer, search.to_save, diverge_th=math.inf) as trainer:
        trainer.run(range(5))
        seen.append(one.count)
    assert (seen, one.count) == ([12], 7)


def test_handlers_do_not_run_in_a_search_unless_asked_for():
    called = []
    for options, expected in (
        ({}, ["inside"] * 5),
        ({"run_handlers": True}, ["outside", "inside"] * 5),
        ({}, ["inside"] * 5),
    ):
        search = Search()
        search.trainer.register_events("own")
        search.trainer.add_event_handler(Events.ITERATION_COMPLETED(every=1), lambda: called.append("outside"))
        search.trainer.add_event_handler("own", lambda: called.append("own"))
        with search.finder.attach(search.trainer, search.to_save, **options) as trainer:
            handle = trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: called.append("inside"))
            with pytest.warns(UserWarning, match="diverged"):
                trainer.run(range(5))
        assert called == expected
        handle.remove()
        called.clear()
        search.trainer.run(range(2))
        search.trainer.fire_event("own")
        assert called == ["outside", "outside", "own"]
        called.clear()


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_handler_of_errors_that_does_not_run_swallows_none(error):
    def fail(engine, batch):
        raise error

    search, handled = Search(), []
    search.trainer = Engine(fail)
    search.trainer.add_event_handler(Events.EXCEPTION_RAISED, handled.append)
    with pytest.raises(error):
        search.run()
    assert handled == []
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
        model[0].weight.grad = torch.ones(2, 2)

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
        checkpoint = Checkpoint(
            {"model": model}, tmp_path / str(searches), score_function=lambda engine: engine.state.iteration
        )
        trainer.add_event_handler(Events.EPOCH_COMPLETED, checkpoint)
        data = torch.utils.data.TensorDataset(torch.randn(10, 2), torch.randn(10, 2))
        loader = torch.utils.data.DataLoader(data, 2, shuffle=True, generator=torch.Generator().manual_seed(1))
        if searches:
            teacher.eval()
            finder = FastaiLRFinder()
            to_save = {"model": model, "optimizer": optimizer}
            options = {"end_lr": 1e6, "num_iter": 17, "diverge_th": math.inf, "run_handlers": run_handlers}
            with finder.attach(trainer, to_save, **options) as searching:
                searching.add_event_handler(Events.STARTED, lambda: teacher.train())
                searching.run(loader)
            assert len(finder.get_results()["lr"]) > 5
            assert not teacher.training
            assert any((tmp_path / "1").iterdir()) == run_handlers
            assert model[0].weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]
        teacher.train()
        trainer.run(loader, max_epochs=2)
        return [
            *(one.state_dict() for one in (model, teacher, optimizer, trainer, scaler)),
            ema.ema_model.state_dict(),
            (scheduler.event_index, stopping.counter, stopping.best_score),
            trainer.state.metrics,
            trainer.state.param_history,
            teacher.calls,
            evaluator.state.iteration,
        ]

    torch.testing.assert_close(train(searches=1), train(searches=0), rtol=0, atol=0)


def test_an_object_that_has_no_state_now_is_left_alone():
    class Broken(Own):
        def state_dict(self):
            raise RuntimeError("needs more ranks")

    search, broken = Search(), Broken()
    search.trainer = Engine(lambda engine, batch: (broken, 1.0)[1])
    with pytest.warns(UserWarning, match="Broken is not restored after the search: needs more ranks"):
        search.run()


# --- invalid arguments ---------------------------------------------------------------------------------------------

OPTIMIZER = torch.optim.SGD([torch.zeros(1)], lr=0.1)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"to_save": [1]}, TypeError, "to_save must be a mapping"),
        ({"to_save": {"optimizer": OPTIMIZER, "model": 3}}, TypeError, r"to_save\['model'\] must have state_dict"),
        ({"to_save": {"model": nn.Linear(1, 1)}}, ValueError, "must hold 'optimizer'"),
        ({"to_save": {"optimizer": nn.Linear(1, 1)}}, TypeError, "must be a torch.optim.Optimizer"),
        ({"output_transform": 3}, TypeError, "output_transform must be callable"),
        ({"num_iter": 2.0}, TypeError, "num_iter must be an integer"),
        ({"num_iter": 0}, ValueError, "num_iter must be at least 1"),
        ({"start_lr": "0.1"}, TypeError, "start_lr must be a number"),
        ({"end_lr": "10"}, TypeError, "end_lr must be a number"),
        ({"end_lr": [1.0, "2"]}, TypeError, "end_lr must be a number"),
        ({"end_lr": None}, TypeError, "end_lr must be a number"),
        ({"start_lr": [0.1, 0.2]}, ValueError, "one rate for each of 1 parameter groups"),
        ({"start_lr": 10, "end_lr": 10}, ValueError, "start_lr must be below end_lr, got 10.0 and 10.0"),
        ({"start_lr": 0}, ValueError, "start_lr must be above 0"),
        ({"step_mode": "cosine"}, ValueError, "step_mode must be 'exp' or 'linear'"),
        ({"smooth_f": 1}, ValueError, "smooth_f must be at least 0 and below 1"),
        ({"smooth_f": -0.1}, ValueError, "smooth_f must be at least 0 and below 1"),
        ({"smooth_f": "0"}, TypeError, "smooth_f must be a number"),
        ({"diverge_th": math.nan}, ValueError, "diverge_th must be a finite number"),
        ({"diverge_th": 0.9}, ValueError, "diverge_th must be at least 1"),
        ({"diverge_th": None}, TypeError, "diverge_th must be a number"),
    ],
)
def test_invalid_arguments_are_rejected_before_the_block(arguments, error, message):
    trainer = Engine(lambda engine, batch: 1.0)
    arguments = {"to_save": {"optimizer": OPTIMIZER}, **arguments}
    with pytest.raises(error, match=message), FastaiLRFinder().attach(trainer, **arguments):
        pytest.fail("the block was entered")


# --- several ranks -----------------------------------------------------------------------------------------


@on_ranks(2)
def test_losses_are_averaged_over_ranks_and_all_ranks_stop_together():
    one, other = [4.0, 2.0, 100.0], [2.0, 2.0, 0.0]
    search = Search(one if idist.get_rank() == 0 else other)
    results = search.run(range(50), smooth_f=0)
    assert results["loss"] == [3.0, 2.0, 50.0]
    assert len(search.used) == 3


# --- the plot ----------------------------------------------------------------------------------------------

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


def test_losses_are_plotted_over_rates(pyplot):
    finder = searched()
    ax = finder.plot(skip_start=2, skip_end=1)
    results = finder.get_results()
    assert points(ax.lines[0]) == list(zip(results["lr"], results["loss"], strict=True))[2:-1]
    assert (ax.get_xscale(), ax.get_xlabel(), ax.get_ylabel()) == ("log", "Learning rate", "Loss")
    [marked] = ax.collections
    assert marked.get_offsets().tolist() == [[finder.lr_suggestion(), 5.0]]


def test_skipping_and_the_suggestion_can_be_turned_off(pyplot):
    ax = searched().plot(skip_start=0, skip_end=0, log_lr=False, display_suggestion=False)
    assert len(points(ax.lines[0])) == len(LOSSES)
    assert ax.get_xscale() == "linear"
    assert not ax.collections
    assert ax.get_legend() is None


def test_it_plots_into_given_or_new_axes(pyplot):
    _, ax = pyplot.subplots()
    assert searched().plot(2, 0, ax=ax) is ax
    assert searched().plot(2, 0, figsize=(3, 4)).figure.get_size_inches().tolist() == [3, 4]


def test_each_group_has_a_line(pyplot):
    ax = searched(rates=(1.0, 10.0)).plot(2, 0)
    assert len(ax.lines) == len(ax.collections) == 2
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert [label for label in labels if label.startswith("group")] == ["group 0", "group 1"]


def test_a_suggestion_in_the_skipped_start_warns(pyplot):
    with pytest.warns(UserWarning, match="that of point 4, is not drawn"):
        searched().plot()


def test_more_points_may_be_skipped_than_exist(pyplot):
    with pytest.warns(UserWarning, match="not drawn"):
        assert points(searched().plot(10, 10).lines[0]) == []


def test_a_search_without_a_suggestion_can_be_plotted(pyplot):
    finder = searched(losses=[1.0, 2.0, 3.0])
    assert len(points(finder.plot(0, 0, display_suggestion=False).lines[0])) == 3


@pytest.mark.parametrize("name", ["skip_start", "skip_end"])
def test_negative_skips_are_rejected(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 0, got -1"):
        searched().plot(**{name: -1})


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    for finder in (searched(), FastaiLRFinder()):
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'camshaft\[plot\]'"):
            finder.plot()


def test_plotting_needs_a_search(pyplot):
    with pytest.raises(RuntimeError, match="no search"):
        FastaiLRFinder().plot()
