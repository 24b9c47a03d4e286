"""Test the files of CSVLogger and JSONLinesLogger, also after a kill, a full disk and a resume."""

from __future__ import annotations

import csv
import gc
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path

import numpy
import pytest
import torch

from camshaft.engine import Engine, Events
from camshaft.handlers import CSVLogger, JSONLinesLogger, file_logger, global_step_from_engine
from tests.handlers.parts import at
from tests.ranks import on_ranks

EPOCH_LENGTH = 4
KINDS = [CSVLogger, JSONLinesLogger]
both = pytest.mark.parametrize("kind", KINDS)


def records(path):
    """Read a file as users would, without the times and the iterations."""
    lines = path.read_text().splitlines()
    if path.suffix == ".jsonl":
        found = [json.loads(line) for line in lines]
    else:
        found = [{name: number(cell) for name, cell in row.items() if cell} for row in csv.DictReader(lines)]
    for record in found:
        assert record.pop("time") > 1.7e9
        assert record.pop("iteration") >= 0
    return found


def number(cell):
    try:
        return float(cell)
    except ValueError:
        return cell


def curve(path, name):
    return [(record["step"], record[name]) for record in records(path) if name in record]


def steps(path, name):
    return [step for step, _ in curve(path, name)]


def write(logger, step=0, **metrics):
    file_logger.OutputHandler("t", "all")(at(epoch=step, **metrics), logger, Events.EPOCH_COMPLETED)


class Crash(Exception):
    pass


def stop():
    raise Crash


def job(logger, attempt=1, start_at=None):
    """Return a trainer that logs by iteration, and by epoch under the same tag through an evaluator."""
    trainer = Engine(lambda engine, batch: engine.state.iteration * attempt)
    evaluator = Engine(lambda engine, batch: None)
    logger.attach_output_handler(
        trainer, Events.ITERATION_COMPLETED(every=2), "training", output_transform=lambda output: {"loss": output}
    )
    step = global_step_from_engine(trainer)
    logger.attach_output_handler(evaluator, Events.COMPLETED, "training", ["accuracy"], global_step_transform=step)
    logger.attach_opt_params_handler(trainer, Events.EPOCH_STARTED, torch.optim.SGD([torch.zeros(1)], lr=0.5))

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate():
        evaluator.state.metrics = {"accuracy": trainer.state.epoch * attempt}
        evaluator.run([0])

    if start_at is not None:
        load(trainer, start_at)
    return trainer


def load(trainer, iteration, epochs=5):
    trainer.load_state_dict({"iteration": iteration, "epoch_length": EPOCH_LENGTH, "max_epochs": epochs})


def crash(trainer, at, epochs=5):
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=at), stop)
    with pytest.raises(Crash):
        trainer.run(range(EPOCH_LENGTH), max_epochs=epochs)


# --- records -----------------------------------------------------------------------------------------------


@both
def test_each_event_writes_a_record_with_step_time_and_names(kind, tmp_path):
    with kind(tmp_path / "new" / "folder") as logger:
        job(logger).run(range(EPOCH_LENGTH), max_epochs=2)
    assert logger.path == tmp_path / "new" / "folder" / f"metrics{kind.suffix}"
    assert records(logger.path) == [
        {"step": 1, "lr/group_0": 0.5},
        {"step": 2, "training/loss": 2},
        {"step": 4, "training/loss": 4},
        {"step": 1, "training/accuracy": 1},
        {"step": 2, "lr/group_0": 0.5},
        {"step": 6, "training/loss": 6},
        {"step": 8, "training/loss": 8},
        {"step": 2, "training/accuracy": 2},
    ]


@both
def test_two_events_of_the_same_step_write_one_record(kind, tmp_path):
    with kind(tmp_path) as logger:
        trainer = Engine(lambda engine, batch: 0.5)
        step = global_step_from_engine(trainer, Events.ITERATION_COMPLETED)
        for tag, events in (
            ("both", Events.ITERATION_COMPLETED(every=2) | Events.EPOCH_COMPLETED),
            ("other", Events.ITERATION_COMPLETED(every=2)),
        ):
            logger.attach_output_handler(
                trainer, events, tag, output_transform=lambda loss: {"loss": loss}, global_step_transform=step
            )
        trainer.run(range(4), max_epochs=2)
        load(trainer, 7, epochs=2)
        trainer.run(range(4))  # writes again what it has removed
    assert curve(logger.path, "both/loss") == [(one, 0.5) for one in (2, 4, 6, 8)]


@both
def test_a_path_with_the_suffix_is_a_file(kind, tmp_path):
    with kind(str(tmp_path / f"run{kind.suffix}")) as logger:
        assert logger.path == tmp_path / f"run{kind.suffix}"
    folder = tmp_path / f"folder{kind.suffix}"
    folder.mkdir()
    with kind(folder) as logger:
        assert logger.path == folder / f"metrics{kind.suffix}"


@both
def test_numbers_of_all_types_and_text_round_trip(kind, tmp_path):
    with kind(tmp_path) as logger:
        text = {"text": 'a,"b"\nc', "lone": "\udc80"}
        write(logger, bool=True, numpy=numpy.float32(0.5), tensor=torch.tensor(3), deep=[{"a": 1}], **text)
        write(logger, a=math.nan, b=math.inf, c=-math.inf)
    record, other = records(logger.path)
    assert (record["t/numpy"], record["t/tensor"], record["t/deep/0/a"]) == (0.5, 3, 1)
    if kind is CSVLogger:
        assert (record["t/bool"], record["t/text"], record["t/lone"]) == ("True", 'a,"b" c', "\\udc80")
        assert math.isnan(other["t/a"])
        assert (other["t/b"], other["t/c"]) == (math.inf, -math.inf)
    else:
        assert (record["t/bool"], record["t/text"], record["t/lone"]) == (True, 'a,"b"\nc', "\udc80")
        assert [other[f"t/{name}"] for name in "abc"] == ["NaN", "Infinity", "-Infinity"]  # JSON has no such numbers


def test_a_late_column_is_added_to_all_rows(tmp_path):
    with CSVLogger(tmp_path) as logger:
        for metrics in ({"a": 1}, {"a": 2, "b": 3}, {"c": 4, "d": 0}, {"b": 5}):
            write(logger, **metrics)
    header, *rows = csv.reader(logger.path.read_text().splitlines())
    assert header == ["step", "time", "iteration", "t/a", "t/b", "t/c", "t/d"]
    assert [row[3:] for row in rows] == [["1", "", "", ""], ["2", "3", "", ""], ["", "", "4", "0"], ["", "5", "", ""]]


def test_weights_and_gradients_are_written_to_file_loggers_only(tmp_path):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, -2)
    model.weight.grad = torch.tensor([[3.0]])
    with JSONLinesLogger(tmp_path) as logger:
        for handler in (file_logger.WeightsScalarHandler(model, tag="net"), file_logger.GradsScalarHandler(model)):
            handler(at(epoch=1), logger, Events.EPOCH_COMPLETED)
    assert records(logger.path) == [{"step": 1, "net/weights_norm/weight": 2}, {"step": 1, "grads_norm/weight": 3}]
    with pytest.raises(RuntimeError, match="OutputHandler needs a FileLogger as its logger, got 'logger' of type str"):
        write("logger", a=1)


# --- resuming a file ----------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(("saved_at", "crash_at"), [(8, 15), (10, 17), (3, 4)])
def test_after_a_resume_each_point_exists_exactly_once(kind, tmp_path, saved_at, crash_at):
    with kind(tmp_path) as logger:
        crash(job(logger), crash_at)
    with kind(tmp_path) as logger:
        job(logger, attempt=100, start_at=saved_at).run(range(EPOCH_LENGTH))

    def value(place, first):
        return place if place <= first else 100 * place

    epochs_done = saved_at // EPOCH_LENGTH
    assert curve(logger.path, "training/loss") == [(step, value(step, saved_at)) for step in range(2, 21, 2)]
    assert curve(logger.path, "training/accuracy") == [(epoch, value(epoch, epochs_done)) for epoch in range(1, 6)]
    assert curve(logger.path, "lr/group_0") == [(epoch, 0.5) for epoch in range(1, 6)]
    assert [file.name for file in tmp_path.iterdir()] == [logger.path.name]


@both
def test_runs_of_one_process_continue_the_file_also_after_close(kind, tmp_path):
    with kind(tmp_path) as logger:
        trainer = job(logger)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), trainer.interrupt)
        trainer.run(range(EPOCH_LENGTH), max_epochs=1)
        trainer.run()
        trainer.run(range(EPOCH_LENGTH), max_epochs=2)
        assert steps(logger.path, "training/loss") == [2, 4, 6, 8]
    for _ in range(2):
        load(trainer, 6, epochs=3)
        trainer.run(range(EPOCH_LENGTH))
        logger.close()
    assert steps(logger.path, "training/loss") == [2, 4, 6, 8, 10, 12]
    assert steps(logger.path, "training/accuracy") == [1, 2, 3]


@both
def test_a_new_job_renames_an_existing_file(kind, tmp_path):
    for attempt in (1, 2, 3):
        with kind(tmp_path) as logger:
            job(logger, attempt).run(range(EPOCH_LENGTH), max_epochs=1)
    files = ["metrics.1", "metrics.2", "metrics"]
    for attempt, name in enumerate(files, start=1):
        assert curve(tmp_path / f"{name}{kind.suffix}", "training/loss") == [(2, 2 * attempt), (4, 4 * attempt)]
    assert len(list(tmp_path.iterdir())) == len(files)


@both
def test_an_evaluation_before_a_resumed_run_is_the_first_record_after_it(kind, tmp_path):
    with kind(tmp_path) as logger:
        crash(job(logger), 15)
    with kind(tmp_path) as logger:
        trainer = job(logger, start_at=8)
        evaluator = Engine(lambda engine, batch: 0.0)
        logger.attach_output_handler(
            evaluator, Events.COMPLETED, "first", output_transform=lambda output: output,
            global_step_transform=global_step_from_engine(trainer),
        )  # fmt: skip
        evaluator.run([0])
        trainer.run(range(EPOCH_LENGTH))
    assert steps(logger.path, "training/loss") == [*range(2, 21, 2)]
    assert curve(logger.path, "first/output") == [(2, 0)]


@both
@pytest.mark.parametrize("start_at", [None, 4])
def test_two_loggers_may_write_to_one_file(kind, tmp_path, start_at):
    with kind(tmp_path) as logger:
        job(logger).run(range(EPOCH_LENGTH), max_epochs=2)
    with kind(tmp_path) as first, kind(tmp_path) as second:
        trainer = Engine(lambda engine, batch: batch)
        for logger, name in ((first, "first"), (second, "second")):
            logger.attach_output_handler(trainer, Events.EPOCH_COMPLETED, name, output_transform=lambda output: output)
        if start_at is not None:
            load(trainer, start_at, epochs=2)
        trainer.run(range(EPOCH_LENGTH), max_epochs=2)
    assert steps(first.path, "first/output") == steps(first.path, "second/output") == [1, 2][start_at is not None :]
    assert len(list(tmp_path.iterdir())) == (2 if start_at is None else 1)


@both
def test_a_removed_file_is_created_again(kind, tmp_path):
    with kind(tmp_path / "folder") as logger:
        write(logger, a=1)
        logger.path.unlink()
        write(logger, a=2)
        assert [value for _, value in curve(logger.path, "t/a")] == [2]
        logger.path.unlink()
        logger.path.parent.rmdir()
        with pytest.warns(UserWarning, match=f"{kind.__name__} cannot write, values are lost: FileNotFoundError"):
            write(logger, a=3)


@both
def test_an_evaluation_repeated_after_a_kill_is_logged_once(kind, tmp_path):
    """Its iteration is that of the checkpoint, so its record is not removed."""
    with kind(tmp_path) as logger:
        job(logger).run(range(EPOCH_LENGTH), max_epochs=2)
    with kind(tmp_path) as logger:
        trainer = job(logger, start_at=8)
        evaluator = Engine(lambda engine, batch: None)
        step = global_step_from_engine(trainer)
        logger.attach_output_handler(evaluator, Events.COMPLETED, "training", "all", global_step_transform=step)
        evaluator.state.metrics = {"accuracy": 2}
        trainer.add_event_handler(Events.STARTED, lambda: evaluator.run([0]))
        trainer.run(range(EPOCH_LENGTH))
    assert steps(logger.path, "training/accuracy") == [1, 2, 3, 4, 5]


def test_resuming_one_trainer_keeps_the_records_of_another(tmp_path):
    def log(states):
        trainers = [Engine(lambda engine, batch: 1.0) for _ in states]
        with CSVLogger(tmp_path) as logger:
            for name, trainer, state in zip("ab", trainers, states, strict=True):
                logger.attach_output_handler(trainer, Events.EPOCH_COMPLETED, name, output_transform=lambda one: one)
                if state is not None:
                    trainer.load_state_dict(state)
                trainer.run(range(2), max_epochs=3 if state is None else 4)
        return [trainer.state_dict() for trainer in trainers]

    log(log([None, None]))
    assert steps(tmp_path / "metrics.csv", "a/output") == steps(tmp_path / "metrics.csv", "b/output") == [1, 2, 3, 4]


@both
def test_a_resume_removes_the_records_of_its_own_run_only(kind, tmp_path):
    """Those of a trainer that ran before in the same file remain."""

    def trainer_on(logger, tag):
        trainer = Engine(lambda engine, batch: 1.0)
        every = Events.ITERATION_COMPLETED(every=2)
        logger.attach_output_handler(trainer, every, tag, output_transform=lambda one: one)
        return trainer

    with kind(tmp_path) as logger:
        trainer_on(logger, "first").run(range(9))
        crash(trainer_on(logger, "second"), 7, epochs=2)
    with kind(tmp_path) as logger:
        second = trainer_on(logger, "second")
        load(second, 1, epochs=2)
        second.run(range(EPOCH_LENGTH))
    assert steps(logger.path, "first/output") == steps(logger.path, "second/output") == [2, 4, 6, 8]


def test_a_file_without_iterations_is_continued(tmp_path):
    """Earlier versions wrote such files."""
    path = tmp_path / "metrics.csv"
    path.write_text("step,time,training/loss\n2,1800000000.0,2.0\n4,1800000000.0,4.0\n")
    with CSVLogger(path) as logger:
        job(logger, start_at=4).run(range(EPOCH_LENGTH))
    losses = [row for row in csv.DictReader(path.read_text().splitlines()) if row["training/loss"]]
    assert [int(row["step"]) for row in losses] == [*range(2, 21, 2)]
    assert [row["iteration"] for row in losses[:4]] == ["", "", "6", "8"]


# --- failures ----------------------------------------------------------------------------------------------

WRITE_FOREVER = """
import sys
import camshaft.distributed as idist
from camshaft.engine import Engine, Events
from camshaft.handlers import CSVLogger, JSONLinesLogger
kind = {"csv": CSVLogger, "jsonl": JSONLinesLogger}[sys.argv[1]]
logger = kind(sys.argv[2])
trainer = Engine(lambda engine, batch: {f"value_{batch % 50}": batch, "loss": 0.5})
logger.attach_output_handler(trainer, Events.ITERATION_COMPLETED, "t", output_transform=lambda output: output)
trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: print(trainer.state.iteration, flush=True))
trainer.run(range(10**9))
"""


@pytest.mark.jobs
@both
def test_a_kill_loses_no_complete_record(kind, tmp_path):
    command = [sys.executable, "-c", WRITE_FOREVER, kind.suffix[1:], str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        while int(process.stdout.readline()) < 120:
            pass
        process.send_signal(signal.SIGKILL)
        written = process.stdout.read().split()
    found = steps(tmp_path / f"metrics{kind.suffix}", "t/loss")
    assert found == [*range(1, len(found) + 1)]
    assert len(found) >= (int(written[-1]) if written else 120)
    with kind(tmp_path):
        pass  # the file can be resumed


@both
def test_a_truncated_record_is_dropped(kind, tmp_path):
    with kind(tmp_path) as logger:
        job(logger).run(range(EPOCH_LENGTH), max_epochs=1)
    whole = records(logger.path)
    logger.path.write_bytes(logger.path.read_bytes()[:-3])
    with kind(tmp_path):
        assert records(logger.path) == whole[:-1]


@both
@pytest.mark.parametrize(
    "content", ["name,value\nloss,1\n", '{"loss": 1}\n', "notes", "\xff\xfe", "[]\n", "step,time\n1\n"]
)
def test_foreign_files_are_rejected_and_unchanged(kind, tmp_path, content):
    path = tmp_path / f"metrics{kind.suffix}"
    path.write_bytes(content.encode("latin1"))
    with pytest.raises(ValueError, match=f"path must be a new file, or one that a {kind.__name__} wrote, got"):
        kind(tmp_path)
    assert path.read_bytes() == content.encode("latin1")


class Full:
    """A file on a full disk, which accepts half of a record."""

    def __init__(self, file):
        self.file, self.size = file, file.tell()

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, content):
        if self.file.tell() > self.size:
            raise OSError(28, "No space left on device")
        return self.file.write(content[: len(content) // 2])


@both
def test_a_full_disk_warns_once_and_loses_records_only(kind, tmp_path):
    with kind(tmp_path) as logger:
        write(logger, a=1)
        before = logger.path.read_bytes()
        real, logger._file = logger._file, Full(logger._file)
        with pytest.warns(UserWarning, match=rf"{kind.__name__} cannot write, .*: OSError: .*No space left"):
            write(logger, a=2)
        write(logger, a=3)  # without another warning
        assert logger.path.read_bytes() == before
        logger._file = real
        write(logger, a=4)
    assert [value for _, value in curve(logger.path, "t/a")] == [1, 4]


def test_engine_and_logger_are_freed_by_reference_counting(tmp_path):
    logger = CSVLogger(tmp_path)
    trainer = Engine(lambda engine, batch: batch)
    logger.attach_output_handler(trainer, Events.COMPLETED, "t", output_transform=lambda output: output)
    trainer.run(range(EPOCH_LENGTH))
    logger.close()
    gone = weakref.ref(logger), weakref.ref(trainer)
    gc.disable()
    try:
        del trainer, logger
        assert [one() for one in gone] == [None, None]
    finally:
        gc.enable()


@on_ranks(2)
def test_only_rank_0_writes():
    with tempfile.TemporaryDirectory() as folder:
        with CSVLogger(f"{folder}/log") as logger:
            job(logger).run(range(EPOCH_LENGTH))
            write(logger, a=1)
        if torch.distributed.get_rank() == 0:
            assert len(records(logger.path)) == 5
        else:
            assert not list(Path(folder).iterdir())
