"""Scripts of the migration guides that need files written by other libraries."""

from __future__ import annotations

import importlib
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from camshaft import handlers
from camshaft.engine import Engine, Events, create_supervised_trainer
from tests.docs.titled import titled

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_checkpoint_of_a_running_job_of_ignite_is_continued(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = [importlib.import_module(f"ignite.{name}") for name in ("engine", "handlers")]
    batches = [(torch.rand(4, 2), torch.rand(4, 1)) for _ in range(4)]
    steps = []
    for create in (theirs[0].create_supervised_trainer, create_supervised_trainer):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters())
        trainer = create(model, optimizer, nn.functional.mse_loss)
        to_save = {"model": model, "optimizer": optimizer, "trainer": trainer}
        if create is create_supervised_trainer:
            trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: steps.append(engine.state.iteration))
            exec(titled("reference/pytorch-ignite.md", "continue.py"), {**to_save, "batches": batches})
            assert optimizer.state_dict()["state"][0]["step"] == 16
        else:
            saving = theirs[1].ModelCheckpoint("models")
            trainer.add_event_handler(theirs[0].Events.EPOCH_COMPLETED, saving, to_save)
            trainer.run(batches, max_epochs=2)
    assert steps == list(range(9, 17))


def test_the_warm_up_of_a_running_job_of_ignite_is_continued(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = [importlib.import_module(f"ignite.{name}") for name in ("engine", "handlers")]
    batches = [(torch.rand(4, 2), torch.rand(4, 1)) for _ in range(4)]

    def rates(create, train):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer, seen = create(model, optimizer, nn.functional.mse_loss), []
        trainer.add_event_handler("ITERATION_COMPLETED", lambda: seen.append(optimizer.param_groups[0]["lr"]))
        train({"model": model, "optimizer": optimizer, "trainer": trainer})
        return seen

    def train(to_save):
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(to_save["optimizer"], T_max=16)
        schedule = theirs[1].create_lr_scheduler_with_warmup(cosine, 0.0, 4)
        to_save["trainer"].add_event_handler(theirs[0].Events.ITERATION_STARTED, schedule)
        saving = theirs[1].ModelCheckpoint("models", n_saved=None)
        to_save["trainer"].add_event_handler(theirs[0].Events.EPOCH_COMPLETED, saving, to_save)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it steps the schedule before the optimizer
            to_save["trainer"].run(batches, max_epochs=4)

    def resume(to_save):
        exec(titled("reference/pytorch-ignite.md", "warm_up.py"), {**to_save, "batches": batches})

    def restart(to_save):
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(to_save["optimizer"], T_max=16)
        schedule = handlers.create_lr_scheduler_with_warmup(cosine, 0.0, 4)
        to_save["trainer"].add_event_handler(Events.ITERATION_STARTED, schedule)
        names = {
            **to_save,
            "schedule": schedule,
            "batches": batches,
            "Checkpoint": handlers.Checkpoint,
            "Events": Events,
        }
        exec(titled("reference/pytorch-ignite.md", "restart.py"), names)

    def first_start(to_save):
        to_save["trainer"].add_event_handler(Events.ITERATION_COMPLETED(once=14), to_save["trainer"].terminate)
        restart(to_save)

    expected = rates(theirs[0].create_supervised_trainer, train)
    assert rates(create_supervised_trainer, resume) == pytest.approx(expected[8:])
    assert rates(create_supervised_trainer, first_start) == pytest.approx(expected[8:14])
    assert rates(create_supervised_trainer, restart) == pytest.approx(expected[12:])


def test_a_checkpoint_of_camshaft_without_schedules_loads_with_ignite():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = [importlib.import_module(f"ignite.{name}") for name in ("engine", "handlers")]

    def objects(create, library):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters())
        trainer = create(model, optimizer, nn.functional.mse_loss)
        return {
            "trainer": trainer,
            "model": model,
            "optimizer": optimizer,
            "torch": torch.optim.lr_scheduler.StepLR(optimizer, 3),
            "stopping": library.EarlyStopping(3, lambda engine: 0.0, trainer),
            "average": library.EMAHandler(model).ema_model,
            "schedule": library.LinearCyclicalScheduler(optimizer, "lr", 0.1, 0.2, 10),
        }

    saved = objects(create_supervised_trainer, handlers)
    saved["trainer"].run([(torch.rand(4, 2), torch.rand(4, 1))] * 4, max_epochs=2)
    checkpoint = {name: one.state_dict() for name, one in saved.items()}
    loaded = objects(theirs[0].create_supervised_trainer, theirs[1])
    schedule = loaded.pop("schedule")
    theirs[1].Checkpoint.load_objects(loaded, checkpoint)
    assert loaded["trainer"].state.iteration == 8
    assert torch.equal(loaded["model"].weight, saved["model"].weight)
    with pytest.raises(ValueError, match="Required state attribute 'save_history' is absent"):
        theirs[1].Checkpoint.load_objects({"schedule": schedule, "model": loaded["model"]}, checkpoint)


@pytest.mark.parametrize(
    "code",
    [
        "handlers.Timer().attach(ignite.engine.Engine(step))",
        "ignite.engine.Engine(step).add_event_handler(Events.EPOCH_COMPLETED, print)",
        "ignite.engine.Events.STARTED | Events.COMPLETED",
        "ignite.handlers.EarlyStopping(3, step, trainer)",
        "ignite.handlers.BasicTimeProfiler().attach(trainer)",
        "ignite.handlers.ProgressBar().attach(trainer)",
        "with ignite.handlers.TensorboardLogger('.') as logger: logger.attach_output_handler("
        "trainer, ignite.engine.Events.ITERATION_COMPLETED, 'training', output_transform=step); trainer.run([1])",
        "trainer.register_events(*ignite.engine.EventEnum('Own', 'ADDED'))",
        "ignite.handlers.ModelCheckpoint('.')(trainer, {'model': nn.Linear(1, 1)})",
        "handlers.ConcatScheduler([schedule, schedule], [10])",
    ],
)
def test_a_half_migrated_script_raises_an_error_that_the_page_explains(tmp_path, monkeypatch, code):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ignite = importlib.import_module("ignite.handlers") and importlib.import_module("ignite")
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        names = {"ignite": ignite, "handlers": handlers, "Events": Events, "nn": nn}
        names["step"] = lambda engine, batch=None: 1
        names["trainer"] = Engine(lambda engine, batch: None)
        names["schedule"] = ignite.handlers.LinearCyclicalScheduler(optimizer, "lr", 0.1, 0.2, 10)
        with pytest.raises(Exception) as caught:  # noqa: PT011 - the page has the message
            exec(code, names)
    section = (ROOT / "docs/reference/pytorch-ignite.md").read_text("utf-8").split("## Half-migrated scripts")[1]
    shown = re.findall(r"`([^`]+)`(?=[,. |])", section.split("\n## ")[0])
    patterns = [".*".join(map(re.escape, message.split("..."))) for message in shown if " " in message]
    assert any(re.match(pattern, str(caught.value)) for pattern in patterns)


def test_weights_of_lightning_are_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
    prefixed = {f"net.{name}": value for name, value in model.state_dict().items()}
    torch.save({"epoch": 3, "state_dict": prefixed}, "epoch=3.ckpt")
    exec(titled("migrating/from-lightning.md", "convert.py"), {})
    converted = torch.load("model.pt", weights_only=True)
    assert converted.keys() == model.state_dict().keys()
    assert all(torch.equal(value, converted[name]) for name, value in model.state_dict().items())
