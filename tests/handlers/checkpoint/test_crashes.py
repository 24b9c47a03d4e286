"""What a process that is killed during a save leaves behind."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import warnings
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
import torch

from camshaft import files
from camshaft.engine import Engine, Events
from camshaft.handlers import Checkpoint, DiskSaver
from camshaft.handlers.checkpoint.manifest import FOLDER, Manifest, names_in
from tests.ranks import context, on_ranks

# --- killed at every change of the disk -------------------------------------------------------------


class Crashes:
    """Records the files on disk before each operation that changes them: what a kill at this moment leaves.

    An audit hook sees all operations, whoever calls them; writes are seen by the file that is written.
    """

    current: Crashes | None = None
    CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink", "open")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.returned = 0
        self.moments: list[tuple[str, int, dict[Path, bytes]]] = []

    def note(self, what: str) -> None:
        found = {path.relative_to(self.folder): path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}
        if not self.moments or self.moments[-1][1:] != (self.returned, found):
            self.moments.append((what, self.returned, found))

    @classmethod
    def hook(cls, event: str, arguments: tuple) -> None:
        self = cls.current
        if self is None or event not in cls.CHANGES or not str(arguments[0]).startswith(str(self.folder)):
            return
        if event != "open" or arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            self.note(f"{event} {arguments[0]}")


class CutOff(io.FileIO):
    """A file whose first write may be interrupted."""

    def write(self, data):
        data = memoryview(data).cast("B")
        is_first, written = self.tell() == 0, 0
        while written < len(data):
            written += super().write(data[written : written + max(len(data) // 2, 1)])
            if is_first:
                Crashes.current.note(f"write {self.name}")
        return written


@contextmanager
def recorded(folder):
    """Record what happens in a folder; only for a process that ends with the test, as an audit hook stays for good."""
    crashes = Crashes(folder)

    def open_cut_off(path, mode, **options):
        return CutOff(path, mode) if Crashes.current and set(mode) & set("xw") else open(path, mode, **options)

    sys.addaudithook(Crashes.hook)
    no_flush = mock.patch.object(os, "fsync")  # only matters if the machine fails
    with mock.patch.object(files, "open", open_cut_off, create=True), no_flush:
        Crashes.current = crashes
        yield crashes
        crashes.note("the end")
        Crashes.current = None


class Counted:
    """An object whose state is its step, stored twice."""

    def __init__(self):
        self.step = 0

    def state_dict(self):
        return {"step": self.step, "weights": torch.full((50,), float(self.step))}

    def load_state_dict(self, state):
        assert torch.equal(state["weights"], torch.full((50,), float(state["step"])))
        self.step = state["step"]


def job(folder, **options):
    counted = Counted()
    engine = Engine(lambda engine, batch: setattr(counted, "step", counted.step + 1))
    saver = DiskSaver(folder, require_empty=False)
    checkpoint = Checkpoint({"counted": counted, "trainer": engine}, saver, include_self=True, **options)
    engine.add_event_handler(Events.ITERATION_COMPLETED, checkpoint)
    return engine, checkpoint, {"counted": counted, "trainer": engine, "checkpointer": checkpoint}


MODES = {
    "newest": {"n_saved": 1},
    "two": {"n_saved": 2},
    "all": {"n_saved": None},
    "one name": {"filename_pattern": "last.pt"},
    "sharded": {"n_saved": 2, "sharded": True},
    "sharded, one name": {"filename_pattern": "last", "sharded": True},
    "best": {"n_saved": 2, "score_function": lambda engine: [3, 3, 2, 1][engine.state.iteration % 4]},
}


CASES = [*((mode, False) for mode in MODES), *((mode, True) for mode in ("two", "one name", "sharded"))]
QUICK = [("two", False), ("one name", False), ("best", False), ("two", True)]


@pytest.mark.parametrize(
    ("mode", "asynchronous"),
    [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.jobs]) for case in CASES],
)
@on_ranks(1)
def test_a_kill_at_any_disk_change_loses_no_saved_checkpoint(tmp_path, mode, asynchronous):
    def note_saved():
        crashes.returned = max(crashes.returned, checkpoint_step(checkpoint))

    options = MODES[mode]
    with recorded(tmp_path / "checkpoints") as crashes:
        engine, checkpoint, _ = job(crashes.folder, asynchronous=asynchronous, **options)
        engine.add_event_handler(Checkpoint.SAVED_CHECKPOINT, note_saved)
        engine.run(range(4))
    whats = " ".join(what.partition(" ")[0] for what, _, _ in crashes.moments)
    assert {"os.mkdir", "open", "write", "os.rename"} <= set(whats.split())
    assert ("os.remove" in whats) == (mode != "all")
    assert len(crashes.moments) > 20
    for number, (what, returned, found) in enumerate(crashes.moments):
        folder = tmp_path / str(number)
        for name, content in found.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        check_resumes(folder, returned, what, **options)


def checkpoint_step(checkpoint):
    """Return the newest step that the handler keeps."""
    Crashes.current, current = None, Crashes.current
    steps = []
    for file in names_in(current.folder):
        Checkpoint.load_objects({"counted": (counted := Counted())}, current.folder / file)
        steps.append(counted.step)
    Crashes.current = current
    return max(steps)


def check_resumes(folder, returned, what, **options):
    """Check that a job resumes from what was saved, and continues to save and prune."""
    engine, checkpoint, everything = job(folder, **options)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        path = Checkpoint.resume(everything, folder)
    assert (path is None) == (everything["counted"].step == 0), what
    assert everything["counted"].step >= returned, what
    assert engine.state.iteration == everything["counted"].step
    if path is None:
        is_named = any("nothing was loaded, as there is no checkpoint" in str(one.message) for one in seen)
        assert is_named == bool(list((folder / FOLDER).glob("*.json"))), what
    engine.run(range(4), max_epochs=2, epoch_length=4)
    n_saved = options.get("n_saved", 1)
    assert n_saved is None or len(names_in(folder)) <= n_saved + 1, what  # one was about to be removed
    assert checkpoint.last_checkpoint.exists()
    assert not [path for path in folder.rglob(".camshaft-*") if path.stat().st_size]
    listed = {shard for entry in Manifest(folder).entries() for shard in entry.shards or ()}
    assert {path.name for path in folder.rglob("*/*") if path.parent.name != FOLDER} == listed, what


def run_kills(folder: Path, *arguments: object) -> list[str]:
    program = Path(__file__).with_name("kill_loop.py")
    result = subprocess.run(
        [sys.executable, str(program), str(folder), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(program.parents[3])},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.parametrize("mode", [pytest.param("waiting", marks=pytest.mark.jobs), "background"])
def test_a_killed_process_resumes_from_the_last_reported_checkpoint(tmp_path, mode):
    assert len(run_kills(tmp_path, 4, mode)) == 4


@pytest.mark.jobs
@pytest.mark.parametrize("mode", ["waiting", "background"])
@pytest.mark.parametrize("part", range(4))
def test_killed_processes_resume_two_hundred_times(tmp_path, mode, part):
    assert len(run_kills(tmp_path, 50 + part, mode)) == 50 + part  # the number seeds the moments too


def kill_ranks_and_note(notes, *arguments):
    from tests.handlers.checkpoint import kill_ranks

    with open(notes, "w") as file, redirect_stdout(file):
        kill_ranks.main(*arguments)


@pytest.mark.jobs
def test_killed_ranks_resume_from_the_newest_sharded_checkpoint(tmp_path):
    # from the server of the ranks, which has imported torch: another import takes as long as all of the kills
    notes = tmp_path / "notes"
    process = context.Process(target=kill_ranks_and_note, args=(notes, tmp_path / "checkpoints", 5, 6), daemon=True)
    process.start()
    process.join()
    assert process.exitcode == 0
    lines = notes.read_text().splitlines()
    assert sum("before operation" in line for line in lines) >= 4
    assert sum("before operation" not in line for line in lines) == 5
