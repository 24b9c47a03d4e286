"""Contenders take turns fairly, and people and programs can read the output."""

from __future__ import annotations

import gc
import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.measuring import Contender, Spread, importable, interleave, over, report, table, verdict


def recorder(name: str, runs: list[tuple[str, int]], share: float = 1.0) -> Contender:
    def run(iterations: int) -> float:
        runs.append((name, iterations))
        return 6.0

    return Contender(name, run, share)


def test_the_order_of_contenders_changes_and_is_the_same_on_each_rank() -> None:
    def orders() -> list[str]:
        runs: list[tuple[str, int]] = []
        interleave([recorder(name, runs) for name in "abc"], iterations=2, repetitions=29)
        order = "".join(name for name, _ in runs)
        return [order[start : start + 3] for start in range(0, 90, 3)]

    assert {"".join(sorted(order)) for order in orders()} == {"abc"}
    assert len(set(orders())) == 6
    assert orders() == orders()


def test_the_warm_up_is_not_measured() -> None:
    runs: list[tuple[str, int]] = []
    seconds = interleave([recorder(name, runs) for name in "ab"], iterations=2, repetitions=5)
    assert Counter(name for name, _ in runs) == {"a": 6, "b": 6}
    assert seconds == {"a": [3.0] * 5, "b": [3.0] * 5}


@pytest.mark.parametrize(("share", "made"), [(1.0, 100), (0.1, 10), (0.0001, 1)])
def test_a_slow_contender_runs_and_is_divided_by_its_share(share: float, made: int) -> None:
    runs: list[tuple[str, int]] = []
    assert recorder("slow", runs, share).per_iteration(100) == 6.0 / made
    assert runs == [("slow", made)]


def test_garbage_collection_is_restored_when_a_contender_fails() -> None:
    frozen = gc.get_freeze_count()
    with pytest.raises(ZeroDivisionError):
        interleave([Contender("broken", lambda iterations: 1 / 0)], iterations=1, repetitions=1)
    assert gc.get_freeze_count() == frozen


def test_a_slow_round_cancels_out() -> None:
    assert over([1.0, 5.0, 2.0], [4.0, 8.0, 5.0]) == [3.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("sample", "expected"),
    [([2.0], Spread(2.0, 2.0, 2.0)), ([5.0, 1.0, 2.0, 4.0, 3.0], Spread(2.0, 3.0, 4.0))],
)
def test_a_spread_is_the_median_and_the_quartiles(sample: list[float], expected: Spread) -> None:
    assert Spread.of(sample) == expected
    assert Spread.of([value / 1000 for value in sample], unit=1e-3) == expected


@pytest.mark.parametrize(
    ("spread", "shown"),
    [
        (Spread(0.012, 0.178, 0.2), "0.18 (0.01 to 0.20)"),
        (Spread(-1.0, -0.68, 12.345), "-0.68 (-1.00 to 12.35)"),
        (Spread(52.0, 52.46, 52.5), "52.5 (52.0 to 52.5)"),
        (Spread(138.4, 147.1, 174.8), "147 (138 to 175)"),
        (Spread(1150.0, 1278.7, 1315.0), "1279 (1150 to 1315)"),
    ],
)
def test_a_spread_has_three_significant_digits(spread: Spread, shown: str) -> None:
    assert str(spread) == shown


@pytest.mark.parametrize(("median", "expected"), [(0.29, "reached"), (0.3, "reached"), (0.31, "missed")])
def test_a_target_includes_its_bound(median: float, expected: str) -> None:
    assert verdict(Spread(0.0, median, 1.0), target=0.3) == expected


def test_peers_that_cannot_be_imported_are_listed_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_library.py").write_text("import no_such_need\n")
    (tmp_path / "half_removed").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    peers = {
        "here": "json",
        "absent": "no_such_library.part",
        "broken": "broken_library",
        "incomplete": "half_removed.part",
    }
    present, skipped = importable(peers)
    assert present == ["here"]
    assert skipped == {
        "absent": "not installed",
        "broken": "broken: ModuleNotFoundError: No module named 'no_such_need'",
        "incomplete": "broken: ModuleNotFoundError: No module named 'half_removed.part'",
    }


def test_a_table_is_markdown_with_even_columns() -> None:
    assert table(["a", "bb"], [["ccc", ""]]) == "| a   | bb |\n| --- | -- |\n| ccc |    |"


def test_a_report_ends_with_json_and_lists_skipped_peers(capsys: pytest.CaptureFixture[str]) -> None:
    report("speed", ["what"], [["all"]], {"lightning": "not installed"}, us={"camshaft": Spread(1.0, 2.0, 3.0)})
    *lines, last = capsys.readouterr().out.splitlines()
    assert "skipped: lightning (not installed)" in lines
    result = json.loads(last)
    assert result["us"]["camshaft"] == {"low": 1.0, "median": 2.0, "high": 3.0}
    assert result["skipped"] == {"lightning": "not installed"}
    assert set(result["machine"]) == {"date", "processor", "cores", "python", "torch"}
