from __future__ import annotations

import inspect
import io
import logging
import sys
import warnings
from itertools import count

import pytest

import camshaft.files
import camshaft.seeding
import camshaft.text
import camshaft.tree
from camshaft import utils


@pytest.mark.parametrize(
    ("home", "names"),
    [
        (camshaft.tree, ["convert_tensor", "apply_to_tensor", "apply_to_type", "to_onehot"]),
        (camshaft.seeding, ["manual_seed"]),
        (camshaft.files, ["hash_checkpoint"]),
    ],
)
def test_utils_reexports_the_leaf_modules(home, names):
    for name in names:
        assert getattr(utils, name) is getattr(home, name)
        assert name in utils.__all__


def test_the_semi_public_name_of_texts_exists():
    assert utils._to_str_list is camshaft.text.to_str_list


NO_DEFAULT = inspect.Parameter.empty


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("convert_tensor", {"x": NO_DEFAULT, "device": None, "non_blocking": False}),
        ("apply_to_tensor", {"x": NO_DEFAULT, "func": NO_DEFAULT}),
        ("apply_to_type", {"x": NO_DEFAULT, "input_type": NO_DEFAULT, "func": NO_DEFAULT}),
        ("to_onehot", {"indices": NO_DEFAULT, "num_classes": NO_DEFAULT}),
        ("manual_seed", {"seed": NO_DEFAULT}),
        ("hash_checkpoint", {"checkpoint_path": NO_DEFAULT, "output_dir": NO_DEFAULT}),
        ("deprecated", {"deprecated_in": NO_DEFAULT, "removed_in": "", "reasons": (), "raise_exception": False}),
        (
            "setup_logger",
            {
                "name": "camshaft",
                "level": logging.INFO,
                "stream": None,
                "format": "%(asctime)s %(name)s %(levelname)s: %(message)s",
                "filepath": None,
                "distributed_rank": None,
                "reset": False,
                "encoding": "utf-8",
            },
        ),
    ],
)
def test_signatures_match_the_api(name, expected):
    parameters = inspect.signature(getattr(utils, name)).parameters.values()
    assert [(parameter.name, parameter.default) for parameter in parameters] == list(expected.items())
    assert all(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)


@pytest.mark.parametrize("rank", [0, 3])
def test_setup_logger_queries_the_rank_unless_it_is_given(name, monkeypatch, rank):
    monkeypatch.setattr(utils, "get_rank", lambda: rank)
    assert kinds(utils.setup_logger(name)) == [logging.NullHandler if rank else logging.StreamHandler]
    monkeypatch.setattr(utils, "get_rank", lambda: pytest.fail("asked"))
    assert kinds(utils.setup_logger(name, distributed_rank=1)) == [logging.NullHandler]


# --- setup_logger ---

NUMBERS = count()


@pytest.fixture
def name():
    """Return an unused logger name, and remove the loggers with that name and their children afterwards."""
    name = f"logs_test_{next(NUMBERS)}"
    yield name
    loggers = logging.Logger.manager.loggerDict
    for one in [one for one in loggers if one.split(".")[0] == name]:
        for handler in getattr(loggers.pop(one), "handlers", ()):
            handler.close()


@pytest.fixture
def root():
    """Return the root logger without the handlers of pytest, and restore them afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = []
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)


def kinds(logger):
    return [type(handler) for handler in logger.handlers]


# setup_logger: rank 0


def test_the_default_is_info_on_standard_error_in_the_documented_format(name, capsys):
    logger = utils.setup_logger(name, distributed_rank=0)
    logger.debug("not this")
    logger.info("but this")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.endswith(f" {name} INFO: but this\n")
    assert captured.err.count("\n") == 1
    assert captured.err[:4].isdigit()  # starts with the time
    assert logger is logging.getLogger(name)


@pytest.mark.parametrize("level", [logging.WARNING, "WARNING"])
def test_level_and_format_apply_to_logger_stream_and_file(name, tmp_path, level):
    stream, path = io.StringIO(), tmp_path / "log"
    logger = utils.setup_logger(
        name, distributed_rank=0, level=level, stream=stream, format="%(levelname)s %(message)s", filepath=path
    )
    assert kinds(logger) == [logging.StreamHandler, logging.FileHandler]
    assert [logger.level, *(handler.level for handler in logger.handlers)] == [logging.WARNING] * 3
    logger.info("quiet")
    logger.warning("loud")
    assert stream.getvalue() == path.read_text() == "WARNING loud\n"


@pytest.mark.parametrize(("encoding", "raw"), [("utf-8", b"\xc3\xa4\n"), ("latin-1", b"\xe4\n")])
@pytest.mark.parametrize("kind", [str, lambda path: path])
def test_the_file_is_appended_to_with_the_encoding(name, tmp_path, encoding, raw, kind):
    path = tmp_path / "log"
    path.write_bytes(b"before\n")
    logger = utils.setup_logger(
        name, distributed_rank=0, stream=io.StringIO(), format="%(message)s", filepath=kind(path), encoding=encoding
    )
    logger.info("ä")
    assert path.read_bytes() == b"before\n" + raw


@pytest.mark.parametrize("rank", [0, 1])
def test_a_named_logger_stops_propagating(name, root, rank):
    records = []
    handler = logging.NullHandler()
    handler.handle = records.append
    root.addHandler(handler)
    utils.setup_logger(name, distributed_rank=rank, stream=io.StringIO()).error("here only")
    assert records == []


# Loggers that exist


def test_an_existing_logger_is_returned_unchanged(name):
    logger = utils.setup_logger(name, distributed_rank=0, level=logging.ERROR)
    handlers = logger.handlers[:]
    again = utils.setup_logger(name, distributed_rank=0, level=logging.DEBUG, stream=io.StringIO())
    assert again is logger
    assert (again.level, again.handlers) == (logging.ERROR, handlers)


CHANGES = {
    "nothing": lambda logger: None,
    "level": lambda logger: logger.setLevel(logging.ERROR),
    "propagation": lambda logger: setattr(logger, "propagate", False),
    "filters": lambda logger: logger.addFilter(lambda record: True),
    "handlers": lambda logger: logger.addHandler(logging.NullHandler()),
    "disabled": lambda logger: setattr(logger, "disabled", True),
}


def facts(logger):
    return logger.level, logger.propagate, logger.filters[:], logger.handlers[:], logger.disabled


@pytest.mark.parametrize("change", CHANGES)
def test_a_logger_configured_by_the_user_is_kept(name, change):
    logging.getLogger(f"{name}2.child" if change == "nothing" else f"{name}.child")  # a sibling, or a child
    CHANGES[change](logging.getLogger(name))
    before = facts(logging.getLogger(name))
    assert facts(utils.setup_logger(name, distributed_rank=0)) == before


@pytest.mark.parametrize("ask", [lambda name: None, logging.getLogger], ids=["placeholder", "logger"])
def test_a_logger_that_exists_only_because_of_a_child_is_set_up(name, ask):
    logging.getLogger(f"{name}.child")
    ask(name)
    logger = utils.setup_logger(name, distributed_rank=0)
    assert kinds(logger) == [logging.StreamHandler]
    assert logger.level == logging.INFO


def test_reset_replaces_and_closes_the_handlers(name, tmp_path):
    old = utils.setup_logger(name, distributed_rank=0, filepath=tmp_path / "old").handlers[:]
    closed = []
    for handler in old:
        handler.close = lambda handler=handler, close=handler.close: (closed.append(handler), close())
    logger = utils.setup_logger(name, distributed_rank=0, level=logging.DEBUG, stream=sys.stdout, reset=True)
    assert closed == old
    assert kinds(logger) == [logging.StreamHandler]
    assert logger.handlers[0] not in old
    assert (logger.level, logger.handlers[0].level) == (logging.DEBUG, logging.DEBUG)
    assert old[1].stream is None


# Rank > 0


@pytest.mark.parametrize("reset", [False, True])
def test_other_ranks_get_one_null_handler_after_any_number_of_calls(name, reset, tmp_path):
    logger = logging.getLogger(name)
    logger.addHandler(handler := logging.FileHandler(tmp_path / "log"))
    logger.setLevel(logging.ERROR)
    for _ in range(2):
        path = tmp_path / "unused"
        assert utils.setup_logger(name, distributed_rank=1, level=logging.DEBUG, filepath=path, reset=reset) is logger
        assert kinds(logger) == [logging.NullHandler]
    assert handler.stream is None
    assert logger.level == logging.ERROR
    assert not path.exists()


# The root logger


def test_the_root_logger_is_set_up_once_regardless_of_other_handlers(root):
    root.addHandler(foreign := logging.NullHandler())
    assert utils.setup_logger(None, distributed_rank=0, stream=io.StringIO(), reset=True) is root
    assert foreign not in root.handlers
    root.addHandler(foreign)
    handlers = root.handlers[:]
    utils.setup_logger(None, distributed_rank=0)
    assert root.handlers == handlers


def test_the_root_logger_is_set_up_though_it_exists(root):
    stream = io.StringIO()
    utils.setup_logger(None, distributed_rank=0, stream=stream, format="%(name)s %(message)s")
    logging.getLogger("somebody.else").info("heard")
    assert stream.getvalue() == "somebody.else heard\n"
    assert root.propagate


# Bad input


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"distributed_rank": -1}, ValueError),
        ({"distributed_rank": 0, "level": "LOUD"}, ValueError),
        ({"distributed_rank": 0, "level": 1.5}, TypeError),
        ({"distributed_rank": 0, "format": "%(message"}, ValueError),
        ({"distributed_rank": 0, "filepath": "absent/folder/log"}, FileNotFoundError),
    ],
)
def test_a_failed_call_changes_nothing(name, tmp_path, monkeypatch, options, error):
    monkeypatch.chdir(tmp_path)
    before = facts(utils.setup_logger(name, distributed_rank=0))
    with pytest.raises(error):
        utils.setup_logger(name, **{"filepath": tmp_path / "log", "reset": True, **options})
    assert facts(logging.getLogger(name)) == before
    assert list(tmp_path.iterdir()) == []


# --- deprecated ---


def make(doc="Do it.", **options):
    def old(a: int, b: int = 2) -> int:
        return a + b

    old.__doc__ = doc
    return utils.deprecated("0.2.0", **options)(old)


def test_each_call_warns_with_the_line_of_the_caller_and_works():
    old = make()
    for _ in range(2):
        with pytest.warns(DeprecationWarning, match="old is deprecated since version 0.2.0") as caught:
            assert old(1, b=4) == 5
        assert [warning.filename for warning in caught] == [__file__]


def test_defining_it_does_not_warn():
    with warnings.catch_warnings(record=True) as caught:
        make()
    assert caught == []


def test_the_warning_contains_the_version_of_the_removal_and_the_reasons():
    text = r"0\.2\.0 and will be removed in version 0\.4\.0\. Slow\. Use new\(\)\."
    with pytest.warns(DeprecationWarning, match=text):
        make(removed_in="0.4.0", reasons=("Slow.", "Use new()."))(1)
    with pytest.warns(DeprecationWarning, match=r"0\.2\.0\. Use new\(\)\.$"):
        make(reasons="Use new().")(1)


@pytest.mark.filterwarnings("ignore")  # otherwise, the warning itself would raise
def test_the_warning_can_be_raised_instead():
    calls = []
    old = utils.deprecated("0.2.0", raise_exception=True)(calls.append)
    with pytest.raises(DeprecationWarning, match="append is deprecated"):
        old(1)
    assert calls == []


@pytest.mark.parametrize("doc", ["Do it.\n\n        At length.\n    ", None])
def test_the_docstring_says_deprecated(doc):
    marked = make(doc, reasons=["Use new()."]).__doc__
    assert marked.startswith("Do it.\n\nAt length.\n\n.. deprecated:: 0.2.0\n" if doc else ".. deprecated:: 0.2.0\n")
    assert "    Use new()." in marked.splitlines()


def test_name_and_signature_are_kept():
    old = make()
    assert old.__name__ == "old"
    assert list(inspect.signature(old).parameters) == ["a", "b"]
