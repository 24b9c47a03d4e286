"""Half an hour of training, on a clock thirty times as fast, in which ranks wait for each other for minutes."""

from __future__ import annotations

import io
import logging
import os
import pdb
import time
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import camshaft.distributed as idist
from camshaft.distributed import job
from camshaft.distributed.failures import board, hang_reports, status, verdicts, watcher
from camshaft.engine import Engine, Events
from camshaft.handlers import Checkpoint, EarlyStopping, TerminateOnNan, TimeLimit
from tests.ranks import run_on_ranks

SPEED = 30.0
NUM_EPOCHS = 19  # each kind of wait comes three times
TIMES = {  # not those that allow for a busy machine
    watcher: ["PERIOD", "URGENT", "PATIENCE", "SHARING", "AGAIN"],
    board: ["PERIOD"],
    status: ["PATIENCE", "EARLY"],
    verdicts: ["PATIENCE"],
    hang_reports: ["_REST"],
}


def pause(minutes: float) -> None:
    time.sleep(60 * minutes / SPEED)


class Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.records: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append((record.levelno, record.getMessage()))


def debug() -> None:
    """Stop at a breakpoint for two minutes."""
    commands, typing = os.pipe()
    Timer(60 * 2 / SPEED, os.write, (typing, b"continue\n")).start()
    with os.fdopen(commands) as typed, os.fdopen(typing):
        pdb.Pdb(stdin=typed, stdout=io.StringIO()).set_trace()
        idist.get_rank()


def compile_slowly(graph: Any, inputs: Any) -> Any:
    pause(1.5 * idist.get_rank())
    return graph.forward


def train(folder: Path) -> tuple[int, int, list[tuple[int, str]]]:
    for module, names in TIMES.items():
        for name in names:
            setattr(module, name, getattr(module, name) / SPEED)
    rank, log = idist.get_rank(), Log()
    logger = logging.getLogger("camshaft.distributed")
    logger.setLevel(logging.INFO)
    logger.addHandler(log)
    job.current().job.find(watcher.Watcher)._hangs.after /= SPEED

    network = torch.nn.Linear(4, 1)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)

    def step(engine: Engine, batch: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(compiled(torch.full((2, 4), float(batch % 7)))).square().mean()
        loss.backward()
        optimizer.step()
        pause(0.01)
        return loss.detach()

    def evaluate() -> None:
        Engine(lambda engine, batch: pause(0.15)).run(range(10))

    def save(checkpoint: Any, name: str, metadata: Any = None) -> None:
        torch.save(checkpoint, folder / f"{rank}.pt")
        pause(0 if rank else 1.5)

    def download() -> None:
        with idist.one_rank_first():
            pause(1.5 if rank == 0 else 0)

    compiled: Any = None
    trainer = Engine(step)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    trainer.add_event_handler(Events.ITERATION_COMPLETED, TimeLimit(36_000))
    trainer.add_event_handler(Events.EPOCH_COMPLETED, EarlyStopping(10_000, lambda engine: 0.0, trainer))
    checkpoint = Checkpoint({"model": network, "trainer": trainer}, save)

    @trainer.on(Events.EPOCH_STARTED)
    def compile_again() -> None:
        nonlocal compiled
        if trainer.state.epoch % 6 == 1:
            torch._dynamo.reset()
            compiled = torch.compile(torch.sigmoid, backend=compile_slowly)

    @trainer.on(Events.EPOCH_COMPLETED)
    def take_long(engine: Engine) -> None:
        kind = engine.state.epoch % 6
        if kind == 1 and rank == 0:
            evaluate()
        elif kind == 2:
            checkpoint(engine)
        elif kind == 3:
            download()
        elif kind == 4 and rank == 1:
            debug()
        elif kind == 5:
            pause(0.5 * rank)

    trainer.run(range(20), max_epochs=NUM_EPOCHS)
    return trainer.state.epoch, trainer.state.iteration, log.records


@pytest.mark.jobs
def test_long_waits_raise_nothing_and_each_is_reported_as_what_it_is(tmp_path):
    first, second = run_on_ranks(2, train, tmp_path)
    assert first[:2] == second[:2] == (NUM_EPOCHS, 20 * NUM_EPOCHS)
    records = first[2] + second[2]
    assert not [text for level, text in records if level >= logging.ERROR]  # verdicts
    lines = [line for _, text in records for line in text.splitlines() if not line.startswith("    ")]  # of no stack
    for what in ("evaluating", "saving", "compiling", "paused in a debugger", "the body of one_rank_first"):
        assert sum(f" is {what}" in line or f" is in {what}" in line for line in lines) >= 2, (what, lines)
