"""The language model learns, with batches weighted by bytes, and resumes, also on a mesh of other ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from examples import transformer
from tests.limits import wait_until
from tests.torchrun.launching import ROOT, Launched, torchrun

SMALL = ("--layers", "1", "--width", "32", "--lr", "0.01")
EPOCHS = 6


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Return a text that is easy to learn, with paragraphs of different lengths."""
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join("to be or not " * (1 + number % 7) for number in range(60)))
    return path


def losses(shown: str) -> dict[int, float]:
    """Return the bits per byte of each epoch."""
    return {int(epoch): float(bits) for epoch, bits in re.findall(r"^epoch (\d+): ([\d.]+) bits", shown, re.MULTILINE)}


def wait_for(run: Launched, line: str) -> None:
    def has_come() -> bool:
        return line in run.output or run.poll() is not None

    wait_until(has_come, lambda: run.output)
    assert line in run.output, run.output


@pytest.mark.jobs
def test_it_learns_and_resumes_on_two_ranks_of_four_that_were_killed_and_then_on_one(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "killed"

    def options(folder: Path, epochs: int) -> list[str]:
        return ["--text", str(text), *SMALL, "--epochs", str(epochs), "--checkpoints", str(folder), "--resume"]

    def alone(folder: Path) -> str:
        transformer.training(0, transformer.parse(options(folder, EPOCHS)))
        return capsys.readouterr().out

    def ranks(count: int, mesh: str, epochs: int) -> Launched:
        script = (transformer.__file__, *options(folder, epochs), "--mesh", mesh)
        return torchrun("--standalone", f"--nproc-per-node={count}", *script, PYTHONPATH=str(ROOT))

    with ranks(4, "dp_shard=2,tp=2", 2) as run:
        wait_for(run, "epoch 2: ")
        first = run.output
    with ranks(2, "tp=2", 5) as run:
        wait_for(run, "epoch 5: ")
        second = run.output
    third, whole = alone(folder), alone(tmp_path / "whole")

    wanted = losses(whole)
    assert list(wanted) == [1, 2, 3, 4, 5, 6]
    assert wanted[6] < 2 < wanted[1] < 8
    found = [losses(shown) for shown in (first, second, third)]
    seen = [set(found[0]), set(found[1]) - {2}, set(found[2]) - {5}]  # repeated if the kill came before the save
    assert seen == [{1, 2}, {3, 4, 5}, {6}]
    for epoch, bits in (pair for part in found for pair in part.items()):
        assert bits == pytest.approx(wanted[epoch], abs=2e-3)
    assert "to be or not" in third


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
    scores = torch.zeros(6, 256)
    scores[5] = torch.randn(256) * 100
    assert transformer.loss_fn(scores, y) == pytest.approx(8)


def test_predictions_are_causal() -> None:
    model = transformer.Transformer(1, 32).eval()
    x = torch.randint(256, (1, 12))
    other = x.clone()
    other[0, 8:] = 0
    torch.testing.assert_close(model(x)[:8], model(other)[:8])
