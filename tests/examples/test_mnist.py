"""The first example: what it promises to show, and what it says when its data cannot be had."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples import mnist
from tests.torchvision_import import import_torchvision

SCRIPT = Path(mnist.__file__)


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--output", str(folder / "runs"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=SCRIPT.parent.parent, check=False)


def test_it_learns_the_digits_shows_its_progress_and_saves_the_best_model(tmp_path):
    done = run(tmp_path, "--epochs", "4")
    assert done.returncode == 0, done.stderr
    shown = done.stdout + done.stderr
    assert "Epoch [4/4]" in shown
    assert "loss=" in shown
    assert "epoch 4: train accuracy" in shown
    assert "validation accuracy" in shown
    (saved,) = (tmp_path / "runs").glob("*.pt")
    assert f"best model saved as {saved}" in done.stdout
    assert float(saved.stem.split("=")[1]) > 0.97
    model = mnist.make_model()
    model.load_state_dict(torch.load(saved, weights_only=True))


def test_mnist_that_cannot_be_had_is_a_clear_message(tmp_path):
    done = run(tmp_path, "--data", "mnist", "--root", str(tmp_path / "absent"))
    assert done.returncode == 1
    assert "MNIST" in done.stderr or "--data mnist needs" in done.stderr
    assert "Traceback" not in done.stderr


def write_idx(path: Path, values: torch.Tensor) -> None:
    header = struct.pack(">BBBB", 0, 0, 8, values.dim()) + struct.pack(f">{values.dim()}I", *values.shape)
    path.write_bytes(header + bytes(values.to(torch.uint8).flatten().tolist()))


def test_mnist_is_read_from_its_folder_through_torchvision(tmp_path):
    import_torchvision()
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", 8), ("t10k", 4)):
        write_idx(raw / f"{part}-images-idx3-ubyte", torch.arange(count * 784).reshape(count, 28, 28) % 256)
        write_idx(raw / f"{part}-labels-idx1-ubyte", torch.arange(count) % 10)
    training, validation = mnist.load_mnist(tmp_path)
    assert (len(training), len(validation)) == (8, 4)
    image, digit = training[3]
    assert image.shape == (1, 28, 28)
    assert image.max() <= 1
    assert digit == 3
    assert mnist.make_model()(image[None]).shape == (1, 10)


@pytest.mark.parametrize("arguments", [["--data", "letters"], ["--epochs", "many"]])
def test_arguments_that_make_no_sense_are_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        mnist.parse(arguments)
    assert arguments[0] in capsys.readouterr().err
