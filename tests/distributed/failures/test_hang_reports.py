"""Reports of hangs: what the ranks do that others wait for, also among a thousand ranks."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from camshaft.distributed.failures import hang_reports
from tests.distributed.failures.stand_in import sent, snapshot, waiting

RUN = {"line": "train.py:9 in main", "number": 1, "epoch": 1, "iteration": 3, "event": "ITERATION_COMPLETED"}
OTHER_RUN = {**RUN, "line": "train.py:5 in evaluate"}
BEGUN = {"begun": {"0": 4}, "at_most": {}}


@pytest.mark.parametrize(
    ("status", "text", "is_alarm"),
    [
        (None, "rank 1 has not reported: it never arrived, or its node cannot be reached", True),
        ({**BEGUN, "stack": ["a.py:1 in f"]}, "rank 1 is at a.py:1 in f\n    a.py:1 in f", True),
        ({**BEGUN, "engines": [RUN]}, "rank 1 is busy, in epoch 1, iteration 3 of the run at train.py:9 in main", True),
        ({**BEGUN, "idle_for": 8.0, "stack": ["a.py:1 in f"]}, "at a.py:1 in f and has not used the CPU for 8 s", True),
        ({**BEGUN, "doing": "is compiling"}, "rank 1 is compiling", False),
        ({**BEGUN, "doing": "is waiting for the workers of its data loader"}, "rank 1 is waiting for the work", True),
        ({**BEGUN, "inside": ["save, which is for rank 1 only", "a.py:3"]}, "rank 1 is in save, which is for ", False),
        ({**BEGUN, "engines": [RUN, OTHER_RUN], "stack": ["a.py:1 in f"]}, "rank 1 is evaluating at a.py:1 in", False),
        ({**BEGUN, "engines": [RUN, OTHER_RUN], "idle_for": 30.0}, "evaluating, in .* not used the CPU for 30 s", True),
        ({**BEGUN, "time": 80.0}, "rank 1 has not run any Python for 20 s: its process is stopped, or", True),
        ({"left": "has left the run", **sent(("0", 4, "barrier"))}, "rank 1 has left the run", True),
        ({**waiting("0", 5, "barrier", "0-1")}, "which all ranks of the group have begun: .*CAMSHAFT_DEBUG=1", True),
    ],
)
def test_the_report_of_a_hang_says_what_the_missing_rank_does(status: Any, text: str, is_alarm: bool) -> None:
    ranks = {0: snapshot(0, **waiting("0", 5, "barrier", "0-1", "b.py:2 in g", engines=[RUN]))}
    if status is not None:
        ranks[1] = snapshot(1, **status)
    report = hang_reports.hang_report(ranks, 0, 100.0)
    assert report is not None
    assert report.text.startswith("rank 0 has been waiting for 10 s in barrier at b.py:2 in g, ")
    assert re.search(text, report.text), report.text
    assert report.is_alarm == is_alarm


def test_the_report_of_a_hang_follows_the_ranks_that_wait_themselves() -> None:
    ranks = {
        0: snapshot(0, 3, **waiting("0", 5, "barrier", "0-2")),
        1: snapshot(1, 3, **{**waiting("1", 2, "all_reduce", "1-2", "c.py:4"), "begun": {"0": 4, "1": 2}}),
        2: snapshot(2, 3, begun={"0": 4, "1": 1}, stack=["a.py:1 in f"]),
    }
    report = hang_reports.hang_report(ranks, 0, 100.0)
    assert report is not None
    assert report.missing == [1, 2]
    assert "rank 1 waits for rank 2 in all_reduce at c.py:4" in report.text
    assert "rank 2 is at a.py:1 in f" in report.text


def test_a_rank_that_does_not_wait_has_no_report() -> None:
    for ranks in ({0: snapshot(0, **BEGUN)}, {}):
        assert hang_reports.hang_report(ranks, 0, 100.0) is None


def test_the_report_on_1024_ranks_in_two_calls_takes_little_time_and_space() -> None:
    ranks = {
        rank: snapshot(
            rank,
            1024,
            stack=[f"x.py:{line} in f" for line in range(30)],
            **{**waiting(str(rank % 2), 5, "barrier", "0-1023"), "begun": {str(rank % 2): 5, str(1 - rank % 2): 4}},
        )
        for rank in range(1024)
    }
    before = time.process_time()
    report = hang_reports.hang_report(ranks, 0, 100.0)
    assert time.process_time() - before < 1.0
    assert report is not None
    assert len(report.missing) == 512
    assert len(report.text.splitlines()) < 400
