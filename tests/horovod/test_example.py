"""Run examples/distributed_backends.py with Horovod."""

from __future__ import annotations

import sys

from tests.examples.ten_steps import assert_ten_steps, command

HOROVOD = ("--backend", "horovod")


def test_training_under_horovodrun_matches_one_process():
    launch = [command("horovodrun"), "-np", "2", sys.executable]
    assert_ten_steps(launch, *HOROVOD, shows="world size 2 on cpu with horovod")


def test_training_in_spawned_processes_matches_one_process():
    assert_ten_steps([sys.executable], *HOROVOD, "--nproc_per_node", "2", shows="world size 2 on cpu with horovod")


def test_parallel_selects_horovod_under_horovodrun():
    assert_ten_steps([command("horovodrun"), "-np", "2", sys.executable], "--backend", "auto", shows="with horovod")
