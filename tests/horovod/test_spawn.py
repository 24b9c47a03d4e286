"""Processes started by `spawn("horovod", ...)`: what they run, how they fail, and how they exit with their parent."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

import camshaft.distributed as idist
from tests.guards import content
from tests.horovod.checking import environment
from tests.spawning import (
    Unloadable,
    call_another_collective,
    end_with_parent,
    fail,
    fail_while_others_wait,
    run,
    write_context,
)


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make the processes import this checkout and use one core, and put temporary files into tmp_path."""
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def test_each_process_runs_the_function_with_the_backend_initialized(tmp_path: Path) -> None:
    before, path = handlers(), os.environ["PYTHONPATH"]
    function, options = write_context, {"hosts": "localhost:1,127.0.0.1:1", "disable_cache": True}
    assert (
        idist.spawn("horovod", function, (tmp_path,), {"word": "größer", "exits": True}, nproc_per_node=2, **options)
        is None
    )
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["0 0 0 2 3 horovod größer", "0 1 0 2 3 horovod größer"]
    assert not list((tmp_path / "temporary").iterdir())
    assert handlers() == before, "Horovod replaces them, spawn must restore them"
    assert os.environ["PYTHONPATH"] == path


RAISED, EXITED = ProcessRaisedException, ProcessExitedException


@pytest.mark.parametrize(
    ("function", "args", "options", "kind", "text"),
    [
        (fail, ("raise",), {}, RAISED, r"process 1 failed:\n(.*\n)*.*LookupError: the cause"),
        (fail, ("exit",), {}, EXITED, "process 1 exited with code 3"),
        (fail, ("kill",), {}, EXITED, "horovod.run exited with code"),
        (fail_while_others_wait, ("raise",), {}, RAISED, r"process 1 failed:\n(.*\n)*.*LookupError: the cause"),
        (fail_while_others_wait, ("kill",), {}, EXITED, "horovod.run exited with code"),
        (fail, (Unloadable(),), {}, RAISED, "ValueError: invalid literal for int.*'no number'"),
        (call_another_collective, (), {"debug": True}, RAISED, "RankDivergenceError: the calls of the ranks differ"),
    ],
    ids=["raise", "exit", "kill", "raise to one that waits", "kill to one that waits", "unloadable", "debug"],
)
def test_a_failing_process_stops_the_others_and_its_error_is_raised(
    function: Callable[..., None],
    args: tuple[object, ...],
    options: dict[str, Any],
    kind: type[Exception],
    text: str,
    tmp_path: Path,
) -> None:
    with pytest.raises(kind, match=text) as caught:
        idist.spawn("horovod", function, args, nproc_per_node=2, **options)
    if text.startswith("process 1"):
        assert getattr(caught.value, "error_index") == 1  # noqa: B009
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (("raise",), {"nnodes": 2, "node_rank": 0}, RuntimeError, "use hosts='name:processes,...' .* nnodes=2"),
        (("raise",), {"node_rank": 1}, RuntimeError, "node_rank=1"),
        (("raise",), {"colour": 1}, TypeError, "unexpected keyword argument 'colour'"),
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


@pytest.fixture(autouse=True)
def neighbor(tmp_path: Path) -> None:
    (tmp_path / "neighbor.py").write_text("def name_of(rank): return f'rank{rank}'")


def test_functions_defined_in_a_script_can_be_spawned(tmp_path: Path) -> None:
    code, output = run(SCRIPT, tmp_path)
    assert code == 0, output
    assert "all is well" in output
    assert all((tmp_path / f"rank{rank}").exists() for rank in range(2))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_processes_exit_with_their_parent(number: signal.Signals, tmp_path: Path) -> None:
    assert end_with_parent(SCRIPT, tmp_path, number) == -number
    assert ("KeyboardInterrupt" in content(tmp_path / "output")) == (number == signal.SIGINT)
