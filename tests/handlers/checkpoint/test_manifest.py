"""The manifest of a directory of checkpoints."""

from __future__ import annotations

from camshaft.handlers import Checkpoint, DiskSaver
from camshaft.handlers.checkpoint.manifest import Manifest
from tests.handlers.parts import Part, at, names


def test_the_manifest_holds_step_score_and_versions(tmp_path):
    checkpoint = Checkpoint({"part": Part()}, tmp_path, score_name="accuracy")
    checkpoint(at(7, accuracy=0.5))
    (entry,) = Manifest(tmp_path).entries()
    assert (entry.file, entry.step, entry.score, entry.score_name) == ("part_accuracy=0.5000.pt", 7, 0.5, "accuracy")
    assert entry.objects == ["part"]
    assert entry.size == (tmp_path / entry.file).stat().st_size
    assert entry.versions.keys() == {"camshaft", "torch", "python"}


def test_pruning_removes_the_entry(tmp_path):
    checkpoint = Checkpoint({"part": Part()}, tmp_path, n_saved=2)
    for step in range(5):
        checkpoint(at(step))
    assert {entry.file for entry in Manifest(tmp_path).entries()} == {"part_3.pt", "part_4.pt"} == set(names(tmp_path))


def test_file_names_may_contain_wildcards(tmp_path):
    saver = DiskSaver(tmp_path)
    saver({"value": 1}, "a[1]*.pt")
    saver({"value": 2}, "a1.pt")
    assert [entry.file for entry in Manifest(tmp_path).entries("a[1]*.pt")] == ["a[1]*.pt"]
    saver.remove("a[1]*.pt")
    assert [entry.file for entry in Manifest(tmp_path).entries()] == ["a1.pt"]
