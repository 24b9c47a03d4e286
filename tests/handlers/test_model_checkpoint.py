"""ModelCheckpoint: a Checkpoint on disk that gets its objects as an argument of the handler."""

from __future__ import annotations

import inspect

import pytest

from camshaft.engine import Engine, Events
from camshaft.handlers import Checkpoint, DiskSaver, ModelCheckpoint
from tests.handlers.parts import Memory, Part, at, load, names


def test_objects_come_as_an_argument_of_the_handler(tmp_path):
    handler = ModelCheckpoint(tmp_path, "best", n_saved=2)
    assert isinstance(handler, Checkpoint)
    assert handler.last_checkpoint is None
    trainer = Engine(lambda engine, batch: None)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, handler, {"model": Part(1)})
    trainer.run(range(10), max_epochs=3)
    assert names(tmp_path) == ["best_model_20.pt", "best_model_30.pt"]
    assert handler.last_checkpoint == tmp_path / "best_model_30.pt"
    assert load(handler.last_checkpoint) == {"value": 1}


def test_they_may_be_given_by_name_and_differ_between_events(tmp_path):
    handler = ModelCheckpoint(tmp_path, n_saved=None)
    trainer = Engine(lambda engine, batch: None)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=1), handler, to_save={"a": Part()})
    trainer.add_event_handler(Events.EPOCH_COMPLETED, handler, {"b": Part(), "c": Part()})
    trainer.run(range(2))
    assert names(tmp_path) == ["a_1.pt", "checkpoint_2.pt"]


def test_the_directory_is_that_of_a_disk_saver_with_its_arguments(tmp_path):
    handler = ModelCheckpoint(tmp_path / "a", atomic=False, save_on_rank="node", _use_new_zipfile_serialization=False)
    saver = handler.save_handler
    assert isinstance(saver, DiskSaver)
    assert (saver.atomic, saver.save_on_rank, handler.save_on_rank) == (False, "node", "node")
    assert saver.kwargs == {"_use_new_zipfile_serialization": False}
    (tmp_path / "model_1.pt").touch()
    with pytest.raises(ValueError, match="does not exist"):
        ModelCheckpoint(tmp_path / "b", create_dir=False)
    with pytest.raises(ValueError, match=r"ModelCheckpoint\(dirname, require_empty=False\)"):
        ModelCheckpoint(tmp_path)
    ModelCheckpoint(tmp_path, require_empty=False)


def test_the_order_of_the_arguments_is_part_of_the_interface():
    assert list(inspect.signature(ModelCheckpoint).parameters) == [
        *("dirname", "filename_prefix", "score_function", "score_name", "n_saved", "atomic", "require_empty"),
        *("create_dir", "global_step_transform", "filename_pattern", "include_self", "greater_or_equal"),
        *("save_on_rank", "asynchronous", "when_busy", "kwargs"),
    ]


@pytest.mark.parametrize(
    ("to_save", "error", "message"),
    [
        ({}, RuntimeError, "to_save must hold at least one object, got {}"),
        ([], RuntimeError, r"to_save must hold at least one object, got \[\]"),
        (3, TypeError, "to_save must be a mapping"),
        ([Part()], TypeError, "to_save must be a mapping"),
        ({"model": 3}, TypeError, r"to_save\['model'\] must have state_dict"),
        ({"checkpointer": Part()}, ValueError, "'checkpointer'"),
    ],
)
def test_objects_that_cannot_be_saved_are_refused(tmp_path, to_save, error, message):
    with pytest.raises(error, match=message):
        ModelCheckpoint(tmp_path, include_self=True)(at(1), to_save)


def test_without_objects_it_cannot_be_registered(tmp_path):
    with pytest.raises(
        ValueError, match=r"it also requires to_save: add_event_handler\(event, handler, to_save=\.\.\.\)"
    ):
        at().add_event_handler(Events.EPOCH_COMPLETED, ModelCheckpoint(tmp_path))


def test_it_saves_on_an_exception_too(tmp_path):
    def step(engine, batch):
        raise ValueError("broken")

    trainer = Engine(step)
    trainer.add_event_handler(Events.EXCEPTION_RAISED, ModelCheckpoint(tmp_path), {"model": Part(1)})

    @trainer.on(Events.EXCEPTION_RAISED)
    def raise_again(error):
        raise error

    with pytest.raises(ValueError, match="broken"):
        trainer.run([1])
    assert names(tmp_path) == ["model_1.pt"]


def test_there_without_objects_it_says_so_and_the_first_error_is_still_seen(tmp_path):
    trainer = Engine(lambda engine, batch: 1 / 0)
    trainer.add_event_handler(Events.EXCEPTION_RAISED, ModelCheckpoint(tmp_path))
    with pytest.raises(TypeError, match="to_save is missing: register a ModelCheckpoint with its objects") as raised:
        trainer.run([1])
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_with_another_save_handler_there_is_no_path_to_give(tmp_path):
    handler = ModelCheckpoint(tmp_path)
    handler.save_handler = Memory()
    handler(at(1), {"model": Part()})
    with pytest.raises(RuntimeError, match="needs a DiskSaver"):
        assert handler.last_checkpoint


def test_scores_and_the_record_work_as_in_a_checkpoint(tmp_path):
    handler = ModelCheckpoint(tmp_path, score_name="accuracy", include_self=True)
    for accuracy in (0.5, 0.75, 0.25):
        handler(at(accuracy=accuracy), {"a": Part(accuracy), "b": Part()})
    assert names(tmp_path) == ["checkpoint_accuracy=0.7500.pt"]
    a, other = Part(), ModelCheckpoint(tmp_path, require_empty=False, score_name="accuracy")
    Checkpoint.load_objects({"a": a, "checkpointer": other}, handler.last_checkpoint)
    assert (a.value, other.last_checkpoint) == (0.75, handler.last_checkpoint)
