"""Training examples on two processes of a launcher: both take part, and only rank 0 prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.ten_steps import command
from tests.limits import HANG
from tests.mpi.checking import MPI_VARIABLES

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {  # arguments, the pattern of a line with a number that is printed once, and the bounds of the number
    "mnist": (("--epochs", "2"), r"epoch 2: train accuracy ([\d.]+)%", 90, 100),
    "resnet": (("--images", "800", "--noise", "2", "--epochs", "2"), r"epoch 2: .*of the average ([\d.]+)%", 40, 100),
    "gan": (("--epochs", "14", "--show_every", "400"), r"step 400: distance ([\d.]+)", 0, 20),
    "reinforce": (("--epochs", "3", "--games", "16"), r"epoch 3: the pole stays up for (\d+)", 60, 500),
    "transformer": (("--epochs", "1", "--width", "32"), r"epoch 1: ([\d.]+) bits", 1, 6),
}
pytestmark = pytest.mark.jobs


@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        *(("mnist", "torchrun"), ("gan", "torchrun"), ("reinforce", "torchrun")),
        *(("mnist", "mpirun"), ("resnet", "mpirun"), ("transformer", "mpirun")),
    ],
)
def test_two_ranks(name: str, launcher: str, tmp_path: Path) -> None:
    arguments, pattern, low, high = EXAMPLES[name]
    launch = {
        "torchrun": [command("torchrun"), "--standalone", "--nproc_per_node", "2"],
        "mpirun": [command("mpirun"), "-np", "2", sys.executable],
    }[launcher]
    backend = {"torchrun": "gloo", "mpirun": "mpi"}[launcher]
    output = ("--output", str(tmp_path)) if name == "mnist" else ()
    done = subprocess.run(
        [*launch, str(ROOT / "examples" / f"{name}.py"), *arguments, *output, "--backend", backend],
        env={**os.environ, **MPI_VARIABLES, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=HANG,
    )  # fmt: skip
    shown = done.stdout.decode(errors="replace")
    assert done.returncode == 0, shown[-6000:]
    (number,) = re.findall(pattern, shown)
    assert low <= float(number) <= high, shown
