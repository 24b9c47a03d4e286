"""The commands of the example for all backends that are Horovod's."""

from __future__ import annotations

import sys

from tests.examples.ten_steps import assert_ten_steps, command

HOROVOD = ("--backend", "horovod")


def test_horovodrun_trains_as_one_process_does():
    launch = [command("horovodrun"), "-np", "2", sys.executable]
    assert_ten_steps(launch, *HOROVOD, shows="2 processes on cpu with horovod")


def test_new_processes_train_as_one_does():
    assert_ten_steps([sys.executable], *HOROVOD, "--nproc_per_node", "2", shows="2 processes on cpu with horovod")


def test_parallel_chooses_the_backend_of_horovodrun():
    assert_ten_steps([command("horovodrun"), "-np", "2", sys.executable], "--backend", "auto", shows="with horovod")
