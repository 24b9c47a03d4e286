"""The example that is killed and resumes with another number of processes: same samples, same losses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import camshaft.distributed as idist
from examples import resume
from tests.limits import HANG
from tests.ranks import kill_on_ranks, run_on_ranks

SCRIPT = Path(resume.__file__)
SAMPLES, STEPS = 1797, 30  # per epoch, for three epochs
AUDIT = f"{SAMPLES} samples seen, {SAMPLES} once, 0 twice, 0 never"


def train(folder: Path, *arguments: str) -> None:
    resume.training(idist.get_local_rank(), resume.parse(["--output", str(folder), *arguments]))


def end_of(folder: Path) -> dict[str, object]:
    """Return the trainer's state from the only checkpoint in a folder, saved at the last iteration."""
    (path,) = folder.glob("*.pt")
    assert path.name == f"checkpoint_{3 * STEPS}.pt"
    return torch.load(path, weights_only=True)["trainer"]


@pytest.mark.jobs
def test_two_kills_and_changes_of_the_world_size_do_not_change_the_result(tmp_path):
    folder = tmp_path / "killed"
    kill_on_ranks(2, train, folder, "--kill_at", "17")
    kill_on_ranks(3, train, folder, "--kill_at", "46")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--output", str(folder)], cwd=SCRIPT.parent.parent,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=HANG, text=True,
    )  # fmt: skip
    shown = [line.partition("; loss")[0] for line in done.stdout.splitlines()]
    assert shown == [
        f"resuming from the checkpoint '{folder / 'checkpoint_40.pt'}'; next: epoch 2, iteration 41, sample 601",
        f"epoch 2: {AUDIT}",
        f"epoch 3: {AUDIT}",
    ]

    run_on_ranks(1, train, tmp_path / "whole")
    again, wanted = end_of(folder), end_of(tmp_path / "whole")
    for epoch in (1, 2, 3):
        assert torch.equal(again["seen"][epoch], torch.ones(SAMPLES, dtype=torch.long))
        assert again["losses"][epoch] == pytest.approx(wanted["losses"][epoch], rel=1e-3)
    assert len(wanted["losses"][3]) == STEPS
    assert wanted["losses"][3][-1] < wanted["losses"][1][0] / 4
