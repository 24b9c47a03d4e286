"""What each process of a job does that was started from within Python, and how the starting one learns of a failure.

Processes report failures in a folder, as a launcher like ``mpiexec`` passes on only output; the first failure is
the cause of the others. All end when the process that started them does, however it ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from torch.multiprocessing.spawn import ProcessException, ProcessExitedException, ProcessRaisedException

from camshaft.distributed import failures
from camshaft.distributed.backends.contract import Backend
from camshaft.distributed.job import current, finalize, install
from camshaft.distributed.ranks import get_local_rank

GRACE = 5.0
"""Seconds that processes have to end by themselves, and again after SIGTERM before they are killed."""

INTERVAL = 1.0
"""Seconds, at most, between checks for failures and exit codes."""

Task: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], dict[str, Any]]
"""A function, its arguments, and the options of `install`."""


class Failure(NamedTuple):
    """How a process failed; the first one is the cause of the others.

    Args:
        when: time of a clock that all processes share; 0 for a process that could not report.
        rank: rank of the process among those that were started.
        pid: process id.
        code: exit code, negative for a signal; ``None`` for an exception.
        text: traceback, if any.
    """

    when: float
    rank: int
    pid: int
    code: int | None = None
    text: str = ""

    @classmethod
    def of(cls, error: BaseException, rank: int, when: float) -> Failure:
        """Describe an exception that was raised at a time."""
        notes = getattr(error, "__notes__", ()) if sys.version_info < (3, 11) else ()
        text = "".join([*traceback.format_exception(error), *(f"{note}\n" for note in notes)])
        code = exit_code(error) if isinstance(error, SystemExit) else None
        return cls(when, rank, os.getpid(), code, text)

    def exception(self) -> ProcessException:
        """Return the error to raise in the parent."""
        if self.code is None:
            return ProcessRaisedException(f"\n\n-- process {self.rank} failed:\n{self.text}", self.rank, self.pid)
        name = next((number.name for number in signal.Signals if number == -self.code), None)
        unknown = " without reporting an exception: check its standard error"
        if self.code < 0:
            how = f"was terminated by {name or f'signal {-self.code}'}" + (f"; {self.text}" if self.text else "")
        else:
            how = f"exited with code {self.code}" + (f":\n{self.text}" if self.text else unknown)
        return ProcessExitedException(f"process {self.rank} {how}", self.rank, self.pid, self.code, name)

    def save(self, folder: str) -> None:
        """Write to a folder of the parent, complete at once; where that fails, as on another machine, print."""
        path = Path(folder, f"failure-{self.rank}")
        try:
            path.with_suffix(".new").write_text(json.dumps(self))
            path.with_suffix(".new").rename(path)
        except OSError as error:
            what = f"process {self.rank} failed, and could not report it to the process that started it: {error}"
            sys.stderr.write(f"{what}\n{self.text}")
            sys.stderr.flush()

    @classmethod
    def all_in(cls, folder: str) -> list[Failure]:
        """Return the failures that processes have saved, the cause first."""
        return sorted(cls(*json.loads(file.read_text())) for file in Path(folder).glob("failure-*[0-9]"))


def run(
    rank: int,
    load: Callable[[], Any],
    create: Callable[..., Backend],
    report: Callable[[Failure], None],
) -> None:
    """Call a function within a backend; ``sys.exit()`` in it is a return.

    Args:
        rank: rank to report.
        load: returns a task, followed by the options of the backend.
        create: called with these options.
        report: called with a failure before the exception propagates, so before it has any consequences.
    """
    try:
        function, args, kwargs, common, options = load()
        install(lambda: create(**options), **common)
        try:
            function(get_local_rank(), *args, **kwargs)
        except SystemExit as error:
            if exit_code(error):
                raise
        finalize()
    except BaseException as error:  # KeyboardInterrupt, too
        when = time.monotonic()  # before other ranks learn of it, and fail in consequence
        try:
            found = failures.publish(error, current())
            report(Failure.of(found, rank, when if found is error else time.monotonic()))
        except BaseException as later:  # torch's handler of SIGCHLD raises anywhere if a data loader worker was killed
            report(Failure.of(later, rank, when))
            raise
        if found is error:
            raise
        raise found from found.__cause__


def exit_code(error: BaseException) -> int:
    """Return the exit code that Python uses for this exception."""
    code = error.code if isinstance(error, SystemExit) else 1
    return code if isinstance(code, int) else 0 if code is None else 1


def not_picklable(task: Task, error: Exception) -> TypeError:
    """Return the error for a task that cannot be sent to new processes."""
    return TypeError(
        "fn and its arguments must be importable and picklable to be sent to new processes, got "
        f"{task[0]!r} with {task[1]!r} and {task[2]!r}: {error}"
    )


def end_with_parent(sentinel: Any, parent: int) -> None:
    """Terminate this process when the one that started it is gone, even if it was killed.

    Args:
        sentinel: becomes readable then: the sentinel of ``multiprocessing.parent_process()``, or a connection of which
            only the parent holds the other end.
        parent: process id of the one that started it, as processes that it forks later inherit the other end. A fork
            server or a launcher may be between the two, so a death signal does not tell.
    """
    watched = [sentinel]
    with suppress(AttributeError, OSError):  # not on Linux, or where process ids are others
        watched.append(os.pidfd_open(parent))
    threading.Thread(target=_watch, args=(watched,), name="camshaft-parent-watchdog", daemon=True).start()


def _watch(watched: list[Any]) -> None:
    wait(watched)
    os.kill(os.getpid(), signal.SIGTERM)  # the user's handler may save something
    time.sleep(GRACE)
    os._exit(1)  # the main thread may never return to Python, for example from a collective
