"""The README's script runs as the README says: with the lines for several processes, and resumed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.docs.pages import ROOT, blocks

TEXT = (ROOT / "README.md").read_text("utf-8")
CODE = {language: [one.code for one in blocks(TEXT) if one.language == language] for language in ("python", "diff")}
RUN = "trainer.run(train_loader, max_epochs="


def changed(script: str, diff: str) -> str:
    """Return the script with the lines of the diff, the first of which adds two lines before those that change."""
    removed, added = ([line[1:] for line in diff.splitlines() if line[0] == sign] for sign in "-+")
    script = script.replace(removed[0], f"{added[0]}\n{added[1]}\n{removed[0]}")
    for old, new in zip(removed, added[2:], strict=True):
        assert script.count(old) == 1, old
        script = script.replace(old, new)
    return script


def test_the_script_runs_on_two_ranks_and_resumes(tmp_path: Path) -> None:
    script, resuming = CODE["python"]
    script = changed(script, CODE["diff"][0])
    path = tmp_path / "train.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for epochs, expected in (2, ["epoch 1", "epoch 2"]), (3, ["epoch 3"]):
        path.write_text(script.replace(RUN, f"{resuming}{RUN}").replace("max_epochs=2", f"max_epochs={epochs}"))
        finished = subprocess.run(torchrun, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert finished.returncode == 0, finished.stderr
        lines = [line for line in (finished.stdout + finished.stderr).splitlines() if ": accuracy " in line]
        assert [line.partition(":")[0] for line in lines] == expected
        assert float(lines[-1].split()[-1].rstrip("%")) > 85
