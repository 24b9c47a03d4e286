"""Test what the functions of common attach, also against PyTorch-Ignite."""

from __future__ import annotations

import importlib
import inspect
import io
import logging
import warnings
from contextlib import redirect_stderr

import pytest
import torch
from torch import nn

from camshaft.contrib.engines import common
from camshaft.engine import Engine, Events
from camshaft.handlers import Checkpoint, CSVLogger, EarlyStopping, PiecewiseLinear, ProgressBar
from tests.handlers.test_file_logger import records
from tests.threads import run_on_threads

setup = common.setup_common_training_handlers


@pytest.fixture(scope="module")
def theirs():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("ignite.contrib.engines.common"), importlib.import_module("ignite.engine")


def trainer_of(output=None):
    return Engine(lambda engine, batch: batch if output is None else output)


def optimizer(lr=1.0):
    return torch.optim.SGD([torch.zeros(1)], lr=lr)


def evaluators(values):
    """Return a trainer, and an evaluator that runs after each epoch with the next value of the metric."""
    trainer, evaluator = (Engine(lambda engine, batch: None) for _ in range(2))

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate():
        evaluator.state.metrics["score"] = values[trainer.state.epoch - 1]
        evaluator.run([0])

    return trainer, evaluator


def files(folder):
    return sorted(path.name for path in folder.glob("*.pt"))


# --- the usual handlers ---------------------------------------------------------------------------------------------


def test_checkpoints_are_saved_and_resumed_in_the_same_directory(tmp_path):
    for last, expected in ((2, ["training_checkpoint_9.pt"]), (4, ["training_checkpoint_18.pt"])):
        trainer, model = trainer_of(), nn.Linear(1, 1)
        to_save = {"model": model, "trainer": trainer}
        if last == 4:
            Checkpoint.load_objects(to_save, tmp_path / "training_checkpoint_9.pt")
            (tmp_path / "training_checkpoint_9.pt").unlink()
        setup(trainer, to_save=to_save, save_every_iters=3, output_path=tmp_path, with_pbars=False)
        trainer.run([1.0] * 5, max_epochs=last)
        assert files(tmp_path) == expected


def test_arguments_of_the_checkpoint_are_passed_on(tmp_path):
    trainer, saved, to_save = trainer_of(), [], {"model": nn.Linear(1, 1)}
    options = {
        "n_saved": 2,
        "filename_prefix": "a",
        "save_handler": lambda checkpoint, name, metadata: saved.append(name),
    }
    setup(trainer, to_save=to_save, save_every_iters=1, with_pbars=False, **options)
    trainer.run([1.0] * 2)
    assert saved == ["a_model_1.pt", "a_model_2.pt"]


def test_schedulers_of_torch_step_after_and_those_of_camshaft_before_an_iteration():
    rates = {}
    for name, make in {
        "torch": lambda one: torch.optim.lr_scheduler.StepLR(one, 1, gamma=0.5),
        "camshaft": lambda one: PiecewiseLinear(one, "lr", [(0, 4.0), (2, 0.0)]),
    }.items():
        one, seen = optimizer(), []
        trainer = Engine(lambda engine, batch, one=one, seen=seen: (seen.append(one.param_groups[0]["lr"]), one.step()))
        setup(trainer, lr_scheduler=make(one), with_pbars=False, stop_on_nan=False)
        trainer.run([0] * 3)
        rates[name] = seen
    assert rates == {"torch": [1.0, 0.5, 0.25], "camshaft": [4.0, 2.0, 0.0]}


@pytest.mark.parametrize(("stops", "iterations"), [(True, 1), (False, 3)])
def test_the_run_stops_on_nan_if_wanted(stops, iterations, caplog):
    caplog.set_level(logging.ERROR)
    trainer = trainer_of(float("nan"))
    setup(trainer, stop_on_nan=stops, with_pbars=False)
    assert trainer.run([0] * 3).iteration == iterations


@pytest.mark.parametrize(
    ("output", "names", "expected"),
    [
        ((1.0, torch.tensor(2.0)), ["a", "b"], {"a": 1.0, "b": 2.0}),
        (torch.tensor(3.0), ["loss"], {"loss": 3.0}),
        (3.0, iter(["loss"]), {"loss": 3.0}),
    ],
)
def test_running_averages_of_named_outputs(output, names, expected):
    trainer = trainer_of(output)
    setup(trainer, output_names=names, with_pbars=False)
    assert trainer.run([0] * 3).metrics == expected


@pytest.mark.parametrize(("clears", "calls"), [(True, 2), (False, 0)])
def test_the_cache_of_gpu_memory_is_emptied_after_each_epoch_if_wanted(clears, calls, monkeypatch):
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(None))
    trainer = trainer_of()
    setup(trainer, clear_cuda_cache=clears, with_pbars=False)
    trainer.run([0], max_epochs=2)
    assert len(emptied) == calls


@pytest.mark.parametrize(
    ("options", "events"),
    [
        ({}, [("ITERATION_COMPLETED", False), ("EPOCH_STARTED", True)]),
        ({"with_pbar_on_iters": False}, [("EPOCH_STARTED", True)]),
        ({"with_pbars": False}, []),
    ],
)
def test_progress_bars(options, events, monkeypatch):
    attached, attach = [], ProgressBar.attach

    def record(bar, engine, **arguments):
        attached.append((arguments["event_name"].name, bar.persist))
        return attach(bar, engine, **arguments)

    monkeypatch.setattr(ProgressBar, "attach", record)
    trainer = trainer_of()
    with redirect_stderr(io.StringIO()) as shown:
        setup(trainer, log_every_iters=2, output_names=["loss"], **options)
        trainer.run([1.0] * 4, max_epochs=2)
    assert attached == events
    assert bool(shown.getvalue()) == bool(events)
    assert ("loss=1" in shown.getvalue()) == (len(events) == 2)


class Sampler:
    def __init__(self):
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


class Loader(list):
    sampler = None


@pytest.mark.parametrize("knows", [True, False])
def test_the_epoch_is_announced_once_also_to_a_sampler_that_the_loader_does_not_name(knows):
    trainer, loader, sampler = trainer_of(), Loader([0, 0]), Sampler()
    loader.sampler = sampler if knows else None
    setup(trainer, sampler, with_pbars=False)
    trainer.run(loader, max_epochs=3)
    assert sampler.epochs == [0, 1, 2]


def test_a_sampler_without_epochs_is_rejected_in_a_job_and_accepted_in_a_single_process():
    def set_up():
        setup(trainer_of(), torch.utils.data.SequentialSampler([0]), with_pbars=False)

    set_up()
    with pytest.raises(pytest.fail.Exception, match="TypeError: train_sampler must have set_epoch"):
        run_on_threads(2, set_up)


def test_gpu_statistics_are_metrics(monkeypatch):
    monkeypatch.setattr(common, "current_device", lambda: torch.device("cuda:1"))
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 10 * device.index)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50, 200))
    trainer = trainer_of()
    setup(trainer, with_gpu_stats=True, log_every_iters=2, with_pbars=False)
    assert trainer.run([0]).metrics == {}
    assert trainer.run([0, 0]).metrics == {"gpu:1 mem(%)": 75, "gpu:1 util(%)": 10}


def test_gpu_statistics_need_a_gpu_and_a_library(monkeypatch):
    monkeypatch.setattr(common, "current_device", lambda: torch.device("cpu"))
    with pytest.raises(RuntimeError, match="with_gpu_stats=True needs a GPU, but this process uses 'cpu'"):
        setup(trainer_of(), with_gpu_stats=True)
    monkeypatch.setattr(common, "current_device", lambda: torch.device("cuda:0"))

    def missing(device):
        raise ModuleNotFoundError("pynvml", name="pynvml")

    monkeypatch.setattr(torch.cuda, "utilization", missing)
    with pytest.raises(ModuleNotFoundError, match="pip install nvidia-ml-py"):
        setup(trainer_of(), with_gpu_stats=True)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"to_save": {"model": nn.Linear(1, 1)}}, ValueError),
        ({"to_save": {"model": nn.Linear(1, 1)}, "output_path": "new", "save_handler": print}, ValueError),
        ({"lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer())}, TypeError),
        ({"lr_scheduler": 3}, TypeError),
        ({"output_names": "loss"}, TypeError),
        ({"save_every_iters": 0}, ValueError),
        ({"log_every_iters": None}, TypeError),
        ({"trainer": "trainer"}, TypeError),
    ],
)
def test_invalid_arguments_are_rejected_before_anything_is_attached(options, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = trainer_of(float("nan"))
    with pytest.raises(error, match=next(iter(options))):
        setup(**{"trainer": trainer, **options})
    assert trainer.run([0] * 2).iteration == 2  # otherwise NaN would end the run
    assert not list(tmp_path.iterdir())


# --- best models and early stopping ---------------------------------------------------------------------------------


def test_several_models_in_one_file_lower_is_better_and_other_arguments(tmp_path):
    trainer, evaluator = evaluators([0.1, 0.3])
    common.gen_save_best_models_by_val_score(
        tmp_path, evaluator, {"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}, "score", 1, tag="test", score_sign=-1.0,
        filename_prefix="x",
    )  # fmt: skip
    trainer.run([0], max_epochs=2)
    assert files(tmp_path) == ["x_checkpoint_test_score=-0.1000.pt"]


def test_training_stops_without_improvement():
    trainer, evaluator = evaluators([3.0, 1.0, 2.0, 2.0, 2.0])
    stopping = common.add_early_stopping_by_val_score(2, evaluator, trainer, "score", score_sign=-1.0)
    assert isinstance(stopping, EarlyStopping)
    assert trainer.run([0], max_epochs=5).epoch == 4


# --- loggers --------------------------------------------------------------------------------------------------------


def test_any_logger_is_set_up_with_a_warning(tmp_path):
    trainer, evaluator = evaluators([0.5])
    trainer.state.metrics = {"loss": 1.5}
    with CSVLogger(tmp_path) as logger:
        with pytest.warns(DeprecationWarning, match="setup_any_logging is deprecated"):
            common.setup_any_logging(logger, None, trainer, optimizer(), {"test": evaluator}, log_every_iters=1)
        trainer.run([0])
    assert records(logger.path) == [
        {"step": 1, "lr/group_0": 1.0},
        {"step": 1, "training/loss": 1.5},
        {"step": 1, "test/score": 0.5},
    ]
    with pytest.raises(TypeError, match="logger must be a logger"):
        common.setup_any_logging("tb", None, trainer)


# --- beside PyTorch-Ignite ------------------------------------------------------------------------------------------


def test_names_and_arguments_are_those_of_ignite(theirs):
    for name in common.__all__:
        arguments = [inspect.signature(getattr(module, name)).parameters for module in (common, theirs[0])]
        if not name.endswith("_logging"):  # those have arguments of their own for the loggers
            ours, others = ([(one.name, one.kind, one.default) for one in each.values()] for each in arguments)
            assert ours == others, name


def test_rates_averages_and_files_are_those_of_ignite(theirs, tmp_path):
    results = []
    for library, engine_class, events in ((common, Engine, Events), (theirs[0], theirs[1].Engine, theirs[1].Events)):
        folder, one, rates = tmp_path / str(len(results)), optimizer(), []
        trainer = engine_class(
            lambda engine, batch, one=one, rates=rates: (
                one.step(),
                rates.append(one.param_groups[0]["lr"]),
                {"a": batch, "b": 2.0},
            )[2]
        )
        evaluator = engine_class(lambda engine, batch: None)

        @trainer.on(events.EPOCH_COMPLETED)
        def evaluate(engine, evaluator=evaluator):
            evaluator.state.metrics["score"] = engine.state.epoch / 10
            evaluator.run([0])

        schedule = torch.optim.lr_scheduler.StepLR(one, 1, gamma=0.5)
        library.setup_common_training_handlers(
            trainer, to_save={"optimizer": one, "trainer": trainer}, save_every_iters=2, output_path=str(folder),
            lr_scheduler=schedule, output_names=["a", "b"], with_pbars=False,
        )  # fmt: skip
        model = nn.Linear(1, 1)
        library.save_best_model_by_val_score(str(folder), evaluator, model, "score", 2, trainer)
        library.gen_save_best_models_by_val_score(
            library.DiskSaver(str(folder / "all"), create_dir=True), evaluator, {"a": model, "b": model}, "score", 1
        )
        trainer.run([0.5, 1.0, 2.0], max_epochs=3)
        results.append((rates, dict(trainer.state.metrics), files(folder), files(folder / "all")))
    assert results[0] == results[1]
    assert results[0][2:] == (
        ["best_model_2_val_score=0.2000.pt", "best_model_3_val_score=0.3000.pt", "training_checkpoint_8.pt"],
        ["best_checkpoint_val_score=0.3000.pt"],
    )
