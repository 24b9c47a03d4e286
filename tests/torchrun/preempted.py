"""Train until a signal preempts all ranks, and print a line of JSON when a run begins and ends on a rank.

torchrun ... -m tests.torchrun.preempted FOLDER [EXIT_CODE] [requeue]

The folder holds the checkpoints; a file named ``stop`` in it ends the training.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

import camshaft.distributed as idist
from camshaft.engine import Engine, Events
from camshaft.handlers import Checkpoint, DiskSaver, Preemption, stop_together
from tests.limits import TIMEOUT

SAMPLES, BATCH = 80, 8


class Samples(Dataset[int]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        time.sleep(0.002)
        return index


def train(folder: Path, exit_code: int | None, requeue: bool) -> None:
    torch.manual_seed(0)
    loader = idist.auto_dataloader(Samples(), batch_size=BATCH, shuffle=True, num_workers=1)
    seen: list[tuple[int, list[int]]] = []

    def step(engine: Engine[Any, Any], batch: Any) -> None:
        idist.all_reduce(1.0)
        seen.append((engine.state.epoch, batch.tolist()))

    trainer = Engine(step)
    evaluator = Engine(lambda engine, batch: time.sleep(0.02))
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(range(5)))
    checkpoint = Checkpoint({"trainer": trainer}, DiskSaver(folder, require_empty=False), asynchronous=True)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=9), checkpoint)
    preemption = Preemption(checkpoint, exit_code=exit_code, requeue=requeue)
    preemption.attach(trainer)
    stop = stop_together(trainer)

    @trainer.on(Events.ITERATION_COMPLETED)
    @idist.one_rank_only()
    def look() -> None:
        if (folder / "stop").exists():
            stop()

    Checkpoint.resume({"trainer": trainer}, folder)
    first = trainer.state.iteration + 1

    def show(what: str, **more: Any) -> None:
        place = {"rank": idist.get_rank(), "world_size": idist.get_world_size()}
        print(f"{json.dumps({'what': what, **place, 'first': first, **more})}\n", end="", flush=True)

    trainer.add_event_handler(Events.STARTED, show, "begin", pid=os.getpid())
    try:
        trainer.run(loader, max_epochs=1000)
    finally:
        show("end", last=trainer.state.iteration, signal=preemption.signal, seen=seen)


def main(folder: str, *options: str) -> None:
    exit_code = next((int(option) for option in options if option.isdigit()), None)
    with idist.Parallel("gloo", timeout=TIMEOUT):
        train(Path(folder), exit_code, "requeue" in options)


def check_samples(ends: list[dict[str, Any]]) -> None:
    """Check the lines that ranks printed at the end: no sample is lost or repeated, and no iteration."""
    runs = sorted({(line["first"], line["last"], line["world_size"]) for line in ends})
    assert [first for first, _, _ in runs] == [1, *(last + 1 for _, last, _ in runs[:-1])], runs
    assert len(ends) == sum(world_size for _, _, world_size in runs), runs
    samples: dict[int, list[int]] = {}
    for line in ends:
        for epoch, batch in line["seen"]:
            samples.setdefault(epoch, []).extend(batch)
    *complete, newest = sorted(samples)
    assert complete == list(range(1, newest))
    assert all(sorted(samples[epoch]) == list(range(SAMPLES)) for epoch in complete)
    assert len(set(samples[newest])) == len(samples[newest])


if __name__ == "__main__":
    main(*sys.argv[1:])
