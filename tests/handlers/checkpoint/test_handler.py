"""Checkpoint and ModelCheckpoint: when they save, what, in which order, and which files they keep."""

from __future__ import annotations

import inspect
import math
import warnings
from collections import OrderedDict
from contextlib import nullcontext
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from camshaft.engine import Engine, Events, create_supervised_trainer
from camshaft.handlers import (
    Checkpoint,
    DiskSaver,
    EarlyStopping,
    LRScheduler,
    ModelCheckpoint,
    global_step_from_engine,
)
from camshaft.handlers.checkpoint import CheckpointEvents
from tests.handlers.parts import Memory, Part, at, linear, load, names, weight
from tests.ranks import on_ranks

NAN = float("nan")


def scored(scores, **options):
    """Save with each of these scores, and return the handler and its save handler."""
    memory, scores = Memory(), list(scores)
    options = {"score_function": lambda engine: engine.state.score, **options}
    checkpoint = Checkpoint({"model": Part()}, memory, **options)
    for step, score in enumerate(scores):
        engine = at(step)
        engine.state.score = score
        checkpoint(engine)
    return checkpoint, memory


# --- arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"to_save": [Part()]}, TypeError, "to_save must be a mapping"),
        ({"to_save": {"model": 3}}, TypeError, r"to_save\['model'\] must have state_dict\(\), as .* do, got 3"),
        ({"to_save": {"a": {"b": [Part(), "text"]}}}, TypeError, r"to_save\['a'\]\['b'\]\[1\] must have state_dict"),
        ({"save_handler": 12}, TypeError, "save_handler must be a str, a Path, or a callable that takes .*, got 12"),
        ({"save_handler": lambda checkpoint: None}, TypeError, r"takes \(checkpoint, filename.*, got the function"),
        ({"score_function": 0.5}, TypeError, "score_function must be callable, got 0.5"),
        ({"global_step_transform": 3}, TypeError, "global_step_transform must be callable, got 3"),
        ({"n_saved": 0}, ValueError, "n_saved must be None, for all, or an integer of at least 1, got 0"),
        ({"filename_prefix": 3}, TypeError, "filename_prefix must be a str, got 3"),
        ({"filename_pattern": 3}, TypeError, "filename_pattern must be a str, got 3"),
        ({"score_name": 3}, TypeError, "score_name must be a str, got 3"),
        ({"include_self": True, "to_save": {"checkpointer": Part()}}, ValueError, "'checkpointer'"),
        ({"include_self": True, "to_save": MappingProxyType({"model": Part()})}, TypeError, "mutable"),
    ],
)
def test_invalid_arguments_are_rejected_at_construction(options, error, message):
    with pytest.raises(error, match=message):
        Checkpoint(**{"to_save": {"model": Part()}, "save_handler": Memory(), **options})


def test_the_arguments_are_attributes(tmp_path):
    step, score = global_step_from_engine(at()), lambda engine: 1
    to_save = {"model": Part()}
    saver = DiskSaver(tmp_path)
    checkpoint = Checkpoint(to_save, saver, "a", score, "b", 3, step, "{name}", True, True, 0)
    assert (checkpoint.to_save, checkpoint.save_handler, checkpoint.ext) == (to_save, saver, "pt")
    assert (checkpoint.filename_prefix, checkpoint.score_function, checkpoint.score_name) == ("a", score, "b")
    assert (checkpoint.n_saved, checkpoint.global_step_transform, checkpoint.filename_pattern) == (3, step, "{name}")
    assert (checkpoint.include_self, checkpoint.greater_or_equal, checkpoint.save_on_rank) == (True, True, 0)


@pytest.mark.parametrize("kind", [str, lambda path: path])
def test_a_path_as_save_handler_is_a_directory_that_is_created_and_holds_no_other_files(tmp_path, kind):
    checkpoint = Checkpoint({"model": Part()}, kind(tmp_path / "new"))
    assert isinstance(checkpoint.save_handler, DiskSaver)
    checkpoint(at(5))
    assert names(tmp_path / "new") == ["model_5.pt"]
    Checkpoint({"model": Part()}, kind(tmp_path / "new"))
    (tmp_path / "new" / "other.pt").touch()
    with pytest.raises(ValueError, match="require_empty=False"):
        Checkpoint({"model": Part()}, kind(tmp_path / "new"))


@pytest.mark.parametrize("sign", [1, 1.0, -1])
def test_the_default_score_is_a_metric_with_a_sign(sign):
    assert Checkpoint.get_default_score_fn("loss", sign)(at(loss=0.5)) == 0.5 * sign


def test_other_signs_are_rejected():
    with pytest.raises(ValueError, match="score_sign must be 1 or -1, got 2"):
        Checkpoint.get_default_score_fn("loss", 2)


@pytest.mark.parametrize("score", [torch.ones(1), "0.5", None, 1j, torch.tensor(1j)])
def test_a_score_that_is_not_a_real_number_is_rejected(score):
    with pytest.raises(ValueError, match="score_function must return a real number"):
        scored([score])


@pytest.mark.parametrize(
    "value", [torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float64), np.array(0.5), np.float32(0.5)]
)
@pytest.mark.parametrize(
    "options", [{"score_name": "loss"}, {"score_function": lambda engine: engine.state.metrics["loss"]}]
)
def test_a_score_without_dimensions_is_a_number(tmp_path, value, options):
    checkpoint = Checkpoint({"model": Part()}, tmp_path, **options)
    checkpoint(at(1, loss=value))
    ((score, _),) = checkpoint.state_dict()["_saved"]
    assert (score, type(score)) == (0.5, float)


# --- which are kept ----------------------------------------------------------------------------------------


def test_without_a_score_the_newest_are_kept():
    memory = Memory()
    trainer = Engine(lambda engine, batch: None)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=10), Checkpoint({"m": Part()}, memory, n_saved=2))
    trainer.run(range(50))
    assert sorted(memory.files) == ["m_40.pt", "m_50.pt"]


@pytest.mark.parametrize(
    ("scores", "n_saved", "ties", "kept"),
    [
        ([1, 3, 2], 1, False, [(3, "model_3.pt")]),
        ([1, 3, 2], 2, False, [(2, "model_2.pt"), (3, "model_3.pt")]),
        ([3, 1, 2], None, False, [(1, "model_1.pt"), (2, "model_2.pt"), (3, "model_3.pt")]),
        ([NAN, 1, NAN], 1, False, [(1, "model_1.pt")]),
        ([-math.inf, NAN, 0.5], 2, False, [(-math.inf, "model_-inf.pt"), (0.5, "model_0.5000.pt")]),
        ([0.12341, 0.12344], 3, False, [(0.12341, "model_0.1234.pt"), (0.12344, "model_0.12344.pt")]),
        ([-4e-5, -3e-5, -3.5e-5], 2, False, [(-3.5e-5, "model_-3.5e-05.pt"), (-3e-5, "model_-3e-05.pt")]),
        ([0.00019, 0.0002], 2, False, [(0.00019, "model_0.0002.pt"), (0.0002, "model_2.00000000000000010e-04.pt")]),
        ([-4e-5, -3e-5, -3.5e-5], 1, False, [(-3e-5, "model_-3e-05.pt")]),
        ([0.5, 0.25, 0.5, 0.25], 3, False, [(0.25, "model_0.2500.pt"), (0.5, "model_0.5000.pt")]),
        ([NAN, NAN, 1.0, NAN], None, True, [(NAN, "model_nan.pt"), (1.0, "model_1.0000.pt")]),
    ],
)
def test_with_a_score_the_best_are_kept_and_nan_is_worst(scores, n_saved, ties, kept):
    checkpoint, memory = scored(scores, n_saved=n_saved, greater_or_equal=ties)
    assert repr(checkpoint.state_dict()["_saved"]) == repr(kept)  # NaN is not equal to itself
    assert set(memory.files) == {name for _, name in kept}


@pytest.mark.parametrize(("ties_win", "saved"), [(False, ["model_0_1.pt"]), (True, ["model_2_1.pt"])])
def test_equal_scores_replace_only_with_greater_or_equal(ties_win, saved):
    _, memory = scored(
        [1, 1, 1], greater_or_equal=ties_win, global_step_transform=lambda engine, _: engine.state.iteration
    )
    assert list(memory.files) == saved


def test_among_equals_the_newest_is_last():
    checkpoint, _ = scored(
        [1, 1, 1], n_saved=2, greater_or_equal=True, global_step_transform=lambda engine, _: engine.state.iteration
    )
    assert [item.filename for item in checkpoint._saved] == ["model_1_1.pt", "model_2_1.pt"]
    assert checkpoint.last_checkpoint == "model_2_1.pt"


@given(st.lists(st.floats() | st.integers(-5, 5)), st.integers(1, 5), st.booleans())
def test_the_record_always_holds_the_best_priorities(priorities, most, ties_win):
    checkpoint, _ = scored(
        priorities,
        n_saved=most,
        greater_or_equal=ties_win,
        global_step_transform=lambda engine, _: engine.state.iteration,
    )
    kept = [priority for priority, _ in checkpoint.state_dict()["_saved"]]

    def order(priority):
        return (False, 0) if math.isnan(priority) else (True, priority)

    assert [order(priority) for priority in kept] == sorted(map(order, priorities))[-most:]


@given(
    st.lists(st.floats(-1e-3, 1e-3).map(lambda score: score + 0.0), min_size=1),
    st.integers(1, 3) | st.none(),
    st.sampled_from([None, "best.pt"]),
)
@example([0.0, 2e-5, 1e-5, 2e-5], 2, None)  # 0.0000, whose name made that of 2e-5 longer, is gone when 2e-5 comes again
def test_a_better_checkpoint_is_never_replaced_by_a_worse_one(scores, most, pattern):
    checkpoint, memory = scored(scores, n_saved=most, filename_pattern=pattern)
    kept = [priority for priority, _ in checkpoint.state_dict()["_saved"]]
    assert kept[-1] == max(scores)
    assert kept == sorted(set(scores))[-(1 if pattern else most or 0) :]
    assert len(memory.files) == len(kept)


def test_a_fixed_name_overwrites_its_one_file():
    checkpoint, memory = scored([1, 2, 3], n_saved=2, filename_pattern="best.pt")
    assert memory.journal == [("save", "best.pt")] * 3
    assert checkpoint.state_dict() == {"_saved": [(3, "best.pt")]}


@given(steps=st.lists(st.integers(0, 9), min_size=1, max_size=12), most=st.one_of(st.none(), st.integers(1, 4)))
def test_without_scores_the_newest_are_kept_whatever_their_steps(steps, most):
    memory = Memory()
    checkpoint = Checkpoint({"model": Part()}, memory, n_saved=most)
    for step in steps:
        checkpoint(at(step))
    newest = list(dict.fromkeys(reversed(steps)))[:most]  # a file of the same step is replaced
    assert checkpoint.state_dict()["_saved"] == [(step, f"model_{step}.pt") for step in reversed(newest)]
    assert set(memory.files) == {f"model_{step}.pt" for step in newest}
    assert memory.journal.count(("save", f"model_{steps[-1]}.pt")) == steps.count(steps[-1])


# --- what is saved, and in which order ---------------------------------------------------------------------


def test_the_new_file_is_written_before_the_record_changes_and_the_old_file_is_removed():
    memory = Memory()
    checkpoint = Checkpoint({"model": Part()}, memory)
    seen = []

    class Watching(Memory):
        def __call__(self, *args):
            super().__call__(*args)
            seen.append(("save", [item.filename for item in checkpoint._saved]))

        def remove(self, filename):
            super().remove(filename)
            seen.append(("remove", [item.filename for item in checkpoint._saved]))

    checkpoint.save_handler = Watching()
    checkpoint(at(1))
    checkpoint(at(2))
    assert seen == [("save", []), ("save", ["model_1.pt"]), ("remove", ["model_2.pt"])]


def test_a_failed_save_changes_nothing_and_the_next_one_succeeds(tmp_path, monkeypatch):
    checkpoint = Checkpoint({"model": Part(1)}, tmp_path)
    checkpoint(at(1))

    def broken(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", broken)
        with pytest.raises(OSError, match="No space left"):
            checkpoint(at(2))
    assert checkpoint.state_dict() == {"_saved": [(1, "model_1.pt")]}
    assert names(tmp_path) == ["model_1.pt"]
    checkpoint(at(3))
    assert names(tmp_path) == ["model_3.pt"]


def test_a_recorded_file_that_was_deleted_is_not_an_error(tmp_path):
    checkpoint = Checkpoint({"model": Part()}, tmp_path)
    checkpoint(at(1))
    (tmp_path / "model_1.pt").unlink()
    checkpoint(at(2))
    assert names(tmp_path) == ["model_2.pt"]


def test_a_single_object_is_saved_as_its_state_and_several_by_name():
    memory = Memory()
    Checkpoint({"model": Part(1)}, memory)(at())
    Checkpoint({"a": Part(1), "b": {"c": [Part(2), Part(3)]}}, memory)(at())
    assert memory.files["model_0.pt"] == {"value": 1}
    assert memory.files["checkpoint_0.pt"] == {"a": {"value": 1}, "b": {"c": [{"value": 2}, {"value": 3}]}}


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # raised by torch.compile
@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile, lambda model: nn.DataParallel(torch.compile(model))])
def test_modules_are_saved_unwrapped(wrap):
    memory = Memory()
    Checkpoint({"model": wrap(linear(2.0))}, memory)(at())
    assert set(memory.files["model_0.pt"]) == {"weight", "bias"}


def test_metadata_hold_base_name_score_name_and_priority():
    memory = Memory()
    Checkpoint({"model": Part()}, memory, "best", score_name="accuracy")(at(accuracy=0.5))
    assert memory.metadata == {"basename": "best_model", "score_name": "accuracy", "priority": 0.5}
    Checkpoint({"model": Part()}, memory)(at(3))
    assert memory.metadata == {"basename": "model", "score_name": None, "priority": 3}


def test_a_save_handler_gets_metadata_if_it_accepts_them_and_is_called_once_even_if_it_raises():
    calls = []
    Checkpoint({"m": Part()}, lambda checkpoint, filename: calls.append((checkpoint, filename)))(at(1))
    Checkpoint({"m": Part()}, lambda *args: calls.append(args))(at(2))
    assert [len(args) for args in calls] == [2, 3]

    def broken(checkpoint, filename, metadata=None):
        calls.append(filename)
        raise TypeError("not this")

    with pytest.raises(TypeError, match="not this"):
        Checkpoint({"m": Part()}, broken)(at(3))
    assert calls[2:] == ["m_3.pt"]


def test_a_replaced_save_handler_is_inspected_again():
    checkpoint = Checkpoint({"m": Part()}, Memory())
    calls = []
    checkpoint.save_handler = lambda checkpoint, filename: calls.append(filename)
    checkpoint(at(1))
    assert calls == ["m_1.pt"]


def test_include_self_saves_the_record_with_the_new_entry_in_it():
    memory = Memory()
    checkpoint = Checkpoint({"a": Part(), "b": Part()}, memory, include_self=True, n_saved=1)
    checkpoint(at(1))
    checkpoint(at(2))
    assert memory.files["checkpoint_2.pt"]["checkpointer"] == {"_saved": [(2, "checkpoint_2.pt")]}


def test_include_self_with_one_object_is_in_the_saved_state_but_not_in_the_object():
    class Owner(Part):
        def __init__(self):
            self.own = OrderedDict(value=1)

        def state_dict(self):
            return self.own

    memory, owner = Memory(), Owner()
    Checkpoint({"model": owner}, memory, include_self=True)(at(1))
    assert memory.files["model_1.pt"] == {"value": 1, "checkpointer": {"_saved": [(1, "model_1.pt")]}}
    assert owner.own == {"value": 1}


@pytest.mark.parametrize("score", [torch.tensor(0.5).numpy()[()], 0.5, 3])
def test_a_record_of_any_score_loads_with_weights_only(tmp_path, score):
    checkpoint = Checkpoint({"a": Part(1), "b": Part(2)}, tmp_path, score_function=lambda _: score, include_self=True)
    checkpoint(at())
    assert load(checkpoint.last_checkpoint)["checkpointer"] == {"_saved": [(score, checkpoint.last_checkpoint.name)]}


# --- the record --------------------------------------------------------------------------------------------


def test_last_checkpoint_is_the_best_as_a_path_on_disk_and_as_a_name_elsewhere(tmp_path):
    checkpoint = Checkpoint({"m": Part()}, tmp_path, score_name="score", n_saved=3)
    assert checkpoint.last_checkpoint is None
    for score in (1, 3, 2):
        checkpoint(at(score=score))
    assert checkpoint.last_checkpoint == tmp_path / "m_score=3.0000.pt"
    assert scored([1, 3, 2], n_saved=3)[0].last_checkpoint == "model_3.pt"


def test_the_record_survives_saving_and_loading():
    checkpoint, memory = scored([1, 3, 2], n_saved=2)
    other = Checkpoint({"model": Part()}, memory, n_saved=2, score_function=lambda engine: 9)
    other.load_state_dict(checkpoint.state_dict())
    assert other._saved == [Checkpoint.Item(2, "model_2.pt"), Checkpoint.Item(3, "model_3.pt")]
    other(at())
    assert sorted(memory.files) == ["model_3.pt", "model_9.pt"]


@pytest.mark.parametrize(
    ("state", "error"),
    [
        ([], TypeError),
        ({}, ValueError),
        ({"_saved": 3}, ValueError),
        ({"_saved": [(1, "a", 2)]}, ValueError),
        ({"_saved": [("a", 1)]}, ValueError),
        ({"_saved": [(1, 2)]}, ValueError),
    ],
)
def test_an_invalid_record_is_rejected_and_changes_nothing(state, error):
    checkpoint, _ = scored([1])
    with pytest.raises(error):
        checkpoint.load_state_dict(state)
    assert checkpoint.state_dict() == {"_saved": [(1, "model_1.pt")]}


# --- on an engine ------------------------------------------------------------------------------------------


def test_the_event_can_be_handled_on_any_engine_before_the_first_save():
    heard = []
    trainer = Engine(lambda engine, batch: None)
    trainer.add_event_handler(Checkpoint.SAVED_CHECKPOINT, lambda engine: heard.append(engine.state.iteration))
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=2), Checkpoint({"m": Part()}, Memory()))
    trainer.run(range(5))
    assert heard == [2, 4]
    assert Checkpoint.SAVED_CHECKPOINT is CheckpointEvents.SAVED_CHECKPOINT


def test_two_checkpoints_on_one_event_see_the_same_event():
    memory = Memory()
    trainer = Engine(lambda engine, batch: None)
    step = global_step_from_engine(trainer)
    for name in ("a", "b"):
        checkpoint = Checkpoint({name: Part()}, memory, global_step_transform=step)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), checkpoint)
    trainer.run(range(5))
    assert sorted(memory.files) == ["a_3.pt", "b_3.pt"]
    checkpoint.reset()
    checkpoint(trainer)
    assert trainer.last_event_name == Events.COMPLETED


def test_an_evaluator_saves_with_the_epoch_of_the_trainer():
    memory = Memory()
    trainer, evaluator = (Engine(lambda engine, batch: None) for _ in range(2))
    checkpoint = Checkpoint({"m": Part()}, memory, n_saved=None, global_step_transform=global_step_from_engine(trainer))
    evaluator.add_event_handler(Events.COMPLETED, checkpoint)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([1]))
    trainer.run(range(4), max_epochs=3)
    assert list(memory.files) == ["m_1.pt", "m_2.pt", "m_3.pt"]


def test_it_works_on_events_that_pass_arguments():
    def step(engine, batch):
        if batch == "last":
            engine.terminate_epoch()
        assert batch != "bad"

    memory = Memory()
    trainer = Engine(step)
    for name, event in (("failed", Events.EXCEPTION_RAISED), ("cut", Events.TERMINATE_SINGLE_EPOCH)):
        trainer.add_event_handler(event, Checkpoint({name: Part()}, memory))
    trainer.run(["good", "bad", "good", "last"], max_epochs=2, epoch_length=3)
    assert list(memory.files) == ["failed_2.pt", "cut_4.pt"]


# --- several ranks -----------------------------------------------------------------------------------------


@on_ranks(2)
def test_on_ranks_a_model_is_saved_unwrapped_and_a_sharded_optimizer_on_one_rank():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own module uses what torch deprecates
        from torch.distributed.optim import ZeroRedundancyOptimizer

    rank = torch.distributed.get_rank()
    model = DistributedDataParallel(linear(1.0))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    memory = Memory()
    Checkpoint({"model": model, "optimizer": optimizer}, memory, save_on_rank=1)(at(1))
    saved = memory.files["checkpoint_1.pt"]
    assert set(saved["model"]) == {"weight", "bias"}
    assert weight(model.module) == saved["model"]["weight"].item()
    assert (set(saved["optimizer"]) if rank == 1 else saved["optimizer"]) == ({"state", "param_groups"} if rank else {})


@on_ranks(2)
def test_one_rank_writes_the_file_and_every_rank_keeps_the_record(tmp_path):
    checkpoint = Checkpoint({"m": Part(torch.distributed.get_rank())}, tmp_path, save_on_rank=1)
    for step in (1, 2):
        checkpoint(at(step))
    torch.distributed.barrier()
    assert names(tmp_path) == ["m_2.pt"]
    assert load(checkpoint.last_checkpoint) == {"value": 1}


@pytest.mark.parametrize("name", ["../model.pt", "/tmp/model.pt", "a/model.pt", "..", "a\0b.pt"])
def test_a_record_with_files_outside_of_the_directory_is_rejected(tmp_path, name):
    checkpoint = Checkpoint({"model": Part()}, tmp_path)
    with pytest.raises(ValueError, match="_saved must be .*: a file name must (not contain a folder|stay in the dir)"):
        checkpoint.load_state_dict({"_saved": [(1, name)]})
    assert checkpoint.state_dict()["_saved"] == []


def test_records_of_other_places_may_name_folders_in_them():
    checkpoint = Checkpoint({"model": Part()}, Memory())
    checkpoint.load_state_dict({"_saved": [(1, "run/model.pt")]})
    assert checkpoint.last_checkpoint == "run/model.pt"
    with pytest.raises(ValueError, match="a file name must stay in the directory"):
        checkpoint.load_state_dict({"_saved": [(1, "run/../../model.pt")]})


# --- two handlers of the same file -------------------------------------------------------------------------


def handler(folder, **options):
    return Checkpoint({"model": Part()}, DiskSaver(folder, require_empty=False), **options)


@pytest.mark.parametrize("loaded", [True, False])
def test_a_new_handler_takes_over_the_files_of_an_existing_one(tmp_path, loaded):
    first = handler(tmp_path, n_saved=2)
    first(at(1))
    first(at(2))
    second = handler(tmp_path, n_saved=2)
    if loaded:
        second.load_state_dict(first.state_dict())
    second(at(3 if loaded else 2))
    second(at(4 if loaded else 3))
    assert names(tmp_path) == (["model_3.pt", "model_4.pt"] if loaded else ["model_1.pt", "model_2.pt", "model_3.pt"])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_handler_does_not_remove_what_another_one_has_saved_under_the_same_name(tmp_path, asynchronous):
    pattern = "{name}_{global_step}.{ext}"
    last = handler(tmp_path, filename_pattern=pattern, asynchronous=asynchronous)
    best = handler(
        tmp_path,
        filename_pattern=pattern,
        score_function=lambda engine: -engine.state.iteration,
        global_step_transform=lambda engine, event: engine.state.iteration,
    )
    last(at(1))
    assert last.last_checkpoint.exists()
    best(at(1))
    last(at(2))
    assert last.last_checkpoint == tmp_path / "model_2.pt"
    assert best.last_checkpoint == tmp_path / "model_1.pt"
    assert best.last_checkpoint.exists()


# --- ModelCheckpoint ---------------------------------------------------------------------------------------


def test_objects_are_an_argument_of_the_handler(tmp_path):
    handler = ModelCheckpoint(tmp_path, "best", n_saved=2)
    assert isinstance(handler, Checkpoint)
    assert handler.last_checkpoint is None
    trainer = Engine(lambda engine, batch: None)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, handler, {"model": Part(1)})
    trainer.run(range(10), max_epochs=3)
    assert names(tmp_path) == ["best_model_20.pt", "best_model_30.pt"]
    assert handler.last_checkpoint == tmp_path / "best_model_30.pt"
    assert load(handler.last_checkpoint) == {"value": 1}


def test_objects_may_be_passed_by_name_and_differ_between_events(tmp_path):
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
    with pytest.raises(ValueError, match="dirname must be an existing directory"):
        ModelCheckpoint(tmp_path / "b", create_dir=False)
    with pytest.raises(ValueError, match="use another one, or require_empty=False to save beside them"):
        ModelCheckpoint(tmp_path)
    ModelCheckpoint(tmp_path, require_empty=False)


def test_the_order_of_the_arguments_is_part_of_the_interface():
    assert list(inspect.signature(ModelCheckpoint).parameters) == [
        *("dirname", "filename_prefix", "score_function", "score_name", "n_saved", "atomic", "require_empty"),
        *("create_dir", "global_step_transform", "filename_pattern", "include_self", "greater_or_equal"),
        *("save_on_rank", "asynchronous", "sharded", "kwargs"),
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
def test_objects_that_cannot_be_saved_are_rejected(tmp_path, to_save, error, message):
    with pytest.raises(error, match=message):
        ModelCheckpoint(tmp_path, include_self=True)(at(1), to_save)


def test_without_objects_it_cannot_be_registered(tmp_path):
    with pytest.raises(ValueError, match=r"it requires to_save: add_event_handler\(event, handler, to_save=\.\.\.\)"):
        at().add_event_handler(Events.EPOCH_COMPLETED, ModelCheckpoint(tmp_path))


def test_a_model_checkpoint_saves_on_an_exception(tmp_path):
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


def test_on_an_exception_without_objects_it_raises_from_the_first_error(tmp_path):
    trainer = Engine(lambda engine, batch: 1 / 0)
    trainer.add_event_handler(Events.EXCEPTION_RAISED, ModelCheckpoint(tmp_path))
    with pytest.raises(TypeError, match="to_save is missing: register a ModelCheckpoint with its objects") as raised:
        trainer.run([1])
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_with_another_save_handler_last_checkpoint_raises(tmp_path):
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


def scheduled(saves_schedule, folder):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = create_supervised_trainer(model, optimizer, torch.nn.MSELoss())
    schedule = LRScheduler(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
    trainer.add_event_handler(Events.ITERATION_STARTED, schedule)
    to_save = {"model": model, "optimizer": optimizer, "trainer": trainer}
    to_save |= {"schedule": schedule} if saves_schedule else {}
    trainer.add_event_handler(Events.ITERATION_COMPLETED, Checkpoint(to_save, folder))
    trainer.run([(torch.ones(1, 1), torch.ones(1, 1))] * 2)


def test_a_schedule_that_is_not_saved_with_its_optimizer_is_named_once(tmp_path):
    with pytest.warns(UserWarning, match="not the LRScheduler that drives it: add the LRScheduler to to_save") as seen:
        scheduled(False, tmp_path / "without")
    assert len(seen) == 1
    scheduled(True, tmp_path / "with")


@pytest.mark.parametrize("is_saved", [True, False])
def test_early_stopping_that_is_not_saved_is_named_once(tmp_path, is_saved):
    trainer, evaluator = Engine(lambda engine, batch: None), Engine(lambda engine, batch: None)
    stopping = EarlyStopping(2, lambda engine: 1.0, trainer)
    stopping.attach(evaluator)
    to_save = {"trainer": trainer, "optimizer": torch.optim.SGD([torch.zeros(1)])}
    to_save |= {"stopping": stopping} if is_saved else {}
    trainer.add_event_handler(Events.EPOCH_COMPLETED, Checkpoint(to_save, tmp_path))
    with nullcontext([1]) if is_saved else pytest.warns(UserWarning, match="an engine, but not its EarlySto") as seen:
        trainer.run([1], max_epochs=2)
    assert len(seen) == 1


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_scaler_that_is_not_saved_is_named_if_it_is_enabled(tmp_path, is_enabled):
    model = torch.nn.Linear(1, 1)
    trainer = Engine(lambda engine, batch: None)
    trainer.state.scaler = torch.amp.GradScaler("cpu", enabled=is_enabled)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer.add_event_handler(Events.COMPLETED, Checkpoint({"optimizer": optimizer, "trainer": trainer}, tmp_path))
    with pytest.warns(UserWarning, match="not the GradScaler") if is_enabled else nullcontext():
        trainer.run([1])
