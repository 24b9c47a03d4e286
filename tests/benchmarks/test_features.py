"""The comparison of features is right about camshaft and detects bad results of any library."""

from __future__ import annotations

import json

import pytest

from benchmarks import features
from benchmarks.features import Outcome
from benchmarks.libraries import SAMPLES, WEIGHTS
from tests.limits import HANG

ORDER = list(range(SAMPLES))
BEFORE = Outcome([ORDER[:4], ORDER[4:8]])


@pytest.mark.jobs
def test_the_table_is_right_about_camshaft(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(features, "HANGING", HANG)  # the ranks of camshaft end by themselves
    features.main(["--libraries", "camshaft"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["benchmark"] == "features"
    seen = {row["what"]: row["seen"]["camshaft"] for row in result["rows"]}
    barrier = seen.pop("a barrier in code for rank 0 only")
    assert barrier.startswith("raises RankDivergenceError after ")
    assert {"gloo", "nccl", "mpi", "horovod", "xla-tpu"} <= set(seen.pop("backends by name").split(", "))
    assert seen == {
        "7 samples evaluated on 2 ranks": "each once",
        "resume after a stop in the middle of an epoch": "resumes with the next sample",
        "the same, from 1 rank to 2": "resumes with the next sample",
        "a flipped bit in the newest checkpoint": "warns, and loads the previous checkpoint",
    }


@pytest.mark.parametrize(
    ("samples", "expected"),
    [([2, 0, 1], "each once"), ([0, 1, 1], "1 never, 1 once, 1 twice"), ([0, 1, 2, 2, 2], "2 once, 1 3 times")],
)
def test_samples_are_counted(samples: list[int], expected: str) -> None:
    assert features.times_seen(samples, 3) == expected


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ([Outcome([ORDER[8:]])], "resumes with the next sample"),
        ([Outcome([ORDER[8::2]]), Outcome([ORDER[9::2]])], "resumes with the next sample"),
        ([Outcome([ORDER[:4]])], "restarts the epoch (16 never, 4 once, 4 twice)"),
        ([Outcome([[0, 1]]), Outcome([[2, 3]])], "restarts the epoch (16 never, 4 once, 4 twice)"),
        ([Outcome([ORDER[9:]])], "another order (1 never, 23 once)"),
        ([Outcome([ORDER[8:]]), Outcome(error="ValueError", seconds=0.04)], "raises ValueError after 0.0 s"),
        ([Outcome(waits=True)], "hangs (10 s and more)"),
    ],
)
def test_a_resumed_run_is_judged_by_its_samples(after: list[Outcome], expected: str) -> None:
    assert features.resumed_by(BEFORE, after) == expected


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (Outcome([1.0] * WEIGHTS, warned=True), "warns, and loads the previous checkpoint"),
        (Outcome([2.0] * (WEIGHTS - 1) + [3.0]), "loads a wrong weight"),
        (Outcome([0.1] * WEIGHTS), "loads neither"),
        (Outcome(error="RuntimeError"), "raises RuntimeError"),
    ],
)
def test_a_loaded_checkpoint_is_judged_by_its_weights(rank: Outcome, expected: str) -> None:
    assert features.loaded_by(rank) == expected


def test_unknown_libraries_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        features.main(["--libraries", "nothing"])
    assert "nothing" in capsys.readouterr().err
