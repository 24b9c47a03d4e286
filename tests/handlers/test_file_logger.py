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
import weakref
from contextlib import nullcontext
from pathlib import Path

import numpy
import pytest
import torch

import camshaft.distributed as idist
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


def job(logger, attempt=1, stop_at=None, start_at=None):
    """Return a trainer that logs by iteration, and by epoch under the same tag through an evaluator."""
    trainer = Engine(lambda engine, batch: engine.state.iteration * attempt)
    evaluator = Engine(lambda engine, batch: None)
    logger.attach_output_handler(
        trainer, Events.ITERATION_COMPLETED(every=2), "training", output_transform=lambda output: {"loss": output}
    )
    logger.attach_output_handler(
        evaluator,
        Events.COMPLETED,
        "training",
        metric_names=["accuracy"],
        global_step_transform=global_step_from_engine(trainer),
    )
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    logger.attach_opt_params_handler(trainer, Events.EPOCH_STARTED, optimizer)

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate():
        evaluator.state.metrics = {"accuracy": trainer.state.epoch * attempt}
        evaluator.run([0])

    if start_at is not None:
        trainer.load_state_dict({"iteration": start_at, "epoch_length": EPOCH_LENGTH, "max_epochs": 5})
    if stop_at is not None:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop_at), stop)
    return trainer


class Crash(Exception):
    pass


def stop():
    raise Crash


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
        assert curve(logger.path, "both/loss") == [(one, 0.5) for one in (2, 4, 6, 8)]
        trainer.load_state_dict({"iteration": 7, "epoch_length": 4, "max_epochs": 2})
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
    values = {
        "bool": True,
        "numpy": numpy.float32(0.5),
        "tensor": torch.tensor(3),
        "deep": [{"a": 1}],
        "text": 'a,"b"\nc',
    }
    with kind(tmp_path) as logger:
        logger.attach_output_handler(at(**values), Events.COMPLETED, "t", metric_names="all")
        engine = at(**values)
        file_logger.OutputHandler("t", "all")(engine, logger, Events.COMPLETED)
    (record,) = records(logger.path)
    assert record["t/numpy"] == 0.5
    assert record["t/tensor"] == 3
    assert record["t/deep/0/a"] == 1
    assert record["t/bool"] in (True, "True")
    assert record["t/text"] == ('a,"b" c' if kind is CSVLogger else 'a,"b"\nc')


def test_non_finite_numbers_are_valid_json_and_valid_cells(tmp_path):
    engine = at(a=math.nan, b=math.inf, c=-math.inf)
    for kind in KINDS:
        with kind(tmp_path) as logger:
            file_logger.OutputHandler("t", "all")(engine, logger, Events.COMPLETED)
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert [line[f"t/{name}"] for name in "abc"] == ["NaN", "Infinity", "-Infinity"]
    (row,) = records(tmp_path / "metrics.csv")
    assert math.isnan(row["t/a"])
    assert (row["t/b"], row["t/c"]) == (math.inf, -math.inf)


def test_a_late_column_is_added_to_all_rows(tmp_path):
    with CSVLogger(tmp_path) as logger:
        handler = file_logger.OutputHandler("t", "all")
        for metrics in ({"a": 1}, {"a": 2, "b": 3}, {"c": 4}, {"b": 5}):
            handler(at(**metrics), logger, Events.COMPLETED)
    header, *rows = csv.reader(logger.path.read_text().splitlines())
    assert header == ["step", "time", "iteration", "t/a", "t/b", "t/c"]
    assert [row[3:] for row in rows] == [["1", "", ""], ["2", "3", ""], ["", "", "4"], ["", "5", ""]]


@both
def test_weights_and_gradients_are_written(kind, tmp_path):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, -2)
    model.weight.grad = torch.tensor([[3.0]])
    with kind(tmp_path) as logger:
        for handler in (file_logger.WeightsScalarHandler(model, tag="net"), file_logger.GradsScalarHandler(model)):
            handler(at(epoch=1), logger, Events.EPOCH_COMPLETED)
    assert records(logger.path) == [{"step": 1, "net/weights_norm/weight": 2}, {"step": 1, "grads_norm/weight": 3}]


def test_handlers_refuse_other_loggers():
    with pytest.raises(RuntimeError, match="OutputHandler needs a FileLogger as its logger, got 'logger' of type str"):
        file_logger.OutputHandler("t", "all")(at(a=1), "logger", Events.COMPLETED)


# --- resuming a file ----------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(("saved_at", "crash_at"), [(8, 15), (6, 7), (10, 17), (3, 4)])
def test_after_a_resume_each_point_exists_exactly_once(kind, tmp_path, saved_at, crash_at):
    with kind(tmp_path) as logger, pytest.raises(Crash):
        job(logger, stop_at=crash_at).run(range(EPOCH_LENGTH), max_epochs=5)
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
def test_a_resume_with_larger_batches_keeps_the_points_of_smaller_ones(kind, tmp_path):
    def run(batch_size, state=None, stop_at=None):
        states = {}
        with kind(tmp_path) as logger:
            trainer = Engine(lambda engine, batch: batch_size)
            trainer.add_event_handler(
                Events.ITERATION_COMPLETED, lambda engine: states.update({engine.state.iteration: engine.state_dict()})
            )
            for event, tag in ((Events.ITERATION_COMPLETED(every=2), "steps"), (Events.EPOCH_COMPLETED, "epochs")):
                logger.attach_output_handler(trainer, event, tag, output_transform=lambda output: {"size": output})
            if stop_at is not None:
                trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop_at), stop)
            trainer.load_state_dict(state or {"iteration": 0, "epoch_length": 12, "max_epochs": 4})
            loader = idist.auto_dataloader(torch.arange(24), batch_size=batch_size, shuffle=True, seed=0)
            with nullcontext() if stop_at is None else pytest.raises(Crash):
                trainer.run(loader)
        return states, logger.path

    states, path = run(2, stop_at=31)
    before = range(2, 27, 2)  # what follows the checkpoint of iteration 26 is removed
    run(8, states[26])
    assert curve(path, "steps/size") == [(step, 2) for step in before] + [(28, 8), (30, 8), (32, 8)]
    assert curve(path, "epochs/size") == [(1, 2), (2, 2), (3, 8), (4, 8)]


@both
def test_loading_a_state_again_in_the_same_process_rewinds_the_file(kind, tmp_path):
    with kind(tmp_path) as logger:
        trainer = job(logger)
        trainer.run(range(EPOCH_LENGTH), max_epochs=3)
        for _ in range(2):
            trainer.load_state_dict({"iteration": 4, "epoch_length": EPOCH_LENGTH, "max_epochs": 3})
            trainer.run(range(EPOCH_LENGTH))
    assert [step for step, _ in curve(logger.path, "training/loss")] == [2, 4, 6, 8, 10, 12]
    assert [step for step, _ in curve(logger.path, "training/accuracy")] == [1, 2, 3]


@both
def test_extending_or_interrupting_a_run_loses_nothing(kind, tmp_path):
    with kind(tmp_path) as logger:
        trainer = job(logger)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), trainer.interrupt)
        trainer.run(range(EPOCH_LENGTH), max_epochs=1)
        trainer.run()
        trainer.run(range(EPOCH_LENGTH), max_epochs=2)
    assert [step for step, _ in curve(logger.path, "training/loss")] == [2, 4, 6, 8]


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
def test_an_evaluation_before_a_resumed_run_keeps_the_file(kind, tmp_path):
    with kind(tmp_path) as logger:
        job(logger).run(range(EPOCH_LENGTH), max_epochs=2)
    with kind(tmp_path) as logger:
        trainer = job(logger, start_at=8)
        evaluator = Engine(lambda engine, batch: None)
        step = global_step_from_engine(trainer)
        logger.attach_output_handler(evaluator, Events.COMPLETED, "first", "all", global_step_transform=step)
        evaluator.state.metrics = {"accuracy": 0}
        evaluator.run([0])
        trainer.run(range(EPOCH_LENGTH))
    assert [step for step, _ in curve(logger.path, "training/loss")] == list(range(2, 21, 2))
    assert curve(logger.path, "first/accuracy") == [(2, 0)]


@both
def test_records_after_close_are_kept(kind, tmp_path):
    with kind(tmp_path) as logger:
        trainer = job(logger)
        trainer.run(range(EPOCH_LENGTH), max_epochs=1)
    trainer.run(range(EPOCH_LENGTH), max_epochs=2)
    logger.close()
    file_logger.OutputHandler("new", "all")(at(epoch=9, a=1), logger, Events.EPOCH_COMPLETED)
    logger.close()
    assert [step for step, _ in curve(logger.path, "training/loss")] == [2, 4, 6, 8]
    assert [step for step, _ in curve(logger.path, "training/accuracy")] == [1, 2]
    assert curve(logger.path, "new/a") == [(9, 1)]


@both
def test_a_closed_logger_rewinds_its_file(kind, tmp_path):
    with kind(tmp_path) as logger:
        trainer = job(logger)
        trainer.run(range(EPOCH_LENGTH), max_epochs=3)
    trainer.load_state_dict({"iteration": 4, "epoch_length": EPOCH_LENGTH, "max_epochs": 3})
    trainer.run(range(EPOCH_LENGTH))
    logger.close()
    assert [step for step, _ in curve(logger.path, "training/loss")] == [2, 4, 6, 8, 10, 12]


@both
def test_records_after_close_warn_if_the_directory_is_gone(kind, tmp_path):
    with kind(tmp_path / "gone") as logger:
        handler = file_logger.OutputHandler("t", "all")
    logger.path.unlink()
    logger.path.parent.rmdir()
    with pytest.warns(UserWarning, match=f"{kind.__name__} cannot write, values are lost: FileNotFoundError"):
        handler(at(a=1), logger, Events.COMPLETED)


@both
def test_two_loggers_may_write_to_one_file(kind, tmp_path):
    with kind(tmp_path) as first, kind(tmp_path) as second:
        handler = file_logger.OutputHandler("t", "all")
        for step, name in enumerate("abacba"):
            handler(at(epoch=step, **{name: step}), (first, second)[step % 2], Events.EPOCH_COMPLETED)
    expected = [{"step": step, f"t/{name}": step} for step, name in enumerate("abacba")]
    assert records(first.path) == expected


@both
def test_a_removed_file_is_created_again(kind, tmp_path):
    with kind(tmp_path) as logger:
        handler = file_logger.OutputHandler("t", "all")
        handler(at(a=1), logger, Events.COMPLETED)
        logger.path.unlink()
        handler(at(a=2), logger, Events.COMPLETED)
    assert [value for _, value in curve(logger.path, "t/a")] == [2]


@both
def test_lone_surrogates_are_escaped(kind, tmp_path):
    with kind(tmp_path) as logger:
        file_logger.OutputHandler("t", "all")(at(a="\udc80"), logger, Events.COMPLETED)
    (record,) = records(logger.path)
    assert record["t/a"] == ("\\udc80" if kind is CSVLogger else "\udc80")


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


@both
def test_a_kill_loses_no_complete_record(kind, tmp_path):
    command = [sys.executable, "-c", WRITE_FOREVER, kind.suffix[1:], str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        while int(process.stdout.readline()) < 120:
            pass
        process.send_signal(signal.SIGKILL)
        written = process.stdout.read().split()
    found = curve(tmp_path / f"metrics{kind.suffix}", "t/loss")
    reported = int(written[-1]) if written else 120
    assert [step for step, _ in found] == list(range(1, len(found) + 1))
    assert len(found) >= reported
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
        handler = file_logger.OutputHandler("t", "all")
        handler(at(a=1), logger, Events.COMPLETED)
        before = logger.path.read_bytes()
        real, logger._file = logger._file, Full(logger._file)
        with pytest.warns(
            UserWarning, match=rf"{kind.__name__} cannot write, values are lost: OSError: .*No space left"
        ):
            handler(at(a=2), logger, Events.COMPLETED)
        handler(at(a=3), logger, Events.COMPLETED)  # without another warning
        assert logger.path.read_bytes() == before
        logger._file = real
        handler(at(a=4), logger, Events.COMPLETED)
    assert [value for _, value in curve(logger.path, "t/a")] == [1, 4]


@both
def test_an_unwritable_path_raises_immediately(kind, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        kind(tmp_path / "file" / "folder")


@both
def test_engine_and_logger_are_freed_by_reference_counting(kind, tmp_path):
    logger = kind(tmp_path)
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
def test_only_rank_0_writes_and_all_ranks_check_arguments():
    import tempfile

    folder = Path(tempfile.gettempdir()) / f"camshaft-ranks-{os.getppid()}-{torch.distributed.get_rank()}"
    with CSVLogger(folder) as logger:
        trainer = job(logger)
        with pytest.raises(RuntimeError, match="event_name must be an event with a counter"):
            logger.attach_output_handler(trainer, Events.TERMINATE, "t", metric_names="all")
        with pytest.raises(ValueError, match="at least one of"):
            logger.attach_output_handler(trainer, Events.COMPLETED, "t")
        trainer.run(range(EPOCH_LENGTH), max_epochs=1)
    if torch.distributed.get_rank() == 0:
        assert len(records(logger.path)) == 4
        logger.path.unlink()
        folder.rmdir()
    assert not folder.exists()


def evaluated(logger, state=None, killed=False, tag="validation"):
    """Log an evaluation after each epoch, and missed ones at the start of a run; return states from before each."""
    trainer, evaluator = Engine(lambda engine, batch: None), Engine(lambda engine, batch: None)
    trainer.state.evaluated, states = 0, []
    trainer.state_dict_user_keys.append("evaluated")

    @trainer.on(Events.STARTED | Events.EPOCH_COMPLETED)
    def evaluate(engine):
        states.append(engine.state_dict())
        if engine.state.evaluated < engine.state.epoch:
            evaluator.state.metrics["accuracy"] = engine.state.epoch / 10
            evaluator.run([0])
            engine.state.evaluated = engine.state.epoch

    step = global_step_from_engine(trainer)
    logger.attach_output_handler(evaluator, Events.COMPLETED, tag, "all", global_step_transform=step)
    trainer.state.metrics["loss"] = 0.5
    logger.attach_output_handler(trainer, Events.ITERATION_COMPLETED, "training", "all")
    if state:
        trainer.load_state_dict(state)
    trainer.run(range(2), max_epochs=2 if killed else 4)
    return states


@both
@pytest.mark.parametrize("saved", [1, 2])
@pytest.mark.parametrize("tag", ["validation", "training"])
def test_an_evaluation_repeated_after_a_kill_is_logged_once(kind, tmp_path, saved, tag):
    path = tmp_path / f"log{kind.suffix}"
    with kind(path) as logger:
        states = evaluated(logger, killed=True, tag=tag)
    with kind(path) as logger:
        evaluated(logger, states[saved], tag=tag)
    assert curve(path, f"{tag}/accuracy") == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    assert [step for step, _ in curve(path, "training/loss")] == [*range(1, 9)]


def logged_by_two(path, states=(None, None), epochs=3):
    """Log two trainers, each with its evaluator, to one file."""
    trainers = []
    with CSVLogger(path) as logger:
        for name in "ab":
            trainer, evaluator = Engine(lambda engine, batch: None), Engine(lambda engine, batch: 1.0)
            trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda _, evaluator=evaluator: evaluator.run([0]))
            step = global_step_from_engine(trainer)
            logger.attach_output_handler(
                evaluator, Events.COMPLETED, name, output_transform=lambda output: output, global_step_transform=step
            )
            trainers.append(trainer)
        for trainer, state in zip(trainers, states, strict=True):
            if state:
                trainer.load_state_dict(state)
            trainer.run(range(2), max_epochs=epochs)
    return [trainer.state_dict() for trainer in trainers]


def test_resuming_one_trainer_keeps_the_records_of_another(tmp_path):
    path = tmp_path / "log.csv"
    states = logged_by_two(path)
    logged_by_two(path, states, epochs=4)
    for name in "ab":
        assert [step for step, _ in curve(path, f"{name}/output")] == [1, 2, 3, 4]


@both
def test_a_resume_removes_the_records_of_its_own_run_only(kind, tmp_path):
    """Records of a trainer that ran before in the same file, or of earlier versions, remain."""

    def trained(length, tag, state=None, stop_at=None):
        trainer = Engine(lambda engine, batch: 1.0)
        with kind(tmp_path) as logger:
            handler = {"tag": tag, "output_transform": lambda output: output}
            logger.attach_output_handler(trainer, Events.ITERATION_COMPLETED, **handler)
            logger._begin = lambda: None  # continue the file
            trainer.load_state_dict(state or {"iteration": 0, "epoch_length": length, "max_epochs": 1})
            if stop_at is not None:
                trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop_at), stop)
            with nullcontext() if stop_at is None else pytest.raises(Crash):
                trainer.run(range(length))
            return logger.path

    trained(9, "first")
    trained(6, "second", stop_at=5)
    path = trained(6, "second", {"iteration": 3, "epoch_length": 6, "max_epochs": 1})
    assert [step for step, _ in curve(path, "first/output")] == [*range(1, 10)]
    assert [step for step, _ in curve(path, "second/output")] == [*range(1, 7)]


def test_a_file_of_an_earlier_version_is_continued(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("step,time,training/loss\n2,1800000000.0,2.0\n4,1800000000.0,4.0\n")
    with CSVLogger(path) as logger:
        job(logger, start_at=4).run(range(EPOCH_LENGTH))
    rows = list(csv.DictReader(path.read_text().splitlines()))
    losses = [row for row in rows if row["training/loss"]]
    assert [int(row["step"]) for row in losses] == [*range(2, 21, 2)]
    assert [row["iteration"] for row in losses[:4]] == ["", "", "6", "8"]


@both
def test_a_later_run_writes_the_steps_of_a_resume_again(kind, tmp_path):
    with kind(tmp_path / f"first{kind.suffix}") as logger:
        states = evaluated(logger, killed=True)
    path = tmp_path / f"first{kind.suffix}"
    with kind(path) as logger:
        evaluated(logger, states[2])
        evaluated(logger)
    assert [step for step, _ in curve(path, "validation/accuracy")] == [1, 2, 3, 4, 1, 2, 3, 4]


def test_a_detached_evaluator_does_not_rewind_the_file(tmp_path):
    trainer, evaluator = Engine(lambda engine, batch: None), Engine(lambda engine, batch: 1.0)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([0]))
    with CSVLogger(tmp_path / "log.csv") as logger:
        handle = logger.attach_output_handler(
            evaluator,
            Events.COMPLETED,
            "a",
            output_transform=lambda output: output,
            global_step_transform=global_step_from_engine(trainer),
        )
        trainer.run(range(2), max_epochs=3)
        handle.remove()
    trainer.load_state_dict({"iteration": 2, "epoch_length": 2, "max_epochs": 3})
    trainer.run(range(2))
    assert [record["step"] for record in records(tmp_path / "log.csv")] == [1, 2, 3]
