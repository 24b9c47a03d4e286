"""Train with Ray, record the samples of each iteration, and fail where the arguments say so.

    python tests/ray/exact.py FOLDER WORKERS [ITERATION HOW]

HOW is `kill`, which Ray answers with a restart, or `raise`, which ends the run.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch

import camshaft.distributed as idist
from camshaft.engine import Engine, Events
from camshaft.handlers import Checkpoint

SAMPLES, EPOCHS = 50, 2


def training(config: dict[str, Any]) -> None:
    records, folder = Path(config["folder"], "records"), tempfile.mkdtemp()
    stored = ray.train.get_checkpoint()
    if stored is not None:
        stored.to_directory(folder)
    loader = idist.auto_dataloader(range(SAMPLES), batch_size=2 * idist.get_world_size(), shuffle=True, seed=0)
    seen: list[str] = []
    trainer = Engine(lambda engine, batch: seen.append(f"{engine.state.epoch} {batch.tolist()}"))
    checkpoint = Checkpoint({"trainer": trainer}, folder, n_saved=1)
    checkpoint.resume_latest()

    @trainer.on(Events.ITERATION_COMPLETED(every=3) | Events.COMPLETED)
    def report() -> None:
        checkpoint(trainer)
        (records / f"{trainer.state.iteration} {idist.get_rank()}").write_text("\n".join(seen))
        seen.clear()
        saved = ray.train.Checkpoint.from_directory(folder) if idist.get_rank() == 0 else None
        ray.train.report({"iteration": trainer.state.iteration}, checkpoint=saved)

    @trainer.on(Events.ITERATION_COMPLETED(once=config["fails_in"]))
    def fail() -> None:
        marker = Path(config["folder"], f"{config['how']} was here")
        if idist.get_rank() == 1 and not marker.exists():
            marker.touch()
            ray.train.get_all_reported_checkpoints()  # a failure would lose what Ray has not yet stored
            if config["how"] == "raise":
                raise RuntimeError("the end of this attempt")
            os.kill(os.getpid(), signal.SIGKILL)

    trainer.run(loader, max_epochs=EPOCHS)


def main(folder: str, workers: str, fails_in: str = "1000", how: str = "kill") -> None:
    Path(folder, "records").mkdir(exist_ok=True)
    ray.init(num_cpus=3, include_dashboard=False)
    result = ray.train.torch.TorchTrainer(
        training,
        train_loop_config={"folder": folder, "fails_in": int(fails_in), "how": how},
        scaling_config=ray.train.ScalingConfig(num_workers=int(workers)),
        torch_config=ray.train.torch.TorchConfig(backend="gloo"),
        run_config=ray.train.RunConfig(
            name="run",
            storage_path=str(Path(folder, "stored")),
            failure_config=ray.train.FailureConfig(max_failures=1 if how == "kill" else 0),
        ),
    ).fit()
    print("finished in iteration", result.metrics["iteration"])


if __name__ == "__main__":
    main(*sys.argv[1:])
