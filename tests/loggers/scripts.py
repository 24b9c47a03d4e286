"""Run scripts in separate processes, because the libraries of tracking services leave threads and processes behind."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.limits import HANG

ROOT = Path(__file__).resolve().parents[2]

COMMON = """
import warnings
import torch
from camshaft.engine import Engine, Events
from camshaft.handlers import global_step_from_engine

def by_iteration(logger, attempt=1):
    trainer = Engine(lambda engine, batch: {"loss": 0.5 * attempt * engine.state.iteration})
    logger.attach_output_handler(
        trainer, Events.ITERATION_COMPLETED(every=2), tag="training", output_transform=lambda output: output
    )
    return trainer
"""


def run_script(folder: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script with its own working directory and home, without settings of tracking services; it must succeed."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CLEARML", "MLFLOW", "WANDB"))}
    kept |= {"HOME": str(home), "PYTHONPATH": str(ROOT), "CLEARML_CACHE_DIR": str(folder / "clearml"), "CI": "false"}
    # Otherwise, ClearML runs git in a thread while it forks. If its fork inherits the pipe by which Python starts git,
    # the thread waits for the fork, and `close` for the thread: five minutes.
    kept["CLEARML_VCS_REPO_URL"] = "https://example.org/repository.git"
    result = subprocess.run(
        [sys.executable, "-c", COMMON + textwrap.dedent(code)],
        cwd=folder,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result
