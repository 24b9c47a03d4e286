"""Processes started by `spawn("mpi", ...)`: what they run, how they fail, and how they exit with their parent."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

import camshaft.distributed as idist
from tests.limits import FOREVER, TIMEOUT
from tests.mpi.checking import MPI_VARIABLES
from tests.spawning import Unloadable, call_another_collective, end_with_parent, fail, run, write_context

pytestmark = pytest.mark.jobs


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**MPI_VARIABLES, "OMP_NUM_THREADS": "1"}.items():
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


def test_each_process_runs_the_function_with_the_backend_initialized(tmp_path: Path, temporary: Path) -> None:
    idist.spawn("mpi", write_context, (tmp_path,), {"word": "größer"}, nproc_per_node=2, nnodes=1)
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["0 0 0 1 3 mpi größer", "1 1 1 1 3 mpi größer"]
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


def time_out(local_rank: int) -> None:
    if local_rank == 1:
        time.sleep(FOREVER)
    idist.barrier()


RAISED, EXITED = ProcessRaisedException, ProcessExitedException


@pytest.mark.parametrize(
    ("function", "args", "options", "kind", "text"),
    [
        (fail, ["raise"], {}, RAISED, "process 1 failed:\n(.*\n)*.*LookupError: the cause"),
        (fail, ["exit"], {}, EXITED, "process 1 exited with code 3:\n(.*\n)*.*SystemExit: 3"),
        (fail, ["finalize"], {}, RAISED, "process 1 failed:\n(.*\n)*.*LookupError: after all"),
        (fail, ["linger"], {}, RAISED, "process 1 failed:\n(.*\n)*.*LookupError: at last"),
        (fail, ["kill"], {}, EXITED, "mpiexec exited with code"),
        (fail, [Unloadable()], {}, RAISED, "ValueError: invalid literal for int.*'no number'"),
        (call_another_collective, [], {"debug": True}, RAISED, "RankDivergenceError: the calls of the ranks differ"),
        (
            time_out,
            [],
            {"timeout": timedelta(seconds=20)},  # in which they also start
            RAISED,
            r"process 0 failed:\n(.*\n)*.*(within|after) 20 s",
        ),
    ],
    ids=["raise", "exit", "finalize", "linger", "kill", "unloadable", "debug", "timeout"],
)
def test_a_failing_process_stops_the_others_and_its_error_is_raised(
    function: Callable[..., None],
    args: list[object],
    options: dict[str, Any],
    kind: type[Exception],
    text: str,
    temporary: Path,
) -> None:
    with pytest.raises(kind, match=text) as caught:
        spawn(function, *args, **options)
    if text.startswith("process 1"):
        assert getattr(caught.value, "error_index") == 1  # noqa: B009
    assert not list(temporary.iterdir())


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


def test_functions_and_objects_defined_in_a_script_can_be_spawned(tmp_path: Path) -> None:
    code, output = run(GUARDED, tmp_path)
    assert code == 0, output
    assert "all is well" in output
    assert all((tmp_path / f"rank{rank}").exists() for rank in range(2))


def test_a_script_without_a_main_guard_is_refused(tmp_path: Path) -> None:
    code, output = run(UNGUARDED, tmp_path)
    assert code == 1
    assert "if __name__ == '__main__':" in output
    assert "ProcessRaisedException" in output


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_processes_exit_with_their_parent(number: signal.Signals, tmp_path: Path) -> None:
    end_with_parent(GUARDED, tmp_path, number)
