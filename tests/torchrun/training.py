"""Train, resume from the last saved step after a restart, and print a line of JSON at each start and at the end.

torchrun ... -m tests.torchrun.training FOLDER BEHAVIOR

The folder holds the checkpoint; a file named ``stop`` in it ends the training.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

import camshaft.distributed as idist
from tests.limits import FOREVER, TIMEOUT

STEPS_PER_ATTEMPT = 3
SECONDS_PER_STEP = 0.05


class Training:
    """A weight that grows by 1 in each step, the mean over the ranks."""

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

    def print_record(self, what: str) -> None:
        place = {"rank": idist.get_rank(), "world_size": idist.get_world_size()}
        state = {"step": self.step, "weight": self.weight.item()}
        attempt = {"attempt": int(os.environ["TORCHELASTIC_RESTART_COUNT"])}
        print(f"{json.dumps({'what': what, **place, **state, **attempt})}\n", end="", flush=True)

    def should_stop(self) -> bool:
        return idist.all_reduce((self.folder / "stop").exists(), "MAX") > 0


def killed_in_turn(training: Training) -> None:
    """Kill one rank in each attempt but the last: rank 0 and rank 1 in turn."""
    attempt, attempts = (int(os.environ[f"TORCHELASTIC_{name}"]) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    for _ in range(STEPS_PER_ATTEMPT):
        training.advance()
    idist.barrier()  # wait until the last step is saved
    if attempt < attempts and idist.get_rank() == attempt % 2:
        os.kill(os.getpid(), signal.SIGKILL)
    idist.barrier()  # the other rank fails here


def killed_while_the_other_computes(training: Training) -> None:
    """Kill rank 1 once while rank 0 computes; torchrun restarts rank 0 without counting a restart."""
    training.advance()
    idist.barrier()
    if training.step == 1:
        if idist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(FOREVER)


def until_stopped(training: Training) -> None:
    while not training.should_stop():
        training.advance()


BEHAVIORS = {
    function.__name__: function for function in (killed_in_turn, killed_while_the_other_computes, until_stopped)
}


def main(folder: str, behavior: str) -> None:
    idist.initialize("gloo", timeout=TIMEOUT)
    training = Training(Path(folder))
    training.print_record("begin")
    BEHAVIORS[behavior](training)
    training.print_record("end")
    idist.finalize()


if __name__ == "__main__":
    main(*sys.argv[1:])
