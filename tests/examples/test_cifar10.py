"""The usual handlers: it learns on two ranks, resumes in one process, and reads the format of CIFAR-10."""

from __future__ import annotations

from pathlib import Path

import pytest

import camshaft.distributed as idist
from examples import cifar10
from tests.ranks import run_on_ranks
from tests.torchvision_import import import_torchvision


def train(folder: Path, epochs: int, *arguments: str) -> float:
    import_torchvision()  # which torchmetrics imports if it is installed
    config = cifar10.parse(["--output", str(folder), "--epochs", str(epochs), *arguments])
    return cifar10.training(idist.get_local_rank(), config)


@pytest.mark.jobs
def test_it_learns_on_two_ranks_and_a_finished_training_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = run_on_ranks(2, train, tmp_path, 3)
    assert one == other > 0.5  # 0.1 by chance
    (latest,) = tmp_path.glob("checkpoint_*.pt")
    assert latest.name == "checkpoint_30.pt"
    (best,) = tmp_path.glob("best_model_*.pt")
    assert float(best.stem.partition("=")[2]) >= round(one, 4)
    assert train(tmp_path, 3) == 0
    shown = capsys.readouterr()
    assert shown.err == f"resuming from the checkpoint '{latest}'; next: epoch 4, iteration 31, sample 1\n"
    assert shown.out.startswith("already finished: ")


def test_a_training_that_has_stopped_early_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, 9, "--lr", "0", "--patience", "1")
    assert "no better accuracy in 1 epochs: stopping" in capsys.readouterr().out
    assert train(tmp_path, 9, "--lr", "0", "--patience", "1") == 0
    shown = capsys.readouterr().out
    assert "already finished: " in shown
    assert "epoch 3: " not in shown


def test_the_files_have_the_format_of_cifar10(tmp_path: Path) -> None:
    cifar10.write_files(tmp_path / "files", count=3)
    images, labels = cifar10.load(tmp_path / "files", "data_batch_1", "data_batch_2").tensors
    assert images.shape == (6, 3, 32, 32)
    assert labels.shape == (6,)
    expected = [20 + 110 * (int(labels[0]) >> bit & 1) for bit in (0, 1)] + [20 + 110 * (int(labels[0]) // 4)]
    assert images[0, :, 0, 0].tolist() == pytest.approx(expected, abs=120)  # about the color of the class
    assert images[0, :, :8].unique(dim=2).shape == (3, 8, 1)
