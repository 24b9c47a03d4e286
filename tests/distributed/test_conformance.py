"""All backends that need no launcher pass the same checks: one process, threads, and processes that gloo joins."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import camshaft.distributed as idist
from tests.distributed.conformance import CHECKS, lack_of
from tests.limits import HANG
from tests.ranks import run_on_ranks
from tests.threads import run_on_threads

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", CHECKS)
def test_one_process_passes(name: str) -> None:
    assert lack_of(name) is None


@pytest.mark.parametrize(("size", "nodes"), [(2, 1), (4, 2)])
@pytest.mark.parametrize("name", CHECKS)
def test_threads_pass(name: str, size: int, nodes: int) -> None:
    assert run_on_threads(size, lack_of, name, nodes=nodes) == [None] * size


def run_all(names: list[str], passed: Path) -> None:
    for name in names:
        assert lack_of(name) is None
        idist.barrier()
        if idist.get_rank() == 0:
            with passed.open("a") as file:
                file.write(f"{name}\n")


@pytest.fixture(scope="module", params=[1, 2, 4], ids=["1_rank", "2_ranks", "4_ranks"])
def failures(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the failures by check: one start of the ranks serves all that pass, and one more each that fails."""
    passed = tmp_path_factory.mktemp("conformance") / "passed"
    passed.touch()
    found: dict[str, str] = {}
    while left := [name for name in CHECKS if name not in {*found, *passed.read_text().split()}]:
        try:
            run_on_ranks(request.param, run_all, left, passed)
        except pytest.fail.Exception as failure:
            reached = next(name for name in left if name not in passed.read_text().split())
            found[reached] = str(failure)
    return found


@pytest.mark.parametrize("name", CHECKS)
def test_gloo_passes(failures: dict[str, str], name: str) -> None:
    assert name not in failures, failures[name]


@pytest.mark.jobs
def test_a_check_that_fails_ends_the_process_with_its_traceback() -> None:
    command = [sys.executable, "-m", "tests.distributed.run_conformance", "barrier_lets_every_rank_through", "unknown"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG)
    assert result.returncode == 1
    assert result.stdout.startswith("passed barrier_lets_every_rank_through\nrank 0 failed unknown\nTraceback")
