"""The command of the example for all backends that is XLA's."""

from __future__ import annotations

import sys

from tests.examples.ten_steps import assert_ten_steps


def test_a_process_for_the_device_trains_as_one_without_does():
    launch = [sys.executable]
    assert_ten_steps(launch, "--backend", "xla-tpu", "--nproc_per_node", "1", shows="1 processes on xla")
