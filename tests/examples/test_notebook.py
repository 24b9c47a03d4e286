"""The cells of the notebook run in order, in one process, and print what its text says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import HANG

NOTEBOOK = Path(__file__).resolve().parent.parent.parent / "examples" / "notebook.ipynb"


@pytest.mark.jobs
def test_the_cells_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    script = tmp_path / "cells.py"
    script.write_text("\n\n".join("".join(cell["source"]) for cell in cells), "utf-8")
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parent.parent))
    monkeypatch.setenv("MPLBACKEND", "agg")
    command = [sys.executable, "-W", "error:::__main__", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = done.stdout.splitlines()
    assert shown[0].startswith("epoch 3, iteration 90, loss ")
    assert "stopped in epoch 4, iteration 100" in shown
    assert any(line.startswith("epoch 5, iteration 150, accuracy ") for line in shown)
    assert "there is no metric 'accuracy'" in shown
    assert [line.partition(":")[0] for line in shown if ": accuracy" in line] == ["epoch 7"]
    assert shown[-2] == "world size 2, 150 iterations"
    assert float(shown[-1].removeprefix("accuracy ").rstrip("%")) > 75  # 10 by chance
