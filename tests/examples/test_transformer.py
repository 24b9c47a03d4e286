"""The language model learns, with batches weighted by bytes, and resumes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples import transformer

SMALL = ("--layers", "1", "--width", "32", "--lr", "0.01")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Return a text that is easy to learn, with paragraphs of different lengths."""
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join("to be or not " * (1 + number % 7) for number in range(120)))
    return path


def test_it_learns_and_resumes(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def train(folder: str, epochs: int) -> float:
        options = ["--text", str(text), *SMALL, "--epochs", str(epochs), "--start", "to"]
        return transformer.training(0, transformer.parse([*options, "--checkpoints", str(tmp_path / folder)]))

    first = train("stopped", 1)
    assert "epoch 1: " in capsys.readouterr().out
    again = train("stopped", 3)
    shown = capsys.readouterr().out
    assert "epoch 1: " not in shown
    assert f"epoch 3: {again:.3f} bits per byte" in shown
    assert again < 2 < first < 8
    assert "to be or not" in shown
    assert train("whole", 3) == pytest.approx(again, rel=1e-4)


def test_without_files_it_reads_the_documentation() -> None:
    paragraphs = transformer.load_paragraphs([])
    assert len(paragraphs) > 100
    assert max(map(len, paragraphs)) == transformer.LONGEST + 2
    assert any(bytes(one.tolist()).strip().startswith(b"# camshaft") for one in paragraphs)


def test_padding_has_no_weight() -> None:
    x, y = transformer.pad([torch.tensor([10, 65, 66, 10]), torch.tensor([10, 65, 10])])
    assert x.tolist() == [[10, 65, 66], [10, 65, 0]]
    assert y.tolist() == [[65, 66, 10], [65, 10, transformer.PADDING]]
    assert transformer.bytes_in(x, y) == 5
    scores = torch.zeros(2, 3, 256)
    scores[1, 2] = torch.randn(256) * 100
    assert transformer.loss_fn(scores, y) == pytest.approx(8)


def test_predictions_are_causal() -> None:
    model = transformer.Transformer(1, 32).eval()
    x = torch.randint(256, (1, 12))
    other = x.clone()
    other[0, 8:] = 0
    torch.testing.assert_close(model(x)[0, :8], model(other)[0, :8])
