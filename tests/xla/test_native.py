"""Training with torch_xla alone and with camshaft gives the same weights."""

from __future__ import annotations

import sys

import pytest

from tests.examples.native import assert_same_weights

CAMSHAFT = ("--backend", "xla-tpu", "--nproc_per_node", "1")


@pytest.mark.parametrize(("script", "arguments"), [("with_xla.py", ()), ("with_camshaft.py", CAMSHAFT)])
def test_training_on_a_device_matches_one_process_on_the_cpu(script, arguments):
    assert_same_weights([sys.executable], script, *arguments, shows="world size 1, backend xla-tpu", PJRT_DEVICE="CPU")
