"""How far a call travels: the functions of camshaft that it enters, and the files that these are in."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import camshaft
import camshaft.distributed as idist
from camshaft.distributed import failures
from camshaft.distributed.failures import record, watcher
from camshaft.distributed.failures.trace import RECORDS_GLOO
from camshaft.distributed.job import current
from camshaft.engine import Engine, Events, create_supervised_trainer
from camshaft.errors import RankFailedError
from camshaft.handlers import Checkpoint, TensorboardLogger
from camshaft.handlers.tensorboard_logger import OutputHandler
from tests.limits import HANG, TIMEOUT
from tests.ranks import await_watchers, on_ranks, run_on_ranks

PACKAGE = str(Path(camshaft.__file__).parent)


def visited(function: Callable[[], Any]) -> tuple[set[tuple[str, str]], set[str]]:
    """Return the functions of camshaft that a call enters in this thread, and their files.

    What is part of a function, such as a comprehension, does not count as one.
    """
    functions = set()

    def count(frame: Any, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            functions.add((code.co_filename, code.co_qualname if sys.version_info >= (3, 11) else code.co_name))

    before = sys.getprofile()
    gc.disable()  # a collection would call what cleans up after other tests
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
        gc.enable()
    return functions, {file for file, _ in functions}


# Functions, and files. These are ceilings, to be lowered only.
ALL_REDUCE = (8, 5) if RECORDS_GLOO else (11, 6)  # with a list of calls of our own
AUTO_DATALOADER = 15, 9
INITIALIZE = 63, 18  # aim: 35 in 8; 22 of them, in 7 files, are in failures
RUN = 40, 13
# to the first step of a run
LIST, LOADED, RESUMED = (49, 11), (55, 11), (82, 16)  # aims: 20 in 5, 25 in 6, 40 in 8
SAVE, RESUME_LATEST = (91, 20), (81, 19)  # aims: 45 in 8, 50 in 9
SCALAR = 13, 6
# on the threads of both ranks: 20 in 8, or 41 in 11 if the library's error comes before the news; more if it has to be
# found out whether the call had begun
FAIL = 60, 14


def check(functions: set[tuple[str, str]], limits: tuple[int, int]) -> None:
    files = {file for file, _ in functions}
    assert len(functions) <= limits[0], (len(functions), len(files), sorted(functions))
    assert len(files) <= limits[1], (len(functions), len(files), sorted(files))


def reduce_at_two_lines(folder: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    idist.initialize("gloo", rank=rank, world_size=size, init_method=f"file://{folder}/store", timeout=TIMEOUT)
    idist.all_reduce(torch.ones(1))  # what is found out once for a job
    for _ in range(2):  # the first call at this line, and a repeated one
        check(visited(lambda: idist.all_reduce(torch.ones(1)))[0], ALL_REDUCE)
    idist.barrier()
    idist.finalize()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # which the harness destroys


def test_all_reduce(tmp_path: Path) -> None:
    run_on_ranks(2, reduce_at_two_lines, str(tmp_path))


@on_ranks(2)
def test_auto_dataloader() -> None:
    await_watchers()
    with idist.use_backend(current()):  # which is not looked for, as in a job that `initialize` has joined
        check(visited(lambda: idist.auto_dataloader(range(12), batch_size=4))[0], AUTO_DATALOADER)


def begin(folder: str) -> None:
    """Initialize twice, as what is imported on demand runs only once, and check how far the second call travels."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    for name in ("warm", "counted"):
        method = f"file://{folder}/{name}"
        start = partial(idist.initialize, "gloo", rank=rank, world_size=size, init_method=method, timeout=TIMEOUT)
        with mock.patch.object(record, "_remove_old"):  # which depends on what other jobs have left
            functions, _ = visited(start)
        idist.barrier()
        idist.finalize()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # which the harness destroys
    check(functions, INITIALIZE)


def test_initialize(tmp_path: Path) -> None:
    run_on_ranks(2, begin, str(tmp_path))


def fail(folder: str) -> list[tuple[str, str]]:
    """Return what the last rank enters to say that it has failed, and the first, which waits for it, to raise this."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    idist.initialize("gloo", rank=rank, world_size=size, init_method=f"file://{folder}/store", timeout=TIMEOUT)
    idist.all_reduce(torch.ones(1))  # what is found out once for a job
    successful, _ = visited(lambda: idist.all_reduce(torch.ones(1)))

    def end() -> None:
        if rank == size - 1:
            failures.publish(ValueError("the last rank"), current())
        else:
            with mock.patch.object(watcher, "_LEARNING", HANG), pytest.raises(RankFailedError, match="the last rank"):
                idist.all_reduce(torch.ones(1))

    functions, _ = visited(end)
    idist.finalize()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # which the harness destroys
    return sorted(functions - successful)


def test_a_failure_until_another_rank_raises(tmp_path: Path) -> None:
    """Its watcher's rounds, which look for more than failures, run beside, on a thread of their own."""
    both = set().union(*run_on_ranks(2, fail, str(tmp_path)))
    check(both, FAIL)
    assert {name for _, name in both} >= {"publish", "translate"}


def test_parallel_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the process that starts the others, which end at once."""
    for name in ("start", "terminate", "join", "kill"):
        monkeypatch.setattr(BaseProcess, name, lambda process, *args: None)
    monkeypatch.setattr(BaseProcess, "exitcode", 0)
    monkeypatch.setattr(BaseProcess, "sentinel", 0)
    with idist.Parallel("gloo", nproc_per_node=2) as parallel:
        parallel.run(print)
        check(visited(lambda: parallel.run(print))[0], RUN)


class FirstStep(BaseException):
    """Ends a run."""


def until_the_first_step(data: Any, state: dict[str, Any] | None = None) -> set[tuple[str, str]]:
    def step(engine: Engine[Any, Any], batch: Any) -> None:
        sys.setprofile(None)
        raise FirstStep

    def run() -> None:
        with pytest.raises(FirstStep):
            engine.run(data, max_epochs=3)

    engine = Engine(step)
    engine.logger = logging.getLogger("tests.silent")
    engine.logger.setLevel(logging.CRITICAL)
    if state is not None:
        engine.load_state_dict(state)
    return visited(run)[0]


def test_a_run_until_its_first_step() -> None:
    check(until_the_first_step([1, 2, 3]), LIST)
    state: dict[str, Any] = {"epoch_length": 5, "iteration": 7, "max_epochs": 3}
    with pytest.warns(UserWarning, match="its data are read from the beginning"):
        check(until_the_first_step(DataLoader(range(10), batch_size=2), state), LOADED)  # type: ignore[arg-type]


def test_a_run_that_resumes_within_an_epoch_until_its_first_step() -> None:
    loader = idist.auto_dataloader(range(10), batch_size=2)
    engine: Engine[Any, Any] = Engine(lambda engine, batch: None)
    states: list[dict[str, Any]] = []
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=7), lambda engine: states.append(engine.state_dict()))
    engine.run(loader, max_epochs=3)
    check(until_the_first_step(loader, states[0]), RESUMED)


def test_saving_with_pruning_and_resuming(tmp_path: Path) -> None:
    def make() -> tuple[Engine[Any, Any], Checkpoint]:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = create_supervised_trainer(model, optimizer, torch.nn.MSELoss())
        return trainer, Checkpoint({"model": model, "optimizer": optimizer, "trainer": trainer}, tmp_path, n_saved=1)

    trainer, checkpoint = make()
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=1, before=4), checkpoint)

    @trainer.on(Events.ITERATION_COMPLETED(once=4))
    def save() -> None:
        check(visited(lambda: checkpoint(trainer))[0], SAVE)

    trainer.run([(torch.ones(1, 1), torch.ones(1, 1))] * 4)
    checkpoint = make()[1]
    check(visited(checkpoint.resume_latest)[0], RESUME_LATEST)


def test_a_scalar_to_tensorboard(tmp_path: Path) -> None:
    write = OutputHandler("training", output_transform=lambda output: {"loss": output})
    with TensorboardLogger(log_dir=tmp_path) as log:
        engine: Engine[Any, Any] = Engine(lambda engine, batch: 1.0)

        @engine.on(Events.ITERATION_COMPLETED)
        def log_loss() -> None:
            functions, _ = visited(lambda: write(engine, log, Events.ITERATION_COMPLETED))
            if engine.state.iteration > 1:
                check(functions, SCALAR)

        engine.run([1, 2, 3])
