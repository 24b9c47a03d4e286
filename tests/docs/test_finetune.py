"""The example for transformers, which only the environment of the pages holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from examples import finetune


def test_it_learns_saves_and_trains_what_it_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    file, saved = tmp_path / "sentences.tsv", str(tmp_path / "model")
    file.write_text("".join(f"{label}\t{sentence}\n" for label, sentence in finetune.read_docstrings()[::3]), "utf-8")
    options = ("--sentences", str(file), "--epochs", "2", "--output", saved)
    _, reached = finetune.training(finetune.parse([*options]))
    assert reached > 0.6  # 0.33 by chance
    shown = capsys.readouterr().out
    assert "sentences of NumPy, PyTorch, Python" in shown
    assert re.search(r"PyTorch +\d+%  Applies dropout", shown)
    assert f"saved {saved}" in shown
    (again,) = finetune.training(finetune.parse([*options, "--epochs", "1", "--lr", "0", "--model", saved]))
    assert again == reached
