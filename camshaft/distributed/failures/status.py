"""What this process is doing, for its record: its engines, its stack, and the collectives that it waits in."""

from __future__ import annotations

import functools
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from threading import get_ident
from types import FrameType
from typing import Any

from camshaft import activity
from camshaft.distributed.failures.alone import inside, strays
from camshaft.distributed.failures.trace import Call, Found, Trace
from camshaft.errors import line_of

PATIENCE = 3.0  # seconds that a rank waits before its wait is evidence
EARLY = 1.0  # seconds that something is unfinished before the calls are read
BACKWARD = "backward (gradient reduction)"
FSDP, DDP = "FSDP (parameters or gradients)", "DistributedDataParallel (parameters or buffers)"
_IDLE = 0.05  # share of one core below which a thread counts as idle
_MOST_FRAMES, _MOST_WAITS = 30, 8
# which wait in Python, where others wait in torch
_PATIENT = re.compile(r"camshaft/distributed/(backends/mpi|failures/store)\.py")
_FOREIGN = re.compile(
    r"/site-packages/|/dist-packages/|/lib(64)?/python3|^<frozen|/camshaft/(?:activity\.py|(?:data|distributed|engine|handlers)/)"
    r"|/torch/(?:distributed|autograd|nn|utils)/|/torch/_ops\.py"
)
_WAITING = re.compile(r"/torch/(distributed/|nn/parallel/distributed\.py)|/torch/autograd/.* in _engine_run_backward$")
_PUBLIC = re.compile(r"/camshaft/distributed/(?:collectives/api|ranks|models/\w+)\.py:\d+ in ([a-z]\w*)$")
_OF_TORCH = re.compile(r"/torch/distributed/distributed_c10d\.py:\d+ in ([a-z]\w*)$")

# paths, or "path:function", with what runs there and whether that explains a long wait; the first match counts
_PURPOSES = (
    (("/pdb.py", "/bdb.py", "/pydevd", "/debugpy/", "/ipdb/"), "is paused in a debugger", True),
    (("/camshaft/handlers/checkpoint/loading.py", "/torch/serialization.py:load"), "is loading a checkpoint", True),
    (
        ("/camshaft/handlers/checkpoint/", "/torch/serialization.py:save", "/torch/distributed/checkpoint/"),
        "is saving or loading a checkpoint",
        True,
    ),
    # not eval_frame.py, which is also in the stack while compiled code runs
    (
        (
            *("/torch/_dynamo/convert_frame.py", "/torch/_inductor/codecache.py", "/torch/_inductor/async_compile.py"),
            *("/torch/_inductor/scheduler.py", "/torch/_inductor/graph.py", "/torch/_inductor/codegen/"),
        ),
        "is compiling",
        True,
    ),
    (("/camshaft/distributed/ranks.py:wrapper",), "is running a function for one rank only", True),
    (
        ("/torch/utils/data/dataloader.py:_get_data", "/torch/utils/data/dataloader.py:_try_get_data"),
        "is waiting for the workers of its data loader",
        False,
    ),
)
EXPLAINS = {doing: explains for _, doing, explains in _PURPOSES}


class Observer:
    """Describes this process, about once a second.

    Args:
        trace: of its collectives.
        main_thread: the identifier of the thread that trains.
    """

    def __init__(self, trace: Trace, main_thread: int) -> None:
        self._trace, self._main = trace, main_thread
        self._unfinished: list[Any] = []
        self._unfinished_since = self._unfinished_at = 0.0
        self._last = (0.0, 0.0, 0.0)  # time, and seconds of CPU of the process and of the main thread
        self._idle_for = 0.0
        self._places: dict[int, tuple[Any, float]] = {}  # by thread, where it is, and since when

    def describe(self, is_asked: bool = False, is_urgent: bool = False) -> dict[str, Any]:
        """Return the status.

        Args:
            is_asked: whether other ranks want to know the last collectives.
            is_urgent: whether they must be in it, however often they were read.
        """
        now = time.monotonic()
        frames = _other_threads()
        stack, doing = stack_of(frames.get(self._main))
        status: dict[str, Any] = {
            "time": now,
            "thread": self._main,
            "stack": stack,
            "doing": doing,
            "inside": next(([one.what, one.where] for one in reversed(inside.get(self._main, ()))), None),
            **self._processor(now, frames),
        }
        unfinished = self._trace.unfinished()
        if unfinished or self._unfinished:
            self._unfinished_at = now
        if unfinished != self._unfinished or not unfinished:
            self._unfinished, self._unfinished_since = unfinished, now
        status["waits_for"] = now - self._unfinished_since
        if is_asked or is_urgent or now - self._unfinished_since >= EARLY:
            found = self._trace.read(now, is_urgent)
            if found is not None:
                status |= self._calls(found, frames, now)
        # read after the calls, as what explains a call happened before it
        return status | {
            "engines": [_engine(engine) for engine in activity.in_thread(self._main)],
            "ended": [end._asdict() for end in tuple(activity.early_ends)],
            "strays": list(strays),
        }

    def may_have_failed(self, call: Call) -> bool:
        """Return whether a call may have failed just now; torch soon lists one that has failed as completed."""
        return not call.is_done or max(call.began, self._unfinished_at) > self._last[0] - PATIENCE

    def _processor(self, now: float, frames: Mapping[int, FrameType]) -> dict[str, float]:
        """Return the use of the processor since the last time."""
        before, used, used_by_main = self._last
        process, main = time.process_time() - time.thread_time(), _seconds_of(self._main)
        self._last = now, process, main
        elapsed = now - before
        self._idle_for = self._idle_for + elapsed if before and main - used_by_main <= _IDLE * elapsed else 0.0
        for thread in self._places.keys() - frames.keys():
            del self._places[thread]
        for thread, frame in frames.items():
            place = _place(frame)
            if self._places.get(thread, (None,))[0] != place:
                self._places[thread] = place, now
        return {"cpu": process - used if before else 0.0, "idle_for": self._idle_for}

    def _calls(self, found: Found, frames: Mapping[int, FrameType], now: float) -> dict[str, Any]:
        """Return what was sent, what this process waits in, and whether no thread of it can send anything else."""
        calls = [one._replace(thread=one.thread or self._main) for one in found.calls]
        timers = {one.ident for one in threading.enumerate() if isinstance(one, threading.Timer)}
        all_stacks = {thread: stack_of(frame)[0] for thread, frame in frames.items()}
        stacks = {
            thread: stack
            for thread, stack in all_stacks.items()
            if thread in found.threads or thread in timers or any(not _FOREIGN.search(line) for line in stack)
        }  # a thread that runs code of the user's may send something, even if it has not done so yet
        stacks[self._main] = stack_of(frames.get(self._main))[0]
        running = [one for one in calls if not one.is_done and one.thread in stacks]
        latest = {one.thread: one for one in calls}
        running = [one for one in running if not latest[one.thread].is_done]  # one that has failed stays unfinished
        reached = _other_threads()  # a call that was read may have begun since the other frames were taken
        return {
            "calls": [[one.group, one.sequence, one.operation, one.value, one.size] for one in calls if one.library],
            "begun": dict(found.begun),
            "at_most": dict(found.at_most),
            "waits": [
                {
                    "group": one.group,
                    "sequence": one.sequence,
                    "ranks": found.members.get(one.group, ""),
                    "operation": one.operation,
                    "value": one.value,
                    "began": one.began,
                    **named(stack_of(reached.get(one.thread))[0], one.operation),
                }
                for one in [*running[: _MOST_WAITS - 1], *running[_MOST_WAITS - 1 :][-1:]]
            ],
            "is_stuck": all(
                self._is_blocked(thread, stack, [one for one in running if one.thread == thread], now)
                for thread, stack in stacks.items()
            ),
        }

    def _is_blocked(self, thread: int, stack: Sequence[str], running: Sequence[Call], now: float) -> bool:
        """Return whether a thread certainly does nothing before one of its calls completes."""
        if not any(now - one.began > PATIENCE for one in running) or now - self._places[thread][1] < PATIENCE:
            return False
        if (inner := next(iter(stack), "")) and _PATIENT.search(inner):
            return True
        if not _WAITING.search(inner):
            return False
        is_busy_waiting = all(one.library not in ("", "gloo") for one in running)
        if "/distributed_c10d.py" in inner and (is_busy_waiting or thread != self._main):
            return True
        return thread == self._main and self._idle_for > PATIENCE and not is_busy_waiting


def _other_threads() -> dict[int, FrameType]:
    """Return where the other threads are; a frame that refers to itself would keep alive what it refers to."""
    frames = sys._current_frames()
    del frames[get_ident()]
    return frames


def _place(frame: FrameType) -> Any:
    """Return where a thread is; inside of a wait in Python, that is one place."""
    found: FrameType | None = frame
    while found is not None and _PATIENT.search(found.f_code.co_filename):
        found = found.f_back
    found = found or frame
    return id(found), id(found.f_code), found.f_lasti


def _seconds_of(thread: int) -> float:
    """Return the seconds of CPU of the main thread, or of the process where the system does not tell."""
    if hasattr(time, "pthread_getcpuclockid"):
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    return time.process_time() - time.thread_time()


def _engine(engine: Any) -> dict[str, Any]:
    state, event = engine.state, engine.last_event_name
    return {
        "line": engine.run_line,
        "number": engine.run_number,
        "event": str(getattr(event, "name", event)),
        "epoch": state.epoch,
        "iteration": state.iteration,
    }


def stack_of(frame: FrameType | None) -> tuple[list[str], str]:
    """Return the innermost lines of a stack, and what the code in it is known to do, from all frames."""
    lines: list[str] = []
    doing, place = "", None
    for _ in range(1000):
        if not isinstance(frame, FrameType):  # None; CPython 3.11 may find anything if the thread runs on meanwhile
            break
        code = frame.f_code
        if len(lines) < _MOST_FRAMES:
            lines.append(line_of(frame))
        found = _purpose(code.co_filename, code.co_name)
        if found is not None and (place is None or found < place):
            place, doing = found, _PURPOSES[found][1]
        frame = frame.f_back
    return lines, doing


@functools.lru_cache(4096)
def _purpose(path: str, function: str) -> int | None:
    path = path.replace("\\", "/")
    for number, (patterns, *_) in enumerate(_PURPOSES):
        for pattern in patterns:
            part, _, name = pattern.partition(":")
            if part in path and name in ("", function):
                return number
    return None


def named(stack: Sequence[str], operation: str = "") -> dict[str, str]:
    """Return what a thread has called as the user knows it, the user's line, and the line of a handler in between.

    >>> named(["/x/torch/autograd/graph.py:9 in _engine_run_backward", "train.py:3 in step"])
    {'what': 'backward (gradient reduction)', 'line': 'train.py:3 in step', 'via': ''}
    """
    what = via = ""
    for line in stack:
        if not _FOREIGN.search(line):
            break
        if "/torch/autograd/" in line and line.endswith(" in _engine_run_backward"):
            what = BACKWARD
        elif "/torch/distributed/fsdp/" in line:
            what = what or FSDP
        elif "/torch/nn/parallel/distributed.py" in line:
            what = what or DDP
        elif found := _PUBLIC.search(line):
            what = found[1]
        elif (found := _OF_TORCH.search(line)) and what not in (BACKWARD, FSDP, DDP):
            what = f"torch.distributed.{found[1]}"
        elif "/camshaft/handlers/" in line:
            via = via or line[line.rindex("/camshaft/") + 1 :]
    return {"what": what or (operation and f"torch.distributed.{operation}"), "line": user_line(stack), "via": via}


def user_line(stack: Sequence[str]) -> str:
    """Return the innermost line that is not of a library, otherwise the innermost one."""
    return next((line for line in stack if not _FOREIGN.search(line)), stack[0] if stack else "")
