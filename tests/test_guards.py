"""Each guard detects its kind of leak, and conftest.py runs all guards."""

from __future__ import annotations

import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from subprocess import PIPE
from unittest import mock

import numpy
import pytest
import torch
from torch._C._distributed_c10d import HashStore

from tests import guards
from tests.limits import HANG


@contextmanager
def variable() -> Iterator[None]:
    os.environ["CAMSHAFT_LEFT"] = "1"
    yield
    assert "CAMSHAFT_LEFT" not in os.environ


@contextmanager
def removed_variable() -> Iterator[None]:
    del os.environ["PATH"]
    yield
    assert os.environ["PATH"]


@contextmanager
def folder() -> Iterator[None]:
    before = os.getcwd()
    os.chdir("/")
    yield
    assert os.getcwd() == before


@contextmanager
def thread() -> Iterator[None]:
    done = threading.Event()
    running = threading.Thread(target=done.wait, name="left-over", daemon=True)
    running.start()
    yield
    done.set()
    running.join()


@contextmanager
def process() -> Iterator[None]:
    script = "import sys; print('up', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=PIPE, stdout=PIPE) as running:
        assert running.stdout
        assert running.stdout.readline() == b"up\n"
        yield


@contextmanager
def open_file() -> Iterator[None]:
    with open(__file__):
        yield


@contextmanager
def new_file() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(guards, "ROOT", Path(folder)):
        Path(folder, "left-over.txt").touch()  # other tests watch the real one at the same time
        yield


@contextmanager
def group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    assert not torch.distributed.is_initialized()


@contextmanager
def log_handler() -> Iterator[None]:
    handler = logging.NullHandler()
    logging.getLogger().addHandler(handler)
    yield
    assert handler not in logging.getLogger().handlers


@contextmanager
def log_level() -> Iterator[None]:
    logging.getLogger().setLevel(5)
    yield
    assert logging.getLogger().level != 5


@contextmanager
def dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    assert torch.get_default_dtype() == torch.float32


@contextmanager
def determinism() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    assert not torch.are_deterministic_algorithms_enabled()


LEAKS = [
    (guards.environment_variables, variable, "CAMSHAFT_LEFT"),
    (guards.environment_variables, removed_variable, "PATH"),
    (guards.working_directory, folder, "/"),
    (guards.threads, thread, "left-over"),
    (guards.child_processes, process, "sys.stdin.read()"),
    (guards.open_files, open_file, "test_guards.py"),
    (guards.files_in_the_repository, new_file, "left-over.txt"),
    (guards.process_group, group, "process group"),
    (guards.root_logger, log_handler, "NullHandler"),
    (guards.root_logger, log_level, "to 5"),
    (guards.torch_settings, dtype, "default_dtype"),
    (guards.torch_settings, determinism, "deterministic_algorithms"),
]


@pytest.mark.parametrize(("guard", "leak", "named"), LEAKS)
def test_a_guard_reports_and_restores_what_is_left(
    guard: Callable[[], guards.Guard],
    leak: Callable[[], AbstractContextManager[None]],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guards, "GRACE", 0.05)
    watching = guard()
    next(watching)
    with leak():
        assert named in (next(watching) or "nothing seen")


@pytest.mark.parametrize("guard", guards.GUARDS)
def test_a_guard_is_silent_when_nothing_is_left(guard: Callable[[], guards.Guard]) -> None:
    watching = guard()
    assert next(watching) is None
    assert next(watching) is None


def test_guards_wait_for_threads_that_are_about_to_end() -> None:
    watching = guards.threads()
    next(watching)
    threading.Timer(0.05, str).start()
    assert next(watching) is None


def test_files_that_other_commands_create_meanwhile_are_not_left_by_a_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make site` and `pip install .`, say."""
    shutil.copy(guards.ROOT / ".gitignore", tmp_path)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr(guards, "ROOT", tmp_path)
    watching = guards.files_in_the_repository()
    next(watching)
    for name in ("site", "build", "dist", "camshaft.egg-info", "left-over"):
        (tmp_path / name).mkdir()
    assert next(watching) == f"files left in {tmp_path}: ['left-over']"


def test_what_hangs_is_reported_by_its_test_before_pytest_ends_it(pytestconfig: pytest.Config) -> None:
    timeouts = [float(pytestconfig.getini(name)) for name in ("timeout", "faulthandler_timeout")]
    assert HANG < timeouts[0] < timeouts[1]


def test_random_states_are_restored() -> None:
    def draw() -> tuple[float, ...]:
        return random.random(), float(numpy.random.rand()), torch.rand(()).item()

    watching = guards.random_state()
    next(watching)
    first = draw()
    next(watching)
    assert draw() == first


def test_every_test_is_guarded(tmp_path: Path) -> None:
    (tmp_path / "test_leak.py").write_text("import os\ndef test_leak():\n    os.environ['CAMSHAFT_LEFT'] = '1'\n")
    run = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "-p", "tests.conftest", str(tmp_path)]
    result = subprocess.run(run, cwd=guards.ROOT, capture_output=True, text=True)
    assert result.returncode == 1
    assert "CAMSHAFT_LEFT" in result.stdout
