"""The notebook runs in a kernel, prints what its text says, and leaves nothing behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.limits import HANG

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "notebook.ipynb"


def printed(notebook: Any) -> list[str]:
    """Return the lines that the cells have written to the standard output."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert [output.evalue for output in outputs if output.output_type == "error"] == []
    return "".join(output.text for output in outputs if output.get("name") == "stdout").splitlines()


def check(notebook: Any, at_least: float) -> None:
    shown = printed(notebook)
    assert shown[0].startswith("epoch 3, iteration 90, loss ")
    assert "stopped in epoch 4, iteration 100" in shown
    assert "there is no metric 'acc'" in shown
    assert [line.partition(":")[0] for line in shown if ": accuracy" in line] == ["epoch 7", "epoch 8"]
    assert shown[-2] == "world size 2, 240 iterations"
    for line in shown[-1], next(line for line in shown if line.startswith("epoch 8")):
        assert float(line.rpartition("accuracy ")[2].rstrip("%")) >= at_least


def test_the_cells_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(NOTEBOOK.parents[1]), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PYTHONWARNINGS", "error:::__main__")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (install,) = [cell for cell in notebook.cells if "install" in cell.metadata.get("tags", ())]
    assert install.source.startswith("%pip install ")
    notebook.cells.remove(install)  # the environment of the tests has it all
    folder = tmp_path / "folder"
    folder.mkdir()
    NotebookClient(
        notebook, timeout=HANG, startup_timeout=int(HANG), resources={"metadata": {"path": str(folder)}}
    ).execute()
    check(notebook, at_least=96)
    assert list(folder.iterdir()) == []


def test_the_saved_outputs_are_those_of_a_run() -> None:
    check(nbformat.read(NOTEBOOK, as_version=4), at_least=97)
