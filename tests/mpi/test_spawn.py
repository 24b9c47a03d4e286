"""Processes that `spawn("mpi", ...)` starts: what they run, how they fail, and that they end with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

import camshaft.distributed as idist
from tests.guards import content, is_running
from tests.mpi.checking import LENIENT, ROOT

pytestmark = pytest.mark.jobs
LIMIT = timedelta(seconds=30)


@pytest.fixture(autouse=True)
def _lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**LENIENT, "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder for temporary files, of this process alone."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def spawn(function: Callable[..., None], *args: object, **options: Any) -> None:
    idist.spawn("mpi", function, args, nproc_per_node=2, **{"timeout": LIMIT, **options})


def write_what_is_seen(local_rank: int, folder: Path, word: str = "") -> None:
    total = int(idist.all_reduce(torch.ones(1)).item())
    seen = [local_rank, idist.get_rank(), idist.get_local_rank(), idist.get_nnodes(), total, idist.backend(), word]
    (folder / str(local_rank)).write_text(" ".join(map(str, seen)))


def test_each_process_runs_the_function_within_the_backend(tmp_path: Path, temporary: Path) -> None:
    idist.spawn("mpi", write_what_is_seen, (tmp_path,), {"word": "größer"}, nproc_per_node=2, nnodes=1)
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["0 0 0 1 2 mpi größer", "1 1 1 1 2 mpi größer"]
    assert not list(temporary.iterdir())


SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOBID": "7", "SLURM_NNODES": "2", "SLURM_NODELIST": "n[1-2]", "SLURM_STEP_ID": "0"}
SLURM |= {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_JOB_CPUS_PER_NODE": "1(x2)"}


def test_in_a_job_of_slurm_the_processes_are_started_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "srun").write_text("#!/bin/sh\nexit 1")
    (tmp_path / "srun").chmod(0o755)
    for name, value in {**SLURM, "PATH": f"{tmp_path}:{os.environ['PATH']}"}.items():
        monkeypatch.setenv(name, value)
    spawn(write_what_is_seen, tmp_path)
    assert [(tmp_path / rank).exists() for rank in "01"] == [True, True]


def call_another_collective(local_rank: int) -> None:
    idist.all_gather(1) if local_rank else idist.barrier()


def test_debug_mode_reaches_the_processes() -> None:
    with pytest.raises(ProcessRaisedException, match="RankDivergenceError: the ranks call different things"):
        spawn(call_another_collective, debug=True)


def fail(local_rank: int, how: str) -> None:
    """Let rank 1 fail while rank 0 is busy, for longer than the test may take."""
    if local_rank == 1:
        if how == "raise":
            raise LookupError("the cause")
        if how == "exit":
            sys.exit(3)
        if how == "finalize":
            idist.finalize()
            raise LookupError("after all")
        if how == "linger":
            os._exit = lambda code: time.sleep(1000)  # type: ignore[assignment]  # as if mpiexec did not see its end
            idist.finalize()
            raise LookupError("at last")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("raise", ProcessRaisedException, "failed:\n(.*\n)*.*LookupError: the cause"),
        ("exit", ProcessExitedException, "exited with code 3:\n(.*\n)*.*SystemExit: 3"),
        ("finalize", ProcessRaisedException, "failed:\n(.*\n)*.*LookupError: after all"),
        ("linger", ProcessRaisedException, "failed:\n(.*\n)*.*LookupError: at last"),
    ],
)
def test_a_process_that_fails_ends_the_others_and_its_traceback_is_the_error(
    how: str, kind: type[Exception], text: str, temporary: Path
) -> None:
    with pytest.raises(kind, match=f"process 1 {text}") as caught:
        spawn(fail, how)
    assert getattr(caught.value, "error_index") == 1  # noqa: B009
    assert not list(temporary.iterdir())


def test_a_process_that_is_killed_ends_the_others() -> None:
    with pytest.raises(ProcessExitedException, match="mpiexec exited with code"):
        spawn(fail, "kill")


def wait_in_vain(local_rank: int) -> None:
    if local_rank == 1:
        time.sleep(100)
    idist.barrier()


def test_the_timeout_is_that_of_the_backend() -> None:
    with pytest.raises(ProcessRaisedException, match=r"process 0 failed:\n(.*\n)*.*(within|after) 2 s"):
        spawn(wait_in_vain, timeout=timedelta(seconds=2))


class Torn:
    """Something that cannot be put together again in another process."""

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return int, ("no number",)


def test_what_fails_before_the_processes_have_met_is_told_too() -> None:
    with pytest.raises(ProcessRaisedException, match="ValueError: invalid literal for int.*'no number'"):
        spawn(fail, Torn())


@pytest.mark.parametrize(
    ("function", "options", "error", "message"),
    [
        (fail, {"nnodes": 2, "node_rank": 0, "master_addr": "a", "master_port": 1}, ValueError, "nnodes must be 1 for"),
        (
            fail,
            {"master_port": 1},
            TypeError,
            r"\['master_port'\] are unknown to backend 'mpi', .*'device'",
        ),
        (lambda rank: None, {}, TypeError, "fn and its arguments must be importable and picklable"),
    ],
)
def test_bad_arguments_are_refused(
    function: Callable[..., None], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        spawn(function, **options)


def test_without_mpiexec_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"needs mpiexec .* pip install 'camshaft\[mpi\]'"):
        spawn(fail)


# --- scripts ---------------------------------------------------------------------------------------------------

SCRIPT = """
import os, sys, time
from dataclasses import dataclass
from pathlib import Path
import camshaft.distributed as idist

@dataclass
class Message:
    text: str

def work(local_rank, message):
    assert isinstance(message, Message) and __name__ == "__mp_main__"
    Path(sys.argv[1], f"{message.text}{local_rank}").write_text(str(os.getpid()))
    time.sleep(float(sys.argv[2]))

GUARD
    idist.spawn("mpi", work, (Message("rank"),), nproc_per_node=2)
    print("all is well")
"""
GUARDED = SCRIPT.replace("GUARD", 'if __name__ == "__main__":')
UNGUARDED = SCRIPT.replace("GUARD", "if True:")


@contextmanager
def running(text: str, folder: Path, seconds: float) -> Iterator[subprocess.Popen[bytes]]:
    """Run a script in a group of processes of its own, in a folder to which it writes its output too."""
    (folder / "script.py").write_text(text)
    with (folder / "output").open("wb") as output:
        script = subprocess.Popen(
            [sys.executable, str(folder / "script.py"), str(folder), str(seconds)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # where these tests run in the background
        )
    try:
        yield script
    finally:
        with suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)
        script.wait()


def test_what_a_script_defines_can_be_handed_over(tmp_path: Path) -> None:
    with running(GUARDED, tmp_path, seconds=0) as script:
        assert script.wait(50) == 0, content(tmp_path / "output")
    assert "all is well" in content(tmp_path / "output")
    assert all((tmp_path / f"rank{rank}").exists() for rank in range(2))


def test_a_script_that_would_start_processes_without_end_is_refused(tmp_path: Path) -> None:
    with running(UNGUARDED, tmp_path, seconds=0) as script:
        assert script.wait(50) == 1
    assert "if __name__ == '__main__':" in content(tmp_path / "output")
    assert "ProcessRaisedException" in content(tmp_path / "output")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_processes_end_with_the_one_that_started_them(number: signal.Signals, tmp_path: Path) -> None:
    with running(GUARDED, tmp_path, seconds=100) as script:
        files = [tmp_path / f"rank{rank}" for rank in range(2)]
        assert eventually(lambda: all(map(content, files))), content(tmp_path / "output")
        workers = [int(content(file)) for file in files]
        script.send_signal(number)
        script.wait(20)
        assert eventually(lambda: not any(map(is_running, [*workers, *group(script.pid)]))), content(
            tmp_path / "output"
        )


def group(number: int) -> list[int]:
    """List the processes of a group."""
    ids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [pid for pid in ids if content(Path(f"/proc/{pid}/stat")).rpartition(") ")[2].split()[2:3] == [str(number)]]


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 40
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return met
