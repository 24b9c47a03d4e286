"""DiskSaver: which directories it accepts, what it writes and removes, and what a failed save leaves."""

from __future__ import annotations

import glob
import os
import resource
import stat
from pathlib import Path

import pytest
import torch

from camshaft.handlers import Checkpoint, DiskSaver
from camshaft.handlers.checkpoint import BaseSaveHandler
from tests.handlers.parts import Part, at, load, names
from tests.ranks import on_ranks

BIG = {"weight": torch.zeros(100_000)}


def test_the_directory_is_created_with_its_parents_and_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    saver = DiskSaver("~/a/b")
    assert saver.dirname == tmp_path / "a" / "b"
    assert isinstance(saver.dirname, Path)
    assert saver.dirname.is_dir()
    assert isinstance(saver, BaseSaveHandler)


@pytest.mark.parametrize(
    ("place", "options", "message"),
    [
        ("missing", {"create_dir": False}, "dirname must be an existing directory, got '.*missing'"),
        ("a_file", {}, "dirname must be an existing directory, got '.*a_file'"),
        (".", {"save_on_rank": -1}, "save_on_rank must be an integer >= 0 or 'node', got -1"),
        (".", {"save_on_rank": "0"}, "save_on_rank must be an integer >= 0 or 'node', got '0'"),
    ],
)
def test_an_unusable_directory_is_rejected_at_construction(tmp_path, place, options, message):
    (tmp_path / "a_file").touch()
    with pytest.raises(ValueError, match=message):
        DiskSaver(tmp_path / place, **options)


def test_a_directory_without_write_permission_is_rejected_at_construction(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)  # root may write everywhere
    with pytest.raises(PermissionError, match="dirname must be a writable directory"):
        DiskSaver(tmp_path)


def test_only_checkpoints_count_for_require_empty_and_the_error_suggests_a_fix(tmp_path):
    name = "model_10.pt"
    (tmp_path / "log.txt").touch()
    DiskSaver(tmp_path)
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=f"with '{name}', which no Checkpoint saved: .*require_empty=False"):
        DiskSaver(tmp_path)
    DiskSaver(tmp_path, require_empty=False)
    assert names(tmp_path) == ["log.txt", name]


@pytest.mark.parametrize("atomic", [True, False])
def test_torch_load_reads_a_file_that_replaced_an_older_one(tmp_path, atomic):
    saver = DiskSaver(tmp_path, atomic=atomic)
    for step in (1, 2):
        saver({"step": step}, "model.pt", {"basename": "model"})
    assert load(tmp_path / "model.pt") == {"step": 2}
    assert names(tmp_path) == ["model.pt"]


def test_removing_deletes_the_file_and_ignores_a_missing_one(tmp_path):
    saver = DiskSaver(tmp_path)
    saver({}, "model.pt")
    saver.remove("model.pt")
    saver.remove("model.pt")
    assert names(tmp_path) == []


def test_the_umask_decides_who_may_read(tmp_path):
    before = os.umask(0o027)
    try:
        DiskSaver(tmp_path)({}, "model.pt")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "model.pt").stat().st_mode) == 0o640


def test_options_are_passed_to_torch_save_and_unknown_ones_fail_at_the_save(tmp_path):
    DiskSaver(tmp_path, _use_new_zipfile_serialization=False)({"a": 1}, "old.pth")
    assert (tmp_path / "old.pth").read_bytes()[:2] != b"PK"
    with pytest.raises(TypeError, match="speed"):
        DiskSaver(tmp_path, speed="high")({}, "model.pt")


def fail(*args, **kwargs):
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize("step", ["open", "torch.save", "fsync", "replace"])
def test_an_atomic_save_that_fails_at_any_step_leaves_only_the_old_file(tmp_path, monkeypatch, step):
    saver = DiskSaver(tmp_path)
    saver({"step": 1}, "model.pt")
    with monkeypatch.context() as broken:
        broken.setattr({"open": "builtins.open", "torch.save": "torch.save"}.get(step, f"os.{step}"), fail)
        with pytest.raises(OSError, match="Input/output error"):
            saver({"step": 2}, "model.pt")
    assert names(tmp_path) == ["model.pt"]
    assert load(tmp_path / "model.pt") == {"step": 1}


def test_an_object_that_cannot_be_pickled_leaves_the_old_file(tmp_path):
    saver = DiskSaver(tmp_path)
    saver({"step": 1}, "model.pt")
    with pytest.raises((AttributeError, TypeError)):
        saver({"step": lambda: None}, "model.pt")
    assert load(tmp_path / "model.pt") == {"step": 1}
    assert names(tmp_path) == ["model.pt"]


@pytest.fixture
def small_files():
    """Limit the size of files to 50 kB, to simulate a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_reported_with_the_file_name(tmp_path, small_files):
    saver = DiskSaver(tmp_path)
    saver({"step": 1}, "model.pt")
    with pytest.raises(OSError, match=r"File too large: '.*model\.pt'"):
        saver(BIG, "model.pt")
    assert load(tmp_path / "model.pt") == {"step": 1}
    assert names(tmp_path) == ["model.pt"]


def test_a_failed_save_that_is_not_atomic_leaves_a_broken_file(tmp_path, small_files):
    saver = DiskSaver(tmp_path, atomic=False)
    saver({"step": 1}, "model.pt")
    with pytest.raises(OSError, match="File too large"):
        saver(BIG, "model.pt")
    with pytest.raises((OSError, RuntimeError)):
        load(tmp_path / "model.pt")


@on_ranks(2)
def test_only_one_rank_checks_the_directory_writes_and_removes(tmp_path):
    rank = torch.distributed.get_rank()
    if rank == 0:
        DiskSaver("/dev/null/nowhere", save_on_rank=1)  # only rank 1 checks the directory, and gets another saver
    folder = tmp_path / "on_rank_1"
    saver = DiskSaver(folder, save_on_rank=1)
    torch.distributed.barrier()
    for step in (1, 2):
        saver({"rank": rank}, f"{step}.pt")
    torch.distributed.barrier()
    assert {path.name: load(path) for path in folder.glob("*.pt")} == {"1.pt": {"rank": 1}, "2.pt": {"rank": 1}}
    torch.distributed.barrier()
    saver.remove(f"{1 + rank}.pt")
    torch.distributed.barrier()
    assert names(folder) == ["1.pt"]


def test_a_single_process_saves_whatever_the_rank_with_a_warning(tmp_path):
    with pytest.warns(UserWarning, match="save_on_rank is 1, but the job has a single process: rank 0 saves"):
        checkpoint = Checkpoint({"model": Part(3)}, tmp_path, save_on_rank=1, n_saved=1)
    for step in (1, 2):
        checkpoint(at(step))
    assert names(tmp_path) == ["model_2.pt"]
    assert load(checkpoint.last_checkpoint) == {"value": 3}


@on_ranks(2)
def test_a_rank_outside_of_the_job_is_rejected_at_construction(tmp_path):
    for make in (DiskSaver, lambda folder, save_on_rank: Checkpoint({"a": Part()}, print, save_on_rank=save_on_rank)):
        with pytest.raises(ValueError, match="save_on_rank must be a rank of the job, which has 2 processes, got 2"):
            make(tmp_path, save_on_rank=2)


# --- the manifest ------------------------------------------------------------------------------------------


def test_wildcards_do_not_match_the_manifest_and_it_never_sorts_last(tmp_path):
    saver = DiskSaver(tmp_path)
    for step in (1, 2):
        saver({}, f"Model_{step}.pt")
    expected = ["Model_1.pt", "Model_2.pt"]
    assert sorted(map(os.path.basename, glob.glob(f"{tmp_path}/*"))) == expected
    assert sorted(path.name for path in tmp_path.glob("**/*.pt")) == expected
    assert sorted(os.listdir(tmp_path))[-1] == max(os.listdir(tmp_path)) == "Model_2.pt"


def test_the_migration_page_mentions_the_manifest_before_other_differences():
    page = (Path(__file__).parents[3] / "docs" / "migrating" / "from-pytorch-ignite.md").read_text()
    assert "`.manifest`" in page


# --- removing files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../train.py", "/etc/passwd", "a/../../train.py"])
def test_names_outside_of_the_directory_are_rejected(tmp_path, name):
    (tmp_path / "train.py").touch()
    saver = DiskSaver(tmp_path / "checkpoints")
    for act in (saver.remove, lambda name: saver({}, name)):
        with pytest.raises(ValueError, match="filename must not contain a folder, got"):
            act(name)
    assert names(tmp_path) == ["checkpoints", "train.py"]
    assert names(saver.dirname) == []


def test_only_files_that_the_manifest_lists_are_removed(tmp_path):
    saver = DiskSaver(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "folder").mkdir()
    for name in ("train.py", "folder"):
        with pytest.warns(UserWarning, match="is not removed: the manifest lists no such checkpoint"):
            saver.remove(name)
    assert names(tmp_path) == ["folder", "train.py"]


def test_neither_a_link_in_place_of_a_checkpoint_nor_its_target_is_removed(tmp_path):
    saver = DiskSaver(tmp_path)
    saver({}, "model.pt")
    (tmp_path / "model.pt").rename(tmp_path / "precious")
    (tmp_path / "model.pt").symlink_to(tmp_path / "precious")
    with pytest.warns(UserWarning, match="is not removed: it is not a regular file"):
        saver.remove("model.pt")
    assert names(tmp_path) == ["model.pt", "precious"]


def load_and_save(checkpoint, record):
    checkpoint.load_state_dict({"_saved": record})
    checkpoint(at(2))


def test_a_hostile_record_removes_nothing(tmp_path):
    checkpoint = Checkpoint({"model": Part()}, tmp_path, n_saved=1)
    (tmp_path / "train.py").touch()
    with pytest.warns(UserWarning, match="is not removed"):
        load_and_save(checkpoint, [(1, "train.py")])
    assert (tmp_path / "train.py").exists()


def test_pipes_among_leftover_files_are_not_opened(tmp_path):
    os.mkfifo(tmp_path / ".camshaft-pipe.tmp")
    DiskSaver(tmp_path)


class Renaming(DiskSaver):
    """Saves under one name, whatever the requested name, as MONAI's CheckpointSaver does."""

    def __call__(self, checkpoint, filename, metadata=None):
        super().__call__(checkpoint=checkpoint, filename="best.pt", metadata=metadata)

    def remove(self, filename):
        super().remove(filename="best.pt")


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("n_saved", [1, 2])
def test_pruning_never_removes_the_file_that_was_just_written(tmp_path, n_saved, asynchronous):
    part = Part()
    saver = Renaming(tmp_path, require_empty=False, atomic=False)
    checkpoint = Checkpoint({"part": part}, saver, n_saved=n_saved, asynchronous=asynchronous)
    for part.value in range(1, 5):
        checkpoint(at(part.value))
        assert checkpoint.state_dict()["_saved"][-1][0] == part.value
        assert load(tmp_path / "best.pt") == {"value": part.value}
    saver.remove("whatever")
    assert names(tmp_path) == []


def test_a_file_that_weights_only_cannot_read_is_saved_with_a_warning(tmp_path):
    with pytest.warns(UserWarning, match="cannot be loaded with weights_only=True") as told:
        DiskSaver(tmp_path, pickle_protocol=4)({"a": "text"}, "model.pt")
    assert told[0].filename == __file__
    assert torch.load(tmp_path / "model.pt", weights_only=False) == {"a": "text"}
