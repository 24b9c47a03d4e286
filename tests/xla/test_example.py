"""Run examples/distributed_backends.py with XLA."""

from __future__ import annotations

import sys

from tests.examples.ten_steps import assert_ten_steps


def test_training_in_a_process_on_xla_matches_one_on_the_cpu():
    launch = [sys.executable]
    assert_ten_steps(launch, "--backend", "xla-tpu", "--nproc_per_node", "1", shows="world size 1 on xla")
