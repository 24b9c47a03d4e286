"""The large example: preempted in one process, it resumes on two, and a finished training is left alone."""

from __future__ import annotations

import importlib
import re
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import camshaft.distributed as idist
from camshaft.engine import Engine, Events
from tests.ranks import run_on_ranks
from tests.torchvision_import import import_torchvision


def load_example() -> Any:
    import_torchvision()
    return importlib.import_module("examples.imagenet")


def train(folder: Path, *arguments: str) -> dict[str, float]:
    options = ("--model", "resnet10", "--size", "32", "--batch_size", "24", "--warm_up", "1", "--epochs", "2")
    example = load_example()
    config = example.parse([*options, "--log_every", "1", "--output", str(folder), *arguments])
    return dict(example.training(idist.get_local_rank(), config))


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint_*.pt"))


@pytest.mark.jobs
def test_it_is_preempted_resumes_on_two_ranks_and_finishes_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load_example()
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)  # the tests keep theirs
    example.draw_images(tmp_path / "images", train=7, val=3)  # 3 iterations per epoch
    with monkeypatch.context() as patch:
        attach = example.Preemption.attach

        def attach_with_a_signal(preemption: Any, trainer: Engine) -> None:
            attach(preemption, trainer)
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: signal.raise_signal(signal.SIGTERM))

        patch.setattr(example.Preemption, "attach", attach_with_a_signal)
        assert train(tmp_path) == {}
    assert checkpoints(tmp_path) == ["checkpoint_2.pt"]

    run_on_ranks(2, train, tmp_path)
    assert checkpoints(tmp_path) == ["checkpoint_3.pt", "checkpoint_6.pt"]
    (best,) = tmp_path.glob("best_model_*.pt")
    assert re.fullmatch(r"best_model_[12]_top1=\d\.\d{4}\.pt", best.name)
    example.make_model("resnet10", 10).load_state_dict(torch.load(best, weights_only=True))
    assert list(tmp_path.glob("events.out.tfevents.*"))

    assert train(tmp_path) == {}
    shown = capsys.readouterr()
    assert f"resuming from the checkpoint '{tmp_path / 'checkpoint_6.pt'}'; next: epoch 3, iteration 7" in shown.err
    assert shown.out.startswith("already finished: ")


@pytest.mark.jobs
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_compiled_and_with_mixed_precision_it_resumes(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # which needs no C++ compiler
    load_example().draw_images(tmp_path / "images", train=2, val=1)  # 1 iteration per epoch
    options = ("--precision", precision, "--compile", "--seed", "1")
    for epochs in (1, 2):
        accuracy = train(tmp_path, *options, "--epochs", str(epochs))
        assert set(accuracy) == {"top1", "top5"}
    resumed = f"resuming from the checkpoint '{tmp_path / 'checkpoint_1.pt'}'; next: epoch 2, iteration 2, sample 1\n"
    assert resumed in capsys.readouterr().err
    saved = torch.load(tmp_path / "checkpoint_2.pt", weights_only=True)
    assert ("scaler" in saved) == (precision == "fp16")
    assert saved["average"]
