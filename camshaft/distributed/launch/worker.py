"""What a started process does: run the function within the backend, report a failure, and end with its parent."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import astuple, dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeAlias

from torch.multiprocessing.spawn import ProcessException, ProcessExitedException, ProcessRaisedException

from camshaft.distributed.backend import Backend
from camshaft.distributed.groups import annotate_departures
from camshaft.distributed.ranks import get_local_rank
from camshaft.distributed.run import current, finalize, install

GRACE = 5.0
"""Seconds a process has to exit after SIGTERM before it is killed."""

_PARENT_INTERVAL = 1.0  # seconds between checks of the parent's process id
_SHOWN = 8_000  # characters kept from each end of a long traceback: a pipe without a reader holds 64 KB

Task: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]  # a function and its arguments


@dataclass(frozen=True, order=True)
class Failure:
    """How a process failed; the smallest one is the cause of the others.

    Args:
        follows: whether it is known to be a consequence of the end of another process.
        when: time of a clock that all processes share; 0 for a process that could not report.
        rank: rank of the process among those that were started.
        pid: process id.
        code: exit code, negative for a signal; ``None`` for an exception.
        text: traceback, if any.
    """

    follows: bool
    when: float
    rank: int
    pid: int
    code: int | None = None
    text: str = ""

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Failure:
        """Describe the exception that is being handled."""
        notes = getattr(error, "__notes__", ()) if sys.version_info < (3, 11) else ()
        text = "".join([traceback.format_exc(), *(f"{note}\n" for note in notes)])
        if (left_out := len(text) - 2 * _SHOWN) > 0:
            text = f"{text[:_SHOWN]}\n... {left_out} characters ...\n{text[-_SHOWN:]}"
        code = exit_code(error) if isinstance(error, SystemExit) else None
        return cls(False, time.monotonic(), rank, os.getpid(), code, text)

    def exception(self) -> ProcessException:
        """Return the error to raise in the parent."""
        if self.code is None:
            return ProcessRaisedException(f"\n\n-- process {self.rank} failed:\n{self.text}", self.rank, self.pid)
        name = next((number.name for number in signal.Signals if number == -self.code), None)
        if self.code < 0:
            how = f"was terminated by {name or f'signal {-self.code}'}"
        else:
            how = f"exited with code {self.code}" + (f":\n{self.text}" if self.text else " without an exception")
        return ProcessExitedException(f"process {self.rank} {how}", self.rank, self.pid, self.code, name)

    def save(self, folder: str) -> None:
        """Write to a folder that the parent reads, complete at once."""
        path = Path(folder, f"failure-{self.rank}")
        path.with_suffix(".new").write_text(json.dumps(astuple(self)))
        path.with_suffix(".new").rename(path)

    @classmethod
    def first_of(cls, folder: str) -> Failure | None:
        """Return the cause among the failures in a folder."""
        files = Path(folder).glob("failure-*[0-9]")
        return min((cls(*json.loads(file.read_text())) for file in files), default=None)


def work(
    rank: int,
    load: Callable[[], tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], dict[str, Any]]],
    create: Callable[..., Backend],
    report: Callable[[Failure], None],
) -> None:
    """Call a function within a backend; ``sys.exit()`` in it is a return.

    Args:
        rank: rank to report.
        load: returns the function, its arguments, and the options of the backend, including ``debug``.
        create: called with these options.
        report: called with a failure before the exception propagates.
    """
    try:
        function, args, kwargs, options = load()
        debug = options.pop("debug", None)
        install(lambda: create(**options), debug)
        try:
            function(get_local_rank(), *args, **kwargs)
        except SystemExit as error:
            if exit_code(error):
                raise
        finalize()
    except BaseException as error:  # KeyboardInterrupt, too
        annotate_departures(error, current())
        report(Failure.of(error, rank))
        raise


def exit_code(error: SystemExit) -> int:
    """Return the exit code that Python uses for this exception."""
    return error.code if isinstance(error.code, int) else 0 if error.code is None else 1


def not_picklable(task: Task, error: Exception) -> TypeError:
    """Return the error for a task that cannot be sent to new processes."""
    return TypeError(
        "fn and its arguments must be importable and picklable to be sent to new processes, got "
        f"{task[0]!r} with {task[1]!r} and {task[2]!r}: {error}"
    )


def end_with_parent(sentinel: Any) -> None:
    """Terminate this process when its parent is gone, even if it was killed.

    Args:
        sentinel: becomes readable then: the sentinel of ``multiprocessing.parent_process()``, or a connection of which
            only the parent holds the other end.
    """
    threading.Thread(target=_watch, args=(sentinel, os.getppid()), name="camshaft-parent-watchdog", daemon=True).start()


def _watch(sentinel: Any, parent: int) -> None:
    # Processes forked later inherit the other end, so the parent's process id is checked as well.
    while not wait([sentinel], _PARENT_INTERVAL) and os.getppid() == parent:
        pass
    os.kill(os.getpid(), signal.SIGTERM)  # the user's handler may save something
    time.sleep(GRACE)
    os._exit(1)  # the main thread may never return to Python, for example from a collective
