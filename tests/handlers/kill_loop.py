"""Save in a loop, be killed, look at what is left, and again; a program of its own, so that it can fork.

    python kill_loop.py FOLDER KILLS

Prints for each kill what was reported saved last and the newest file, and ends with an error when a file that
can be seen does not load, or when a checkpoint that was reported saved is gone.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

from camshaft.engine import Engine, Events
from camshaft.handlers import Checkpoint, DiskSaver


class Weights:
    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict:
        return {"step": self.step, "weights": torch.full((250_000,), float(self.step))}


def save_for_ever(folder: Path, first: int, report: int) -> None:
    weights = Weights()

    def step(engine: Engine, batch: int) -> None:
        weights.step = first + batch

    engine = Engine(step)
    saver = DiskSaver(folder, require_empty=False)
    checkpoint = Checkpoint({"w": weights}, saver, global_step_transform=lambda *_: weights.step)
    engine.add_event_handler(Events.ITERATION_COMPLETED, checkpoint)
    engine.add_event_handler(Checkpoint.SAVED_CHECKPOINT, lambda: os.write(report, f"{weights.step}\n".encode()))
    engine.run(range(1, 10_000))


def kill_while_saving(folder: Path, first: int, patience: float) -> int:
    """Let a child save, kill it a moment after its first report, and give the last step that it reported."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        save_for_ever(folder, first, writer)
    os.close(writer)
    heard = os.read(reader, 100)
    time.sleep(patience)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(reader, 100_000):
        heard += more
    os.close(reader)
    return int(heard.split()[-1])


def newest(folder: Path) -> int:
    """Load every file, and give the largest step."""
    steps = []
    for path in folder.glob("*.pt"):
        content = torch.load(path, weights_only=True)
        assert path.name == f"w_{content['step']}.pt"
        assert torch.equal(content["weights"], torch.full((250_000,), float(content["step"])))
        steps.append(content["step"])
    return max(steps)


def main(folder: Path, kills: int) -> None:
    torch.set_num_threads(1)
    step = 0
    for number in range(kills):
        reported = kill_while_saving(folder, step, patience=0.0017 * number)
        step = newest(folder)
        assert step >= reported, f"step {reported} was reported saved, but the newest file is that of step {step}"
        print(reported, step)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
