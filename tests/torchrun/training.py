"""Train, and go on after a restart where the last step was saved: a line of JSON tells of each begin and of the end.

torchrun ... -m tests.torchrun.training FOLDER [MANNER]

The folder holds what was trained; the end is when it has a file ``stop``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch

import camshaft.distributed as idist

STEPS_PER_ATTEMPT = 3
SECONDS_PER_STEP = 0.05


class Training:
    """A weight of which every step adds the mean of what the ranks have, which is 1."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.step, self.weight = 0, torch.zeros(1)
        if (folder / "saved").exists():
            saved = torch.load(folder / "saved", weights_only=True)
            self.step, self.weight = saved["step"], saved["weight"]

    def advance(self) -> None:
        gradient = torch.full((1,), 2.0 * (idist.get_rank() + 1) / (idist.get_world_size() + 1))
        self.weight += idist.all_reduce(gradient) / idist.get_world_size()
        self.step += 1
        if idist.get_rank() == 0:
            torch.save({"step": self.step, "weight": self.weight}, self.folder / "saving")
            os.replace(self.folder / "saving", self.folder / "saved")
        time.sleep(SECONDS_PER_STEP)

    def tell(self, what: str) -> None:
        place = {"rank": idist.get_rank(), "world_size": idist.get_world_size()}
        state = {"step": self.step, "weight": self.weight.item()}
        attempt = {"attempt": int(os.environ["TORCHELASTIC_RESTART_COUNT"])}
        print(f"{json.dumps({'what': what, **place, **state, **attempt})}\n", end="", flush=True)

    def is_to_stop(self) -> bool:
        return idist.all_reduce((self.folder / "stop").exists(), "MAX") > 0


def killed_in_turn(training: Training) -> None:
    """One rank is killed in each attempt but the last, the first and the second in turn."""
    attempt, attempts = (int(os.environ[f"TORCHELASTIC_{name}"]) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    for _ in range(STEPS_PER_ATTEMPT):
        training.advance()
    idist.barrier()  # so that the last step is saved
    if attempt < attempts and idist.get_rank() == attempt % 2:
        os.kill(os.getpid(), signal.SIGKILL)
    idist.barrier()  # where the other one notices


def killed_while_the_other_computes(training: Training) -> None:
    """Rank 1 is killed once, and rank 0 does not notice: torchrun starts it again without counting a restart there."""
    training.advance()
    idist.barrier()
    if training.step == 1:
        if idist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)


def until_stopped(training: Training) -> None:
    while not training.is_to_stop():
        training.advance()


MANNERS = {function.__name__: function for function in (killed_in_turn, killed_while_the_other_computes, until_stopped)}


def main(folder: str, manner: str) -> None:
    idist.initialize("gloo", timeout=timedelta(seconds=60))
    training = Training(Path(folder))
    training.tell("begin")
    MANNERS[manner](training)
    training.tell("end")
    idist.finalize()


if __name__ == "__main__":
    main(*sys.argv[1:])
