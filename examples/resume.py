"""Train on handwritten digits, get killed at any time, and resume, also with a different number of processes.

    python examples/resume.py --kill_at 47; python examples/resume.py
    python examples/resume.py --output runs/killed --backend gloo --nproc_per_node 2 --kill_at 47
    torchrun --nproc_per_node 3 examples/resume.py --output runs/killed --backend gloo

After each epoch you see how many samples were seen once, twice, or never, and the loss. Killed in its second epoch, the
run resumes from the checkpoint of iteration 40, with the sample that is named, and ends as if it had not been killed:
every sample once per epoch, and the same losses, also on three processes instead of two.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import camshaft.distributed as idist
from camshaft.engine import Engine, Events, create_supervised_trainer
from camshaft.handlers import Checkpoint
from camshaft.utils import manual_seed, setup_logger

Batch = tuple[Tensor, Tensor, Tensor]


class NoisyDigits(Dataset[tuple[Tensor, int, int]]):
    """The digits of scikit-learn with their indices, and with new noise in each epoch."""

    def __init__(self) -> None:
        from sklearn import datasets

        scans, digits = datasets.load_digits(return_X_y=True)
        self.scans, self.digits = torch.tensor(scans, dtype=torch.float32) / 16, digits.tolist()

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        return self.scans[index] + torch.randn(64) / 8, self.digits[index], index


def without_index(batch: Batch, device: torch.device, non_blocking: bool) -> tuple[Tensor, Tensor]:
    scans, digits, _ = batch
    return scans.to(device, non_blocking=non_blocking), digits.to(device, non_blocking=non_blocking)


def training(local_rank: int, config: argparse.Namespace) -> None:
    """Train; runs in every process."""
    manual_seed(config.seed)
    setup_logger("camshaft.handlers.checkpoint", format="%(message)s")  # says where a run resumes
    dataset = NoisyDigits()
    loader = idist.auto_dataloader(dataset, batch_size=config.batch_size, shuffle=True, seed=config.seed)
    model = idist.auto_model(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    trainer = create_supervised_trainer(
        model, optimizer, nn.functional.cross_entropy, device=idist.device(), prepare_batch=without_index
    )

    # saved with the trainer: how often each sample was seen, and the losses, per epoch
    trainer.state.seen, trainer.state.losses = {}, {}
    trainer.state_dict_user_keys += ["seen", "losses"]

    @trainer.on(Events.ITERATION_COMPLETED)
    def note(engine: Engine[Batch, float]) -> None:
        epoch, (_, _, indices) = engine.state.epoch, engine.state.batch
        seen = torch.bincount(indices, minlength=len(dataset)).to(idist.device())
        engine.state.seen[epoch] = engine.state.seen.get(epoch, 0) + idist.all_reduce(seen).cpu()
        loss = idist.all_reduce(engine.state.output * engine.batch_share) / idist.get_world_size()
        engine.state.losses.setdefault(epoch, []).append(loss)

    @trainer.on(Events.EPOCH_COMPLETED)
    @idist.one_rank_only()
    def show(engine: Engine[Batch, float]) -> None:
        seen, losses = engine.state.seen[engine.state.epoch], engine.state.losses[engine.state.epoch]
        once, twice, never = (int((seen == times).sum()) for times in (1, 2, 0))
        print(
            f"epoch {engine.state.epoch}: {int(seen.sum())} samples seen, {once} once, {twice} twice, {never} never; "
            f"loss {sum(losses) / len(losses):.6f}", flush=True,
        )  # fmt: skip

    checkpoint = Checkpoint({"model": model, "optimizer": optimizer, "trainer": trainer}, config.output)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=config.save_every), checkpoint)
    checkpoint.resume_latest()
    if config.kill_at:
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED(once=config.kill_at), lambda: os.kill(os.getpid(), signal.SIGKILL)
        )
    if trainer.state.iteration < config.epochs * len(loader):
        trainer.run(loader, max_epochs=config.epochs)
    else:
        idist.one_rank_only()(print)("already finished: pass a larger --epochs to continue", flush=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", help="gloo, nccl, mpi, horovod, xla-tpu, or auto (default: a single process)")
    parser.add_argument("--nproc_per_node", type=int, help="processes to start; omit under a launcher")
    parser.add_argument("--output", type=Path, default=Path("runs/resume"), help="folder for the newest checkpoint")
    parser.add_argument(
        "--epochs", type=int, default=3, help="passes over the data, including those before a resume (default: 3)"
    )
    parser.add_argument(
        "--batch_size", type=int, default=60, help="images in a batch, over all processes (default: 60)"
    )
    parser.add_argument("--save_every", type=int, default=10, help="iterations between two checkpoints (default: 10)")
    parser.add_argument("--kill_at", type=int, help="iteration after which the processes kill themselves")
    parser.add_argument("--seed", type=int, default=17)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    config = parse()
    with idist.Parallel(backend=config.backend, nproc_per_node=config.nproc_per_node) as parallel:
        parallel.run(training, config)
