from __future__ import annotations

import inspect
import io
import logging

import pytest

import camshaft.deprecation
import camshaft.files
import camshaft.seeding
import camshaft.text
import camshaft.tree
from camshaft import utils


@pytest.fixture
def logger_name():
    name = "utils_test"
    yield name
    logging.Logger.manager.loggerDict.pop(name, None)


@pytest.mark.parametrize(
    ("home", "names"),
    [
        (camshaft.tree, ["convert_tensor", "apply_to_tensor", "apply_to_type", "to_onehot"]),
        (camshaft.seeding, ["manual_seed"]),
        (camshaft.files, ["hash_checkpoint"]),
        (camshaft.deprecation, ["deprecated"]),
    ],
)
def test_the_utilities_are_those_of_the_leaves(home, names):
    for name in names:
        assert getattr(utils, name) is getattr(home, name)
        assert name in utils.__all__


def test_the_half_public_name_for_texts_works():
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
def test_signatures_are_those_of_the_api(name, expected):
    parameters = inspect.signature(getattr(utils, name)).parameters.values()
    assert [(parameter.name, parameter.default) for parameter in parameters] == list(expected.items())
    assert all(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)


def test_setup_logger_hands_everything_on_in_its_place(logger_name, tmp_path):
    stream, path = io.StringIO(), tmp_path / "log"
    utils.setup_logger(logger_name)
    logger = utils.setup_logger(logger_name, logging.DEBUG, stream, "%(message)s", path, 0, True, "latin-1")
    logger.debug("ä")
    assert stream.getvalue() == "ä\n"
    assert path.read_bytes() == b"\xe4\n"
    assert len(logger.handlers) == 2
    logger.handlers[1].close()


@pytest.mark.parametrize("rank", [0, 3])
def test_setup_logger_asks_for_the_rank_unless_it_is_given(logger_name, monkeypatch, rank):
    monkeypatch.setattr(utils, "get_rank", lambda: rank)
    handler = logging.NullHandler if rank else logging.StreamHandler
    assert type(utils.setup_logger(logger_name).handlers[0]) is handler
    monkeypatch.setattr(utils, "get_rank", lambda: pytest.fail("asked"))
    assert type(utils.setup_logger(logger_name, distributed_rank=1).handlers[0]) is logging.NullHandler
