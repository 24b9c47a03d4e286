"""Processes started by `spawn("horovod", ...)`: what they run, how they fail, and how they exit with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

import camshaft.distributed as idist
from tests.guards import content, is_running
from tests.horovod.checking import ROOT, environment
from tests.limits import FOREVER, HANG


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make the processes import this checkout and use one core, and put temporary files into tmp_path."""
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))


def write_context(local_rank: int, folder: Path, word: str = "") -> None:
    total = idist.all_reduce(idist.get_rank() + 1)
    seen = [local_rank, idist.get_rank(), idist.get_local_rank(), idist.get_nnodes(), total, idist.backend(), word]
    (folder / str(idist.get_rank())).write_text(" ".join(map(str, seen)))
    if idist.get_rank() == 1:
        sys.exit(0)


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def test_each_process_runs_the_function_with_the_backend_initialized(tmp_path: Path) -> None:
    before, path = handlers(), os.environ["PYTHONPATH"]
    function, options = write_context, {"hosts": "localhost:1,127.0.0.1:1", "disable_cache": True}
    assert idist.spawn("horovod", function, (tmp_path,), {"word": "größer"}, nproc_per_node=2, **options) is None
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["0 0 0 2 3 horovod größer", "0 1 0 2 3 horovod größer"]
    assert not list((tmp_path / "temporary").iterdir())
    assert handlers() == before, "Horovod replaces them, spawn must restore them"
    assert os.environ["PYTHONPATH"] == path


def call_another_collective(local_rank: int) -> None:
    idist.all_gather(1) if local_rank else idist.barrier()


def test_debug_mode_reaches_the_processes() -> None:
    with pytest.raises(ProcessRaisedException, match="RankDivergenceError: the calls of the ranks differ"):
        idist.spawn("horovod", call_another_collective, (), nproc_per_node=2, debug=True)


def fail(local_rank: int, how: str) -> None:
    """Fail on rank 1 while rank 0 waits for it."""
    if local_rank == 1:
        if how == "raise":
            raise LookupError("the cause")
        if how == "exit":
            sys.exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    idist.barrier()


def test_an_error_in_one_process_stops_the_others_and_is_raised_with_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(ProcessRaisedException, match=r"process 1 failed:\n(.*\n)*.*LookupError: the cause") as caught:
        idist.spawn("horovod", fail, ("raise",), nproc_per_node=2)
    assert caught.value.error_index == 1
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.parametrize(
    ("how", "message"), [("exit", "process 1 exited with code 3"), ("kill", "horovod.run exited with code")]
)
def test_a_process_that_exits_or_is_killed_is_reported(how: str, message: str) -> None:
    with pytest.raises(ProcessExitedException, match=message):
        idist.spawn("horovod", fail, (how,), nproc_per_node=2)


class Unloadable:
    """An object that cannot be unpickled."""

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return int, ("no number",)


def test_an_error_before_the_processes_connect_is_raised() -> None:
    with pytest.raises(ProcessRaisedException, match="ValueError: invalid literal for int.*'no number'"):
        idist.spawn("horovod", fail, (Unloadable(),), nproc_per_node=1)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (("raise",), {"nnodes": 2, "node_rank": 0}, RuntimeError, "use hosts='name:processes,...' .* nnodes=2"),
        (("raise",), {"node_rank": 1}, RuntimeError, "node_rank=1"),
        (
            ("raise",),
            {"colour": 1},
            TypeError,
            "unexpected keyword argument 'colour'",
        ),
        (("raise",), {"num_proc": 1}, TypeError, "multiple values for keyword argument 'num_proc'"),
        ((threading.Lock(),), {}, TypeError, "fn and its arguments must be importable and picklable"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        idist.spawn("horovod", fail, arguments, nproc_per_node=2, **options)


# --- scripts ---------------------------------------------------------------------------------------------------

SCRIPT = """
import os, sys, time
from pathlib import Path
import camshaft.distributed as idist
from neighbor import name_of  # found because it is next to the script

def work(local_rank, folder, seconds):
    Path(folder, name_of(local_rank)).write_text(str(os.getpid()))
    time.sleep(seconds)

if __name__ == "__main__":
    with idist.Parallel("horovod", nproc_per_node=2) as parallel:
        parallel.run(work, sys.argv[1], float(sys.argv[2]))
    print("all is well")
"""


@contextmanager
def running(folder: Path, seconds: float) -> Iterator[subprocess.Popen[bytes]]:
    """Run the script in a process group of its own."""
    (folder / "script.py").write_text(SCRIPT)
    (folder / "neighbor.py").write_text("def name_of(rank): return f'rank{rank}'")
    with (folder / "output").open("wb") as output:
        script = subprocess.Popen(
            [sys.executable, str(folder / "script.py"), str(folder), str(seconds)],
            env=environment(PYTHONPATH=str(ROOT), TMPDIR=str(folder / "temporary")),
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


def test_functions_defined_in_a_script_can_be_spawned(tmp_path: Path) -> None:
    with running(tmp_path, seconds=0) as script:
        assert script.wait(HANG) == 0, content(tmp_path / "output")
    assert "all is well" in content(tmp_path / "output")
    assert all((tmp_path / f"rank{rank}").exists() for rank in range(2))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_processes_exit_with_their_parent(number: signal.Signals, tmp_path: Path) -> None:
    with running(tmp_path, seconds=FOREVER) as script:
        files = [tmp_path / f"rank{rank}" for rank in range(2)]
        assert eventually(lambda: all(map(content, files))), content(tmp_path / "output")
        script.send_signal(number)
        assert script.wait(HANG) == -number, content(tmp_path / "output")
        workers = [int(content(file)) for file in files]
        assert eventually(lambda: not any(map(is_running, workers))), content(tmp_path / "output")
    assert ("KeyboardInterrupt" in content(tmp_path / "output")) == (number == signal.SIGINT)


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + HANG
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return met
