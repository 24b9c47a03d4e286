"""Preemption: save and stop on all ranks when the platform sends a signal to any of them."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from multiprocessing import forkserver, popen_spawn_posix, resource_tracker
from multiprocessing.context import get_spawning_popen
from multiprocessing.popen_forkserver import Popen as ForkServerPopen
from multiprocessing.process import current_process
from multiprocessing.util import register_after_fork
from signal import Signals
from types import FrameType
from typing import Any

from torch.utils.data import get_worker_info

from camshaft.arguments import check_type, integer
from camshaft.distributed import barrier, get_rank
from camshaft.distributed.environments import slurm_job
from camshaft.engine.engine import Engine, check_engine
from camshaft.engine.events import Events
from camshaft.handlers.checkpoint.handler import Checkpoint
from camshaft.handlers.checkpoint.state import walk
from camshaft.handlers.stopping import StopTogether

__all__ = ["Preemption"]

_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))  # Windows lacks one
_ECHO = 5.0  # seconds in which launchers forward a signal that the whole process group has received already
_LINGERS = 1.0  # the same at the end of a run, when only the exit code depends on it


class Preemption:
    """Save and stop on all ranks after the same iteration when any of them receives a signal.

    Attach it on every rank. Signals are handled while ``run`` executes: the current iteration is completed, including
    ``EPOCH_COMPLETED`` and evaluations in it if it is the last one of the epoch; the checkpoint is saved on
    ``TERMINATE``, unless it has just been saved; all ranks wait for the file, and the run ends as after
    ``engine.terminate()``. A signal that arrives when the target is reached changes nothing.

    A second signal, 5 s or more after the first, has its default action: the process ends at once, with the exit code
    128 + its number in a shell. Handlers that the script has set for the signals are restored when ``run`` ends, with
    an error or without. If there is one for the signal, it is then called, on the ranks that have received it.

    Until a signal arrives, an iteration only checks a flag, without communication. Processes that
    ``multiprocessing`` starts during the run, such as those of data loaders, obey these signals only if their parent
    sends them, because Slurm and torchrun send signals to whole process groups.

    Args:
        checkpoint: a handler that keeps the newest checkpoints. Its ``to_save`` should contain the trainer, so that the
            next run resumes with the next sample. It need not be attached to an event.
        signals: which signals to handle, by default SIGTERM and SIGUSR1.
        exit_code: if given, ``run`` ends all ranks with ``sys.exit(exit_code)`` instead of returning.
        requeue: whether rank 0 calls ``scontrol requeue`` after the save, to restart a batch job of Slurm.

    Attributes:
        signal: the signal that has ended the last run, the same on all ranks; ``None`` while it executes, and if it
            ended otherwise.

    Raises:
        TypeError: ``checkpoint`` is not a Checkpoint, ``signals`` are not signals, or ``exit_code`` is not an integer.
        ValueError: ``checkpoint`` keeps the best checkpoints or has nothing to save, a signal cannot be handled, or
            ``exit_code`` is out of range.

    >>> import tempfile
    >>> from camshaft.engine import Events
    >>> trainer = Engine(lambda engine, batch: None)
    >>> @trainer.on(Events.ITERATION_STARTED(once=3))
    ... def as_slurm_does() -> None:
    ...     signal.raise_signal(signal.SIGUSR1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     preemption = Preemption(Checkpoint({"trainer": trainer}, folder))
    ...     preemption.attach(trainer)
    ...     state = trainer.run(range(10))
    ...     preemption.signal.name, preemption.checkpoint.last_checkpoint.name
    ('SIGUSR1', 'trainer_3.pt')
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        signals: Iterable[int] = _SIGNALS,
        exit_code: int | None = None,
        requeue: bool = False,
    ) -> None:
        check_type("checkpoint", checkpoint, Checkpoint, "a Checkpoint")
        hint = "use a Checkpoint without a score, whose to_save contains the trainer"
        if checkpoint.score_function is not None:
            raise ValueError(f"checkpoint must keep the newest checkpoints, got one that keeps the best: {hint}")
        if not checkpoint.to_save:
            raise ValueError(f"checkpoint must know what to save, got an empty to_save: {hint}")
        self.checkpoint = checkpoint
        self.signals = _checked(signals)
        self.exit_code = None if exit_code is None else integer("exit_code", exit_code, least=0, below=256)
        self.requeue = requeue
        self.signal: Signals | None = None
        self.logger = logging.getLogger(f"{__name__}.{type(self).__name__}")
        self._together = StopTogether()
        self._is_attached = self._has_saved = self._is_requeued = False
        self._arrived = 0  # the first signal that was not acted on yet
        self._since = 0.0
        self._process = 0
        self._before: dict[int, Any] = {}

    def attach(self, trainer: Engine[Any, Any]) -> None:
        """Handle signals during the runs of an engine.

        Raises:
            TypeError: ``trainer`` is not an Engine.
            RuntimeError: called outside of the main thread, or a second time.
        """
        check_engine("trainer", trainer)
        _check_is_main_thread()
        if self._is_attached:
            raise RuntimeError("this Preemption is already attached: create another one")
        if not any(one is trainer for _, one in walk(self.checkpoint.to_save, "state_dict")):
            hint = "add it as to_save['trainer'], or the next run starts from the beginning"
            warnings.warn(f"to_save does not contain the trainer: {hint}", stacklevel=2)
        if self.requeue and slurm_job(os.environ) is None:
            warnings.warn("requeue=True has no effect: this is not a job of Slurm", stacklevel=2)
        self._is_attached = True
        trainer.surround(self._handling)
        self._together.surround(trainer)
        trainer.add_event_handler(Events.TERMINATE | Events.COMPLETED, self._save)

    @contextmanager
    def _handling(self, engine: Engine[Any, Any]) -> Iterator[None]:
        """Handle the signals during a run."""
        _check_is_main_thread()
        self.signal, self._has_saved, self._process = None, False, os.getpid()
        with ExitStack() as stack:
            stack.callback(self._restore)
            self._before = {number: signal.getsignal(number) for number in self.signals}
            for number in self.signals:
                signal.signal(number, self._receive)
            if hasattr(signal, "sigwaitinfo"):  # not on macOS
                stack.enter_context(_shielded_children(self.signals))
            if self._arrived:  # too late for the previous run
                self._together.request(self._arrived)
            yield
            if self.signal is not None:  # the signal may still be forwarded to this rank, or reach it only now
                time.sleep(max(0.0, self._since + _LINGERS - time.monotonic()))
        arrived, before = self._arrived, self._before.get(self._arrived)
        if self.signal is not None or callable(before):
            self._arrived = 0
        if callable(before):
            before(arrived, None)
        if self.signal is not None and self.exit_code is not None:
            barrier()  # launchers end the other ranks when the first one exits
            raise SystemExit(self.exit_code)

    def _restore(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # in a forked child, which is no rank
            if not _is_child_of_multiprocessing(frame):
                signal.signal(number, self._before[number])
                signal.raise_signal(number)
        elif not self._arrived:
            self._arrived, self._since = number, time.monotonic()
            self._together.request(number)
        elif time.monotonic() - self._since > _ECHO and not self._is_requeued:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def _save(self, engine: Engine[Any, Any]) -> None:
        self._together.settle()
        if self._has_saved or not self._together.reason or _has_reached_target(engine):
            return
        if not self._arrived:
            self._since = time.monotonic()
        self._has_saved, self.signal = True, Signals(self._together.reason)
        level = logging.WARNING if get_rank() == 0 else logging.INFO
        self.logger.log(level, "Preemption: %s, saving after iteration %d", self.signal.name, engine.state.iteration)
        self.checkpoint.save_after(self._together.event, engine)
        barrier()  # no rank leaves before the file exists
        job = slurm_job(os.environ)
        if self.requeue and job is not None:
            self._is_requeued = True  # Slurm now sends SIGTERM
            if get_rank() == 0:
                self._requeue(job)

    def _requeue(self, job: str) -> None:
        try:
            command = ["scontrol", "requeue", job]
            subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            self.logger.error("job %s was not requeued: %s %s", job, error, getattr(error, "stdout", ""))


def _checked(signals: Iterable[int]) -> tuple[Signals, ...]:
    if not isinstance(signals, Iterable) or isinstance(signals, str):
        raise TypeError(f"signals must be a sequence such as (signal.SIGTERM,), got {signals!r}")
    for number in (signals := tuple(signals)):
        if integer("signals", number, least=1) not in signal.valid_signals() or number in (9, 19):
            raise ValueError(f"signals must be signals that a process can handle, got {number!r}")
    if not signals:
        raise ValueError("signals must not be empty")
    return tuple(map(Signals, signals))


def _has_reached_target(engine: Engine[Any, Any]) -> bool:
    progress = engine.state_dict()
    if "max_iters" in progress:
        return bool(progress["iteration"] >= progress["max_iters"])
    return bool(progress["epochs_completed"] >= progress["max_epochs"])


def _check_is_main_thread() -> None:
    if threading.current_thread() is not threading.main_thread():
        name = threading.current_thread().name
        raise RuntimeError(f"Preemption needs the main thread, which handles signals; this is thread {name!r}")


# --- children --------------------------------------------------------------------------------------------------------


class _Shield:
    """Protects the children that ``multiprocessing`` starts from signals; passed to each of them."""

    def __init__(self, signals: tuple[Signals, ...]) -> None:
        self.signals = signals

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it, as the first part of a child that is not forked from this process."""
        if isinstance(get_spawning_popen(), ForkServerPopen):  # the server, too, is in the process group
            with self.blocked():
                forkserver.ensure_running()
        return _obey_parent_only, (self.signals, os.getpid())

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Block the signals in this thread, so that a new interpreter inherits the block.

        Before it could block them itself, it would have imported libraries that start threads, and a signal to any
        thread ends the process.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, self.signals)
        try:
            resource_tracker.ensure_running()  # unblocks SIGTERM
            signal.pthread_sigmask(signal.SIG_BLOCK, self.signals)
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _shielded_children(signals: tuple[Signals, ...]) -> Iterator[None]:
    """Make children that ``multiprocessing`` starts ignore signals, except those that their parent sends."""
    shield = _Shield(signals)
    register_after_fork(shield, lambda shield: _obey_parent_only(shield.signals, os.getppid()))  # until it is garbage
    configuration: dict[str, Any] = current_process()._config  # type: ignore[attr-defined]  # which children inherit
    configuration["camshaft_shield"] = shield
    launch = popen_spawn_posix.Popen._launch  # type: ignore[attr-defined]

    def launch_blocked(popen: Any, process: Any) -> None:
        with shield.blocked() if process._config.get("camshaft_shield") is shield else nullcontext():
            launch(popen, process)

    popen_spawn_posix.Popen._launch = launch_blocked  # type: ignore[attr-defined]
    try:
        yield
    finally:
        popen_spawn_posix.Popen._launch = launch  # type: ignore[attr-defined]
        del configuration["camshaft_shield"]


def _is_child_of_multiprocessing(frame: FrameType | None) -> bool:
    """Return True if a forked process is about to get its shield."""
    while frame is not None and frame.f_globals.get("__name__") != "multiprocessing.popen_fork":
        frame = frame.f_back
    return frame is not None


def _obey_parent_only(signals: tuple[Signals, ...], parent: int) -> None:
    """Handle signals in a thread, which learns who has sent them; the handlers that torch sets are then not called."""
    forked_by = os.getppid()  # may be the fork server

    def wait() -> None:
        while True:
            sent = signal.sigwaitinfo(signals)
            if sent.si_pid == parent or os.getppid() != forked_by:
                os._exit(128 + sent.si_signo if get_worker_info() is None else 0)  # as a worker of torch does

    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    threading.Thread(target=wait, name="camshaft-signals", daemon=True).start()
