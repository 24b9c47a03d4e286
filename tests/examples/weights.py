"""Run scripts that save their weights to the file given as the last argument."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tests.limits import HANG

ROOT = Path(__file__).resolve().parents[2]


def run_for_weights(command: Sequence[str], environment: Mapping[str, str]) -> tuple[str, list[Tensor]]:
    """Run a command with the path of a file as its last argument; return its output and the weights in the file."""
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "weights.pt"
        done = subprocess.run(
            [*command, str(saved)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=HANG,
        )
        output = done.stdout.decode(errors="replace")
        assert done.returncode == 0, output[-6000:]
        return output, torch.load(saved, weights_only=True)
