"""Train with Ray on several workers, which Ray restarts when one fails; the run resumes with the very next sample.

    python examples/ray_train.py
    python examples/ray_train.py --kill            # one worker is killed, once
    python examples/ray_train.py --workers 3       # resumes what has been saved, on another number of workers

You see the accuracy every 20 iterations, which Ray receives together with a checkpoint. The same command resumes a run
that was killed, and shows the result of one that has ended. All nodes of the cluster must be able to reach `--output`,
a directory or a bucket.
"""

import argparse
import os
import signal
import tempfile
from pathlib import Path

import ray.train
import ray.train.torch
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import camshaft.distributed as idist
from camshaft.engine import Events, create_supervised_trainer
from camshaft.handlers import Checkpoint
from camshaft.utils import manual_seed


def training(config: argparse.Namespace) -> None:
    """Train on one worker, in the process group that Ray has made."""
    manual_seed(0)
    scans, digits = (torch.tensor(part) for part in load_digits(return_X_y=True))
    scans = scans.float() / 16
    loader = idist.auto_dataloader(TensorDataset(scans[:1400], digits[:1400]), batch_size=40, shuffle=True, seed=0)
    model = idist.auto_model(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = idist.auto_optim(torch.optim.Adam(model.parameters(), 0.005))
    trainer = create_supervised_trainer(model, optimizer, nn.functional.cross_entropy, idist.device())

    folder, stored = tempfile.mkdtemp(), ray.train.get_checkpoint()
    if stored is not None:  # what was reported last, from the storage that all nodes reach
        stored.to_directory(folder)
    checkpoint = Checkpoint({"model": model, "optimizer": optimizer, "trainer": trainer}, folder, n_saved=1)
    checkpoint.resume_latest()

    @trainer.on(Events.ITERATION_COMPLETED(every=20) | Events.COMPLETED)
    def report() -> None:
        checkpoint(trainer)
        with torch.inference_mode():
            accuracy = (model(scans[1400:]).argmax(1) == digits[1400:]).float().mean().item()
        metrics = {"epoch": trainer.state.epoch, "iteration": trainer.state.iteration, "accuracy": accuracy}
        trainer.logger.info("epoch %d, iteration %d: accuracy %.3f", *metrics.values())
        saved = ray.train.Checkpoint.from_directory(folder) if idist.get_rank() == 0 else None
        ray.train.report(metrics, checkpoint=saved)

    @trainer.on(Events.ITERATION_COMPLETED(once=55))
    def fail() -> None:
        if config.kill and stored is None and idist.get_rank() == 1:
            ray.train.get_all_reported_checkpoints()  # waits until Ray has stored what was reported
            os.kill(os.getpid(), signal.SIGKILL)

    trainer.run(loader, max_epochs=config.epochs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--epochs", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--output", default=str(Path("runs").absolute()), help="where Ray stores results (%(default)s)")
    parser.add_argument("--kill", action="store_true", help="kill a worker in the second epoch")
    config = parser.parse_args()
    result = ray.train.torch.TorchTrainer(
        training,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=config.workers),
        torch_config=ray.train.torch.TorchConfig(backend="gloo"),
        run_config=ray.train.RunConfig(
            name="ray_train",
            storage_path=config.output,
            failure_config=ray.train.FailureConfig(max_failures=3),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    ).fit()
    print(f"accuracy {result.metrics['accuracy']:.1%} after {result.metrics['iteration']} iterations")


if __name__ == "__main__":
    main()
