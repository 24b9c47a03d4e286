"""Test TensorboardLogger by reading its event files with TensorBoard's own reader."""

from __future__ import annotations

import copy
import importlib.machinery
import pickle
import sys
import tempfile
import types
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer
from torch.utils.tensorboard import SummaryWriter

from camshaft.engine import Engine, Events
from camshaft.handlers import Checkpoint, TensorboardLogger, global_step_from_engine
from camshaft.handlers.tensorboard_logger import (
    GradsHistHandler,
    GradsScalarHandler,
    OptimizerParamsHandler,
    OutputHandler,
    WeightsHistHandler,
    WeightsScalarHandler,
)
from tests.handlers.parts import Memory, Part, at
from tests.ranks import on_ranks


@pytest.fixture(autouse=True)
def files_in_order(monkeypatch):
    """Let the names of the files of one second, which end in a count of writers, sort as text."""
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(100))


def reader(folder):
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    found.Reload()
    return found


def curve(folder, tag):
    return [(point.step, point.value) for point in reader(folder).Scalars(tag)]


def model():
    layers = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(1, 1, bias=False))
    for layer in layers:
        torch.nn.init.constant_(layer.weight, 3)
    layers[1].weight.grad = torch.full((1, 1), -2.0)
    return layers


def test_outputs_are_scalars_named_by_tag_and_path(tmp_path):
    with TensorboardLogger(log_dir=tmp_path) as logger:
        handler = OutputHandler("t", "all", lambda output: {"box": output}, state_attributes=["epoch"])
        engine = at(iteration=7, epoch=2, loss=torch.tensor(0.5))
        engine.state.output = [1, {"x": 2}]
        handler(engine, logger, Events.ITERATION_COMPLETED)
    found = {tag: curve(tmp_path, tag) for tag in reader(tmp_path).Tags()["scalars"]}
    assert found == {"t/loss": [(7, 0.5)], "t/box/0": [(7, 1)], "t/box/1/x": [(7, 2)], "t/epoch": [(7, 2)]}


@pytest.mark.parametrize(("tag", "prefix"), [(None, ""), ("net", "net/")])
def test_optimizers_weights_and_gradients(tmp_path, tag, prefix):
    layers = model()
    optimizer = torch.optim.SGD(
        [{"params": layers[0].parameters()}, {"params": layers[1].parameters(), "lr": torch.tensor(0.25)}], lr=0.5
    )
    with TensorboardLogger(log_dir=tmp_path) as logger:
        for handler in (
            OptimizerParamsHandler(optimizer, tag=tag),
            WeightsScalarHandler(layers, torch.max, tag=tag, whitelist=["1"]),
            GradsScalarHandler(layers, tag=tag),
            WeightsHistHandler(layers, tag=tag),
            GradsHistHandler(layers, tag=tag),
        ):
            handler(at(epoch=3), logger, Events.EPOCH_COMPLETED)
    found = {name: curve(tmp_path, name) for name in reader(tmp_path).Tags()["scalars"]}
    assert found == {
        f"{prefix}lr/group_0": [(3, 0.5)],
        f"{prefix}lr/group_1": [(3, 0.25)],
        f"{prefix}weights_max/1/weight": [(3, 3)],
        f"{prefix}grads_norm/1/weight": [(3, 2)],
    }
    histograms = {
        name: reader(tmp_path).Histograms(name)[0].histogram_value.num for name in reader(tmp_path).Tags()["histograms"]
    }
    weights = {f"{prefix}weights/0/weight": 2, f"{prefix}weights/1/weight": 1}
    assert histograms == {**weights, f"{prefix}grads/1/weight": 1}


# --- resuming a run -----------------------------------------------------------------------------------


class Crash(Exception):
    pass


def stop():
    raise Crash


def run(folder, attempt=1, stop_at=None, start_at=None):
    """Log by iteration, also evaluations."""
    trainer = Engine(lambda engine, batch: engine.state.iteration * attempt)
    evaluator = Engine(lambda engine, batch: None)
    with TensorboardLogger(log_dir=folder) as logger:
        logger.attach_output_handler(
            trainer, Events.ITERATION_COMPLETED(every=2), "training", output_transform=lambda output: {"loss": output}
        )
        step = global_step_from_engine(trainer, Events.ITERATION_COMPLETED)
        logger.attach_output_handler(evaluator, Events.COMPLETED, "validation", "all", global_step_transform=step)

        @trainer.on(Events.EPOCH_COMPLETED)
        def evaluate():
            logger.add_scalar("own", attempt, trainer.state.iteration)
            evaluator.state.metrics = {"accuracy": trainer.state.epoch * attempt}
            evaluator.run([0])

        if start_at is not None:
            trainer.load_state_dict({"iteration": start_at, "epoch_length": 4, "max_epochs": 5})
        if stop_at is None:
            trainer.run(range(4), max_epochs=5)
            return
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop_at), stop)
        with pytest.raises(Crash):
            trainer.run(range(4), max_epochs=5)


def test_each_point_of_a_run_that_was_resumed_repeatedly_exists_once(tmp_path):
    run(tmp_path, stop_at=18)
    run(tmp_path, attempt=100, start_at=10, stop_at=19)
    run(tmp_path, attempt=10_000, start_at=16)

    def attempt(step):
        return 1 if step <= 10 else 100 if step <= 16 else 10_000

    assert curve(tmp_path, "training/loss") == [(step, step * attempt(step)) for step in range(2, 21, 2)]
    ends = [(epoch, epoch * 4) for epoch in range(1, 6)]
    assert curve(tmp_path, "validation/accuracy") == [(step, epoch * attempt(step)) for epoch, step in ends]
    assert curve(tmp_path, "own") == [(step, attempt(step)) for _, step in ends]
    with TensorboardLogger(log_dir=tmp_path) as logger:  # which hides nothing, as it may be an evaluation
        evaluator = Engine(lambda engine, batch: 0.5)
        logger.attach_output_handler(evaluator, Events.COMPLETED, "test", output_transform=lambda output: output)
        evaluator.run([0])
    assert [step for step, _ in curve(tmp_path, "training/loss")] == [*range(2, 21, 2)]
    assert curve(tmp_path, "test/output") == [(1, 0.5)]


def test_a_closed_logger_rewinds_and_writes_again(tmp_path):
    trainer = Engine(lambda engine, batch: engine.state.iteration)
    with TensorboardLogger(log_dir=tmp_path) as logger:
        logger.attach_output_handler(trainer, Events.ITERATION_COMPLETED, "t", output_transform=lambda output: output)
        trainer.run(range(4), max_epochs=2)
    trainer.load_state_dict({"iteration": 4, "epoch_length": 4, "max_epochs": 2})
    trainer.run(range(4))
    logger.close()
    assert [step for step, _ in curve(tmp_path, "t/output")] == [*range(1, 9)]
    logger.writer.purge_step = 5  # that of tensorboardX keeps it
    logger.close()
    assert logger.writer.purge_step is None


def test_a_full_disk_warns_once_and_loses_points_only(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(28, "No space left on device")

    trainer, logger = Engine(lambda engine, batch: batch), TensorboardLogger(log_dir=tmp_path)
    logger.attach_output_handler(trainer, Events.ITERATION_COMPLETED, "t", output_transform=lambda output: output)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, Checkpoint({"part": Part()}, Memory()))
    trainer.add_event_handler(Events.COMPLETED, logger.close)
    for name in ("add_scalar", "flush", "close"):
        monkeypatch.setattr(logger.writer, name, fail)
    with pytest.warns(UserWarning, match="OSError: .*No space") as caught:
        assert trainer.run(range(5)).iteration == 5
    assert len(caught) == 1
    monkeypatch.undo()
    logger.close()


def test_points_logged_before_a_checkpoint_are_flushed_with_it_once(tmp_path, monkeypatch):
    """This includes evaluators that log with the trainer's steps."""
    trainer, evaluator = Engine(lambda engine, batch: batch), Engine(lambda engine, batch: batch)
    seen, flush = [], SummaryWriter.flush
    monkeypatch.setattr(SummaryWriter, "flush", lambda writer: flush(writer) or seen.append(trainer.state.iteration))
    with TensorboardLogger(log_dir=tmp_path) as logger:
        step = global_step_from_engine(trainer)
        for number in range(3):
            logger.attach_output_handler(evaluator, Events.COMPLETED, f"{number}", "all", global_step_transform=step)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(every=2), Checkpoint({"part": Part()}, Memory()))
        trainer.run(range(5))
        for number in range(3):
            logger.attach_output_handler(trainer, Events.COMPLETED, f"{number}", "all")
        trainer.run(range(5), max_epochs=2)
        assert seen == [2, 4, 6, 8, 10]


# --- the logger itself -------------------------------------------------------------------------------------


def test_unknown_attributes_are_looked_up_on_the_writer_unless_there_is_none(tmp_path):
    with TensorboardLogger(log_dir=tmp_path) as logger:
        logger.add_scalar("own", 0.5, 3)
        assert copy.copy(logger).writer is logger.writer
        with pytest.raises(AttributeError, match="no_such_thing"):
            logger.no_such_thing()
    assert curve(tmp_path, "own") == [(3, 0.5)]
    unmade = TensorboardLogger.__new__(TensorboardLogger)
    with pytest.raises(AttributeError, match="TensorboardLogger has no attribute 'add_scalar'"):
        unmade.add_scalar("a", 1)
    assert vars(copy.copy(unmade)) == vars(pickle.loads(pickle.dumps(unmade))) == {}


def test_handlers_refuse_other_loggers():
    for handler in (OutputHandler("t", "all"), WeightsScalarHandler(model()), GradsHistHandler(model())):
        with pytest.raises(RuntimeError, match="needs a TensorboardLogger as its logger, got 'logger' of type str"):
            handler(at(), "logger", Events.COMPLETED)


def test_a_missing_tensorboard_raises_with_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'camshaft\[tensorboard\]'"):
        TensorboardLogger()


@pytest.mark.parametrize("name", ["log_dir", "logdir"])
def test_the_writer_of_torch_is_preferred(tmp_path, monkeypatch, name):
    """The one of tensorboardX does not flush its queue: a kill loses points logged before a checkpoint."""
    monkeypatch.setitem(sys.modules, "tensorboardX", types.ModuleType("tensorboardX"))
    with TensorboardLogger(**{name: tmp_path}) as logger:
        assert isinstance(logger.writer, SummaryWriter)
        assert logger.writer.logdir == logger.logdir == logger.writer.log_dir == tmp_path


def test_the_writer_of_tensorboardx_warns(monkeypatch):
    other = types.ModuleType("tensorboardX")
    other.SummaryWriter = lambda **options: types.SimpleNamespace(options=options)
    other.__spec__ = importlib.machinery.ModuleSpec("tensorboardX", None)
    monkeypatch.setitem(sys.modules, "tensorboardX", other)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.warns(UserWarning, match="may be lost if the process is killed; pip install") as caught:
        assert TensorboardLogger(log_dir="here").writer.options == {"log_dir": "here"}
    assert caught[0].filename == __file__


@on_ranks(2)
def test_only_rank_0_has_a_writer():
    with tempfile.TemporaryDirectory() as folder:
        with TensorboardLogger(log_dir=f"{folder}/log") as logger:
            trainer = Engine(lambda engine, batch: batch)
            logger.attach_output_handler(trainer, Events.COMPLETED, "t", output_transform=lambda output: output)
            logger.add_text("any", "method")
            trainer.run(range(3))
        assert len([*Path(folder).iterdir()]) == (torch.distributed.get_rank() == 0)
