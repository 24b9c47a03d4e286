"""Training with Horovod alone and with camshaft gives the same weights."""

from __future__ import annotations

import sys

import pytest

from tests.examples.native import assert_same_weights
from tests.examples.ten_steps import command


@pytest.mark.parametrize(
    ("script", "arguments"), [("with_horovod.py", ()), ("with_camshaft.py", ("--backend", "horovod"))]
)
def test_training_on_two_ranks_matches_one_process(script, arguments):
    launch = [command("horovodrun"), "-np", "2", sys.executable]
    assert_same_weights(launch, script, *arguments, shows="world size 2, backend horovod")
