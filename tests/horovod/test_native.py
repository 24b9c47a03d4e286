"""The training that is written with Horovod alone and with camshaft comes to the same weights."""

from __future__ import annotations

import sys

import pytest

from tests.examples.native import assert_same_weights
from tests.examples.ten_steps import command


@pytest.mark.parametrize(
    ("script", "arguments"), [("with_horovod.py", ()), ("with_camshaft.py", ("--backend", "horovod"))]
)
def test_two_ranks_train_as_one_process_does(script, arguments):
    launch = [command("horovodrun"), "-np", "2", sys.executable]
    assert_same_weights(launch, script, *arguments, shows="2 processes with horovod")
