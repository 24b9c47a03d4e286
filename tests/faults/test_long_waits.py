"""Half an hour of training, on a clock thirty times as fast, in which ranks wait for minutes until that is reported."""

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
from tests.limits import wait_until
from tests.ranks import run_on_ranks

SPEED = 30.0
NUM_EPOCHS = 18  # each kind of wait comes three times
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
    """Keeps what one rank logs, and adds it to a file of all ranks."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.INFO)
        self.path = path
        self.records: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append((record.levelno, record.getMessage()))
        with open(self.path, "a") as file:
            file.write(f"{record.getMessage()}\n")

    def count(self, kind: str) -> int:
        """Return how often any rank was reported to do this, without the lines of stacks."""
        lines = self.path.read_text().splitlines() if self.path.exists() else ()
        return sum(f" is {kind}" in line and not line.startswith("    ") for line in lines)

    def hold(self, minutes: float, kind: str) -> None:
        """Take this long, and as much longer as the rank that waits needs to report it: the machine may be slow."""
        before = self.count(kind)
        pause(minutes)
        wait_until(lambda: self.count(kind) > before, lambda: f"not reported: {kind}\n{self.path.read_text()}")


def train(folder: Path) -> tuple[int, int, list[tuple[int, str]]]:
    for module, names in TIMES.items():
        for name in names:
            setattr(module, name, getattr(module, name) / SPEED)
    rank, log = idist.get_rank(), Log(folder / "log")
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
        Engine(lambda engine, minutes: log.hold(minutes, "evaluating")).run([1.5])

    def save(checkpoint: Any, name: str, metadata: Any = None) -> None:
        torch.save(checkpoint, folder / f"{rank}.pt")
        if rank == 0:
            log.hold(1.5, "saving")

    def download() -> None:
        with idist.one_rank_first():
            if rank == 0:
                log.hold(1.5, "in the body of one_rank_first")

    def compile_slowly(graph: Any, inputs: Any) -> Any:
        if rank == 1:
            log.hold(1.5, "compiling")
        return graph.forward

    def debug() -> None:
        commands, typing = os.pipe()

        def type_later() -> None:
            log.hold(2, "paused in a debugger")
            os.write(typing, b"continue\n")

        Timer(0, type_later).start()
        with os.fdopen(commands) as typed, os.fdopen(typing):
            pdb.Pdb(stdin=typed, stdout=io.StringIO()).set_trace()
            idist.get_rank()

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
