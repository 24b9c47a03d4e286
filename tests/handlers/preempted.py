"""Train on ranks that are preempted at random moments, over and over, and check that no sample is lost or repeated."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset

import camshaft.distributed as idist
from camshaft.engine import Engine, Events
from camshaft.handlers import Checkpoint, DiskSaver, Preemption
from tests.ranks import run_on_ranks

SAMPLES = 80
MOST = 1.0  # seconds until the signal


class Samples(Dataset[int]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        time.sleep(0.0005)
        return index


class Ended(NamedTuple):
    """A run that was preempted, as a rank has seen it."""

    first: int
    last: int
    seen: list[tuple[int, list[int]]]  # epoch and samples
    signal: int | None
    saves: int
    newest: str


def train(
    folder: str, seconds: float, receivers: tuple[int, ...], to_group: bool, asynchronous: bool, workers: str
) -> Ended:
    """Train until a signal has reached the receivers, a time after the run has started."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, lambda *_: None)  # that of one rank may come after the other's has ended the run
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # has workers
    rank = idist.get_rank()
    torch.manual_seed(0)
    loader = idist.auto_dataloader(
        Samples(), batch_size=4 * idist.get_world_size(), shuffle=True, num_workers=2, multiprocessing_context=workers
    )
    seen: list[tuple[int, list[int]]] = []

    def step(engine: Engine[Any, Any], batch: Any) -> None:
        weights.add_(idist.all_reduce(1.0))
        seen.append((engine.state.epoch, batch.tolist()))

    trainer = Engine(step)
    weights = torch.zeros(100_000)
    evaluator = Engine(lambda engine, batch: time.sleep(0.01))
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(range(5)))
    to_save = {"trainer": trainer, "weights": Weights(weights)}
    saver = Recorder(folder, require_empty=False)
    checkpoint = Checkpoint(to_save, saver, n_saved=2, asynchronous=asynchronous)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=7), checkpoint)
    Checkpoint.resume(to_save, folder)
    first = trainer.state.iteration + 1
    assert weights[0] == trainer.state.iteration * idist.get_world_size()

    def kill() -> None:  # as another process, because the workers obey this one
        subprocess.run(["kill", "-TERM", "--", f"{'-' if to_group else ''}{os.getpid()}"])

    timer = threading.Timer(seconds, kill)
    if rank in receivers:
        trainer.add_event_handler(Events.STARTED, timer.start)
    preemption = Preemption(checkpoint)
    preemption.attach(trainer)
    trainer.run(loader, max_epochs=1000)
    if rank in receivers:
        timer.join()
    newest = "" if checkpoint.last_checkpoint is None else Path(checkpoint.last_checkpoint).name
    last = trainer.state.iteration
    assert weights[0] == last * idist.get_world_size()
    return Ended(first, last, seen, preemption.signal, saver.names.count(f"checkpoint_{last}.pt"), newest)


class Recorder(DiskSaver):
    """Records the names of the files."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.names: list[str] = []

    def __call__(self, checkpoint: Any, filename: str, metadata: Any = None) -> None:
        self.names.append(filename)
        super().__call__(checkpoint, filename, metadata)


class Weights:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.tensor.copy_(state["tensor"])


def preempt_again_and_again(folder: Path, signals: int, seed: int, workers: str = "fork") -> None:
    """Preempt training on two ranks as often as this, and check the samples of all runs."""
    choose = random.Random(seed)
    seen: dict[int, list[int]] = defaultdict(list)
    last = 0
    for number in range(signals):
        receivers = choose.choice([(0,), (1,), (0, 1)])
        how = choose.uniform(0, MOST), receivers, choose.random() < 0.5, choose.random() < 0.5, workers
        runs: list[Ended] = run_on_ranks(2, train, str(folder), *how)
        context = f"run {number}, signal to ranks {receivers}, {runs}"
        first, last = last + 1, runs[0].last
        saves = 2 if last % 70 == 0 else 1  # after the last iteration of an epoch, and at the end of the epoch
        expected = (first, last, signal.SIGTERM, saves, f"checkpoint_{last}.pt")
        assert [(run.first, run.last, run.signal, run.saves, run.newest) for run in runs] == [expected] * 2, context
        assert last >= first, context
        for run in runs:
            for epoch, samples in run.seen:
                seen[epoch] += samples
    epochs = sorted(seen)
    assert epochs == list(range(1, len(epochs) + 1))
    for epoch in epochs[:-1]:
        assert sorted(seen[epoch]) == list(range(SAMPLES)), epoch
    assert len(set(seen[epochs[-1]])) == len(seen[epochs[-1]])
