"""Packages that were written for PyTorch-Ignite give the same results on camshaft, unmodified."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.limits import HANG

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
ON_CAMSHAFT = ("-m", "camshaft.as_ignite")
TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
EXAMPLE = ROOT / "examples" / "monai_segmentation.py"
# kills itself when it has written a checkpoint, but not yet given it its name
KILLED = """
import os, runpy, signal, sys

def kill(event, arguments):
    if event == "os.rename" and str(arguments[1]).endswith("checkpoint_25.pt"):
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(kill)
sys.argv[:1] = []
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def results_of(script: str, *arguments: object, how: tuple[str, ...] = ON_CAMSHAFT) -> dict[str, Any]:
    """Run a script, and return the JSON that it prints."""
    command = [sys.executable, *how, str(FOLDER / script), *map(str, arguments)]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    results: dict[str, Any] = json.loads(line)
    wanted = "ignite.engine.engine" if how == () else "camshaft.engine.engine"
    assert results.pop("engine") == wanted
    return results


def test_monais_trainer_evaluator_and_handlers_give_the_same_as_on_pytorch_ignite(tmp_path: Path) -> None:
    found, wanted = (
        results_of("segment.py", tmp_path / how, how=(ON_CAMSHAFT, ())[how == "theirs"]) for how in ("ours", "theirs")
    )
    assert found == wanted
    assert found["metrics"]["dice"] == found["loaded"] > 0.6
    assert found["iteration"] == 16


def test_monais_trainer_evaluator_and_handlers_on_two_ranks(tmp_path: Path) -> None:
    found = results_of("segment.py", tmp_path, how=(*TWO_RANKS, *ON_CAMSHAFT))
    assert (found["size"], found["iteration"]) == (2, 16)
    assert found["metrics"]["dice"] == found["loaded"] > 0.6
    assert found["files"][:3] == ["checkpoint_epoch=7.pt", "checkpoint_epoch=8.pt", "checkpoint_final_iteration=16.pt"]


@pytest.mark.parametrize("script", ["gan.py", "prune.py"])
def test_the_results_are_those_on_pytorch_ignite(script: str) -> None:
    found = results_of(script)
    assert found == results_of(script, how=())
    if script == "prune.py":
        assert found == {"epochs": [5, 2, 5], "states": ["COMPLETE", "PRUNED", "COMPLETE"], "best": pytest.approx(1.4)}


def test_the_example_resumes_exactly_after_a_kill(tmp_path: Path) -> None:
    def start(folder: str, *how: str) -> subprocess.Popen[str]:
        command = [sys.executable, *how, str(EXAMPLE), "--epochs=3", "--output", folder]
        environ = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    with start("killed", "-c", KILLED) as killed:
        output = killed.communicate(timeout=HANG)[0]
    assert killed.returncode == -signal.SIGKILL, output
    with start("killed") as again, start("whole") as whole:
        outputs = [program.communicate(timeout=HANG)[0] for program in (again, whole)]
    assert [again.returncode, whole.returncode] == [0, 0], outputs
    assert "; next: epoch 2, iteration 21, sample 17\n" in outputs[0]
    last = [torch.load(tmp_path / folder / "checkpoint_48.pt", weights_only=True) for folder in ("killed", "whole")]
    assert last[0]["trainer"] == last[1]["trainer"]
    for name, weight in last[0]["model"].items():
        assert torch.equal(weight, last[1]["model"][name]), name


def test_the_search_with_optuna_prunes_trials_and_finds_a_good_rate(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE.with_name("optuna_pruning.py"))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANG)
    assert (done.returncode, done.stderr) == (0, "")
    *trials, best = done.stdout.splitlines()
    assert len(trials) == 12
    pruned = [line for line in trials if ", pruned after epoch " in line]
    assert 0 < len(pruned) < 12
    assert float(best.partition("accuracy ")[2].rstrip("%")) > 90
