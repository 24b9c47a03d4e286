"""What processes started by `spawn` do in tests, and scripts that start some."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import camshaft.distributed as idist
from tests.guards import content, is_running
from tests.limits import FOREVER, HANG, wait_until

ROOT = Path(__file__).resolve().parents[1]


def write_context(local_rank: int, folder: Path, word: str = "", exits: bool = False) -> None:
    """Write what this process knows into a file named by its rank."""
    total = idist.all_reduce(idist.get_rank() + 1)
    seen = [local_rank, idist.get_rank(), idist.get_local_rank(), idist.get_nnodes(), total, idist.backend(), word]
    (folder / str(idist.get_rank())).write_text(" ".join(map(str, seen)))
    if exits and idist.get_rank() == 1:
        sys.exit(0)


def call_another_collective(local_rank: int) -> None:
    idist.all_gather(1) if local_rank else idist.barrier()


def fail(local_rank: int, how: str) -> None:
    """Fail on rank 1 while rank 0 is busy for longer than the test may take."""
    if local_rank == 1:
        if how == "raise":
            raise LookupError("the cause")
        if how == "exit":
            sys.exit(3)
        if how == "finalize":
            idist.finalize()
            raise LookupError("after all")
        if how == "linger":
            os._exit = lambda code: time.sleep(FOREVER)  # type: ignore[assignment]  # as if its launcher did not notice
            idist.finalize()
            raise LookupError("at last")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(FOREVER)


def fail_while_others_wait(local_rank: int, how: str) -> None:
    """Fail on rank 1: what the other rank raises is a consequence."""
    fail(local_rank, how) if local_rank == 1 else idist.barrier()


class Unloadable:
    """An object that cannot be unpickled."""

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return int, ("no number",)


@contextmanager
def running(script: str, folder: Path, seconds: float, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a script in a process group of its own, with the script and its output in a folder."""
    (folder / "script.py").write_text(script)
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(folder / "script.py"), str(folder), str(seconds)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder), **variables},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(script: str, folder: Path) -> tuple[int, str]:
    """Run a script to its end and return its exit code and its output."""
    with running(script, folder, seconds=0) as process:
        code = process.wait(HANG)
    return code, content(folder / "output")


def end_with_parent(script: str, folder: Path, number: signal.Signals) -> int:
    """Send a signal to a script whose processes run, wait until all of them have ended, and return its exit code.

    The processes write their ids into ``rank0`` and ``rank1``.
    """
    with running(script, folder, seconds=FOREVER) as process:
        files = [folder / f"rank{rank}" for rank in range(2)]
        wait_until(lambda: all(map(content, files)), lambda: content(folder / "output"))
        workers = [int(content(file)) for file in files]
        process.send_signal(number)
        code = process.wait(HANG)
        wait_until(
            lambda: not any(map(is_running, [*workers, *group(process.pid)])), lambda: content(folder / "output")
        )
    return code


def group(number: int) -> list[int]:
    """Return the processes of a process group."""
    ids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [pid for pid in ids if content(Path(f"/proc/{pid}/stat")).rpartition(") ")[2].split()[2:3] == [str(number)]]
