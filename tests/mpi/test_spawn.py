"""Processes started by `spawn("mpi", ...)`: what they run, how they fail, and how they exit with their parent."""

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
from tests.limits import FOREVER, HANG, TIMEOUT
from tests.mpi.checking import OPEN_MPI, ROOT

pytestmark = pytest.mark.jobs


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**OPEN_MPI, "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Set a folder for the temporary files of this process."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def spawn(function: Callable[..., None], *args: object, **options: Any) -> None:
    idist.spawn("mpi", function, args, nproc_per_node=2, **{"timeout": TIMEOUT, **options})


def write_context(local_rank: int, folder: Path, word: str = "") -> None:
    total = int(idist.all_reduce(torch.ones(1)).item())
    seen = [local_rank, idist.get_rank(), idist.get_local_rank(), idist.get_nnodes(), total, idist.backend(), word]
    (folder / str(local_rank)).write_text(" ".join(map(str, seen)))


def test_each_process_runs_the_function_with_the_backend_initialized(tmp_path: Path, temporary: Path) -> None:
    idist.spawn("mpi", write_context, (tmp_path,), {"word": "größer"}, nproc_per_node=2, nnodes=1)
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["0 0 0 1 2 mpi größer", "1 1 1 1 2 mpi größer"]
    assert not list(temporary.iterdir())


SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOBID": "7", "SLURM_NNODES": "2", "SLURM_NODELIST": "n[1-2]", "SLURM_STEP_ID": "0"}
SLURM |= {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_JOB_CPUS_PER_NODE": "1(x2)"}


def test_processes_are_started_on_this_host_in_a_slurm_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "srun").write_text("#!/bin/sh\nexit 1")
    (tmp_path / "srun").chmod(0o755)
    for name, value in {**SLURM, "PATH": f"{tmp_path}:{os.environ['PATH']}"}.items():
        monkeypatch.setenv(name, value)
    spawn(write_context, tmp_path)
    assert [(tmp_path / rank).exists() for rank in "01"] == [True, True]


def call_another_collective(local_rank: int) -> None:
    idist.all_gather(1) if local_rank else idist.barrier()


def test_debug_mode_reaches_the_processes() -> None:
    with pytest.raises(ProcessRaisedException, match="RankDivergenceError: the calls of the ranks differ"):
        spawn(call_another_collective, debug=True)


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
            os._exit = lambda code: time.sleep(FOREVER)  # type: ignore[assignment]  # as if mpiexec did not notice that it exited
            idist.finalize()
            raise LookupError("at last")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(FOREVER)


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("raise", ProcessRaisedException, "failed:\n(.*\n)*.*LookupError: the cause"),
        ("exit", ProcessExitedException, "exited with code 3:\n(.*\n)*.*SystemExit: 3"),
        ("finalize", ProcessRaisedException, "failed:\n(.*\n)*.*LookupError: after all"),
        ("linger", ProcessRaisedException, "failed:\n(.*\n)*.*LookupError: at last"),
    ],
)
def test_an_error_in_one_process_stops_the_others_and_is_raised_with_its_traceback(
    how: str, kind: type[Exception], text: str, temporary: Path
) -> None:
    with pytest.raises(kind, match=f"process 1 {text}") as caught:
        spawn(fail, how)
    assert getattr(caught.value, "error_index") == 1  # noqa: B009
    assert not list(temporary.iterdir())


def test_a_killed_process_stops_the_others() -> None:
    with pytest.raises(ProcessExitedException, match="mpiexec exited with code"):
        spawn(fail, "kill")


def time_out(local_rank: int) -> None:
    if local_rank == 1:
        time.sleep(FOREVER)
    idist.barrier()


def test_the_timeout_is_passed_to_the_backend() -> None:
    with pytest.raises(ProcessRaisedException, match=r"process 0 failed:\n(.*\n)*.*(within|after) 2 s"):
        spawn(time_out, timeout=timedelta(seconds=2))


class Unloadable:
    """An object that cannot be unpickled."""

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return int, ("no number",)


def test_an_error_before_the_processes_connect_is_raised() -> None:
    with pytest.raises(ProcessRaisedException, match="ValueError: invalid literal for int.*'no number'"):
        spawn(fail, Unloadable())


@pytest.mark.parametrize(
    ("function", "options", "error", "message"),
    [
        (fail, {"nnodes": 2, "node_rank": 0, "master_addr": "a", "master_port": 1}, ValueError, "nnodes must be 1 for"),
        (
            fail,
            {"master_port": 1},
            TypeError,
            r"spawn on backend 'mpi' got unknown options \['master_port'\]; .*device",
        ),
        (lambda rank, how: None, {}, TypeError, "fn and its arguments must be importable and picklable"),
    ],
)
def test_bad_arguments_are_refused(
    function: Callable[..., None], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        spawn(function, "raise", **options)


def test_without_mpiexec_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"needs mpiexec .* pip install 'camshaft\[mpi\]'"):
        spawn(fail, "raise")


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
    """Run a script in a process group of its own, with the script and its output in a folder."""
    (folder / "script.py").write_text(text)
    with (folder / "output").open("wb") as output:
        script = subprocess.Popen(
            [sys.executable, str(folder / "script.py"), str(folder), str(seconds)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield script
    finally:
        with suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)
        script.wait()


def test_functions_and_objects_defined_in_a_script_can_be_spawned(tmp_path: Path) -> None:
    with running(GUARDED, tmp_path, seconds=0) as script:
        assert script.wait(HANG) == 0, content(tmp_path / "output")
    assert "all is well" in content(tmp_path / "output")
    assert all((tmp_path / f"rank{rank}").exists() for rank in range(2))


def test_a_script_without_a_main_guard_is_refused(tmp_path: Path) -> None:
    with running(UNGUARDED, tmp_path, seconds=0) as script:
        assert script.wait(HANG) == 1
    assert "if __name__ == '__main__':" in content(tmp_path / "output")
    assert "ProcessRaisedException" in content(tmp_path / "output")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_processes_exit_with_their_parent(number: signal.Signals, tmp_path: Path) -> None:
    with running(GUARDED, tmp_path, seconds=FOREVER) as script:
        files = [tmp_path / f"rank{rank}" for rank in range(2)]
        assert eventually(lambda: all(map(content, files))), content(tmp_path / "output")
        workers = [int(content(file)) for file in files]
        script.send_signal(number)
        script.wait(HANG)
        assert eventually(lambda: not any(map(is_running, [*workers, *group(script.pid)]))), content(
            tmp_path / "output"
        )


def group(number: int) -> list[int]:
    """Return the processes of a process group."""
    ids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [pid for pid in ids if content(Path(f"/proc/{pid}/stat")).rpartition(") ")[2].split()[2:3] == [str(number)]]


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + HANG
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return met
