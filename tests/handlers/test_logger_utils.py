"""Test what setup_*_logging attaches, with which tags and steps."""

from __future__ import annotations

import pytest
import torch

from camshaft.engine import Engine, Events
from camshaft.handlers import logger_utils
from camshaft.handlers.logger_utils import setup_csv_logging, setup_jsonl_logging, setup_tb_logging
from tests.handlers.test_file_logger import records
from tests.handlers.test_tensorboard_logger import curve, reader


def engines(**metrics):
    trainer, evaluator = (Engine(lambda engine, batch: None) for _ in range(2))
    trainer.state.metrics = {"loss": 0.5, **metrics}
    evaluator.state.metrics = {"accuracy": 0.25, **metrics}
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([0]))
    return trainer, evaluator


def optimizer(lr=0.5):
    return torch.optim.SGD([torch.zeros(1)], lr=lr)


@pytest.mark.parametrize("setup", [setup_csv_logging, setup_jsonl_logging])
def test_trainer_optimizer_and_evaluator_are_logged(setup, tmp_path):
    trainer, evaluator = engines()
    with setup(tmp_path, trainer, optimizer(), evaluator, log_every_iters=2) as logger:
        trainer.run(range(3), max_epochs=2)
    assert records(logger.path) == [
        {"step": 2, "lr/group_0": 0.5},
        {"step": 2, "training/loss": 0.5},
        {"step": 1, "validation/accuracy": 0.25},
        {"step": 4, "lr/group_0": 0.5},
        {"step": 4, "training/loss": 0.5},
        {"step": 6, "lr/group_0": 0.5},
        {"step": 6, "training/loss": 0.5},
        {"step": 2, "validation/accuracy": 0.25},
    ]


def test_optimizers_and_evaluators_by_tag_and_metrics_by_name(tmp_path):
    trainer, evaluator = engines(other=1)
    logger = setup_tb_logging(
        tmp_path, trainer, {"a": optimizer(), "b": optimizer(0.25)}, {"test": evaluator}, log_every_iters=None,
        trainer_metric_names=["loss"], evaluator_metric_names=["accuracy"],
    )  # fmt: skip
    with logger:
        trainer.run(range(2))
    names = reader(tmp_path).Tags()["scalars"]
    assert {name: curve(tmp_path, name) for name in names} == {
        "training/loss": [(1, 0.5), (2, 0.5)],
        "a/lr/group_0": [(1, 0.5), (2, 0.5)],
        "b/lr/group_0": [(1, 0.25), (2, 0.25)],
        "test/accuracy": [(1, 0.25)],
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trainer": "trainer"}, "trainer must be an Engine, got 'trainer'"),
        ({"optimizers": "sgd"}, "optimizers must be an optimizer, or a mapping of tags to optimizers, got 'sgd'"),
        ({"optimizers": {"a": optimizer(), "b": 3}}, "optimizers must be .*, got 3"),
        ({"evaluators": [1]}, r"evaluators must be an evaluator, or a mapping of tags to evaluators, got \[1\]"),
        ({"trainer_metric_names": "loss"}, "trainer_metric_names must be a list of names or 'all', got 'loss'"),
        ({"evaluator_metric_names": 3}, "evaluator_metric_names must be a list"),
    ],
)
def test_invalid_arguments_raise_before_the_logger_is_made(options, message, tmp_path):
    with pytest.raises(TypeError, match=message):
        setup_csv_logging(tmp_path / "new", **{"trainer": engines()[0], **options})
    assert not (tmp_path / "new").exists()


class Lines:
    """Records how it was made and what was attached to it."""

    def __init__(self, **kwargs):
        self.kwargs = kwargs
        self.attached = []

    def attach_output_handler(self, engine, event, tag, metric_names, global_step_transform=None):
        self.attached.append((engine, event, tag, metric_names, global_step_transform))

    def attach_opt_params_handler(self, engine, event, optimizer, param_name, tag):
        self.attached.append((engine, event, optimizer, param_name, tag))


@pytest.mark.parametrize(
    ("kind", "logger", "step"),
    [("mlflow", "MLflowLogger", 2), ("wandb", "WandBLogger", 6), ("clearml", "ClearMLLogger", 2)],
)
def test_services_get_their_arguments_and_the_right_step_for_evaluators(kind, logger, step):
    setup = getattr(logger_utils, f"setup_{kind}_logging")
    assert setup.args[0].__name__ == logger
    trainer, evaluator = engines()
    made = setup.func(Lines, *setup.args[1:], trainer, None, evaluator, project="p")
    assert made.kwargs == {"project": "p"}
    (engine, event, tag, _, _), (other, at, name, names, transform) = made.attached
    assert (engine, tag, event) == (trainer, "training", Events.ITERATION_COMPLETED)
    assert event.filter(None, 100)
    assert not event.filter(None, 50)
    assert (other, at, name, names) == (evaluator, Events.COMPLETED, "validation", "all")
    trainer.run(range(3), max_epochs=2)
    assert transform(evaluator, Events.COMPLETED) == step


def test_trains_is_a_deprecated_name_of_clearml(monkeypatch):
    monkeypatch.setattr(logger_utils, "setup_clearml_logging", Lines)
    with pytest.warns(DeprecationWarning, match="use setup_clearml_logging"):
        assert logger_utils.setup_trains_logging(project="p").kwargs == {"project": "p"}
