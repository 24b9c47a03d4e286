"""Run the code about Horovod on the pages of docs/."""

from __future__ import annotations

import sys

from tests.docs.titled import run, titled
from tests.examples.ten_steps import command


def test_gradients_are_accumulated(tmp_path):
    code = titled("reference/backends.md", "accumulate.py")
    assert 'backend="horovod"' in code
    run([command("horovodrun"), "-np", "2", sys.executable], tmp_path / "accumulate.py", code)


def test_the_collectives_tutorial(tmp_path):
    code = titled("tutorials/talking-between-processes.md", "collectives.py")
    assert code.count('initialize("gloo")') == 1
    code = code.replace('initialize("gloo")', 'initialize("horovod")')
    run([command("horovodrun"), "-np", "3", sys.executable], tmp_path / "collectives.py", code)
