"""A failing worker ends the others and its error is printed; workers exit with torchrun."""

from __future__ import annotations

import re
import signal

import pytest

from tests.limits import wait_until
from tests.torchrun.launching import Launched, torchrun

pytestmark = pytest.mark.jobs
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


def test_the_workers_end_if_torchrun_is_killed() -> None:
    """Rank 0, which waits, raises an error; rank 1 sleeps, and is ended."""
    with torchrun(*FAILING, "reduce_or_compute") as run:
        wait_for(run, "all ranks have started", times=2)
        run.process.kill()
        wait_until(lambda: not run.workers(), lambda: run.output)
        assert re.search(
            r"RankFailedError: torchrun \(process \d+\), which had started rank [01], was killed", run.output
        )
        assert "rank 1 exits: torchrun has ended 5 s ago" in run.output


def wait_for(run: Launched, text: str, times: int) -> None:
    def has_come() -> bool:
        assert run.process.poll() is None, run.output
        return run.output.count(text) >= times

    wait_until(has_come, lambda: run.output)
