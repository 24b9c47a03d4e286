"""Two Checkpoints whose files have the same names: neither takes those of the other."""

from __future__ import annotations

import gc

import pytest

from camshaft.engine import Engine, Events
from camshaft.handlers import Checkpoint, DiskSaver, ModelCheckpoint
from tests.handlers.parts import Part, at, load, names


def handler(folder, **options):
    return Checkpoint({"model": Part()}, DiskSaver(folder, require_empty=False), **options)


@pytest.mark.parametrize("options", [{}, {"asynchronous": True}])
def test_the_second_of_two_is_refused_before_it_writes_anything(tmp_path, options):
    trainer = Engine(lambda engine, batch: None)
    for part in (Part(1), Part(2)):
        checkpoint = Checkpoint({"model": part}, tmp_path, **options)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(every=2), checkpoint)
    with pytest.raises(ValueError, match=r"two handlers save to '.*model_2\.pt'.*filename_prefix"):
        trainer.run(range(4))
    assert load(tmp_path / "model_2.pt") == {"value": 1}
    assert checkpoint.last_checkpoint is None


def test_other_names_or_directories_are_fine(tmp_path):
    checkpoints = [handler(tmp_path), handler(tmp_path, filename_prefix="b"), handler(tmp_path / "c")]
    for step in (1, 2):
        for checkpoint in checkpoints:
            checkpoint(at(step))
    assert names(tmp_path) == ["b_model_2.pt", "c", "model_2.pt"]


def test_a_link_to_the_directory_hides_nothing(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    first, second = handler(tmp_path / "real"), handler(tmp_path / "link")
    first(at(1))
    with pytest.raises(ValueError, match="two handlers save to"):
        second(at(1))


def test_a_handler_may_overwrite_its_own_files(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, filename_pattern="last.pt")
    for step in (1, 2):
        checkpoint(at(step), {"model": Part(step)})
    assert load(tmp_path / "last.pt") == {"value": 2}


@pytest.mark.parametrize("loaded", [True, False])
def test_a_handler_made_later_goes_on_with_the_files_of_an_earlier_one_that_is_still_there(tmp_path, loaded):
    first = handler(tmp_path, n_saved=2)
    first(at(1))
    first(at(2))
    second = handler(tmp_path, n_saved=2)
    if loaded:
        second.load_state_dict(first.state_dict())
    second(at(3 if loaded else 2))
    second(at(4 if loaded else 3))
    assert names(tmp_path) == (["model_3.pt", "model_4.pt"] if loaded else ["model_1.pt", "model_2.pt", "model_3.pt"])


def test_a_handler_that_loads_the_record_of_another_takes_over(tmp_path):
    first, second = handler(tmp_path), handler(tmp_path)
    first(at(1))
    second.load_state_dict(first.state_dict())
    second(at(1))
    second(at(2))
    assert names(tmp_path) == ["model_2.pt"]


def test_files_of_a_handler_that_is_gone_are_free(tmp_path):
    first, second = handler(tmp_path), handler(tmp_path)
    first(at(1))
    del first
    gc.collect()
    second(at(1))


def test_what_another_handler_has_taken_over_is_not_removed(tmp_path):
    first = handler(tmp_path)
    first(at(1))
    second = handler(tmp_path)
    second(at(1))
    first(at(2))
    assert names(tmp_path) == ["model_1.pt", "model_2.pt"]
    assert second.last_checkpoint.exists()


def test_a_name_that_is_no_longer_used_is_free(tmp_path):
    first, second = handler(tmp_path), handler(tmp_path)
    first(at(1))
    first(at(2))
    second(at(1))
    assert names(tmp_path) == ["model_1.pt", "model_2.pt"]


@pytest.mark.parametrize("options", [{}, {"asynchronous": True}])
@pytest.mark.parametrize("event", [Events.COMPLETED, Events.TERMINATE, Events.EXCEPTION_RAISED, "evaluator"])
def test_when_the_run_is_over_the_second_of_two_saves_with_a_warning(tmp_path, event, options):
    part = Part(1)
    every, last = (handler(tmp_path, n_saved=2, **options) for _ in range(2))
    every.to_save = last.to_save = {"model": part}
    trainer = Engine(lambda engine, batch: 1 / 0 if event == Events.EXCEPTION_RAISED and batch == 3 else None)
    trainer.add_event_handler(Events.ITERATION_STARTED, every)
    if event == Events.TERMINATE:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), trainer.terminate)
    evaluator = Engine(lambda engine, batch: None)
    evaluator.state.iteration = 2
    ending = Events.COMPLETED if event == "evaluator" else event
    if event == "evaluator":
        evaluator.add_event_handler(Events.STARTED, lambda engine: setattr(engine.state, "iteration", 3))
        evaluator.add_event_handler(Events.COMPLETED, last)
    trainer.add_event_handler(ending, lambda *_: setattr(part, "value", 5))
    trainer.add_event_handler(ending, (lambda: evaluator.run([0])) if event == "evaluator" else last)
    with pytest.warns(UserWarning, match=r"two handlers save to .*The run is over, so the file is overwritten"):
        trainer.run([1, 2, 3, 4])
    assert last.last_checkpoint.exists()
    assert load(last.last_checkpoint) == {"value": 5}
    every(at(9))
    every(at(10))
    assert every.last_checkpoint.exists()
    assert last.last_checkpoint.exists()  # it is no longer the first one's to prune
