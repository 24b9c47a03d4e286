"""Run the commands of examples/distributed_backends.py that need only pip; other folders test the others."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from examples import distributed_backends
from tests.examples.ten_steps import EXAMPLE, assert_ten_steps, command, run, train_on_one_process
from tests.limits import HANG
from tests.mpi.checking import MPI_VARIABLES

GLOO = ("--backend", "gloo")

pytestmark = pytest.mark.jobs


@pytest.mark.parametrize(("ranks", "backend"), [(2, "gloo"), (4, "auto")])
def test_training_in_spawned_processes_matches_one_process(ranks, backend):
    arguments = ("--backend", backend, "--nproc_per_node", str(ranks))
    assert_ten_steps([sys.executable], *arguments, shows=f"world size {ranks} on cpu with gloo")


def test_training_changes_the_weights():
    _, untrained = run([sys.executable], "--num_iterations", "1")
    assert not torch.allclose(untrained[0], train_on_one_process()[0], rtol=1e-4, atol=1e-6)


def test_torchrun():
    launch = [command("torchrun"), "--standalone", "--nproc_per_node", "2"]
    assert_ten_steps(launch, *GLOO, shows="world size 2 on cpu with gloo")


def test_the_launch_module_of_torch():
    launch = [sys.executable, "-m", "torch.distributed.launch", "--standalone", "--nproc_per_node", "2", "--use_env"]
    assert_ten_steps(launch, *GLOO, shows="world size 2 on cpu with gloo")


def test_mpirun():
    launch = [command("mpirun"), "-np", "2", sys.executable]
    assert_ten_steps(launch, "--backend", "mpi", shows="world size 2 on cpu with mpi", environment=MPI_VARIABLES)


def test_a_wide_residual_network_of_torchvision(tmp_path):
    program = tmp_path / "with_torchvision.py"
    program.write_text(
        "import runpy\nfrom tests.torchvision_import import import_torchvision\nimport_torchvision()\n"
        f"runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')\n"
    )
    launch = [command("torchrun"), "--standalone", "--nproc_per_node", "2", str(program)]
    done = subprocess.run(
        [*launch, *GLOO, "--model", "wide_resnet50_2", "--num_iterations", "2", "--batch_size", "4"],
        env={**os.environ, "PYTHONPATH": str(EXAMPLE.parent.parent)}, capture_output=True, timeout=HANG,
    )  # fmt: skip
    assert b"iteration 2: loss" in done.stdout, done.stderr.decode()[-3000:]


def test_an_image_is_the_same_in_every_process():
    first, again = (distributed_backends.RandomImages(8, 4)[3] for _ in range(2))
    torch.testing.assert_close(first, again)
    assert not torch.equal(first[0], distributed_backends.RandomImages(8, 4)[4][0])
