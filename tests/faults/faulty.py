"""Train a small model on two ranks, of which one fails.

python -m tests.faults.faulty FOLDER --fault step --nproc_per_node 2
torchrun --nproc-per-node 2 -m tests.faults.faulty FOLDER --fault step

The comment ``# FAULT name`` marks the line that an error should name. Each rank locks a file in the folder for as long
as its process exists, and the one that fails writes the time of the fault to another one.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import inspect
import itertools
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

import camshaft.distributed as idist
from camshaft.distributed.environments import detect
from camshaft.distributed.failures import watcher
from camshaft.engine import Engine, Events
from camshaft.handlers import Checkpoint
from tests.limits import FOREVER, SOON

LENGTH, BATCH = 4, 2  # iterations of an epoch, and samples of a batch on each rank
WHEN = 6  # the iteration of the fault, in the second epoch
EPOCHS, PAUSE = 60, 0.25  # after the fault, the training would take 15 seconds, which lets the watcher notice it
_held: list[Any] = []  # a lock is released when its file is closed


class Fault:
    """A fault of one rank, which happens once."""

    def __init__(self, config: argparse.Namespace, rank: int) -> None:
        self.name, self._folder = config.fault, config.folder
        self.is_mine = rank == config.rank

    def begin(self, *names: str) -> bool:
        """Return whether this rank is to fail now if the fault has one of these names, and write down the time."""
        if self.name not in names or not self.is_mine:
            return False
        note_time(self._folder)
        return True


class Samples(Dataset[Tensor]):
    """Random samples; the process that reads them may fail."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.num_read = self.num_collated = 0  # in this process, which lives as long as the loader

    def __len__(self) -> int:
        return 2 * LENGTH * BATCH

    def __getitem__(self, index: int) -> Tensor:
        self.num_read += 1
        if self.num_read == WHEN * BATCH:
            if self.fault.begin("worker"):
                raise ValueError("the fault")  # FAULT worker
            if self.fault.begin("worker-killed"):
                os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((4,), float(index))

    def collate(self, samples: list[Tensor]) -> Any:
        self.num_collated += 1
        if self.num_collated == WHEN and self.fault.begin("collate"):
            raise ValueError("the fault")  # FAULT collate
        return default_collate(samples)


class Saved:
    """An object of a checkpoint."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def state_dict(self) -> dict[str, Any]:
        if self.fault.begin("save"):
            raise ValueError("the fault")  # FAULT save
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


# --- faults of a process ----------------------------------------------------------------------------------------------


def end_or_stop(name: str) -> None:
    if name == "exit-0":
        sys.exit(0)  # FAULT exit-0
    if name == "exit-3":
        sys.exit(3)  # FAULT exit-3
    if name == "os._exit":
        os._exit(0)  # FAULT os._exit
    if name == "lost-node":
        time.sleep(FOREVER)  # until its host is lost
    if name == "gil":
        nothing, _ = os.pipe()
        while True:  # a signal with a handler in Python ends the call, that of faulthandler does not
            ctypes.PyDLL(None).read(nothing, ctypes.create_string_buffer(1), 1)  # FAULT gil
    os.kill(os.getpid(), getattr(signal, name))  # FAULT signal
    if name == "SIGINT":
        time.sleep(FOREVER)  # interrupted


ENDS = ("exit-0", "exit-3", "os._exit", "lost-node", "gil", "SIGINT", "SIGTERM", "SIGKILL", "SIGSEGV", "SIGSTOP")


# --- faults of collectives --------------------------------------------------------------------------------------------


def call_alone(is_faulty: bool) -> None:
    if is_faulty:
        idist.barrier()  # FAULT alone


def call_in_another_order(is_faulty: bool) -> None:
    if is_faulty:
        idist.barrier()  # FAULT order
        idist.all_reduce(1.0)
    else:
        idist.all_reduce(1.0)
        idist.barrier()


def differ_in_shape(is_faulty: bool) -> None:
    if is_faulty:
        idist.all_reduce(torch.ones(3))  # FAULT shape
    else:
        idist.all_reduce(torch.ones(4))


def differ_in_dtype(is_faulty: bool) -> None:
    if is_faulty:
        idist.all_reduce(torch.ones(4, dtype=torch.float64))  # FAULT dtype
    else:
        idist.all_reduce(torch.ones(4))


def differ_in_root(is_faulty: bool) -> None:
    if is_faulty:
        idist.broadcast(torch.ones(4), src=0)  # FAULT root
    else:
        idist.broadcast(torch.ones(4), src=1)


def differ_in_reduction(is_faulty: bool) -> None:
    if is_faulty:
        idist.all_reduce(torch.ones(4), op="MAX")  # FAULT reduction
    else:
        idist.all_reduce(torch.ones(4))


COLLECTIVES: dict[str, Callable[[bool], None]] = {
    "alone": call_alone,
    "order": call_in_another_order,
    "shape": differ_in_shape,
    "dtype": differ_in_dtype,
    "root": differ_in_root,
    "reduction": differ_in_reduction,
}


# --- training ---------------------------------------------------------------------------------------------------------


def training(local_rank: int, config: argparse.Namespace) -> None:
    """Train; runs in every process."""
    fault = Fault(config, idist.get_rank())
    samples = Samples(fault)
    loader: Any = idist.auto_dataloader(
        samples, batch_size=2 * BATCH, shuffle=False, num_workers=1, persistent_workers=True, collate_fn=samples.collate
    )
    model = idist.auto_model(nn.Linear(4, 1))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=1e-6))

    def step(engine: Engine, batch: Tensor) -> float:
        if engine.state.iteration == WHEN:
            if fault.begin("skipped-step"):
                return 0.0  # FAULT skipped-step
            if fault.begin("step", "swallowed"):
                raise ValueError("the fault")  # FAULT step
            if fault.begin(*ENDS):
                end_or_stop(fault.name)
        optimizer.zero_grad()
        loss = model(batch).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    def evaluation_step(engine: Engine, batch: Tensor) -> Tensor:
        if trainer.state.epoch == 2 and engine.state.iteration == 2 and fault.begin("evaluation"):
            raise ValueError("the fault")  # FAULT evaluation
        with torch.no_grad():
            return model(batch).mean()

    trainer, evaluator = Engine(step), Engine(evaluation_step)

    @trainer.on(Events.ITERATION_COMPLETED(once=WHEN))
    def handle(engine: Engine) -> None:
        if fault.begin("handler"):
            raise ValueError("the fault")  # FAULT handler
        if fault.begin("terminate"):
            engine.terminate()  # FAULT terminate
        if fault.name in COLLECTIVES:
            COLLECTIVES[fault.name](fault.begin(fault.name))

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine: Engine) -> None:
        if engine.state.epoch == 1:
            fault.begin("uneven")
        engine.state.loss = idist.all_reduce(engine.state.output)  # FAULT uneven
        evaluator.run(loader)
        idist.all_reduce(evaluator.state.output)
        if engine.state.epoch > 2:
            time.sleep(PAUSE)

    # every rank takes the state, and each writes its own file
    checkpoint = Checkpoint({"model": model, "saved": Saved(fault)}, partial(save, config.folder))
    trainer.add_event_handler(Events.EPOCH_COMPLETED(once=2), checkpoint)
    data = loader
    if fault.name == "uneven":
        data = [torch.ones(BATCH, 4)] * (LENGTH - fault.is_mine)
    try:
        trainer.run(data, max_epochs=EPOCHS)
    except ValueError:
        if fault.name != "swallowed":
            raise
    idist.barrier()
    idist.one_rank_only()(print)("trained to the end", flush=True)


def save(folder: Path, checkpoint: Any, filename: str) -> None:
    torch.save(checkpoint, folder / f"{idist.get_rank()}-{filename}")


# --- the process ------------------------------------------------------------------------------------------------------


def hold_lock(folder: Path, rank: int) -> None:
    """Show that the process of a rank exists."""
    path = folder / f"rank-{rank}"
    _held.append(file := path.with_suffix(".new").open("w"))
    fcntl.lockf(file, fcntl.LOCK_EX)
    print(os.getpid(), file=file, flush=True)
    path.with_suffix(".new").rename(path)


def is_locked(path: Path) -> bool:
    """Return whether the process of a rank exists."""
    with path.open("r+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def outlast_others(folder: Path, rank: int) -> None:
    """Wait until no other rank exists, but not forever: a launcher may stop them before they have reported."""
    until = time.monotonic() + SOON
    others = [path for path in folder.glob("rank-[0-9]") if path.name != f"rank-{rank}"]  # a look ends an own lock
    while any(map(is_locked, others)) and time.monotonic() < until:
        time.sleep(0.01)


def note_time(folder: Path) -> None:
    (folder / "fault.new").write_text(str(time.monotonic()))
    (folder / "fault.new").rename(folder / "fault")


def enter(config: argparse.Namespace, rank: int) -> None:
    """Run in each process before it connects to the others."""
    hold_lock(config.folder, rank)
    if config.fault == "never-arrives" and rank == config.rank:
        note_time(config.folder)
        time.sleep(FOREVER)  # FAULT never-arrives


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fault", default="none")
    parser.add_argument("--rank", type=int, default=1, help="the rank that fails")
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--nproc_per_node", type=int, help="processes to fork; omit under a launcher")
    parser.add_argument("--debug", action="store_true")
    parser.add_argument("--timeout", type=float)
    parser.add_argument("--hang_report_after", type=float)
    config = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts jobs in the background without it
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    options: dict[str, Any] = {"debug": True} if config.debug else {}
    if config.timeout is None:
        watcher._LEARNING = SOON  # a rank may be slow to say what it has called
    else:
        options["timeout"] = timedelta(seconds=config.timeout)
    if config.hang_report_after is not None and "hang_report_after" in inspect.signature(idist.initialize).parameters:
        options["hang_report_after"] = config.hang_report_after
    if config.nproc_per_node is None:
        launch = detect(os.environ)
        assert launch is not None, "this needs a launcher, or --nproc_per_node"
        enter(config, launch.topology.rank)
    else:
        options.update(nproc_per_node=config.nproc_per_node, start_method="fork")
        enter_when_forked(config)
    try:
        with idist.Parallel(config.backend, **options) as parallel:
            parallel.run(training, config)
    except ValueError:  # the fault
        if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun kills the others within 0.1 seconds
            outlast_others(config.folder, config.rank)
        raise


def enter_when_forked(config: argparse.Namespace) -> None:
    """Enter in the children that this process will fork, which are the ranks in ascending order."""
    ranks, parent = itertools.count(), os.getpid()
    current = 0

    def before() -> None:
        nonlocal current
        if os.getpid() == parent:  # a rank forks the workers of its loader
            current = next(ranks)

    def in_child() -> None:
        if os.getppid() == parent:
            enter(config, current)

    os.register_at_fork(before=before, after_in_child=in_child)


if __name__ == "__main__":
    main()
