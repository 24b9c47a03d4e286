"""Real ranks that are killed and resume in other numbers: the samples that they get, and the weights they end with."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import warnings
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import camshaft.distributed as idist
from camshaft.dtensors import full_value
from camshaft.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from camshaft.handlers import Checkpoint, DiskSaver
from camshaft.utils import manual_seed
from tests.ranks import kill_on_ranks, run_on_ranks

EPOCHS = 3


class Noisy(Dataset):
    """Samples of two numbers with noise of three generators, and their class."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.samples = torch.randn(length, 2, dtype=torch.float64, generator=generator)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        sample = self.samples[index]
        noise = random.random() + numpy.random.random() + torch.rand(2)
        return sample + noise / 8, int(sample[0] * sample[1] > 0)


def kill_all_of_this_rank() -> None:
    with suppress(RuntimeError):  # another rank was killed before this one has left the barrier
        idist.barrier()  # all have come as far: otherwise, those behind would end with an error that names this one
    os.killpg(0, signal.SIGKILL)  # and its workers, which would keep its pipe to the test open


def prepare_to_be_killed_with_workers() -> None:
    os.setpgid(0, 0)
    multiprocessing.process.current_process()._config["daemon"] = False  # else it may have no workers
    multiprocessing.set_start_method("fork", force=True)  # else a server of this rank, which takes seconds, forks them
    warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)


# --- the samples --------------------------------------------------------------------------------------------------

LENGTH = 83  # sixteen steps of 5, and 3 samples: a step on 2 and 3 ranks, but too few for one on 4


def record_samples(folder: Path, job: int, workers: int, kill_at: int | None) -> None:
    """Write down the samples of each step; save the state every third iteration."""
    prepare_to_be_killed_with_workers()
    loader = idist.auto_dataloader(
        list(range(LENGTH)), batch_size=5, shuffle=True, seed=3, num_workers=workers * idist.get_world_size(),
        persistent_workers=workers > 0,
    )  # fmt: skip
    with open(folder / f"{job}-{idist.get_rank()}.jsonl", "w", buffering=1) as notes:

        def note(engine: Engine, batch: torch.Tensor) -> None:
            notes.write(json.dumps([engine.state.iteration, engine.state.epoch, batch.tolist()]) + "\n")

        engine = Engine(note)
        if job > 0:
            engine.load_state_dict(json.loads((folder / f"{job - 1}.state").read_text()))
        if kill_at is not None:
            engine.add_event_handler(Events.ITERATION_COMPLETED(once=kill_at), kill_all_of_this_rank)

        @engine.on(Events.ITERATION_COMPLETED(every=3))
        @idist.one_rank_only()
        def save() -> None:
            (folder / f"{job}.state").write_text(json.dumps(engine.state_dict()))

        engine.run(loader, max_epochs=EPOCHS)
    if workers:
        loader._iterator._shutdown_workers()  # else they outlast this rank, for seconds


def samples_of(folder: Path, job: int, until: float) -> Counter[tuple[int, int]]:
    """Count how often each sample came in each epoch, in the iterations of a job that are not repeated."""
    lines = [json.loads(line) for file in folder.glob(f"{job}-*.jsonl") for line in file.read_text().splitlines()]
    return Counter((epoch, index) for iteration, epoch, batch in lines if iteration <= until for index in batch)


@pytest.mark.parametrize("workers", [0, 2])
def test_each_sample_comes_once_in_runs_killed_on_2_and_4_ranks_and_resumed_on_3(tmp_path, workers):
    kill_on_ranks(2, record_samples, tmp_path, 0, workers, 8)
    kill_on_ranks(4, record_samples, tmp_path, 1, workers, 14)
    run_on_ranks(3, record_samples, tmp_path, 2, workers, None)

    states = [json.loads((tmp_path / f"{job}.state").read_text()) for job in (0, 1)]
    assert [state["iteration"] for state in states] == [6, 12]
    assert [state["epoch_length"] for state in states] == [17, 16]
    ends = [state["iteration"] for state in states] + [float("inf")]
    given = sum((samples_of(tmp_path, job, until) for job, until in enumerate(ends)), Counter())
    assert given == Counter((epoch, index) for epoch in range(1, EPOCHS + 1) for index in range(LENGTH))


# --- the same weights to the last bit -----------------------------------------------------------------------------


def train(folder: Path, window: int, workers: int = 0, kill_at: int | None = None) -> list[torch.Tensor]:
    """Train on noisy samples, save every second iteration, resume from what is saved; return the weights."""
    prepare_to_be_killed_with_workers()
    manual_seed(2)
    model = idist.auto_model(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = create_supervised_trainer(
        model, optimizer, nn.functional.cross_entropy, gradient_accumulation_steps=window
    )
    objects = {"model": model, "optimizer": optimizer, "trainer": trainer}
    checkpoint = Checkpoint(objects, DiskSaver(folder, require_empty=False), include_self=True)
    for saved in folder.glob("*.pt"):
        checkpoint.load_objects({**objects, "checkpointer": checkpoint}, saved)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=2), checkpoint)
    if kill_at is not None:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=kill_at), kill_all_of_this_rank)
    workers *= idist.get_world_size()
    trainer.run(
        idist.auto_dataloader(Noisy(101), batch_size=8, shuffle=True, seed=4, num_workers=workers), max_epochs=EPOCHS
    )
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("window", "kills"),
    [
        (1, {17: 16}),
        (3, {14: 12, 19: 16, 26: 26}),  # killed in windows, whose saves are due at their ends; at the end of an epoch
    ],
)
def test_a_killed_and_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path, ranks, window, kills):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    for kill_at, reached in kills.items():
        kill_on_ranks(ranks, train, killed, window, 1, kill_at)
        (saved,) = killed.glob("*.pt")
        assert saved.name == f"checkpoint_{reached}.pt"
    first, *others = run_on_ranks(ranks, train, whole, window)
    for weights in (*others, *run_on_ranks(ranks, train, killed, window)):
        assert all(map(torch.equal, weights, first))


# --- sharded, and resumed in other layouts ------------------------------------------------------------------------


class Numbered(Dataset):
    """Samples that name themselves, and their class: eight steps of 8, the last of which has 5."""

    def __len__(self) -> int:
        return 61

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([index / 61, 1], dtype=torch.float64), index % 3


def train_sharded(folder: Path, job: int, replicas: int, kill_at: int | None = None) -> list[torch.Tensor]:
    """Resume a sharded model and train it, or save shards every second iteration until killed; return full weights.

    Steps and saves wait for all ranks, which takes long if other processes use the cores, so there are only a few.
    """
    prepare_to_be_killed_with_workers()
    manual_seed(2)
    mesh = idist.make_mesh(dp_replicate=replicas, dp_shard=-1)
    network = nn.Sequential(nn.Linear(2, 9), nn.Tanh(), nn.Linear(9, 3)).double()
    model = idist.auto_model(network, mesh=mesh, shard=[nn.Linear])
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=0.01))
    trainer = create_supervised_trainer(model, optimizer, nn.functional.cross_entropy)
    objects = {"model": model, "optimizer": optimizer, "trainer": trainer}
    checkpoint = Checkpoint(objects, folder, n_saved=2, sharded=True)
    checkpoint.resume_latest()
    with open(folder / f"{job}-{idist.get_rank()}.jsonl", "w", buffering=1) as notes:

        @trainer.on(Events.ITERATION_STARTED)
        def note(engine: Engine) -> None:
            indices = (engine.state.batch[0][:, 0] * 61).round().int().tolist()
            notes.write(json.dumps([engine.state.iteration, engine.state.epoch, indices]) + "\n")

        if kill_at is not None:
            trainer.add_event_handler(Events.ITERATION_COMPLETED(every=2), checkpoint)
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=kill_at), kill_all_of_this_rank)
        trainer.run(idist.auto_dataloader(Numbered(), batch_size=8, shuffle=True, seed=4), max_epochs=2)
    return [full_value(parameter.detach()).clone() for parameter in model.parameters()]


@pytest.mark.jobs
def test_a_sharded_run_killed_on_4_ranks_and_resumed_on_3_and_1_ends_with_the_weights_of_an_uninterrupted_one(tmp_path):
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    uninterrupted.mkdir()
    killed.mkdir()
    kill_on_ranks(4, train_sharded, killed, 0, 2, 5)  # hsdp
    assert [path.name for path in sorted(killed.glob("*.sharded"))] == ["checkpoint_2.sharded", "checkpoint_4.sharded"]
    kill_on_ranks(3, train_sharded, killed, 1, 1, 13)  # fsdp
    (weights,) = run_on_ranks(1, train_sharded, killed, 2, 1)
    given = sum((samples_of(killed, job, until) for job, until in enumerate([4, 12, float("inf")])), Counter())
    assert given == Counter((epoch, index) for epoch in (1, 2) for index in range(61))
    for expected in run_on_ranks(4, train_sharded, uninterrupted, 0, 2):
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)


# --- the same weights and metrics on any number of ranks ----------------------------------------------------------


class Right:
    """A metric that counts over all ranks."""

    def attach(self, engine: Engine, name: str) -> None:
        self.right = self.samples = 0
        engine.add_event_handler(Events.ITERATION_COMPLETED, self.update)
        engine.add_event_handler(Events.COMPLETED, self.compute, name)

    def update(self, engine: Engine) -> None:
        scores, classes = engine.state.output
        self.right += int((scores.argmax(1) == classes).sum())
        self.samples += len(classes)

    def compute(self, engine: Engine, name: str) -> None:
        engine.state.metrics[name] = (idist.all_reduce(self.right), idist.all_reduce(self.samples))


def evaluate(length: int) -> tuple[int, int]:
    manual_seed(2)
    network = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).double()
    nn.init.normal_(network[1].running_mean)
    evaluator = create_supervised_evaluator(idist.auto_model(network), {"right": Right()})
    return evaluator.run(idist.auto_dataloader(Noisy(length), batch_size=8, shuffle=False)).metrics["right"]


def train_and_evaluate(folder: Path) -> tuple[list[torch.Tensor], list[tuple[int, int]]]:
    return train(folder, 1), [evaluate(length) for length in (4, 7, 17, 83, 101)]


def test_weights_and_metrics_do_not_depend_on_the_number_of_ranks(tmp_path):
    outcomes = []
    for ranks in (1, 2, 3, 4):
        (tmp_path / str(ranks)).mkdir()
        outcomes.append(run_on_ranks(ranks, train_and_evaluate, tmp_path / str(ranks)))
    ((weights, metrics),) = outcomes[0]
    assert [samples for _, samples in metrics] == [4, 7, 17, 83, 101]
    assert len({right / samples for right, samples in metrics}) > 3
    for others, counts in (outcome for ranks in outcomes for outcome in ranks):
        assert counts == metrics
        torch.testing.assert_close(others, weights, rtol=1e-10, atol=1e-12)
