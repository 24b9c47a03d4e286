"""The training of `restarts.py`: save after each step, and write down when it has finished.

torchrun ... benchmarks/stamping.py FOLDER [--backend gloo] [--timeout SECONDS] [--ray]
"""

# ruff: noqa: E402
from __future__ import annotations

import time

STARTED = time.time()  # before torch is imported; the clock that all processes share

import argparse
import os
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this clone, installed or not

import camshaft.distributed as idist
from camshaft.engine import Events, create_supervised_trainer
from camshaft.handlers import Checkpoint

PAUSE = 0.1  # seconds per step


def training(local_rank: int, folder: Path) -> None:
    (folder / socket.gethostname()).write_text(str(os.getpid()))
    model = idist.auto_model(torch.nn.Linear(8, 1))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    trainer = create_supervised_trainer(model, optimizer, torch.nn.functional.mse_loss)
    checkpoint = Checkpoint({"model": model, "optimizer": optimizer, "trainer": trainer}, folder / "saved", n_saved=2)
    checkpoint.resume_latest()
    trainer.add_event_handler(Events.ITERATION_COMPLETED, checkpoint)

    @trainer.on(Events.ITERATION_COMPLETED)
    def write() -> None:
        if idist.get_rank() == 0:
            with (folder / "steps").open("a") as file:
                file.write(f"{trainer.state.iteration} {time.time()} {STARTED}\n")
        time.sleep(PAUSE)

    trainer.run([(torch.randn(4, 8), torch.randn(4, 1))] * 100, max_epochs=1000)


def start_ray(folder: Path, timeout: float) -> None:
    """Let Ray start the training on two nodes."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    def training_of_worker(config: dict[str, Any]) -> None:
        from benchmarks import stamping  # imported by the worker, as it starts

        stamping.training(0, Path(config["folder"]))

    ray.init(address="auto", runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)}})
    TorchTrainer(
        training_of_worker,
        train_loop_config={"folder": str(folder)},
        scaling_config=ScalingConfig(num_workers=2),
        torch_config=TorchConfig(backend="gloo", timeout_s=int(timeout)),
        run_config=RunConfig(
            name="run", storage_path=str(folder / "stored"), failure_config=FailureConfig(max_failures=-1)
        ),
    ).fit()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--ray", action="store_true")
    options = parser.parse_args()
    if options.ray:
        start_ray(options.folder, options.timeout)
    else:
        with idist.Parallel(options.backend, timeout=timedelta(seconds=options.timeout)) as parallel:
            parallel.run(training, options.folder)


if __name__ == "__main__":
    main()
