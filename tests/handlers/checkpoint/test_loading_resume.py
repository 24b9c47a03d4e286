"""Resuming from the newest complete checkpoint, whatever happened to the files."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from camshaft import distributed as idist
from camshaft.engine import Engine, Events
from camshaft.engine.deterministic import DeterministicEngine
from camshaft.errors import DamagedCheckpointError
from camshaft.files import checksum_of
from camshaft.handlers import Checkpoint, DiskSaver, EarlyStopping, ModelCheckpoint
from camshaft.handlers.checkpoint import loading, manifest
from camshaft.handlers.checkpoint.manifest import FOLDER, Entry, Manifest
from camshaft.seeding import capture_random_state
from tests.handlers.parts import Part, at, linear, names, weight
from tests.ranks import on_ranks


def save(folder, *steps, **options):
    """Save an object at each step, with the step as its value."""
    part = Part()
    saver = DiskSaver(folder, require_empty=False, **options)
    checkpoint = Checkpoint({"part": part, "other": Part()}, saver, n_saved=None)
    for step in steps:
        part.value = step
        checkpoint(at(step))


def resume(folder, **options):
    part = Part()
    path = Checkpoint.resume({"part": part}, folder, **options)
    return part.value, None if path is None else path.name


def warning_on_rank_0(match):
    """Expect a warning of what all ranks have found."""
    return pytest.warns(UserWarning, match=match) if idist.get_rank() == 0 else nullcontext()


def file_of(step):
    return f"checkpoint_{step}.pt"


def flip_a_bit(path, position):
    content = bytearray(path.read_bytes())
    content[position % len(content)] ^= 1 << (position % 8)
    path.write_bytes(content)


# --- which checkpoint ---------------------------------------------------------------------------------------------


def test_nothing_is_loaded_from_an_empty_directory(tmp_path):
    assert resume(tmp_path) == (0, None)
    assert resume(tmp_path / "missing") == (0, None)


def test_the_newest_is_loaded_whatever_its_step_or_name(tmp_path):
    save(tmp_path, 20, 30)
    save(tmp_path, 9)
    assert resume(tmp_path) == (9, file_of(9))


def test_a_clock_that_goes_backwards_changes_nothing(tmp_path, monkeypatch):
    save(tmp_path, 20)
    monkeypatch.setattr("time.time_ns", lambda: 1)
    save(tmp_path, 30, 40)
    assert resume(tmp_path) == (40, file_of(40))


def list_file(folder, file):
    """Add a file to the manifest."""
    size = (folder / file).stat().st_size
    Manifest(folder).write(Entry(file, checksum_of(folder / file), size, saved_at=2**61))


def test_an_unreadable_listed_file_is_reported_and_the_previous_one_is_used(tmp_path):
    save(tmp_path, 1)
    torch.save({"part": Evil()}, tmp_path / "evil.pt")
    list_file(tmp_path, "evil.pt")
    with pytest.warns(UserWarning, match=r"evil.pt' cannot be read: UnpicklingError: .*; resuming from 'checkpoint_1"):
        assert resume(tmp_path) == (1, file_of(1))
    (tmp_path / file_of(1)).unlink()
    problem = r"evil.pt' cannot be read: .* unsupported GLOBAL .*mkdir.*checkpoint_1.pt' is not there"
    with pytest.raises(DamagedCheckpointError, match=f"(?s)no checkpoint can be loaded:.*{problem}") as raised:
        resume(tmp_path)
    assert isinstance(raised.value.__cause__, pickle.UnpicklingError)


@on_ranks(2)
def test_a_file_that_one_rank_cannot_load_is_skipped_on_all(tmp_path, monkeypatch):
    if idist.get_rank() == 0:
        save(tmp_path, 1, 2)
    idist.barrier()
    read = loading._read

    def fail(path, map_location=None):
        if idist.get_rank() == 1 and path.name == file_of(2):
            raise MemoryError("too much")
        return read(path, map_location)

    monkeypatch.setattr(loading, "_read", fail)
    with warning_on_rank_0(r"checkpoint_2.pt' cannot be read: MemoryError: too much; resuming from"):
        assert resume(tmp_path) == (1, file_of(1))


def test_files_of_plain_torch_save_without_a_manifest_are_found(tmp_path):
    torch.save({"part": {"value": 1}}, tmp_path / "checkpoint_1.pt")
    torch.save({"part": {"value": 2}, "other": {"value": 0}}, tmp_path / "checkpoint_2.pt")
    torch.save({"model": {}}, tmp_path / "model_3.pt")
    for age, name in enumerate(("model_3.pt", "checkpoint_2.pt", "checkpoint_1.pt")):
        os.utime(tmp_path / name, ns=(0, 10**9 - age))
    assert Checkpoint.resume({"part": (part := Part()), "other": Part()}, tmp_path).name == "checkpoint_2.pt"
    assert part.value == 2


def test_checkpoints_of_other_objects_are_skipped_with_a_warning_if_there_are_no_others(tmp_path):
    save(tmp_path, 1)
    Checkpoint({"best": Part(7)}, DiskSaver(tmp_path, require_empty=False))(at(2))
    assert resume(tmp_path) == (1, file_of(1))
    with pytest.warns(UserWarning, match=r"nothing was loaded: no checkpoint in .* holds \['part', 'x'\]"):
        assert Checkpoint.resume({"part": Part(), "x": Part()}, tmp_path) is None


@pytest.mark.parametrize("has_manifest", [True, False])
def test_a_checkpoint_with_the_engine_but_not_all_objects_is_no_reason_to_start_over(tmp_path, has_manifest):
    trainer = Engine(lambda engine, batch: None)
    Checkpoint({"trainer": trainer, "model": Part(7)}, tmp_path)(at(2))
    if not has_manifest:  # like files of PyTorch-Ignite
        shutil.rmtree(tmp_path / ".manifest")
    with pytest.raises(ValueError, match=r"'checkpoint_2.pt' lacks \['stopping'\].*another directory"):
        Checkpoint.resume({"trainer": trainer, "model": (part := Part()), "stopping": Part()}, tmp_path)
    assert part.value != 7
    assert Checkpoint.resume({"trainer": trainer, "model": part}, tmp_path).name == "checkpoint_2.pt"


def test_a_single_object_resumes_with_the_record_of_its_handler(tmp_path):
    def saving():
        engine = Engine(lambda engine, batch: None)
        checkpoint = Checkpoint({"trainer": engine}, DiskSaver(tmp_path, require_empty=False), include_self=True)
        engine.add_event_handler(Events.EPOCH_COMPLETED, checkpoint)
        return engine, checkpoint

    engine, checkpoint = saving()
    engine.run(range(3), max_epochs=2)
    again, record = saving()
    assert Checkpoint.resume({"trainer": again, "checkpointer": record}, tmp_path) == checkpoint.last_checkpoint
    assert again.state.iteration == 6
    assert record.last_checkpoint == checkpoint.last_checkpoint
    with pytest.warns(UserWarning, match=r"holds \['model', 'checkpointer'\]"):
        assert Checkpoint.resume({"model": linear(0.0), "checkpointer": record}, tmp_path) is None


# --- the latest of a handler ---------------------------------------------------------


def in_three_lines(folder, **options):
    """Return an engine and the handler that saves it, as a script makes them in each of its runs."""
    engine = Engine(lambda engine, batch: None)
    checkpoint = Checkpoint({"trainer": engine, "part": Part(3)}, folder, **{"n_saved": 2, **options})
    engine.add_event_handler(Events.EPOCH_COMPLETED, checkpoint)
    return engine, checkpoint


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"include_self": True},
        {"filename_prefix": "deep/run"},
        {"filename_pattern": "{global_step:06d}_{name}.{ext}"},
        {"score_function": lambda engine: engine.state.epoch / 7, "score_name": "a/b"},
        {
            "score_function": lambda engine: engine.state.epoch,
            "global_step_transform": lambda engine, event: engine.state.epoch + 0.5,
        },
        {
            "score_function": lambda engine: 1,
            "global_step_transform": lambda engine, event: engine.state.epoch,
            "greater_or_equal": True,
        },
    ],
    ids=lambda options: ", ".join(options) or "plain",
)
def test_the_latest_is_resumed_and_older_ones_are_pruned(tmp_path, options):
    engine, checkpoint = in_three_lines(tmp_path, **options)
    assert checkpoint.resume_latest() is None
    engine.run(range(3), max_epochs=3)
    before = checkpoint.state_dict()

    engine, again = in_three_lines(tmp_path, **options)
    assert again.resume_latest() == checkpoint.last_checkpoint == again.last_checkpoint
    assert again.state_dict() == before
    assert engine.state.epoch == 3
    engine.run(range(3), max_epochs=5)
    whole, uninterrupted = in_three_lines(tmp_path / "whole", **options)
    whole.run(range(3), max_epochs=5)
    assert names(again.save_handler.dirname)[:2] == names(uninterrupted.save_handler.dirname)


class Rows:
    """Data of one rank that know their position, which is another one on each rank."""

    def __init__(self):
        self.first = self.row = 100 * idist.get_rank()

    def __iter__(self):
        while self.row < self.first + 4:
            self.row += 1
            yield self.row
        self.row = self.first

    def state_dict(self):
        return {"row": self.row}

    def load_state_dict(self, state):
        self.row = state["row"]


def drawn_by(kind, folder, data, score_function=None, **options):
    """Train; return the batches, each with a random number, and where the run resumed."""
    drawn = []
    torch.manual_seed(idist.get_rank())
    trainer = kind(lambda engine, batch: drawn.append((batch, torch.rand(()).item())))
    saving = Checkpoint({"trainer": trainer}, folder, score_function=score_function, **options)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(event_filter=lambda engine, number: number in (3, 6)), saving)
    saving.resume_latest()
    resumed_at = trainer.state.iteration
    trainer.run(data, max_epochs=2, epoch_length=4)
    return drawn, resumed_at


def test_one_line_of_the_log_says_what_is_resumed_and_where(tmp_path, caplog):
    def train(max_epochs):
        trainer = Engine(lambda engine, batch: None)
        checkpoint = Checkpoint({"model": nn.Linear(1, 1), "trainer": trainer}, tmp_path)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(every=5), checkpoint)
        checkpoint.resume_latest()
        trainer.run(idist.auto_dataloader(range(12), batch_size=4), max_epochs=max_epochs)

    train(2)
    with caplog.at_level("INFO", "camshaft.handlers"):
        train(3)
    path = tmp_path / "checkpoint_5.pt"
    assert caplog.messages == [f"resuming from the checkpoint '{path}'; next: epoch 2, iteration 6, sample 9"]


@pytest.mark.parametrize("options", [{}, {"sharded": True, "asynchronous": True}, {"save_on_rank": 1}], ids=str)
@on_ranks(2)
def test_each_rank_resumes_with_its_own_random_numbers_and_data(tmp_path, options):
    """Also if the ranks disagree about a score: that of the rank that writes counts."""
    drawn, _ = drawn_by(DeterministicEngine, tmp_path, Rows(), **options)
    rest, resumed_at = drawn_by(DeterministicEngine, tmp_path, Rows(), **options)
    assert resumed_at == 6
    assert rest == drawn[6:]
    assert len(set(idist.all_gather(rest[0]))) == 2

    of_data, _ = drawn_by(Engine, tmp_path / "engine", Rows(), **options)
    assert [batch for batch, _ in drawn_by(Engine, tmp_path / "engine", Rows(), **options)[0]] == [
        batch for batch, _ in of_data[6:]
    ]

    def score(engine):
        return engine.state.iteration * (1 if idist.get_rank() == options.get("save_on_rank", 0) else -1)

    drawn, _ = drawn_by(DeterministicEngine, tmp_path / "scores", range(4), score, **options)
    rest, resumed_at = drawn_by(DeterministicEngine, tmp_path / "scores", range(4), score, **options)
    assert (resumed_at, rest) == (6, drawn[6:])


@on_ranks(2)
def test_a_rank_that_is_new_does_not_repeat_the_random_numbers_of_another():
    state = {"iteration": 2, "epoch_length": 4, "max_epochs": 2, "rng_states": list(capture_random_state().values())}
    torch.manual_seed(idist.get_rank())
    drawn = []
    trainer = DeterministicEngine(lambda engine, batch: drawn.append(torch.rand(()).item()))
    state["ranks"] = [{"rng_states": state["rng_states"]}]  # saved by a single process
    Checkpoint.load_objects({"trainer": trainer}, {"trainer": state})
    trainer.run(range(4))
    assert len(set(idist.all_gather(drawn[0]))) == 2


def test_a_kill_between_the_first_best_and_the_first_latest_file_starts_again(tmp_path):
    def handlers():
        engine = Engine(lambda engine, batch: None)
        best = Checkpoint({"part": Part()}, tmp_path / "best", n_saved=1)
        latest = Checkpoint({"trainer": engine, "best": best}, tmp_path / "latest", n_saved=1)
        for handler in (best, latest):
            engine.add_event_handler(Events.EPOCH_COMPLETED, handler)
        return engine, best, latest

    _, best, _ = handlers()
    best(at(3))  # and the process was killed
    engine, best, latest = handlers()
    assert latest.resume_latest() is None
    engine.run(range(3), max_epochs=2)
    assert names(tmp_path / "latest") == [file_of(6)]


def test_a_run_that_forgets_to_resume_raises_at_its_start_and_saves_nothing(tmp_path):
    engine, _ = in_three_lines(tmp_path)
    engine.run(range(3), max_epochs=3)
    engine, _ = in_three_lines(tmp_path)
    with pytest.raises(ValueError, match=r"contains checkpoints of an earlier run.*: call resume_latest\(\) before"):
        engine.run(range(3), max_epochs=4)
    assert engine.state.iteration == 0
    part = Checkpoint({"part": Part()}, tmp_path)
    with pytest.raises(ValueError, match="not resumed"):
        part(at(12))
    assert names(tmp_path) == [file_of(6), file_of(9)]


def test_what_is_saved_at_the_end_of_a_run_that_forgot_to_resume_is_not_lost(tmp_path):
    Checkpoint({"part": Part()}, tmp_path)(at(1))
    part = Part(7)
    engine = Engine(lambda engine, batch: None)
    engine.add_event_handler(Events.COMPLETED, Checkpoint({"part": part}, tmp_path))
    with pytest.warns(UserWarning, match="not resumed, and the run is over, so new ones are saved beside them"):
        engine.run(range(3))
    assert names(tmp_path) == ["part_1.pt", "part_3.pt"]


def test_a_finished_job_that_is_started_again_leaves_everything_as_it_was(tmp_path):
    engine, checkpoint = in_three_lines(tmp_path)
    engine.run(range(3), max_epochs=3)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    engine, checkpoint = in_three_lines(tmp_path)
    checkpoint.resume_latest()
    with pytest.warns(UserWarning, match="nothing was run"):
        engine.run(range(3), max_epochs=3)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.filterwarnings("ignore:to_save holds no engine")
def test_a_handler_takes_over_its_own_files_only_and_none_after_the_one_it_loads(tmp_path):
    def make():
        part = Part(1)
        best = Checkpoint({"part": part}, tmp_path, "best", lambda engine: 0.5, "score", n_saved=2)
        last = Checkpoint({"part": part, "best": best}, tmp_path, n_saved=3)
        other = Checkpoint({"part": part, "best": best}, tmp_path, "other", n_saved=3)
        return best, last, other

    best, last, other = make()
    for step in (1, 2, 3):
        for handler in (best, other, last):
            handler(at(step))
    flip_a_bit(tmp_path / file_of(3), 100)
    best, last, other = make()
    with pytest.warns(UserWarning, match="checkpoint_3.pt' is damaged"):
        assert last.resume_latest().name == "other_checkpoint_3.pt"  # newer than checkpoint_2.pt, and holds the same
    assert last.state_dict()["_saved"] == [(1, file_of(1)), (2, file_of(2))]
    assert best.state_dict()["_saved"] == [(0.5, "best_part_score=0.5000.pt")]  # from the file
    last(at(4))
    last(at(5))
    assert file_of(1) not in names(tmp_path)


@pytest.mark.filterwarnings("ignore:to_save holds no engine")
def test_model_options_reach_the_models(tmp_path):
    Checkpoint({"model": linear(1.0)}, tmp_path)(at(1))
    model = nn.Linear(1, 1, bias=False)
    Checkpoint({"model": model}, tmp_path).resume_latest(strict=False, map_location="cpu")
    assert weight(model) == 1.0


@pytest.mark.parametrize("has_file", [True, False])
def test_a_handler_that_saves_no_engine_warns_that_all_iterations_are_repeated(tmp_path, has_file):
    if has_file:
        Checkpoint({"part": Part()}, tmp_path)(at(1))
    checkpoint = Checkpoint({"part": Part()}, tmp_path)
    with pytest.warns(UserWarning, match="to_save holds no engine, .*: add the trainer to to_save") as seen:
        checkpoint.resume_latest()
    assert [one.filename for one in seen] == [__file__]


def test_other_handlers_cannot_resume():
    with pytest.raises(AttributeError, match="resume_latest needs a directory as save_handler"):
        Checkpoint({"part": Part()}, lambda checkpoint, filename: None).resume_latest()


def test_a_handler_that_does_not_know_what_it_saves_cannot_resume(tmp_path):
    with pytest.raises(
        RuntimeError, match=r"unknown before the first call: use Checkpoint, or Checkpoint.resume\(to_load"
    ):
        ModelCheckpoint(tmp_path).resume_latest()


@on_ranks(2)
def test_all_ranks_take_over_the_same_files(tmp_path):
    for _ in range(2):
        engine, checkpoint = in_three_lines(tmp_path)
        checkpoint.resume_latest()
        assert [name for _, name in checkpoint.state_dict()["_saved"]] == names(tmp_path)
        idist.barrier()
        engine.run(range(3), max_epochs=engine.state.epoch + 2)
        idist.barrier()
    assert set(names(tmp_path)) == {file_of(9), file_of(12)}


# --- damaged files -------------------------------------------------------------------


@settings(max_examples=25)
@given(position=st.integers(0, 10**6))
def test_any_flipped_bit_is_reported_and_the_previous_checkpoint_is_used(tmp_path_factory, position):
    folder = tmp_path_factory.mktemp("bits")
    save(folder, 1, 2)
    flip_a_bit(folder / file_of(2), position)
    with pytest.warns(UserWarning, match=r"checkpoint_2.pt' is damaged: .*resuming from 'checkpoint_1.pt'"):
        assert resume(folder) == (1, file_of(1))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), r"has [\d,]+ bytes instead of [\d,]+"),
        (lambda path: path.write_bytes(b""), "has 0 bytes instead of"),
        (lambda path: path.unlink(), "is not there"),
        (lambda path: (path.unlink(), path.mkdir()), "is not a regular file"),
    ],
)
def test_a_truncated_or_missing_file_is_reported_and_the_previous_one_is_used(tmp_path, harm, message):
    save(tmp_path, 1, 2)
    harm(tmp_path / file_of(2))
    with pytest.warns(UserWarning, match=message):
        assert resume(tmp_path) == (1, file_of(1))


def resume_latest(part, folder):
    return Checkpoint({"part": part, "other": Part()}, folder).resume_latest()


def resume_from_folder(part, folder):
    return Checkpoint.resume({"part": part}, folder)


@pytest.mark.filterwarnings("ignore:to_save holds no engine")
@pytest.mark.parametrize("way", [resume_latest, resume_from_folder])
@pytest.mark.parametrize("kept", [[1], []])
def test_a_warning_about_a_checkpoint_points_to_the_line_of_the_user(tmp_path, way, kept):
    save(tmp_path, *kept, 2)
    (tmp_path / file_of(2)).unlink()
    with pytest.warns(UserWarning, match="checkpoint_2.pt' is not there") as told:
        way(Part(), tmp_path)
    assert {one.filename for one in told} == {__file__}


@on_ranks(2)
@pytest.mark.parametrize("kept", [[1], []])
def test_what_all_ranks_find_is_reported_once(tmp_path, kept):
    if idist.get_rank() == 0:
        save(tmp_path, *kept, 2)
        (tmp_path / file_of(2)).unlink()
    idist.barrier()
    with warning_on_rank_0("checkpoint_2.pt' is not there"):  # elsewhere, warnings are errors
        resume(tmp_path)


def test_if_no_checkpoint_is_complete_the_error_names_each(tmp_path):
    save(tmp_path, 1, 2)
    flip_a_bit(tmp_path / file_of(1), 100)
    (tmp_path / file_of(2)).unlink()
    part = Part(5)
    with pytest.raises(DamagedCheckpointError, match=r"(?s)checkpoint_2.pt' is not there.*checkpoint_1.pt' is damaged"):
        Checkpoint.resume({"part": part}, tmp_path)
    assert part.value == 5


def break_disk(monkeypatch, ending):
    """Make paths with this ending fail, as a network mount may temporarily do."""

    def broken(inner, path, *args, **kwargs):
        if str(path).endswith(ending):
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return inner(path, *args, **kwargs)

    for name in ("lstat", "stat", "listdir", "scandir"):
        monkeypatch.setattr(os, name, partial(broken, getattr(os, name)))


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_temporarily_unreadable_file_does_not_count_as_missing(tmp_path, monkeypatch, is_listed):
    save(tmp_path, 1, 2)
    if not is_listed:
        shutil.rmtree(tmp_path / FOLDER)
    with monkeypatch.context() as broken:
        break_disk(broken, file_of(2))
        with pytest.warns(UserWarning, match=r"checkpoint_2.pt' cannot be read: .*Stale file handle.*; resuming from"):
            assert resume(tmp_path) == (1, file_of(1))
    (tmp_path / file_of(1)).unlink()
    break_disk(monkeypatch, ".pt")
    with pytest.raises(DamagedCheckpointError, match=r"checkpoint_2.pt' cannot be read: .*Stale file handle"):
        resume(tmp_path)


@pytest.mark.parametrize("ending", ["checkpoints", FOLDER])
def test_a_directory_that_cannot_be_listed_does_not_count_as_empty(tmp_path, monkeypatch, ending):
    folder = tmp_path / "checkpoints"
    save(folder, 1)
    break_disk(monkeypatch, ending)
    with pytest.raises(OSError, match=r"the checkpoints in '.*checkpoints' cannot be listed: .*Stale file handle"):
        resume(folder)


@on_ranks(2)
def test_all_ranks_report_a_directory_that_one_rank_cannot_list(tmp_path, monkeypatch):
    if idist.get_rank() == 0:
        save(tmp_path, 1)
        break_disk(monkeypatch, FOLDER)
    with pytest.raises(OSError, match="cannot be listed: .*Stale file handle"):
        resume(tmp_path)


def test_loading_a_damaged_file_by_its_path_is_an_error(tmp_path):
    save(tmp_path, 1)
    flip_a_bit(tmp_path / file_of(1), 300)
    with pytest.raises(DamagedCheckpointError, match=r"checkpoint_1.pt' is damaged"):
        Checkpoint.load_objects({"part": Part()}, tmp_path / file_of(1))


class Evil:
    def __reduce__(self):
        return os.mkdir, ("you_were_here",)


def test_a_file_that_would_run_code_is_not_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"part": {"value": 1}}, tmp_path / "good.pt")
    (tmp_path / "evil.pt").write_bytes(pickle.dumps({"part": Evil()}, protocol=2))
    torch.save({"part": Evil()}, tmp_path / "zipped.pt")
    os.utime(tmp_path / "good.pt", ns=(0, 1))
    with pytest.warns(UserWarning, match="cannot be read: UnpicklingError") as told:
        assert resume(tmp_path) == (1, "good.pt")
    assert len(told) == 2
    assert not (tmp_path / "you_were_here").exists()


def test_the_first_save_warns_if_the_file_cannot_be_loaded_with_weights_only(tmp_path):
    saver = DiskSaver(tmp_path)
    with pytest.warns(UserWarning, match=r"because of .*parts\.Part; return plain values"):
        saver({"part": Part()}, "a.pt")
    saver({"part": Part()}, "b.pt")


def entry_of(folder, step):
    (entry,) = (folder / FOLDER).glob(f"{file_of(step)}.*")
    return entry


def forged(text, field, value):
    """Change a field of an entry, and its checksum."""
    content = json.loads(text)
    del content["checksum_of_entry"]
    content[field] = value
    return json.dumps({**content, "checksum_of_entry": manifest.checksum_of_entry(content)})


WRONG = {
    "file": ["checkpoint_1.pt", "../checkpoint_2.pt"],
    "format": [None, 2],
    "checksum": [None, "crc32:00000000"],
    "size": [None, True, -1, 10**30],
    "saved_at": [None, -1, float("nan"), 10**30, []],
    "objects": [3, [3], "part"],
}
HARMS = {
    **{repr(text)[:20]: lambda _, text=text: text for text in ("", "{", "null", "[" * 100_000, " " * (1 << 20) + "{}")},
    **{
        f"{field} {value!r}": lambda text, field=field, value=value: forged(text, field, value)
        for field, values in WRONG.items()
        for value in values
    },
    "other objects": lambda text: text.replace('"other"', '"odder"'),
}


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_a_damaged_entry_is_skipped_with_one_record_in_the_log(tmp_path, caplog, harm):
    """Its file counts as one without an entry, whose age is that of the file."""
    save(tmp_path, 1, 2)
    entry = entry_of(tmp_path, 2)
    entry.write_text(harm(entry.read_text()))
    assert resume(tmp_path) == (2, file_of(2))
    (record,) = caplog.records
    assert f"skipping the damaged entry '{entry}'" in record.getMessage()
    saver = DiskSaver(tmp_path, require_empty=False)
    saver({"part": {"value": 3}}, file_of(2))
    assert resume(tmp_path) == (3, file_of(2))
    saver.remove(file_of(2))
    assert not list((tmp_path / FOLDER).glob(f"{file_of(2)}.*"))


@pytest.mark.parametrize("field", ["step", "score"])
def test_a_value_that_is_nan_does_not_hide_damage(tmp_path, field):
    save(tmp_path, 1, 2)
    entry = entry_of(tmp_path, 2)
    entry.write_text(forged(entry.read_text(), field, float("nan")))
    flip_a_bit(tmp_path / file_of(2), 700)
    with pytest.warns(UserWarning, match=r"checkpoint_2\.pt' is damaged"):
        assert resume(tmp_path) == (1, file_of(1))


def test_files_in_the_manifest_that_are_not_entries_are_ignored(tmp_path):
    save(tmp_path, 1)
    for name in ("broken.json", "...00000000.json", "..00000000.json", ".json", "notes.txt"):
        (tmp_path / FOLDER / name).write_text("{")
    assert [entry.file for entry in Manifest(tmp_path).entries()] == [file_of(1)]
    assert resume(tmp_path) == (1, file_of(1))


# --- while a trainer saves and prunes ------------------------------------------------------------------


def interrupt(monkeypatch, act, when):
    """Call ``act`` before accesses of ``resume`` to the disk whose number satisfies ``when``; return the accesses."""
    accesses = []
    acting = False

    def watch(owner, name):
        inner = getattr(owner, name)

        def access(*args, **kwargs):
            nonlocal acting
            if not acting:
                accesses.append(name)
                acting = True
                if when(len(accesses)):
                    act()
                acting = False
            return inner(*args, **kwargs)

        monkeypatch.setattr(owner, name, access)

    for owner, name in (
        (loading, "find"),
        (loading, "checkpoints_in"),
        (Entry, "problem"),
        (loading, "_read"),
    ):
        watch(owner, name)
    return accesses


@pytest.mark.parametrize(("pattern", "n_saved", "count"), [(None, 1, 10), (None, 2, 2), ("fixed.pt", 1, 10)])
@pytest.mark.parametrize("first", [1, 2, 4, 6])
def test_while_a_trainer_prunes_the_newest_is_loaded_without_a_warning(
    tmp_path, monkeypatch, pattern, n_saved, first, count
):
    part = Part()
    saver = DiskSaver(tmp_path, require_empty=False)
    checkpoint = Checkpoint({"part": part, "other": Part()}, saver, n_saved=n_saved, filename_pattern=pattern)

    def train():
        part.value += 1
        checkpoint(at(part.value))

    for _ in range(3):
        train()
    accesses = interrupt(monkeypatch, train, lambda number: first <= number < first + count)
    value, name = resume(tmp_path)
    assert value >= 3
    assert name == (pattern or file_of(value))
    assert len(accesses) >= min(first, 4)


def test_a_file_that_is_replaced_while_it_is_verified_is_not_damaged(tmp_path, monkeypatch):
    saver = DiskSaver(tmp_path)
    saver({"value": 1}, "part.pt")
    real, values = manifest.checksum_of, iter([2])

    def replaced_first(path):
        for value in values:
            saver({"value": value}, "part.pt")
        return real(path)

    monkeypatch.setattr(manifest, "checksum_of", replaced_first)
    part = Part()
    Checkpoint.load_objects({"part": part}, tmp_path / "part.pt")
    assert part.value == 2


def test_resume_gives_up_if_a_trainer_keeps_replacing_the_files(tmp_path, monkeypatch):
    save(tmp_path, 1)
    steps = iter(range(2, 10_000))

    def train():
        for path in tmp_path.glob("*.pt"):
            DiskSaver(tmp_path, require_empty=False).remove(path.name)
        save(tmp_path, next(steps))

    monkeypatch.setattr(loading, "_MOST_CHANGES", 5)
    accesses = interrupt(monkeypatch, train, lambda number: accesses[-1] == "problem")
    with pytest.warns(UserWarning, match="nothing was loaded, as there is no checkpoint to resume from"):
        assert resume(tmp_path) == (0, None)
    assert 5 <= accesses.count("problem") <= 7


@on_ranks(2)
def test_all_ranks_list_again_if_one_rank_misses_the_file(tmp_path, monkeypatch):
    rank = idist.get_rank()
    if rank == 0:
        save(tmp_path, 1)
    idist.barrier()
    read = loading._read
    reads = []

    def vanish(path, map_location=None):
        reads.append(path.name)
        if rank == 1 and len(reads) == 1:
            DiskSaver(tmp_path, require_empty=False, save_on_rank=1).remove(file_of(1))
            save(tmp_path, 2, save_on_rank=1)
            raise FileNotFoundError(path)
        return read(path, map_location)

    monkeypatch.setattr(loading, "_read", vanish)
    assert resume(tmp_path) == (2, file_of(2))
    assert len(reads) == 2 or rank == 0  # which may find that the first file is gone before it reads it


# --- hostile directories ---------------------------------------------------------------------------------------


def write_entry(folder, file, checksum="crc32:00000000", size=0, name=None):
    """Write an entry as an attacker would."""
    content = {"format": 1, "file": file, "checksum": checksum, "size": size, "saved_at": 2**61, "objects": None}
    text = json.dumps({**content, "checksum_of_entry": manifest.checksum_of_entry(content)})
    (folder / FOLDER / (name or f"{file}.{checksum[-8:]}.json")).write_text(text)


@pytest.mark.parametrize("kind", ["parent", "absolute", "device"])
def test_an_entry_that_names_a_file_outside_of_the_directory_is_rejected(tmp_path, kind):
    folder = tmp_path / "checkpoints"
    save(folder, 1)
    secret = tmp_path / "secret.pt"
    torch.save({"part": {"value": 666}}, secret)
    file = {"parent": "../secret.pt", "absolute": str(secret), "device": "/dev/zero"}[kind]
    write_entry(folder, file, checksum_of(secret), secret.stat().st_size, name="checkpoint_2.pt.01234567.json")
    assert resume(folder) == (1, file_of(1))


def as_pipe(path, folder):
    os.mkfifo(path)


def as_link(path, folder):
    path.symlink_to(folder / "secret.pt")


def as_device(path, folder):
    path.symlink_to("/dev/zero")


def as_folder(path, folder):
    path.mkdir()


KINDS = [as_pipe, as_link, as_device, as_folder]


@pytest.mark.parametrize("is_listed", [True, False])
@pytest.mark.parametrize("make", KINDS)
def test_only_regular_files_are_opened(tmp_path, make, is_listed):
    folder = tmp_path / "checkpoints"
    save(folder, 1)
    secret = tmp_path / "secret.pt"
    torch.save({"part": {"value": 666}}, secret)
    make(folder / "evil.pt", tmp_path)
    if is_listed:
        write_entry(folder, "evil.pt", checksum_of(secret), secret.stat().st_size)
        with pytest.warns(UserWarning, match=r"evil.pt' is not a regular file, and links are not followed"):
            assert resume(folder) == (1, file_of(1))
        DiskSaver(folder, require_empty=False).remove(file_of(1))
        with pytest.raises(DamagedCheckpointError, match=r"evil.pt' is not a regular file"):
            resume(folder)
    else:
        assert resume(folder) == (1, file_of(1))


@pytest.mark.parametrize("make", [as_pipe, as_device])
def test_loading_by_path_does_not_hang_on_a_listed_pipe(tmp_path, make):
    save(tmp_path, 1)
    make(tmp_path / "evil.pt", tmp_path)
    write_entry(tmp_path, "evil.pt")
    with pytest.raises(DamagedCheckpointError, match="is not a regular file"):
        Checkpoint.load_objects({"part": Part()}, tmp_path / "evil.pt")


def test_a_link_passed_by_the_user_is_followed(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "latest").symlink_to(tmp_path / file_of(1))
    part = Part()
    Checkpoint.load_objects({"part": part}, tmp_path / "latest")
    assert part.value == 1


@pytest.mark.parametrize("make", KINDS)
def test_entries_that_are_not_regular_files_are_not_opened(tmp_path, caplog, make):
    save(tmp_path, 1, 2)
    entry = entry_of(tmp_path, 2)
    entry.unlink()
    make(entry, tmp_path)
    assert resume(tmp_path) == (2, file_of(2))
    assert "it is not a regular file" in caplog.text


def test_a_manifest_that_is_a_link_is_neither_read_nor_written(tmp_path):
    folder, other = tmp_path / "checkpoints", tmp_path / "other"
    save(other, 1)
    save(folder, 2)
    shutil.rmtree(folder / FOLDER)
    (folder / FOLDER).symlink_to(other / FOLDER)
    assert resume(folder) == (2, file_of(2))
    before = sorted((other / FOLDER).iterdir())
    with pytest.raises(NotADirectoryError, match="the manifest of the checkpoints, .* is a link or a file: remove it"):
        DiskSaver(folder, require_empty=False)
    assert sorted((other / FOLDER).iterdir()) == before


def test_a_manifest_that_is_a_file_is_rejected_at_construction(tmp_path):
    (tmp_path / FOLDER).touch()
    with pytest.raises(NotADirectoryError, match="the manifest of the checkpoints, .* is a link or a file: remove it"):
        DiskSaver(tmp_path)


def best_and_last(folder):
    """Return an object, a handler that keeps the best, and one that saves the record of that handler."""
    part = Part()
    best = Checkpoint(
        {"part": part}, DiskSaver(folder / "best", require_empty=False), score_function=lambda _: part.value
    )
    last = Checkpoint({"part": part, "best": best}, DiskSaver(folder / "last", require_empty=False))
    return part, best, last


def saved_after_the_best_was_replaced(folder):
    part, best, last = best_and_last(folder)
    part.value = 5
    best(at(1))
    last(at(1))
    part.value = 9
    best(at(2))  # removes the file that the saved record names; then the job is killed


def test_a_resumed_record_forgets_files_that_the_run_removed_later(tmp_path):
    saved_after_the_best_was_replaced(tmp_path)
    part, best, _ = best_and_last(tmp_path)
    Checkpoint.resume({"part": part, "best": best}, tmp_path / "last")
    assert best.last_checkpoint is None
    part.value = 4
    best(at(2))
    assert best.last_checkpoint == tmp_path / "best" / "part_4.pt"


@on_ranks(2)
def test_all_ranks_forget_the_same_files(tmp_path):
    if idist.get_rank() == 0:
        saved_after_the_best_was_replaced(tmp_path)
    idist.barrier()
    part, best, _ = best_and_last(tmp_path)
    Checkpoint.resume({"part": part, "best": best}, tmp_path / "last")
    assert best.state_dict() == {"_saved": []}


def test_while_a_file_is_replaced_both_the_old_and_the_new_one_are_valid(tmp_path, monkeypatch):
    saver = DiskSaver(tmp_path)
    saver({"value": 1}, "part.pt")

    class Killed(BaseException):
        pass

    def killed(*args, **kwargs):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(
            "os.replace", lambda source, target: killed() if str(target).endswith(".pt") else rename(source, target)
        )
        with pytest.raises(Killed):
            saver({"value": 2}, "part.pt")
    assert resume(tmp_path) == (1, "part.pt")
    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "remove", killed)
        with pytest.raises(Killed):
            saver({"value": 3}, "part.pt")
    assert resume(tmp_path) == (3, "part.pt")
    assert len(Manifest(tmp_path).entries()) > 1


rename = os.replace


@pytest.mark.parametrize("to_load", [None, [Part()], {"part": 3}])
def test_invalid_to_load_is_rejected(tmp_path, to_load):
    with pytest.raises(TypeError, match="to_load"):
        Checkpoint.resume(to_load, tmp_path)


# --- on ranks ----------------------------------------------------------------------------------------------


@on_ranks(2)
def test_all_ranks_resume_from_the_same_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 1, 2)
    idist.barrier()
    if idist.get_rank() == 0:
        flip_a_bit(tmp_path / file_of(2), 99)
    idist.barrier()
    with warning_on_rank_0("is damaged"):
        assert resume(tmp_path) == (1, file_of(1))


def test_a_file_as_the_directory_is_rejected(tmp_path):
    DiskSaver(tmp_path)({"value": 1}, "model.pt")
    with pytest.raises(ValueError, match=r"directory must contain checkpoints, got the file '.*model\.pt'"):
        Checkpoint.resume({"model": Part()}, tmp_path / "model.pt")


def test_records_are_found_in_nested_objects(tmp_path):
    part, best, _ = best_and_last(tmp_path)
    best(at(1))
    Checkpoint({"part": part, "handlers": [{"best": best}]}, DiskSaver(tmp_path / "nested"))(at(1))
    best.last_checkpoint.unlink()
    _, best, _ = best_and_last(tmp_path)
    Checkpoint.resume({"part": part, "handlers": [{"best": best}]}, tmp_path / "nested")
    assert best.last_checkpoint is None


# --- what a resumed run saves -------------------------------------------------------------------------------------


def train(folder, batch_size=2, max_epochs=4, stop_at=None, **options):
    """Train over 24 samples, resuming if there is a checkpoint; return the epochs and iterations that were run."""
    trainer, ran = Engine(lambda engine, batch: None), []
    checkpoint = Checkpoint({"trainer": trainer}, folder, **options)

    @trainer.on(Events.ITERATION_COMPLETED)
    def stop(engine):
        ran.append((engine.state.epoch, engine.state.iteration))
        if engine.state.iteration == stop_at:
            raise KeyboardInterrupt

    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=2), checkpoint)
    checkpoint.resume_latest()
    loader = idist.auto_dataloader(torch.arange(24), batch_size=batch_size, shuffle=True, seed=1)
    if stop_at is None:
        trainer.run(loader, max_epochs=max_epochs)
    else:
        with pytest.raises(KeyboardInterrupt):
            trainer.run(loader, max_epochs=max_epochs)
    return ran


def test_a_run_resumed_with_larger_batches_counts_its_iterations_from_where_it_was(tmp_path):
    ran = train(tmp_path, stop_at=27, n_saved=2)  # of 12 per epoch
    assert ran[-1] == (3, 27)
    ran = train(tmp_path, batch_size=8, n_saved=2)  # 3 per epoch
    assert ran[-1] == (4, 32)
    assert names(tmp_path) == ["trainer_30.pt", "trainer_32.pt"]
    ran = train(tmp_path, batch_size=8, max_epochs=5, n_saved=2)
    assert ran == [(5, 33), (5, 34), (5, 35)]


def test_what_an_evaluation_changed_is_saved_although_its_iteration_was_saved_before(tmp_path):
    def run():
        trainer, evaluator = Engine(lambda engine, batch: None), Engine(lambda engine, batch: None)
        stopping = EarlyStopping(1, lambda engine: 0.0, trainer)
        stopping.attach(evaluator)
        checkpoint = Checkpoint({"trainer": trainer, "stopping": stopping}, tmp_path)  # one file
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([0]))
        trainer.add_event_handler(Events.ITERATION_COMPLETED(every=3) | Events.EPOCH_COMPLETED, checkpoint)
        checkpoint.resume_latest()
        trainer.run(range(3), max_epochs=9)
        return trainer.state.epoch

    assert run() == 2
    assert run() == 2  # and stays stopped


@pytest.mark.filterwarnings("ignore:to_save holds no engine")
def test_checkpoints_of_the_other_format_are_taken_over_and_removed_too(tmp_path):
    for number, sharded in enumerate([True, False, True]):
        part = Part()
        checkpoint = Checkpoint({"part": part}, tmp_path, sharded=sharded, n_saved=2)
        checkpoint.resume_latest()
        assert part.value == 10 * number
        for step in (10 * number + 5, 10 * number + 10):
            part.value = step
            checkpoint(at(step))
        suffix = ".sharded" if sharded else ".pt"
        assert {path.name for path in tmp_path.glob("part_*")} == {f"part_{step}{suffix}" for step in (step - 5, step)}
