"""The first example: what it prints, and its messages if the data are not available."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest
import sklearn  # noqa: F401  # sets environment variables when it is first imported
import torch

from examples import mnist
from tests.limits import HANG
from tests.torchvision_import import import_torchvision

SCRIPT = Path(mnist.__file__)


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--output", str(folder / "runs"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG, cwd=SCRIPT.parent.parent, check=False)


@pytest.mark.jobs
def test_it_learns_the_digits_logs_progress_and_saves_the_best_model(tmp_path):
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


def test_a_second_run_leaves_the_best_model_of_the_first_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = ["--batch_size", "96", "--epochs", "1"]
    for moment, rate in (("1", "0.004"), ("2", "0.0001")):
        monkeypatch.setattr("time.strftime", lambda form, moment=moment: moment)
        mnist.training(0, mnist.parse([*options, "--lr", rate]))
    assert [len(list(Path("runs/mnist", moment).glob("*.pt"))) for moment in "12"] == [1, 1]
    with pytest.raises(ValueError, match="use another one"):
        mnist.training(0, mnist.parse([*options, "--output", "runs/mnist/1"]))


@pytest.mark.jobs
def test_missing_mnist_exits_with_a_message(tmp_path):
    done = run(tmp_path, "--data", "mnist", "--root", str(tmp_path / "absent"))
    assert done.returncode == 1
    assert "--data mnist needs" in done.stderr
    assert "Traceback" not in done.stderr


def write_idx(path: Path, values: torch.Tensor) -> None:
    header = struct.pack(">BBBB", 0, 0, 8, values.dim()) + struct.pack(f">{values.dim()}I", *values.shape)
    path.write_bytes(header + bytes(values.to(torch.uint8).flatten().tolist()))


def test_mnist_is_read_with_torchvision(tmp_path):
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


def train(folder: Path, *arguments: str) -> float | None:
    """Run a short training in this process."""
    options = ["--batch_size", "96", "--lr", "0.004", "--output", str(folder / "best"), *arguments]
    return mnist.training(0, mnist.parse(options))


def test_a_resumed_training_continues_and_writes_one_curve(tmp_path, capsys):
    kept = ["--checkpoints", str(tmp_path / "kept"), "--tensorboard", str(tmp_path / "curves"), "--patience", "5"]
    train(tmp_path, *kept, "--epochs", "2")
    assert "epoch 2: train accuracy" in capsys.readouterr().out
    end = train(tmp_path, *kept, "--epochs", "3")
    shown, errors = capsys.readouterr()
    assert f"resuming from the checkpoint '{tmp_path / 'kept' / 'checkpoint_30.pt'}'; next: epoch 3, " in errors
    assert [f"epoch {number}: " in shown for number in (1, 2, 3)] == [False, False, True]
    assert end > 0.9
    (best,) = (tmp_path / "best").glob("*.pt")  # it replaced that of the first run
    assert float(best.stem.split("=")[1]) >= round(end, 4)
    assert read_curve(tmp_path / "curves", "validation/accuracy").keys() == {1, 2, 3}
    assert list(read_curve(tmp_path / "curves", "training/loss")) == [10, 20, 30, 40]

    with pytest.warns(UserWarning, match="nothing was run"):
        assert train(tmp_path, *kept, "--epochs", "3") is None
    shown = capsys.readouterr().out
    assert "epoch 3: " not in shown
    assert f"best model saved as {best}" in shown


def read_curve(folder: Path, name: str) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {point.step: point.value for point in events.Scalars(name)}


def test_it_stops_without_improvement(tmp_path, capsys):
    train(tmp_path, "--lr", "0", "--patience", "1", "--epochs", "9")
    shown = capsys.readouterr().out
    assert "epoch 2: " in shown
    assert "epoch 3: " not in shown


@pytest.mark.parametrize("arguments", [["--data", "letters"], ["--epochs", "many"]])
def test_invalid_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        mnist.parse(arguments)
    assert arguments[0] in capsys.readouterr().err
