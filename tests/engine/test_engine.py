"""The engine: log records and types."""

from __future__ import annotations

import gc
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mypy import api

from camshaft.engine import Engine, Events
from tests.engine.traces import at, echo

# === Log records ===


NAME = "camshaft.engine.engine.Engine"
DURATION = r"\d\d:\d\d:\d\d\.\d\d\d"


def records(caplog, level):
    return [record.getMessage() for record in caplog.records if record.levelno == level and record.name == NAME]


@pytest.fixture
def debug(caplog):
    caplog.set_level(logging.DEBUG, NAME)
    return caplog


@pytest.fixture
def info(caplog):
    caplog.set_level(logging.INFO, NAME)
    return caplog


def matches(found, *patterns):
    return len(found) == len(patterns) and all(
        re.search(pattern, text) for pattern, text in zip(patterns, found, strict=True)
    )


def test_the_logger_is_named_after_module_and_class():
    class Trainer(Engine):
        pass

    assert Engine(echo).logger is logging.getLogger(NAME)
    assert Trainer(echo).logger is logging.getLogger("camshaft.engine.engine.Trainer")
    assert Engine(echo).logger.handlers == []


def test_a_logger_of_the_user_is_used(caplog):
    engine = Engine(echo)
    engine.logger = logging.getLogger("mine")
    with caplog.at_level(logging.INFO):
        engine.run([1])
    assert {record.name for record in caplog.records} == {"mine"}


def test_a_run_logs_when_it_begins_and_ends_and_each_epoch(info):
    Engine(echo).run([1, 2], max_epochs=2)
    found = records(info, logging.INFO)
    epochs = (rf"[Ee]poch\D*{epoch}\D*[Cc]omplete.*{DURATION}" for epoch in (1, 2))
    assert matches(found, r"starting.*2 epochs", *epochs, rf"complete.*{DURATION}")
    assert len(info.records) == len(found)


@pytest.mark.parametrize(("target", "shown"), [({"max_epochs": 3}, "3 epochs"), ({"max_iters": 5}, "5 iterations")])
def test_the_target_is_shown(info, target, shown):
    engine = Engine(echo)
    engine.run([1, 2], **target)
    assert shown in records(info, logging.INFO)[0]


def test_a_resumed_run_logs_from_where(info):
    engine = Engine(echo)
    engine.load_state_dict({"iteration": 5, "epoch_length": 2, "max_epochs": 4})
    engine.run([1, 2])
    assert re.search(r"resuming.*iteration 5.*epoch 2.*4 epochs", records(info, logging.INFO)[0])


@pytest.mark.parametrize("wish", ["terminate", "terminate_epoch", "interrupt"])
def test_each_stop_request_is_one_record(info, wish):
    engine = Engine(echo)
    getattr(engine, wish)()
    assert len(records(info, logging.INFO)) == len(info.records) == 1


def test_a_pause_and_going_on_are_recorded(info):
    engine = Engine(echo)
    at(engine, Events.ITERATION_COMPLETED, lambda engine: engine.interrupt())
    engine.run([1, 2])
    engine.run()
    patterns = ("starting", "[Ii]nterrupt", "resuming.*iteration 1.*epoch 1", "[Ee]poch.*1.*[Cc]omplete", "complete")
    assert matches(records(info, logging.INFO), *patterns)


def test_each_firing_is_recorded_with_its_counters(debug):
    engine = Engine(echo)
    for event in Events.GET_BATCH_STARTED | Events.ITERATION_COMPLETED(every=2):
        engine.add_event_handler(event, lambda: None)
    engine.run([10, 20])
    found = [text for text in records(debug, logging.DEBUG) if "iring" in text]
    places = [re.match(r"(\d+) \| (\d+).*Events\.([A-Z_]+)", text) for text in found]
    assert all(places)
    assert [place.group(3) for place in places if place] == [
        "STARTED", "EPOCH_STARTED", "GET_BATCH_STARTED", "ITERATION_COMPLETED", "GET_BATCH_STARTED",
        "ITERATION_COMPLETED", "EPOCH_COMPLETED", "COMPLETED",
    ]  # fmt: skip
    assert [place.group(1, 2) for place in places[3:5] if place] == [("1", "1"), ("1", "1")]


@pytest.mark.parametrize("inside", [True, False])
def test_a_firing_by_hand_is_recorded_too(debug, inside):
    engine = Engine(echo)
    engine.register_events("foo")
    if inside:
        engine.add_event_handler(Events.ITERATION_STARTED, lambda: engine.fire_event("foo"))
        engine.run([1])
    else:
        engine.fire_event("foo")
    assert sum("iring" in text and "foo" in text for text in records(debug, logging.DEBUG)) == 1


def test_recording_ends_with_the_request_for_it(caplog):
    engine = Engine(echo)
    with caplog.at_level(logging.DEBUG, NAME):
        engine.run([1])
    caplog.clear()
    engine.run([1])
    assert caplog.records == []


def test_an_added_handler_is_recorded(debug):
    Engine(echo).add_event_handler(Events.EPOCH_COMPLETED(every=2), lambda: None)
    (text,) = records(debug, logging.DEBUG)
    assert "Events.EPOCH_COMPLETED(every=2)" in text


@pytest.mark.parametrize("swallowed", [True, False])
@pytest.mark.parametrize("event", [Events.STARTED, Events.ITERATION_COMPLETED])
def test_an_error_of_a_run_is_recorded_once(caplog, swallowed, event):
    engine = Engine(echo)

    @engine.on(event)
    def fail(engine):
        raise KeyError("lost")

    if swallowed:
        engine.add_event_handler(Events.EXCEPTION_RAISED, lambda error: None)
        engine.run([1])
    else:
        with pytest.raises(KeyError):
            engine.run([1])
    (text,) = records(caplog, logging.ERROR)
    assert "lost" in text


def test_an_error_that_leaves_several_engines_is_recorded_once(caplog):
    def fail(engine, batch):
        raise KeyError("lost")

    evaluator = Engine(fail)
    with pytest.raises(KeyError):
        Engine(lambda engine, batch: evaluator.run([batch])).run([1])
    assert records(caplog, logging.ERROR) == ["Engine met an exception: KeyError: 'lost'"]


def test_the_record_of_an_error_is_one_line_and_a_stop_button_or_an_exit_leaves_none(caplog):
    def fail(error):
        def step(engine, batch):
            raise error

        with caplog.at_level(logging.INFO), pytest.raises(type(error)):
            Engine(step).run([1])

    fail(ValueError("two\nlines"))
    assert records(caplog, logging.ERROR) == ["Engine met an exception: ValueError: two lines"]
    caplog.clear()
    for exit in (KeyboardInterrupt(), SystemExit(), SystemExit(0)):
        fail(exit)
    assert [text for text in caplog.messages if "exception" in text] == []
    fail(SystemExit(3))
    assert records(caplog, logging.ERROR) == ["Engine met an exception: SystemExit: 3"]


@pytest.mark.parametrize("handler", [lambda: None, lambda a, b, c: None])
def test_an_event_never_registered_is_recorded(caplog, handler):
    with pytest.raises(ValueError, match="unknown"):
        Engine(echo).add_event_handler("UNKNOWN", handler)
    (text,) = records(caplog, logging.ERROR)
    assert "UNKNOWN" in text


def test_a_handler_that_cannot_be_called_is_not_recorded(caplog):
    with pytest.raises(ValueError, match=r"read engine.state.batch instead of an argument$"):
        Engine(echo).add_event_handler(Events.EPOCH_COMPLETED | Events.COMPLETED, lambda engine, batch: None)
    assert records(caplog, logging.ERROR) == []


QUIET = """
from camshaft.engine import Engine, Events
engine = Engine(lambda engine, batch: batch)
engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: engine.terminate_epoch())
engine.run([1, 2, 3], max_epochs=2)
"""


@pytest.mark.jobs
def test_nothing_is_printed_where_logging_is_not_configured():
    result = subprocess.run([sys.executable, "-c", QUIET], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


# === Types ===


ROOT = Path(__file__).parents[2]
CHECKED = {"expected_errors.py": 40, "expected_distributed_errors.py": 10}  # and at least so many errors
MARK = re.compile(r"# error: ([a-z, -]+)$")
REPORT = re.compile(r":(\d+): error: .*\[([a-z-]+)\]$")

SETTINGS = """
[mypy]
python_version = 3.10
strict = true
explicit_package_bases = true
enable_error_code = ignore-without-code
[mypy-torch.*]
follow_imports = skip
"""
"""Strict as for the package; torch itself, which is large, plays no part here."""


@pytest.fixture(params=CHECKED)
def checked(request):
    return ROOT / "tests" / "typing" / request.param


@pytest.fixture
def report(checked, tmp_path, monkeypatch):
    """What mypy says about the file."""
    settings = tmp_path / "mypy.ini"
    settings.write_text(SETTINGS)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("MYPY_CONFIG_FILE_DIR", str(tmp_path))  # mypy sets it too, and leaves it
    threshold = gc.get_threshold()
    cache = ROOT / ".mypy_cache" / "expected_errors"
    text, failure, _ = api.run(["--config-file", str(settings), "--cache-dir", str(cache), str(checked)])
    gc.set_threshold(*threshold)  # mypy changes it
    assert failure == ""
    return [line for line in text.splitlines() if line.startswith(str(checked.relative_to(ROOT)))]


def test_a_type_checker_finds_the_marked_errors_and_no_others(checked, report):
    lines = checked.read_text("utf-8").splitlines()
    marks = ((number, MARK.search(line)) for number, line in enumerate(lines, start=1))
    marked = {(number, code) for number, mark in marks if mark for code in mark[1].split(", ")}
    found = {(int(match[1]), match[2]) for match in map(REPORT.search, report) if match}
    missing = [f"{number}: [{code}] {lines[number - 1]}" for number, code in sorted(marked - found)]
    surprising = [f"{number}: [{code}] {lines[number - 1]}" for number, code in sorted(found - marked)]
    assert (missing, surprising) == ([], [])
    assert len(found) > CHECKED[checked.name]
