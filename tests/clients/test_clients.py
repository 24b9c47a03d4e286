"""Packages that were written for PyTorch-Ignite give the same results on camshaft, unmodified."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import struct
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


def output_of(*command: object, folder: Path = ROOT) -> str:
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    words = [sys.executable, *map(str, command)]
    done = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def results_of(
    script: str, *arguments: object, how: tuple[str, ...] = ON_CAMSHAFT, folder: Path = ROOT
) -> dict[str, Any]:
    """Run a script, and return the JSON that it prints."""
    (found,) = re.findall('{"engine".*', output_of(*how, FOLDER / script, *arguments, folder=folder))
    results: dict[str, Any] = json.loads(found)
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


@pytest.mark.parametrize("script", ["extend.py", "gan.py", "prune.py", "reinforce.py"])
def test_the_results_are_those_on_pytorch_ignite(script: str, tmp_path: Path) -> None:
    found = results_of(script, tmp_path / "ours")
    assert found == results_of(script, tmp_path / "theirs", how=())
    if script == "extend.py":
        assert found["parts"] == found["whole"]
    if script == "prune.py":
        assert found == {"epochs": [5, 2, 5], "states": ["COMPLETE", "PRUNED", "COMPLETE"], "best": pytest.approx(1.4)}


def test_a_project_that_gatle_ignite_creates_trains_as_on_pytorch_ignite(tmp_path: Path) -> None:
    output_of("-m", "gatle_ignite", "init", "project", folder=tmp_path)
    # not shuffled, because auto_dataloader does that in an order of its own
    changes = ["max_epochs=2", "train_ds_params.n=256", "train_ds_params.shuffle=False"]
    train = ["-m", "gatle_ignite", "train", "--config=configs/project_v0.py", *(f"--override={one}" for one in changes)]
    files = []
    for how in (ON_CAMSHAFT, ()):
        folder = tmp_path / ("ours" if how else "theirs")
        output_of(*how, *train, f"--override=save_dir={folder}", folder=tmp_path / "project")
        assert (folder / ".manifest").exists() == bool(how)
        files.append({path.name: torch.load(path, weights_only=True) for path in folder.glob("*.pt")})
    assert files[0].keys() == files[1].keys()
    assert len(files[0]) == 2
    for name, saved in files[0].items():
        torch.testing.assert_close(saved["model"], files[1][name]["model"], rtol=0, atol=0)


def test_examples_of_pytorch_ignite_train_as_there(tmp_path: Path) -> None:
    raw = tmp_path / "ours" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, size in (("train", 128), ("t10k", 32)):
        write_idx(raw / f"{name}-images-idx3-ubyte", torch.arange(size * 28 * 28).mul(31).view(size, 28, 28))
        write_idx(raw / f"{name}-labels-idx1-ubyte", torch.arange(size) % 10)
    shutil.copytree(tmp_path / "ours", tmp_path / "theirs")
    save_and_resume = [
        f"mnist/mnist_save_resume_engine.py --epochs 2 --log_dir logs {option}"
        for option in ("--checkpoint_every 1", "--resume_from logs/checkpoint_1.pt")
    ]
    commands = [
        "reinforcement_learning/reinforce.py --max-episodes 10",
        "reinforcement_learning/actor_critic.py --max-episodes 10",
        "mnist/mnist.py --epochs 1",
        "mnist/mnist_with_tqdm_logger.py --epochs 1",
        *save_and_resume,
    ]
    # torch 2.6 and newer do not load what the example saves there with this option
    deterministic = [f"{command} --deterministic" for command in save_and_resume]
    found = results_of("published.py", *commands, *deterministic, folder=tmp_path / "ours")
    whole, resumed = [found.pop(command) for command in deterministic]
    assert (whole["steps"], resumed["steps"]) == (4, 2)
    assert whole["last"] == resumed["last"]
    assert found == results_of("published.py", *commands, how=(), folder=tmp_path / "theirs")


def write_idx(path: Path, values: torch.Tensor) -> None:
    """Write bytes as a file of MNIST."""
    header = struct.pack(f">BBBB{values.dim()}i", 0, 0, 8, values.dim(), *values.shape)
    path.write_bytes(header + values.to(torch.uint8).numpy().tobytes())


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
