"""The example for transformers, which only the environment of the pages holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples import finetune


def test_it_learns_saves_and_trains_what_it_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    text = tmp_path / "text.txt"
    text.write_text("\n".join(finetune.topics.values())[:60_000], "utf-8")
    options = ("--text", str(text), "--epochs", "1", "--output", str(tmp_path / "model"))
    before, after = finetune.training(finetune.parse([*options]))
    assert 800 < before < 1300  # 1,000 tokens, all as likely
    assert after < before / 1.5
    again, better = finetune.training(finetune.parse([*options, "--model", str(tmp_path / "model")]))
    assert again == pytest.approx(after, rel=1e-4)
    assert better < again
    shown = capsys.readouterr().out
    assert "The expression is evaluated" in shown
    assert f"saved {tmp_path / 'model'}" in shown
