"""Test TensorboardLogger by reading its event files with TensorBoard's own reader."""

from __future__ import annotations

import copy
import importlib.machinery
import pickle
import sys
import types

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
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

EPOCH_LENGTH = 4


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
            OptimizerParamsHandler(optimizer, "momentum", tag=tag),
            WeightsScalarHandler(layers, tag=tag),
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
        f"{prefix}momentum/group_0": [(3, 0)],
        f"{prefix}momentum/group_1": [(3, 0)],
        f"{prefix}weights_norm/0/weight": [(3, pytest.approx(18**0.5))],
        f"{prefix}weights_norm/1/weight": [(3, 3)],
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


def age(folder):
    """Rename the files of earlier writers, so that they come first: their names differ by seconds only."""
    for file in folder.glob("events.*"):
        file.rename(folder / f"earlier.{len(list(folder.iterdir())):03}.{file.name}")


def run(folder, attempt=1, stop_at=None, start_at=None, epochs=5, before=None):
    """Log by iteration, and evaluations by the trainer's iteration or its epoch."""
    age(folder)
    trainer = Engine(lambda engine, batch: engine.state.iteration * attempt)
    evaluator = Engine(lambda engine, batch: None)
    with TensorboardLogger(log_dir=folder) as logger:
        logger.attach_output_handler(
            trainer, Events.ITERATION_COMPLETED(every=2), "training", output_transform=lambda output: {"loss": output}
        )
        for tag, event in (("validation", Events.ITERATION_COMPLETED), ("by epoch", Events.EPOCH_COMPLETED)):
            step = global_step_from_engine(trainer, event)
            logger.attach_output_handler(evaluator, Events.COMPLETED, tag, ["accuracy"], global_step_transform=step)

        @trainer.on(Events.EPOCH_COMPLETED)
        def evaluate():
            evaluator.state.metrics = {"accuracy": trainer.state.epoch * attempt}
            evaluator.run([0])
            logger.add_scalar("own", attempt, trainer.state.iteration)

        if start_at is not None:
            trainer.load_state_dict({"iteration": start_at, "epoch_length": EPOCH_LENGTH, "max_epochs": epochs})
        if before is not None:
            before(logger)
        if stop_at is None:
            trainer.run(range(EPOCH_LENGTH), max_epochs=epochs)
            return
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop_at), stop)
        with pytest.raises(Crash):
            trainer.run(range(EPOCH_LENGTH), max_epochs=epochs)


def stop():
    raise Crash


def check(folder, attempts):
    """Assert that each point exists once, in order, with the value of the attempt that wrote it."""
    assert curve(folder, "training/loss") == [(step, step * attempts(step)) for step in range(2, 21, 2)]
    ends = [(epoch, epoch * EPOCH_LENGTH) for epoch in range(1, 6)]
    assert curve(folder, "validation/accuracy") == [(step, epoch * attempts(step)) for epoch, step in ends]
    assert curve(folder, "own") == [(step, attempts(step)) for _, step in ends]


def test_after_a_resume_each_point_exists_exactly_once(tmp_path):
    run(tmp_path, stop_at=15)
    run(tmp_path, attempt=100, start_at=8)
    check(tmp_path, lambda step: 1 if step <= 8 else 100)


def test_a_run_may_be_resumed_repeatedly_from_any_step(tmp_path):
    run(tmp_path, stop_at=18)
    run(tmp_path, attempt=100, start_at=10, stop_at=19)
    run(tmp_path, attempt=10_000, start_at=16)
    check(tmp_path, lambda step: 1 if step <= 10 else 100 if step <= 16 else 10_000)


def test_after_a_kill_before_the_first_checkpoint_each_point_exists_once(tmp_path):
    run(tmp_path, stop_at=15)
    run(tmp_path, attempt=100, before=lambda logger: logger.add_scalar("initial", 1.0, 0))
    check(tmp_path, lambda step: 100)
    assert curve(tmp_path, "initial") == [(0, 1.0)]


def test_an_evaluation_in_the_folder_of_a_training_hides_nothing(tmp_path):
    run(tmp_path)
    age(tmp_path)
    with TensorboardLogger(log_dir=tmp_path) as logger:
        evaluator = Engine(lambda engine, batch: 0.5)
        logger.attach_output_handler(evaluator, Events.COMPLETED, "test", output_transform=lambda output: output)
        evaluator.run([0])
    check(tmp_path, lambda step: 1)
    assert curve(tmp_path, "test/output") == [(1, 0.5)]


def test_extending_a_run_hides_nothing_that_another_trainer_wrote(tmp_path):
    first, second = (Engine(lambda engine, batch: 1.0) for _ in range(2))
    with TensorboardLogger(log_dir=tmp_path) as logger:
        for name, engine in {"first": first, "second": second}.items():
            options = {"tag": name, "output_transform": lambda output: output}
            logger.attach_output_handler(engine, Events.ITERATION_COMPLETED, **options)
        first.run(range(4), max_epochs=2)
        second.run(range(4), max_epochs=1)
        first.run(range(4), max_epochs=3)
        second.run(range(4), max_epochs=2)
    assert [step for step, _ in curve(tmp_path, "first/output")] == [*range(1, 13)]
    assert [step for step, _ in curve(tmp_path, "second/output")] == [*range(1, 9)]


def test_a_closed_logger_rewinds_and_writes_again(tmp_path):
    trainer = Engine(lambda engine, batch: engine.state.iteration)
    with TensorboardLogger(log_dir=tmp_path) as logger:
        logger.attach_output_handler(trainer, Events.ITERATION_COMPLETED, "t", output_transform=lambda output: output)
        trainer.run(range(EPOCH_LENGTH), max_epochs=2)
    age(tmp_path)
    trainer.load_state_dict({"iteration": 4, "epoch_length": EPOCH_LENGTH, "max_epochs": 2})
    trainer.run(range(EPOCH_LENGTH))
    logger.close()
    assert [step for step, _ in curve(tmp_path, "t/output")] == [*range(1, 9)]


def test_a_truncated_record_does_not_prevent_a_resume(tmp_path):
    run(tmp_path, stop_at=15)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    run(tmp_path, attempt=100, start_at=8)
    assert [step for step, _ in curve(tmp_path, "training/loss")] == list(range(2, 21, 2))


def test_a_full_disk_warns_once_and_loses_points_only(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(28, "No space left on device")

    trainer, logger = Engine(lambda engine, batch: batch), TensorboardLogger(log_dir=tmp_path)
    logger.attach_output_handler(trainer, Events.ITERATION_COMPLETED, "t", output_transform=lambda output: output)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, Checkpoint({"part": Part()}, Memory()))
    trainer.add_event_handler(Events.COMPLETED, logger.close)
    for name in ("add_scalar", "flush", "close"):
        monkeypatch.setattr(logger.writer, name, fail)
    with pytest.warns(
        UserWarning, match="TensorboardLogger cannot write, values are lost: OSError: .*No space"
    ) as caught:
        assert trainer.run(range(5)).iteration == 5
    assert len(caught) == 1
    monkeypatch.undo()
    logger.close()


def test_points_logged_before_a_checkpoint_are_flushed_with_it(tmp_path, monkeypatch):
    trainer = Engine(lambda engine, batch: batch)
    seen, flush = [], SummaryWriter.flush
    monkeypatch.setattr(SummaryWriter, "flush", lambda writer: flush(writer) or seen.append(trainer.state.iteration))
    with TensorboardLogger(log_dir=tmp_path) as logger:
        logger.attach_output_handler(trainer, Events.ITERATION_COMPLETED, "t", output_transform=lambda output: output)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), Checkpoint({"part": Part()}, Memory()))
        trainer.run(range(5))
        assert seen == [3]


def test_many_handlers_flush_once_per_checkpoint(tmp_path, monkeypatch):
    """This includes evaluators that log with the trainer's steps."""
    trainer, evaluator = Engine(lambda engine, batch: batch), Engine(lambda engine, batch: batch)
    seen = []
    with TensorboardLogger(log_dir=tmp_path) as logger:
        monkeypatch.setattr(SummaryWriter, "flush", lambda writer: seen.append(trainer.state.iteration))
        step = global_step_from_engine(trainer)
        for number in range(10):
            logger.attach_output_handler(evaluator, Events.COMPLETED, f"{number}", "all", global_step_transform=step)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(every=2), Checkpoint({"part": Part()}, Memory()))
        trainer.run(range(5))
        assert seen == [2, 4]
        for number in range(10):
            handle = logger.attach_output_handler(trainer, Events.COMPLETED, f"{number}", "all")
        handle.remove()
        trainer.run(range(5), max_epochs=2)
        assert seen == [2, 4, 6, 8, 10]
        monkeypatch.undo()


# --- the logger itself -------------------------------------------------------------------------------------


def test_unknown_attributes_are_looked_up_on_the_writer(tmp_path):
    with TensorboardLogger(log_dir=tmp_path) as logger:
        logger.add_scalar("own", 0.5, 3)
        with pytest.raises(AttributeError, match="no_such_thing"):
            logger.no_such_thing()
    assert curve(tmp_path, "own") == [(3, 0.5)]


def test_uninitialized_copied_and_unpickled_loggers_raise_attribute_error(tmp_path):
    unmade = TensorboardLogger.__new__(TensorboardLogger)
    with pytest.raises(AttributeError, match="TensorboardLogger has no attribute 'add_scalar'"):
        unmade.add_scalar("a", 1)
    assert vars(copy.copy(unmade)) == {}
    assert vars(pickle.loads(pickle.dumps(unmade))) == {}
    with TensorboardLogger(log_dir=tmp_path) as logger:
        assert copy.copy(logger).writer is logger.writer


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
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        rank = torch.distributed.get_rank()
        with TensorboardLogger(log_dir=f"{folder}/{rank}") as logger:
            trainer = Engine(lambda engine, batch: batch)
            logger.attach_output_handler(trainer, Events.COMPLETED, "t", output_transform=lambda output: output)
            logger.add_text("any", "method")
            trainer.run(range(3))
        from pathlib import Path

        assert [file.name for file in Path(folder).iterdir()] == (["0"] if rank == 0 else [])
