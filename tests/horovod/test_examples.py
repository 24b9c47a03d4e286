"""Run the examples and the code on the pages of docs/ with Horovod."""

from __future__ import annotations

import sys

import pytest

from tests.docs.titled import run, titled
from tests.examples.native import assert_same_weights
from tests.examples.ten_steps import assert_ten_steps, command
from tests.limits import HANG


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_GLOO_TIMEOUT_SECONDS", f"{HANG:.0f}")  # which ranks have to start


ALONE, ON_TWO = [sys.executable], [command("horovodrun"), "-np", "2", sys.executable]


@pytest.mark.parametrize(
    ("launch", "options", "shows"),
    [
        (ON_TWO, ("horovod",), "world size 2 on cpu with horovod"),
        (ALONE, ("horovod", "--nproc_per_node", "2"), "world size 2 on cpu with horovod"),
        (ON_TWO, ("auto",), "with horovod"),
    ],
    ids=["launched", "spawned", "selected"],
)
def test_training_on_two_ranks_matches_one_process(launch, options, shows):
    assert_ten_steps(launch, "--backend", *options, shows=shows)


@pytest.mark.parametrize(
    ("script", "arguments"), [("with_horovod.py", ()), ("with_camshaft.py", ("--backend", "horovod"))]
)
def test_training_with_horovod_alone_and_with_camshaft_gives_the_same_weights(script, arguments):
    assert_same_weights(ON_TWO, script, *arguments, shows="world size 2, backend horovod")


def test_gradients_are_accumulated(tmp_path):
    code = titled("reference/backends.md", "accumulate.py")
    assert 'backend="horovod"' in code
    run(ON_TWO, tmp_path / "accumulate.py", code)


def test_the_collectives_tutorial(tmp_path):
    code = titled("tutorials/talking-between-processes.md", "collectives.py")
    assert code.count('initialize("gloo")') == 1
    code = code.replace('initialize("gloo")', 'initialize("horovod")')
    run([command("horovodrun"), "-np", "3", sys.executable], tmp_path / "collectives.py", code)
