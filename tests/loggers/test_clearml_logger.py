"""Test ClearMLLogger and ClearMLSaver in offline mode by reading the files that they write."""

from __future__ import annotations

import json

import pytest
import torch

from camshaft.engine import Engine, Events
from camshaft.handlers import Checkpoint
from camshaft.handlers.clearml_logger import ClearMLLogger, ClearMLSaver
from tests.loggers.scripts import run_script

NEW = 'ClearMLLogger(project_name="p", task_name="t", auto_resource_monitoring=False, auto_connect_streams=False)'


def events(folder):
    """Return the events that would have been sent to the server."""
    (file,) = folder.glob("clearml/offline/offline-*/metrics.jsonl")
    found = []
    for line in file.read_text().splitlines():
        content = json.loads(line)
        found += content if isinstance(content, list) else [content]
    return found


def scalars(folder):
    return [
        (event["metric"], event["variant"], event["iter"], event["value"])
        for event in events(folder)
        if event["type"] == "training_stats_scalar"
    ]


def test_values_weights_and_gradients_are_written(tmp_path):
    run_script(
        tmp_path,
        f"""
        from camshaft.handlers.clearml_logger import *
        ClearMLLogger.set_bypass_mode(True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            logger = {NEW}
        assert any("bypass mode" in str(one.message) for one in caught)
        with logger:
            trainer = by_iteration(logger)
            logger.attach_output_handler(trainer, Events.COMPLETED, "t", output_transform=lambda output: [[3]])
            layers = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False))
            torch.nn.init.constant_(layers[0].weight, 3)
            layers[0].weight.grad = torch.full((1, 1), -2.0)
            optimizer = torch.optim.SGD(layers.parameters(), lr=0.25)
            for handler in (
                OptimizerParamsHandler(optimizer), OptimizerParamsHandler(optimizer, tag="net"),
                WeightsScalarHandler(layers), GradsScalarHandler(layers, tag="net"),
                WeightsHistHandler(layers, tag="net"), GradsHistHandler(layers),
            ):
                logger.attach(trainer, handler, Events.COMPLETED)
            logger.report_text("any method of the logger")
            trainer.run(range(4))
            assert logger.get_task().get_logger() is logger.clearml_logger
        assert logger.get_task() is None
        """,
    )
    assert scalars(tmp_path) == [
        ("training", "loss", 2, 1.0),
        ("training", "loss", 4, 2.0),
        ("t/output", "0/0", 1, 3),
        ("lr", "0", 1, 0.25),
        ("net/lr", "0", 1, 0.25),
        ("weights_norm/0", "weight", 1, 3.0),
        ("net/grads_norm/0", "weight", 1, 2.0),
    ]
    plots = {(event["metric"], event["variant"]) for event in events(tmp_path) if event["type"] == "plot"}
    assert plots == {("net/weights_0", "weight"), ("grads_0", "weight")}


def test_checkpoints_are_models_and_slots_are_reused(tmp_path):
    result = run_script(
        tmp_path,
        f"""
        from camshaft.handlers import Checkpoint
        from camshaft.handlers.clearml_logger import *
        ClearMLLogger.set_bypass_mode(True)
        warnings.simplefilter("ignore")
        try:
            ClearMLSaver(dirname="saved")
        except RuntimeError as error:
            assert "there is no ClearML task" in str(error)
        else:
            raise AssertionError
        with {NEW} as logger:
            saver = ClearMLSaver(logger, dirname="saved")
            assert saver.atomic is False
            model = torch.nn.Linear(1, 1)
            trainer = Engine(lambda engine, batch: None)
            checkpoint = Checkpoint({{"model": model}}, saver, n_saved=2)
            trainer.add_event_handler(Events.EPOCH_COMPLETED, checkpoint)
            trainer.run(range(4), max_epochs=4)
            assert saver.get_local_copy("model_16.pt") == "saved/model_16.pt"
            assert saver.get_local_copy("model_4.pt") is None
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                saver({{}}, "bare.pt")
                unnamed = ClearMLSaver(logger)
            assert "named 'checkpoint'" in str(caught[0].message)
            assert f"temporary directory {{unnamed.dirname}}" in str(caught[1].message)
            unnamed.dirname.rmdir()
            found = {{name: one.metadata["filename"] for name, one in logger.get_task().artifacts.items()}}
            assert found == {{"model_0": "model_16.pt", "model_1": "model_8.pt", "model_2": "model_12.pt",
                             "checkpoint_0": "bare.pt"}}, found
        """,
    )
    assert "Skipping upload" not in result.stdout + result.stderr
    uploaded = {file.name for file in tmp_path.glob("clearml/offline/offline-*/**/*.pt")}
    assert uploaded == {"model_4.pt", "model_8.pt", "model_12.pt", "model_16.pt", "bare.pt"}


class Model:
    """Replaces the model that ClearML would upload."""

    def __init__(self, task, name, framework):
        task.models.append(self)
        self.name, self.uploads, self.comment = name, [], ""

    def update_weights(self, path, target_filename, auto_delete_file, update_comment):
        assert (auto_delete_file, update_comment) == (False, False)
        self.uploads.append(target_filename)


class Task:
    def __init__(self):
        self.models = []

    def is_offline(self):
        return False


def test_online_each_slot_is_a_model_with_the_metadata_as_its_comment(monkeypatch, tmp_path):
    import clearml

    task = Task()
    monkeypatch.setattr(clearml, "OutputModel", Model)
    monkeypatch.setattr(clearml.Task, "current_task", lambda: task)
    saver = ClearMLSaver(dirname=tmp_path, output_uri="somewhere")
    assert task.output_uri == "somewhere"
    trainer = Engine(lambda engine, batch: None)
    checkpoint = Checkpoint({"model": torch.nn.Linear(1, 1)}, saver, n_saved=1)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, checkpoint)
    trainer.run(range(4), max_epochs=4)
    assert {model.name: model.uploads for model in task.models} == {
        "model_0": ["model_4.pt", "model_12.pt"],
        "model_1": ["model_8.pt", "model_16.pt"],
    }
    assert "filename: model_16.pt" in task.models[1].comment
    assert "basename: model" in task.models[1].comment


def test_a_task_whose_block_failed_is_marked_as_failed(tmp_path):
    run_script(
        tmp_path,
        f"""
        from camshaft.handlers.clearml_logger import *
        ClearMLLogger.set_bypass_mode(True)
        warnings.simplefilter("ignore")
        calls = []
        try:
            with {NEW} as logger:
                task = logger.get_task()
                by_iteration(logger).run(range(4))
                marked, closed = task.mark_failed, task.close
                task.mark_failed = lambda *args, **options: calls.append("failed") or marked(*args, **options)
                task.close = lambda: calls.append("closed") or closed()
                raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        assert calls == ["failed", "closed"], calls
        """,
    )
    assert scalars(tmp_path) == [("training", "loss", 2, 1.0), ("training", "loss", 4, 2.0)]


def test_an_unreachable_server_keeps_the_task_offline_with_one_warning(tmp_path):
    run_script(
        tmp_path,
        f"""
        from camshaft.handlers import ClearMLLogger
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with {NEW} as logger:
                assert by_iteration(logger).run(range(4)).iteration == 4
        found = [str(one.message) for one in caught if "does not answer: the task is kept offline" in str(one.message)]
        assert len(found) == 1, caught
        """,
        **{f"CLEARML_{name}_HOST": "http://127.0.0.1:9" for name in ("API", "WEB", "FILES")},
        CLEARML_API_ACCESS_KEY="key",
        CLEARML_API_SECRET_KEY="secret",
    )
    assert scalars(tmp_path) == [("training", "loss", 2, 1.0), ("training", "loss", 4, 2.0)]


@pytest.mark.parametrize(
    ("value", "expected"), [("", False), ("0", False), ("false", False), ("No", False), ("true", True), ("1", True)]
)
def test_the_environment_variable_ci_is_parsed(monkeypatch, value, expected):
    monkeypatch.setattr(ClearMLLogger, "_bypass", None)
    monkeypatch.setenv("CI", value)
    assert ClearMLLogger.bypass_mode() is expected


def test_a_saver_rejects_other_loggers():
    with pytest.raises(TypeError, match="logger must be a ClearMLLogger, got 'logger' of type str"):
        ClearMLSaver("logger")
