"""Run the checks of every backend on one XLA device, and on several devices with XLA's own collectives."""

from __future__ import annotations

import sys

import pytest

from tests.distributed import check_groups, check_messages, check_training
from tests.distributed.checking import CHECKS
from tests.distributed.conformance import MODULES
from tests.xla import check_replicas
from tests.xla.processes import run

EVERY = [name for name, check in CHECKS.items() if check.__module__ in {module.__name__ for module in MODULES}]
REPLICA_CHECKS = [name for name, check in CHECKS.items() if check.__module__ == check_replicas.__name__]


def of(module):
    return [name for name, check in CHECKS.items() if check.__module__ == module.__name__]


def passed(completed):
    """Return the names of the checks that passed; fail if the process failed."""
    assert completed.returncode == 0, completed.stdout
    return [line.removeprefix("passed ") for line in completed.stdout.splitlines() if line.startswith("passed ")]


def run_on_replicas(size, names):
    """Run checks on several devices, again if the runtime crashed: with a thread per device, it rarely does on the CPU.

    A crash is a signal; a check that fails exits with a status, and is not repeated.
    """
    for _ in range(3):
        completed = run(
            *(sys.executable, "-m", "tests.xla.replicas", *names),
            CPU_NUM_DEVICES=str(size),
            XLA_THREAD_POOL_SIZE="8",
        )
        if completed.returncode >= 0:
            break
    return completed


def test_every_check_passes_on_one_device():
    completed = run(sys.executable, "-m", "tests.distributed.run_conformance", "--backend", "xla-tpu")
    assert sorted(passed(completed)) == sorted(EVERY)


# Three devices cannot be split into groups of equal size, and their number does not divide the batches of the training.
@pytest.mark.parametrize(
    ("size", "names"),
    [(2, EVERY + REPLICA_CHECKS), (3, of(check_groups)), (4, of(check_groups) + of(check_training))],
)
def test_checks_pass_on_several_devices(size, names):
    completed = run_on_replicas(size, names)
    assert passed(completed) == names
    lacking = {line.split(":")[0].removeprefix("lacks ") for line in completed.stdout.splitlines() if "lacks" in line}
    assert lacking < set(of(check_messages)), "only messages may be missing"
