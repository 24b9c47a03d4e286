"""Scripts that write their weights to a file, named by their last argument, run by whatever command."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]


def run_for_weights(command: Sequence[str], environment: Mapping[str, str], seconds: float) -> tuple[str, list[Tensor]]:
    """Run a command, which gets the file's path besides; give what it wrote and the weights that it ended with."""
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "weights.pt"
        done = subprocess.run(
            [*command, str(saved)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=seconds,
        )
        output = done.stdout.decode(errors="replace")
        assert done.returncode == 0, output[-6000:]
        return output, torch.load(saved, weights_only=True)
