"""The names of checkpoint files."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from camshaft.engine import Engine
from camshaft.engine.state import LazyNumber
from camshaft.handlers import Checkpoint, DiskSaver, ModelCheckpoint
from tests.handlers.parts import Memory, Part, at, names


def name(engine, **options):
    """Return the name under which a call saves."""
    memory = Memory()
    options = {"to_save": {"model": Part()}, **options}
    Checkpoint(save_handler=memory, **options)(engine)
    ((_, filename),) = memory.journal
    return filename


def score(engine):
    return engine.state.metrics["accuracy"]


def step(engine, event):
    return 7


ENGINE = {"iteration": 123, "epoch": 4, "accuracy": 0.98765}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "model_123.pt"),
        ({"global_step_transform": step}, "model_7.pt"),
        ({"score_function": score}, "model_0.9877.pt"),
        ({"score_function": score, "global_step_transform": step}, "model_7_0.9877.pt"),
        ({"score_function": score, "score_name": "acc"}, "model_acc=0.9877.pt"),
        ({"score_function": score, "score_name": "acc", "global_step_transform": step}, "model_7_acc=0.9877.pt"),
        ({"score_name": "accuracy"}, "model_accuracy=0.9877.pt"),
        ({"filename_prefix": "best"}, "best_model_123.pt"),
        ({"filename_prefix": "best", "score_name": "accuracy"}, "best_model_accuracy=0.9877.pt"),
        ({"to_save": {"model": Part(), "optimizer": Part()}}, "checkpoint_123.pt"),
        ({"to_save": {"model": Part()}, "include_self": True}, "model_123.pt"),
    ],
)
def test_the_default_name_has_the_components_that_exist(options, expected):
    assert name(at(**ENGINE), **options) == expected


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (12, "12"),
        (-3, "-3"),
        (True, "1"),
        (0.98765, "0.9877"),
        (2.0, "2.0000"),
        (1e-7, "0.0000"),
        (float("nan"), "nan"),
        (LazyNumber(torch.tensor(0.5)), "0.5000"),
    ],
)
def test_scores_have_4_decimals_unless_they_are_integers(value, text):
    assert name(at(), score_function=lambda engine: value) == f"model_{text}.pt"


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("{filename_prefix}-{name}.{ext}", "best-model.pt"),
        ("{name}_{global_step:06d}.pth", "model_000123.pth"),
        ("{name}_{score_name}_{score}.{ext}", "model_None_None.pt"),
        ("fixed", "fixed"),
    ],
)
def test_a_pattern_renders_absent_components_as_none(pattern, expected):
    assert name(at(**ENGINE), filename_prefix="best", filename_pattern=pattern) == expected


def test_a_pattern_with_a_score_has_no_step_without_a_transform():
    pattern = "{global_step}_{score_name}_{score}"
    assert name(at(**ENGINE), score_name="accuracy", filename_pattern=pattern) == "None_accuracy_0.9877"


@pytest.mark.parametrize("pattern", ["{name}_{epoch}.{ext}", "{}", "{name.real}"])
def test_a_pattern_with_an_unknown_key_is_rejected_at_construction(pattern):
    with pytest.raises(KeyError, match="filename_pattern"):
        Checkpoint({"model": Part()}, Memory(), filename_pattern=pattern)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "{filename_prefix}_{name}_{global_step}_{score_name}={score}.{ext}"),
        ({"with_prefix": False}, "{name}_{global_step}_{score_name}={score}.{ext}"),
        ({"with_score_name": False}, "{filename_prefix}_{name}_{global_step}_{score}.{ext}"),
        ({"with_score": False, "with_score_name": False}, "{filename_prefix}_{name}_{global_step}.{ext}"),
        ({"with_global_step": False}, "{filename_prefix}_{name}_{score_name}={score}.{ext}"),
    ],
)
def test_setup_filename_pattern(options, expected):
    assert Checkpoint.setup_filename_pattern(**options) == expected


@pytest.mark.parametrize(
    "options", [{"with_score": False, "with_global_step": False, "with_score_name": False}, {"with_score": False}]
)
def test_setup_filename_pattern_rejects_invalid_combinations(options):
    with pytest.raises(ValueError, match="with_score"):
        Checkpoint.setup_filename_pattern(**options)


def test_the_error_names_a_pattern_whose_format_does_not_fit():
    checkpoint = Checkpoint(
        {"model": Part()}, Memory(), filename_pattern="{name}_{global_step:06d}.{ext}", score_name="a"
    )
    with pytest.raises(ValueError, match="filename_pattern '{name}_{global_step:06d}.{ext}' does not fit"):
        checkpoint(at(1, a=0.5))


def test_a_key_that_is_not_a_string_names_a_file():
    memory = Memory()
    Checkpoint({3: Part()}, memory)(at(1))
    assert list(memory.files) == ["3_1.pt"]


@pytest.mark.parametrize("name", ["../best", "best/x", "/tmp/best"])
def test_a_name_with_a_folder_is_rejected(tmp_path, name):
    saver = DiskSaver(tmp_path / "checkpoints")
    with pytest.raises(ValueError, match="filename_pattern must not contain a folder, got .*: make a DiskSaver for"):
        Checkpoint({"part": Part()}, saver, filename_pattern=name)
    assert names(tmp_path) == ["checkpoints"]


@pytest.mark.parametrize("pattern", [None, "{name}-{filename_prefix}-{global_step}.pt"])
@pytest.mark.parametrize("saver", [lambda path: path, DiskSaver, partial(DiskSaver, create_dir=False)])
def test_a_prefix_may_begin_with_a_folder_of_the_directory(tmp_path, pattern, saver):
    (tmp_path / "best").mkdir()
    checkpoint = Checkpoint({"part": Part()}, saver(tmp_path), filename_prefix="best/x", filename_pattern=pattern)
    for step in (1, 2):
        checkpoint(at(step))
    expected = "part-x-2.pt" if pattern else "x_part_2.pt"
    assert checkpoint.last_checkpoint == tmp_path / "best" / expected
    assert (names(tmp_path), names(tmp_path / "best")) == (["best"], [expected])
    assert Checkpoint.resume({"part": Part()}, tmp_path / "best") == tmp_path / "best" / expected
    with pytest.raises(ValueError, match=r"must not contain checkpoints, got '.*best'"):
        ModelCheckpoint(tmp_path, "best/x", filename_pattern=pattern)
    again = ModelCheckpoint(tmp_path, "best/x", filename_pattern=pattern, require_empty=False)
    again.load_state_dict(checkpoint.state_dict())
    again(at(3), {"part": Part()})
    assert names(tmp_path / "best") == [expected.replace("2", "3")]


@pytest.mark.parametrize("prefix", ["../best/x", "best/../../x", "/tmp/x"])
def test_a_prefix_outside_the_directory_is_rejected(tmp_path, prefix):
    for make in (ModelCheckpoint, partial(Checkpoint, {"part": Part()})):
        with pytest.raises(ValueError, match="filename_prefix must stay in the directory, got"):
            make(tmp_path, prefix)
    with pytest.raises(ValueError, match="filename_prefix must stay in the directory, got"):
        Checkpoint({"part": Part()}, DiskSaver(tmp_path), prefix)
    assert names(tmp_path) == []


def test_a_long_prefix_is_rejected_at_construction(tmp_path):
    for make in (ModelCheckpoint, lambda *args: Checkpoint({"part": Part()}, *args)):
        with pytest.raises(ValueError, match="filename_prefix must have at most 180 bytes, got 236"):
            make(tmp_path, "p" * 236)
    Checkpoint({"part": Part()}, tmp_path, "p" * 180, score_name="accuracy")(at(1_999_999_999, accuracy=0.5))
    assert len(list(tmp_path.glob("*.pt"))) == 1


def test_a_name_that_is_too_long_for_the_manifest_leaves_nothing(tmp_path):
    with pytest.raises(OSError, match="File name too long"):
        DiskSaver(tmp_path)({}, "m" * 250)
    assert names(tmp_path) == []


def test_an_invalid_format_string_is_rejected_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"filename_pattern '\{name' is not a format string"):
        Checkpoint({"part": Part()}, tmp_path, filename_pattern="{name")


def test_slashes_in_names_of_scores_and_objects_are_replaced(tmp_path):
    engine = Engine(lambda engine, batch: None)
    engine.state.metrics["validation/accuracy"] = 0.5
    checkpoint = Checkpoint({"a/b": Part()}, tmp_path, score_name="validation/accuracy")
    checkpoint(engine)
    assert checkpoint.last_checkpoint == tmp_path / "a_b_validation_accuracy=0.5000.pt"


def test_files_of_another_handler_in_a_record_are_not_removed(tmp_path):
    best = Checkpoint({"part": Part()}, tmp_path, filename_prefix="best")
    best(at(1))
    last = Checkpoint({"part": Part()}, DiskSaver(tmp_path, require_empty=False), filename_prefix="last")
    last.load_state_dict(best.state_dict())
    last(at(2))
    assert names(tmp_path) == ["best_part_1.pt", "last_part_2.pt"]


def test_a_pattern_without_the_prefix_keeps_its_record(tmp_path):
    checkpoint = Checkpoint(
        {"part": Part()}, DiskSaver(tmp_path), filename_prefix="best", filename_pattern="{name}_{global_step}.{ext}"
    )
    checkpoint.load_state_dict({"_saved": [(1, "part_1.pt")]})
    assert checkpoint.state_dict() == {"_saved": [(1, "part_1.pt")]}


def test_names_passed_to_a_function_may_contain_slashes():
    saved = []
    checkpoint = Checkpoint({"part": Part()}, lambda state, name: saved.append(name), filename_prefix="runs/best")
    checkpoint(at(1))
    assert saved == ["runs/best_part_1.pt"]
