"""Signals to torchrun, or to one of its workers, save on all ranks, and nothing is lost."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.torchrun.launching import Launched, free_port, lines, torchrun
from tests.torchrun.preempted import check_samples
from tests.torchrun.test_restarts import FOR_GROWTH, elastic, wait_until

PROGRAM = ("-m", "tests.torchrun.preempted")


def of(what: str, *runs: Launched) -> list[dict[str, Any]]:
    return [line for line in lines(*(run.output for run in runs)) if line["what"] == what]


def preempt_again_and_again(folder: Path, signals: int, seed: int) -> None:
    choose = random.Random(seed)
    ends: list[dict[str, Any]] = []
    for number in range(signals):
        with torchrun("--standalone", "--nproc-per-node=2", *PROGRAM, str(folder)) as run:
            wait_until(lambda run=run: len(of("begin", run)) == 2, run)
            time.sleep(choose.uniform(0, 2))
            if number % 3 == 2:
                os.kill(of("begin", run)[number % 2]["pid"], signal.SIGUSR1)  # not its data loader
                assert run.wait() == 0, run.output
            else:
                run.process.send_signal(signal.SIGTERM)
                assert run.wait() != 0, run.output
            ended = of("end", run)
            expected = signal.SIGUSR1 if number % 3 == 2 else signal.SIGTERM
            assert [line["signal"] for line in ended] == [expected] * 2, run.output
            assert (folder / f"trainer_{ended[0]['last']}.pt").exists(), run.output
            ends += ended
    check_samples(ends)
    assert len({line["last"] for line in ends}) == signals


@pytest.mark.jobs
def test_signals_to_torchrun_and_to_a_worker(tmp_path: Path) -> None:
    preempt_again_and_again(tmp_path, 3, seed=0)


@pytest.mark.restarts
def test_twenty_signals_at_random_moments(tmp_path: Path) -> None:
    preempt_again_and_again(tmp_path, 20, seed=1)


@pytest.mark.restarts
def test_an_elastic_job_loses_nothing_when_a_node_joins_and_leaves(tmp_path: Path) -> None:
    node = ("--nproc-per-node=1", *PROGRAM, str(tmp_path), "75")
    common = elastic("1:2", 3, tmp_path, free_port())

    def worlds(*runs: Launched) -> list[int]:
        return [line["world_size"] for line in sorted(of("begin", *runs), key=lambda line: line["first"])]

    with torchrun(*common, *node, **FOR_GROWTH) as stays:
        wait_until(lambda: worlds(stays) == [1], stays)
        with torchrun(*common, *node, **FOR_GROWTH) as comes:
            wait_until(lambda: worlds(stays) == [1, 2], stays, comes)
            comes.process.send_signal(signal.SIGTERM)
            assert comes.wait() != 0
            ends = of("end", comes)
        wait_until(lambda: worlds(stays) == [1, 2, 1], stays)
        (tmp_path / "stop").touch()
        assert stays.wait() == 0, stays.output
        ends += of("end", stays)
    check_samples(ends)
    assert sorted(line["world_size"] for line in ends) == [1, 1, 2, 2]
    assert [line["signal"] for line in sorted(ends, key=lambda line: line["last"])] == [signal.SIGTERM] * 3 + [None]
