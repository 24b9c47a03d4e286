"""Save in a loop, get killed, check what is left, and repeat; a separate program, so that it can fork.

    python kill_loop.py FOLDER KILLS MODE

MODE is `waiting` or `background`. Prints for each kill the step that was last reported as saved and the step that the
run resumes from. Fails if a visible file is incomplete, or if the run resumes from an older step than the reported one.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path

import torch

from camshaft.engine import Engine, Events
from camshaft.handlers import Checkpoint, DiskSaver
from camshaft.handlers.checkpoint.manifest import Manifest

SIZE = 250_000


class Weights:
    def __init__(self) -> None:
        self.step = 0
        self.weights = torch.zeros(SIZE)

    def state_dict(self) -> dict:
        return {"step": self.step, "weights": self.weights}

    def load_state_dict(self, state: dict) -> None:
        self.step = state["step"]
        self.weights.copy_(state["weights"])


def save_forever(folder: Path, weights: Weights, report: int, background: bool) -> None:
    first = weights.step

    def step(engine: Engine, batch: int) -> None:
        weights.step = first + batch
        weights.weights.fill_(weights.step)  # also while the previous step is being saved

    engine = Engine(step)
    saver = DiskSaver(folder, require_empty=False)
    checkpoint = Checkpoint(
        {"w": weights}, saver, n_saved=2, asynchronous=background, global_step_transform=lambda *_: weights.step
    )
    engine.add_event_handler(Events.ITERATION_COMPLETED(every=2 if background else 1), checkpoint)

    def send_report() -> None:
        os.write(report, f"{checkpoint.state_dict()['_saved'][-1][0]}\n".encode())

    engine.add_event_handler(Checkpoint.SAVED_CHECKPOINT, send_report)
    engine.run(range(1, 10_000))


def kill_while_saving(folder: Path, weights: Weights, patience: float, background: bool) -> int:
    """Let a child save, kill it shortly after its first report, and return the last step that it reported."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        save_forever(folder, weights, writer, background)
    os.close(writer)
    heard = os.read(reader, 100)
    time.sleep(patience)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(reader, 100_000):
        heard += more
    os.close(reader)
    return int(heard.split()[-1])


def check_all(folder: Path) -> None:
    """Check that every visible file is complete."""
    for path in folder.glob("*.pt"):
        content = torch.load(path, weights_only=True)
        assert path.name == f"w_{content['step']}.pt"
        assert torch.equal(content["weights"], torch.full((SIZE,), float(content["step"])))
        assert Manifest(folder).problem(path.name) is None


def main(folder: Path, kills: int, mode: str) -> None:
    torch.set_num_threads(1)
    chance = random.Random(kills)
    weights = Weights()
    for _ in range(kills):
        reported = kill_while_saving(folder, weights, chance.uniform(0, 0.03), mode == "background")
        check_all(folder)
        with warnings.catch_warnings():
            # A save that was killed between its manifest entry and the rename is reported, and loses nothing.
            warnings.filterwarnings("ignore", message=r".*its save was interrupted")
            assert Checkpoint.resume({"w": weights}, folder) is not None
        assert weights.step >= reported, (
            f"step {reported} was reported as saved, but {weights.step} is the newest complete one"
        )
        print(reported, weights.step)
        for path in sorted(folder.glob("*.pt"), key=lambda path: path.stat().st_mtime_ns)[:-3]:
            path.unlink()  # each child keeps two files of its own
    left = [path for path in folder.glob("**/.camshaft-*.tmp") if path.stat().st_size]
    assert len(left) <= 2, f"each start removes what the last one left, but there are {left}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
