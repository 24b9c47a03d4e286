"""A failing worker ends the others and its error is printed; workers exit with torchrun."""

from __future__ import annotations

import re
import signal
import time

import pytest

from tests.torchrun.launching import SECONDS, Launched, torchrun

pytestmark = [pytest.mark.jobs, pytest.mark.timeout(SECONDS + 10)]
FAILING = ("--standalone", "--nproc-per-node=2", "-m", "tests.torchrun.failing")


def test_an_error_within_parallel_is_in_the_summary_of_torchrun() -> None:
    with torchrun(*FAILING, "raise_or_reduce") as run:
        assert run.wait() == 1, run.output
        printed, _, summary = run.output.partition("tests.torchrun.failing FAILED")
    assert "LookupError: the cause" in printed
    assert "LookupError: the cause" in summary


def test_an_error_without_parallel_prints_its_traceback() -> None:
    with torchrun(*FAILING, "raise_or_compute", "plain") as run:
        assert run.wait() == 1, run.output
        assert "[rank1]: LookupError: the cause" in run.output


def test_the_workers_exit_with_torchrun() -> None:
    with torchrun(*FAILING, "reduce_or_compute") as run:
        wait_for(run, "all ranks have started", times=2)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() != 0
        assert run.workers() == []


@pytest.mark.timeout(235)
def test_the_workers_end_if_torchrun_is_killed() -> None:
    """Rank 0, which waits, raises an error; rank 1 sleeps, and is ended."""
    with torchrun(*FAILING, "reduce_or_compute") as run:
        wait_for(run, "all ranks have started", times=2, seconds=150)
        run.process.kill()
        deadline = time.monotonic() + 75
        while run.workers():
            assert time.monotonic() < deadline, run.output
            time.sleep(0.1)
        assert re.search(
            r"RankFailedError: torchrun \(process \d+\), which had started rank [01], was killed", run.output
        )
        assert "rank 1 exits: torchrun has ended 30 s ago" in run.output


def wait_for(run: Launched, text: str, times: int, seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while run.output.count(text) < times:
        assert run.process.poll() is None, run.output
        assert time.monotonic() < deadline, run.output
        time.sleep(0.05)
