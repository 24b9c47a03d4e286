from __future__ import annotations

import io
import logging
import sys
from itertools import count

import pytest

from camshaft.logs import configure_logger

NUMBERS = count()


@pytest.fixture
def name():
    """Give a name that no logger has, and forget the loggers of that name and below."""
    name = f"logs_test_{next(NUMBERS)}"
    yield name
    loggers = logging.Logger.manager.loggerDict
    for one in [one for one in loggers if one.split(".")[0] == name]:
        for handler in getattr(loggers.pop(one), "handlers", ()):
            handler.close()


@pytest.fixture
def root():
    """Lend the root logger, without the handlers that pytest hung on it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = []
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)


def kinds(logger):
    return [type(handler) for handler in logger.handlers]


# Rank 0


def test_by_default_it_writes_info_to_standard_error_in_the_format_of_the_api(name, capsys):
    logger = configure_logger(name, rank=0)
    logger.debug("not this")
    logger.info("but this")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.endswith(f" {name} INFO: but this\n")
    assert captured.err.count("\n") == 1
    assert captured.err[:4].isdigit()  # a time comes first
    assert logger is logging.getLogger(name)


@pytest.mark.parametrize("level", [logging.WARNING, "WARNING"])
def test_level_and_format_hold_for_logger_stream_and_file(name, tmp_path, level):
    stream, path = io.StringIO(), tmp_path / "log"
    logger = configure_logger(
        name, rank=0, level=level, stream=stream, format="%(levelname)s %(message)s", filepath=path
    )
    assert kinds(logger) == [logging.StreamHandler, logging.FileHandler]
    assert [logger.level, *(handler.level for handler in logger.handlers)] == [logging.WARNING] * 3
    logger.info("quiet")
    logger.warning("loud")
    assert stream.getvalue() == path.read_text() == "WARNING loud\n"


@pytest.mark.parametrize(("encoding", "raw"), [("utf-8", b"\xc3\xa4\n"), ("latin-1", b"\xe4\n")])
@pytest.mark.parametrize("kind", [str, lambda path: path])
def test_the_file_is_appended_to_in_the_encoding(name, tmp_path, encoding, raw, kind):
    path = tmp_path / "log"
    path.write_bytes(b"before\n")
    logger = configure_logger(
        name, rank=0, stream=io.StringIO(), format="%(message)s", filepath=kind(path), encoding=encoding
    )
    logger.info("ä")
    assert path.read_bytes() == b"before\n" + raw


@pytest.mark.parametrize("rank", [0, 1])
def test_a_named_logger_stops_propagating(name, root, rank):
    records = []
    handler = logging.NullHandler()
    handler.handle = records.append
    root.addHandler(handler)
    configure_logger(name, rank=rank, stream=io.StringIO()).error("here only")
    assert records == []


# Loggers that exist


def test_an_existing_logger_is_returned_as_it_is(name):
    logger = configure_logger(name, rank=0, level=logging.ERROR)
    handlers = logger.handlers[:]
    again = configure_logger(name, rank=0, level=logging.DEBUG, stream=io.StringIO())
    assert again is logger
    assert (again.level, again.handlers) == (logging.ERROR, handlers)


def touch_level(logger):
    logger.setLevel(logging.ERROR)


def touch_propagation(logger):
    logger.propagate = False


def touch_filters(logger):
    logger.addFilter(lambda record: True)


def touch_handlers(logger):
    logger.addHandler(logging.NullHandler())


def touch_disabled(logger):
    logger.disabled = True


TOUCHES = [touch_level, touch_propagation, touch_filters, touch_handlers, touch_disabled]


def facts(logger):
    return logger.level, logger.propagate, logger.filters[:], logger.handlers[:], logger.disabled


@pytest.mark.parametrize("touch", TOUCHES)
@pytest.mark.parametrize("has_child", [False, True])
def test_what_a_user_set_up_by_name_is_kept(name, touch, has_child):
    if has_child:
        logging.getLogger(f"{name}.child")
    touch(logging.getLogger(name))
    before = facts(logging.getLogger(name))
    assert facts(configure_logger(name, rank=0)) == before


def test_a_logger_that_a_user_only_asked_for_is_kept(name):
    before = facts(logging.getLogger(name))
    logging.getLogger(f"{name}2.child")  # a neighbour, not a child
    assert facts(configure_logger(name, rank=0)) == before


@pytest.mark.parametrize("ask", [lambda name: None, logging.getLogger], ids=["placeholder", "logger"])
def test_a_logger_that_is_there_only_above_its_child_is_set_up(name, ask):
    logging.getLogger(f"{name}.child")
    ask(name)
    logger = configure_logger(name, rank=0)
    assert kinds(logger) == [logging.StreamHandler]
    assert logger.level == logging.INFO


def test_reset_replaces_and_closes_the_handlers(name, tmp_path):
    old = configure_logger(name, rank=0, filepath=tmp_path / "old").handlers[:]
    closed = []
    for handler in old:
        handler.close = lambda handler=handler, close=handler.close: (closed.append(handler), close())
    logger = configure_logger(name, rank=0, level=logging.DEBUG, stream=sys.stdout, reset=True)
    assert closed == old
    assert kinds(logger) == [logging.StreamHandler]
    assert logger.handlers[0] not in old
    assert (logger.level, logger.handlers[0].level) == (logging.DEBUG, logging.DEBUG)
    assert old[1].stream is None


# Rank > 0


@pytest.mark.parametrize("reset", [False, True])
def test_other_ranks_get_one_null_handler_however_often_they_ask(name, reset, tmp_path):
    logger = logging.getLogger(name)
    logger.addHandler(handler := logging.FileHandler(tmp_path / "log"))
    logger.setLevel(logging.ERROR)
    for _ in range(2):
        path = tmp_path / "unused"
        assert configure_logger(name, rank=1, level=logging.DEBUG, filepath=path, reset=reset) is logger
        assert kinds(logger) == [logging.NullHandler]
    assert handler.stream is None
    assert logger.level == logging.ERROR
    assert not path.exists()


# The root logger


def test_the_root_logger_is_set_up_once_whatever_others_hung_on_it(root):
    root.addHandler(foreign := logging.NullHandler())
    assert configure_logger(None, rank=0, stream=io.StringIO(), reset=True) is root
    assert foreign not in root.handlers
    root.addHandler(foreign)
    handlers = root.handlers[:]
    configure_logger(None, rank=0)
    assert root.handlers == handlers


def test_the_root_logger_is_set_up_though_it_exists(root):
    stream = io.StringIO()
    configure_logger(None, rank=0, stream=stream, format="%(name)s %(message)s")
    logging.getLogger("somebody.else").info("heard")
    assert stream.getvalue() == "somebody.else heard\n"
    assert root.propagate


def test_the_root_logger_is_silent_on_other_ranks(root):
    configure_logger(None, rank=2)
    assert kinds(root) == [logging.NullHandler]
    assert root.propagate


# Bad input


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"rank": -1}, ValueError),
        ({"rank": 0, "level": "LOUD"}, ValueError),
        ({"rank": 0, "level": 1.5}, TypeError),
        ({"rank": 0, "format": "%(message"}, ValueError),
        ({"rank": 0, "filepath": "absent/folder/log"}, FileNotFoundError),
    ],
)
def test_a_failed_call_changes_nothing(name, tmp_path, monkeypatch, options, error):
    monkeypatch.chdir(tmp_path)
    before = facts(configure_logger(name, rank=0))
    with pytest.raises(error):
        configure_logger(name, **{"filepath": tmp_path / "log", "reset": True, **options})
    assert facts(logging.getLogger(name)) == before
    assert list(tmp_path.iterdir()) == []
