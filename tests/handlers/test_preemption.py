"""Preemption: signals save and end the run on all ranks after the same iteration."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import threading
import time
from contextlib import nullcontext
from multiprocessing import popen_spawn_posix
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader

from camshaft import distributed as idist
from camshaft.engine import Engine, Events
from camshaft.handlers import Checkpoint, DiskSaver, EarlyStopping, ModelCheckpoint, Preemption
from tests.handlers.clocks import Clock
from tests.handlers.preempted import preempt_again_and_again
from tests.limits import HANG, wait_until
from tests.ranks import context, on_ranks, run_on_ranks


@pytest.fixture(autouse=True)
def restores_signal_handlers(monkeypatch):
    monkeypatch.setattr("camshaft.handlers.preemption._ECHO", 0.05)
    monkeypatch.setattr("camshaft.handlers.preemption._LINGERS", 0.05)
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before


def trainer_of(folder, step=lambda engine, batch: batch, saves=None, **options):
    """Return a trainer, and its Preemption."""
    trainer = Engine(step)
    checkpoint = Checkpoint({"trainer": trainer}, DiskSaver(folder, require_empty=False), **(saves or {}))
    preemption = Preemption(checkpoint, **options)
    preemption.attach(trainer)
    return trainer, preemption


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def files(folder):
    return sorted(path.name for path in Path(folder).glob("*.pt"))


# --- one process ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "last", "asynchronous"),
    [
        (Events.STARTED, 1, False),
        (Events.EPOCH_STARTED(once=2), 5, False),
        (Events.GET_BATCH_COMPLETED(once=3), 4, False),
        (Events.ITERATION_STARTED(once=3), 3, True),
        (Events.ITERATION_COMPLETED(once=3), 3, False),
        (Events.ITERATION_COMPLETED(once=4), 4, False),
        (Events.EPOCH_COMPLETED(once=2), 8, True),
    ],
)
def test_the_iteration_is_completed_saved_once_and_followed_by_the_next_sample(tmp_path, event, last, asynchronous):
    def new(seen):
        saves = {"asynchronous": asynchronous}
        trainer, preemption = trainer_of(tmp_path, lambda engine, batch: seen.append(int(batch)), saves)
        return trainer, preemption, idist.auto_dataloader(range(4), shuffle=False)

    seen, saved, order = [], [], []
    trainer, preemption, loader = new(seen)
    trainer.add_event_handler(event, terminate)
    trainer.add_event_handler(Checkpoint.SAVED_CHECKPOINT, lambda: saved.append(trainer.state.iteration))
    for name in ("EPOCH_COMPLETED", "TERMINATE", "COMPLETED"):
        trainer.add_event_handler(name, order.append, name)
    trainer.run(loader, max_epochs=3)
    assert (trainer.state.iteration, preemption.signal, saved) == (last, signal.SIGTERM, [last])
    assert order == ["EPOCH_COMPLETED"] * (last // 4) + ["TERMINATE", "COMPLETED"]
    assert preemption.checkpoint.last_checkpoint == tmp_path / f"trainer_{last}.pt"

    trainer, preemption, loader = new(seen)
    Checkpoint.resume({"trainer": trainer}, tmp_path)
    trainer.run(loader, max_epochs=3)
    assert (seen, preemption.signal) == ([*range(4)] * 3, None)


def test_a_signal_during_an_evaluation_or_a_save(tmp_path):
    trainer, preemption = trainer_of(tmp_path, signals=[signal.SIGUSR1])
    evaluator = Engine(lambda engine, batch: batch == 2 and signal.raise_signal(signal.SIGUSR1))
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: evaluator.run(range(5)))
    trainer.run(range(10))
    assert (evaluator.state.iteration, trainer.state.iteration, preemption.signal) == (5, 2, signal.SIGUSR1)

    trainer, preemption = trainer_of(tmp_path)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), preemption.checkpoint)
    trainer.add_event_handler(Checkpoint.SAVED_CHECKPOINT, terminate)  # once more when it saves
    trainer.run(range(10))
    assert (trainer.state.iteration, preemption.signal, files(tmp_path)) == (2, signal.SIGTERM, ["trainer_2.pt"])


@pytest.mark.parametrize(
    ("event", "expected", "evaluated"),
    [(Events.ITERATION_COMPLETED(once=3), [1, 2, 3], 0), (Events.EPOCH_COMPLETED, [1, 2, 3, 4, 4], 1)],
)
def test_a_save_that_has_just_happened_counts_unless_the_epoch_has_ended_since(tmp_path, event, expected, evaluated):
    """Handlers of its end may have changed what is saved."""
    trainer, preemption = trainer_of(tmp_path)
    saves = []
    trainer.state_dict_user_keys.append("evaluated")
    trainer.state.evaluated = 0
    trainer.add_event_handler(Events.ITERATION_COMPLETED, preemption.checkpoint)
    trainer.add_event_handler(Checkpoint.SAVED_CHECKPOINT, lambda: saves.append(trainer.state.iteration))
    trainer.add_event_handler(event, terminate)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: setattr(trainer.state, "evaluated", 1))
    trainer.run(range(4), max_epochs=5)
    assert saves == expected
    state = torch.load(preemption.checkpoint.last_checkpoint, weights_only=True)
    assert state["evaluated"] == evaluated


def test_a_checkpoint_that_counts_epochs_saves_in_the_middle_of_one(tmp_path):
    saves = {"global_step_transform": lambda engine, event: engine.state.epoch}
    record = {"_saved": []}
    for _ in range(2):  # twice in the same epoch
        trainer, preemption = trainer_of(tmp_path, saves=saves)
        loader = idist.auto_dataloader(range(10))
        if record["_saved"]:
            Checkpoint.resume({"trainer": trainer}, tmp_path)
        preemption.checkpoint.load_state_dict(record)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=trainer.state.iteration + 2), terminate)
        trainer.run(loader, max_epochs=2)
        record = preemption.checkpoint.state_dict()
    assert trainer.state.iteration == 4
    assert torch.load(tmp_path / "trainer_1.pt", weights_only=True)["iteration"] == 4


def test_a_run_that_has_reached_its_target_is_not_preempted(tmp_path):
    for target in ({"max_epochs": 2}, {"max_iters": 6}):
        trainer, preemption = trainer_of(tmp_path, exit_code=3)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=6), terminate)
        trainer.run(range(3), **target)
        assert (trainer.state.iteration, preemption.signal, files(tmp_path)) == (6, None, [])


def test_a_signal_that_is_too_late_for_one_run_ends_the_next(tmp_path):
    trainer, preemption = trainer_of(tmp_path)
    with trainer.add_event_handler(Events.COMPLETED, terminate):
        trainer.run(range(3))
    assert preemption.signal is None
    trainer.run(range(3), max_epochs=3)
    assert (trainer.state.iteration, preemption.signal) == (4, signal.SIGTERM)
    trainer.run(range(3), max_epochs=3)
    assert (trainer.state.epoch, preemption.signal) == (3, None)


def test_an_exit_code_ends_the_process_after_the_run(tmp_path):
    trainer, preemption = trainer_of(tmp_path, exit_code=75)
    events = []
    trainer.add_event_handler(Events.COMPLETED, events.append, "completed")
    trainer.add_event_handler(Events.EXCEPTION_RAISED, lambda error: events.append(error))
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), terminate)
    with pytest.raises(SystemExit) as exit:
        trainer.run(range(4))
    assert (exit.value.code, events, preemption.signal) == (75, ["completed"], signal.SIGTERM)
    assert files(tmp_path) == ["trainer_2.pt"]


def test_handlers_of_the_user_are_called_after_the_save_and_restored(tmp_path):
    calls = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: calls.append((number, files(tmp_path))))
    try:
        trainer, _ = trainer_of(tmp_path)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), terminate)
        trainer.run(range(4))
        assert calls == [(signal.SIGTERM, ["trainer_2.pt"])]
        terminate()
        assert len(calls) == 2
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_handlers_are_restored_after_an_error(tmp_path, error):
    def fail(engine, batch):
        terminate()
        raise error

    trainer, preemption = trainer_of(tmp_path, fail)
    with pytest.raises(error):
        trainer.run(range(4))
    assert (preemption.signal, files(tmp_path)) == (None, [])


def test_a_paused_run_handles_signals_again_when_it_continues(tmp_path):
    trainer, preemption = trainer_of(tmp_path)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), trainer.interrupt)
    trainer.run(range(10))
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=4), terminate)
    trainer.run()
    assert (trainer.state.iteration, preemption.signal) == (4, signal.SIGTERM)


def twice(folder, seconds):
    clock = Clock()

    def step(engine, batch):
        terminate()
        clock.take(seconds)
        terminate()

    trainer, _preemption = trainer_of(folder, step)
    with mock.patch("camshaft.handlers.preemption.time", SimpleNamespace(monotonic=clock, sleep=clock.take)):
        trainer.run(range(2))
    raise SystemExit(50 + trainer.state.iteration)


@pytest.mark.parametrize(("seconds", "code"), [(5.5, -signal.SIGTERM), (4.5, 51)])
def test_a_second_signal_kills_unless_it_is_an_echo_of_the_first(tmp_path, seconds, code):
    process = context.Process(target=twice, args=(tmp_path, seconds))
    process.start()
    process.join(HANG)
    assert (process.exitcode, files(tmp_path)) == (code, ["trainer_1.pt"] if code == 51 else [])


def test_requeue_calls_scontrol_after_the_save(tmp_path, monkeypatch, caplog):
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "scontrol"
    script.write_text(f"#!/bin/sh\necho $* $(ls {tmp_path}/*.pt) >>{tmp_path}/calls\n[ $2 != 8 ] || exit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    for job in ("7", "8"):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        trainer, _ = trainer_of(tmp_path, requeue=True)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), terminate)
        trainer.run(range(4))
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == [f"requeue {job} {tmp_path}/trainer_2.pt" for job in "78"]
    assert "job 8 was not requeued" in caplog.text
    assert "job 7" not in caplog.text
    monkeypatch.delenv("SLURM_JOB_ID")
    with pytest.warns(UserWarning, match="requeue=True has no effect"):
        trainer_of(tmp_path, requeue=True)


def test_arguments_are_checked(tmp_path):
    trainer = Engine(lambda engine, batch: None)
    checkpoint = Checkpoint({"trainer": trainer}, tmp_path)
    for arguments, error in [
        ({"checkpoint": 3}, TypeError),
        ({"checkpoint": ModelCheckpoint(tmp_path)}, ValueError),  # which does not know what to save
        ({"checkpoint": Checkpoint({"trainer": trainer}, tmp_path, score_function=len)}, ValueError),
        ({"signals": 3}, TypeError),
        ({"signals": ()}, ValueError),
        ({"signals": ("SIGTERM",)}, TypeError),
        ({"signals": (signal.SIGKILL,)}, ValueError),
        ({"signals": (1000,)}, ValueError),
        ({"exit_code": 256}, ValueError),
        ({"exit_code": "0"}, TypeError),
    ]:
        with pytest.raises(error, match=next(iter(arguments))):
            Preemption(**{"checkpoint": checkpoint, **arguments})
    preemption = Preemption(checkpoint)
    with pytest.raises(TypeError, match="trainer must be an Engine"):
        preemption.attach(None)
    preemption.attach(trainer)
    with pytest.raises(RuntimeError, match="already attached"):
        preemption.attach(trainer)
    with pytest.warns(UserWarning, match="to_save does not contain the trainer"):
        Preemption(checkpoint).attach(Engine(lambda engine, batch: None))


def test_it_needs_the_main_thread(tmp_path):
    errors = []
    trainer, _ = trainer_of(tmp_path)
    other = Engine(lambda engine, batch: None)
    preemption = Preemption(Checkpoint({"trainer": other}, tmp_path))

    def work():
        for function, argument in ((preemption.attach, other), (trainer.run, range(3))):
            with pytest.raises(RuntimeError, match="Preemption needs the main thread"):
                function(argument)
            errors.append(function)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(errors) == 2


# --- processes of data loaders -------------------------------------------------------------------------------------

# new processes import torch, which takes seconds
METHODS = ["fork", *(pytest.param(method, marks=pytest.mark.jobs) for method in ("spawn", "forkserver"))]


def train_with_workers(folder, method):
    """Send a signal to the processes of a run, and check that its workers survive until the run tells them to end."""
    os.setpgid(0, 0)
    multiprocessing.current_process()._config["daemon"] = False  # may have children
    seen, alive = [], []
    trainer, preemption = trainer_of(folder, lambda engine, batch: seen.extend(batch.tolist()))
    command = ["kill", "-TERM", "--", f"-{os.getpid()}"]  # in another process: workers obey this one
    trainer.add_event_handler(Events.ITERATION_STARTED(once=2), lambda: subprocess.run(command))

    @trainer.on(Events.ITERATION_COMPLETED(once=2))
    def look():
        time.sleep(0.2)  # they would have died
        alive.extend(child.is_alive() for child in multiprocessing.active_children())

    trainer.run(DataLoader(range(20), batch_size=2, num_workers=2, multiprocessing_context=method))
    assert (trainer.state.iteration, preemption.signal, seen) == (2, signal.SIGTERM, [0, 1, 2, 3])
    assert alive == [True, True]
    for child in multiprocessing.active_children():  # torch has told them to end
        child.join(HANG)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("method", METHODS)
def test_workers_survive_a_signal_to_the_process_group(tmp_path, method):
    run_on_ranks(1, train_with_workers, tmp_path, method)


def write_masks_and_hang(pipe):
    """Write the signals that each thread of this process blocks, except for the one that waits for them."""
    waiting = [str(one.native_id) for one in threading.enumerate() if one.name == "camshaft-signals"]
    threads = [path for path in Path("/proc/self/task").iterdir() if path.name not in waiting]
    status = [(path / "status").read_text() for path in threads]
    pipe.send([int(line.split()[1], 16) for text in status for line in text.splitlines() if "SigBlk" in line])
    while True:
        time.sleep(0.1)


def is_pending(pid, number):
    """Return whether a signal was sent to a process that has not received it yet."""
    (pending,) = re.findall(r"^ShdPnd:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(pending, 16) >> (number - 1) & 1


def terminate_children(folder, method):
    """Terminate children in several ways; return the masks of the threads of one, and the exit codes of all."""
    multiprocessing.current_process()._config["daemon"] = False
    os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = (
        "2"  # so that libraries of a child have threads
    )
    masks, codes = [], []

    def step(engine, batch):
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        read, write = multiprocessing.get_context(method).Pipe()
        child = multiprocessing.get_context(method).Process(target=write_masks_and_hang, args=(write,))
        child.start()
        masks.extend(read.recv())
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
        subprocess.run(["kill", "-TERM", str(child.pid)])  # by another process
        child.join(0.2)
        codes.append(child.exitcode)
        wait_until(lambda pid=child.pid: not is_pending(pid, signal.SIGTERM))  # else, a second one would not count
        child.terminate()
        child.join(HANG)
        codes.append(child.exitcode)
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(write, b"1")
            while True:  # Python does not notice a signal that comes between its last look and a sleep
                time.sleep(0.1)
        os.read(read, 1)  # an earlier signal may be lost
        os.kill(pid, signal.SIGTERM)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        with multiprocessing.get_context(method).Pool(1) as pool:  # which it terminates in the end
            codes.append(pool.apply(abs, (-1,)))

    launch = popen_spawn_posix.Popen._launch
    trainer, _ = trainer_of(folder, step)
    trainer.run(range(1))
    assert popen_spawn_posix.Popen._launch is launch
    return masks, codes


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="without /proc")
@pytest.mark.parametrize("method", METHODS)
def test_other_children_obey_their_parent_and_block_the_signals_in_all_threads(tmp_path, method):
    [[masks, codes]] = run_on_ranks(1, terminate_children, tmp_path, method)
    assert codes == [None, 128 + signal.SIGTERM, -signal.SIGTERM, 1]
    assert masks
    assert all(mask >> (number - 1) & 1 for mask in masks for number in (signal.SIGTERM, signal.SIGUSR1)), masks


# --- on ranks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("receivers", "exit_code"), [((0,), None), ((0, 1), None), ((1,), 75)])
def test_a_signal_to_any_rank_ends_the_run_on_all(tmp_path, receivers, exit_code):
    run_on_ranks(2, preempt_one, tmp_path, receivers, exit_code)


def preempt_one(folder, receivers, exit_code):
    trainer, preemption = trainer_of(folder, lambda engine, batch: idist.all_reduce(1), exit_code=exit_code)
    if idist.get_rank() in receivers:
        trainer.add_event_handler(Events.ITERATION_STARTED(once=5), terminate)
    with nullcontext() if exit_code is None else pytest.raises(SystemExit, match=f"^{exit_code}$"):
        trainer.run(range(1_000_000))
    last = trainer.state.iteration
    assert preemption.signal == signal.SIGTERM
    assert idist.all_gather(last) == [last] * idist.get_world_size()
    assert last >= 5
    assert files(folder) == [f"trainer_{last}.pt"]  # on every rank
    assert preemption.checkpoint.last_checkpoint == folder / f"trainer_{last}.pt"


@on_ranks(2)
def test_the_ranks_agree_whether_a_run_that_ends_was_preempted(tmp_path):
    """The signal comes around the last iteration, which another handler has chosen, or which is the target."""
    for last in range(1, 13):
        folder = tmp_path / str(last)
        folder.mkdir(exist_ok=True)
        trainer, preemption = trainer_of(folder, lambda engine, batch: idist.all_reduce(1))
        stopping = EarlyStopping(1, lambda engine: 0.0, trainer)
        if last % 3 == 0:
            trainer.add_event_handler(Events.ITERATION_COMPLETED(after=last - 2), stopping)
        if idist.get_rank() == last % 2:
            event = (Events.ITERATION_STARTED, Events.ITERATION_COMPLETED, Events.GET_BATCH_STARTED)[last // 2 % 3]
            trainer.add_event_handler(event(once=last), terminate)
        if last % 4 == 1:
            trainer.run(iter(range(last)))  # of an unknown length
        else:
            trainer.run(range(last if last % 3 else 100))
        ended = idist.all_gather([(trainer.state.iteration, preemption.signal)])
        assert ended[0] == ended[1]
        idist.barrier()


@pytest.mark.parametrize(
    ("signals", "workers"),
    [(3, "fork"), *(pytest.param(*case, marks=pytest.mark.jobs) for case in ((60, "fork"), (3, "spawn")))],
)
def test_signals_at_random_moments_lose_no_sample(tmp_path, signals, workers):
    preempt_again_and_again(tmp_path, signals, seed=signals, workers=workers)
