"""Save sharded checkpoints on gloo ranks, get killed, check what is left, and repeat; a program, so that it can fork.

    python kill_ranks.py FOLDER KILLS EVERY

First a rank is killed before every EVERY-th operation of a save that changes the disk, then one or all ranks are killed
KILLS times at random moments: 100 1 is complete, and takes minutes. Prints for each kill where it was, the step of the
newest save that had returned on any rank, and the step that one process resumes from. Fails if that is older, or if a
checkpoint is torn.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from unittest import mock

import torch
import torch._dynamo  # once, rather than in each rank, as the import of fully_shard
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

import camshaft.distributed as idist
from camshaft.engine import Engine, Events
from camshaft.handlers import Checkpoint, DiskSaver

RANKS = 3
SIZE = 100_001  # numbers, which the ranks hold in uneven parts
CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")


class Weights:
    """An object whose state is its step, stored twice."""

    def __init__(self) -> None:
        self.step = 0
        self.weights = torch.zeros(SIZE)

    def state_dict(self) -> dict:
        return {"step": self.step, "weights": self.weights}

    def load_state_dict(self, state: dict) -> None:
        self.step = state["step"]
        self.weights.copy_(state["weights"])
        assert torch.equal(self.weights, torch.full_like(self.weights, float(self.step))), "the checkpoint is torn"


class Crash:
    """Kills this process before an operation that changes a folder, counted from when it is armed."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder, self.left, self.is_armed = str(folder), number, False

    def hook(self, event: str, arguments: tuple) -> None:
        writes = event != "open" or (isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR))
        if event in CHANGES and writes and str(arguments[0]).startswith(self.folder):
            self.count()

    def count(self) -> None:
        if self.is_armed:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def save_on_rank(folder: Path, report: int, background: bool, rank: int, crash: Crash | None) -> None:
    """Resume, save, and report each save that has returned: forever, or two saves, of which the second may crash."""
    idist.initialize("gloo", init_method=f"file://{folder}.store", rank=rank, world_size=RANKS)
    mesh, parts = init_device_mesh("cpu", (RANKS,)), torch.zeros(SIZE).chunk(RANKS)
    part, weights = parts[rank].clone(), Weights()
    weights.weights = DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=(SIZE,), stride=(1,))

    def step(engine: Engine, batch: int) -> None:
        weights.step += 1
        part.fill_(weights.step)  # also while the previous step is being saved

    engine, saver = Engine(step), DiskSaver(folder, require_empty=False)
    checkpoint = Checkpoint(
        {"w": weights}, saver, n_saved=2, sharded=True, asynchronous=background,
        global_step_transform=lambda *_: weights.step,
    )  # fmt: skip
    checkpoint.resume_latest()
    engine.add_event_handler(Events.ITERATION_COMPLETED, checkpoint)

    @engine.on(Checkpoint.SAVED_CHECKPOINT)
    def send_report() -> None:
        os.write(report, f"{checkpoint.state_dict()['_saved'][-1][0]}\n".encode())

    if crash is None:
        engine.run(range(1_000_000))
    engine.run(range(1))
    with mock.patch.object(os, "fsync", lambda file, flush=os.fsync: (crash.count(), flush(file))):
        sys.addaudithook(crash.hook)
        crash.is_armed = True
        engine.run(range(1), max_epochs=2)
        crash.is_armed = False
    idist.finalize()


def fork(folder: Path, report: int, *arguments: object) -> int:
    """Start a rank, and return its process."""
    if process := os.fork():
        return process
    code = 1
    try:
        save_on_rank(folder, report, *arguments)
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)


def kill_and_check(folder: Path, chance: random.Random, victims: list[int], number: int = 0) -> bool:
    """Let all ranks save until the victims are killed, and check what is left.

    Args:
        folder: of the checkpoints.
        chance: for the moment, where the saves run, and whether the other ranks are killed next or end by themselves.
        victims: the ranks to kill.
        number: of the operation before which the victims are killed; 0 for a random moment after a save.

    Returns:
        False if there were fewer operations.
    """
    background, others_end = chance.random() < 0.5, chance.random() < 0.5
    Path(f"{folder}.store").unlink(missing_ok=True)
    reader, writer = os.pipe()
    ranks = [
        fork(folder, writer, background, rank, Crash(folder, number if rank in victims else 0) if number else None)
        for rank in range(RANKS)
    ]
    os.close(writer)
    heard = os.read(reader, 100)
    if not number:
        time.sleep(chance.uniform(0, 0.1))
        for rank in victims:
            os.kill(ranks[rank], signal.SIGKILL)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(ranks[rank], 0)[1]) for rank in victims]
    was_killed = statuses == [-signal.SIGKILL] * len(victims)
    for rank in set(range(RANKS)).difference(victims):
        if was_killed and not others_end:
            os.kill(ranks[rank], signal.SIGKILL)
        os.waitpid(ranks[rank], 0)
    while more := os.read(reader, 100_000):
        heard += more
    os.close(reader)
    assert was_killed or (number and not any(statuses)), statuses

    how = f"background {background!s:5} ranks {victims}" + f" before operation {number}" * bool(number)
    reported, weights = max(map(int, heard.split())), Weights()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # The save that was killed is reported, and loses nothing.
        warnings.filterwarnings("ignore", message=r".*its save was interrupted")
        assert Checkpoint.resume({"w": weights}, folder) is not None
    assert weights.step >= reported, f"{how}: {reported} was saved, but {weights.step} is the newest complete one"
    if was_killed:
        print(how, "others end" if others_end else "others killed", reported, weights.step, flush=True)
    return was_killed


def main(folder: Path, kills: int, every: int) -> None:
    torch.set_num_threads(1)
    chance = random.Random(kills)
    kill_and_check(folder, chance, [0], sys.maxsize)  # two checkpoints, so that each save after these removes one
    for victim in (0, RANKS - 1):  # the rank that commits, and one of the others
        number = chance.randint(1, every)
        while kill_and_check(folder, chance, [victim], number):
            number += every
        assert number > 4, "the hook saw no operations"
    for _ in range(kills):
        everyone = list(range(RANKS))
        kill_and_check(folder, chance, chance.choice([everyone, [chance.choice(everyone)]]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
