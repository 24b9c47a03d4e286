"""Run the examples and the code on the pages of docs/ with XLA."""

from __future__ import annotations

import sys

import pytest

from tests.docs.titled import run, titled
from tests.examples.native import assert_same_weights
from tests.examples.ten_steps import assert_ten_steps

CAMSHAFT = ("--backend", "xla-tpu", "--nproc_per_node", "1")


def test_training_in_a_process_on_xla_matches_one_on_the_cpu():
    assert_ten_steps([sys.executable], *CAMSHAFT, shows="world size 1 on xla")


@pytest.mark.parametrize(("script", "arguments"), [("with_xla.py", ()), ("with_camshaft.py", CAMSHAFT)])
def test_training_with_torch_xla_alone_and_with_camshaft_gives_the_same_weights(script, arguments):
    assert_same_weights([sys.executable], script, *arguments, shows="world size 1, backend xla-tpu", PJRT_DEVICE="CPU")


def test_gradients_are_clipped_after_they_are_averaged(tmp_path):
    code = titled("reference/backends.md", "clip.py")
    assert 'backend="xla-tpu"' in code
    run([sys.executable], tmp_path / "clip.py", code)
