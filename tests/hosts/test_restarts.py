"""The benchmark of restarts finds the step that follows a fault, and starts what docs/how-to/clusters.md recommends."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from benchmarks import restarts
from tests import cluster_page
from tests.benchmarks.test_scripts import SPREAD, result_of, run


def test_a_node_is_lost_and_the_other_one_goes_on(tmp_path: Path) -> None:
    name = "torchrun, elastic, tuned"
    options = ("--repetitions", "1", "--faults", "lost node")
    result = result_of(run("restarts.py", *options, "--only", name, "Ray", folder=tmp_path))
    assert set(result["skipped"]) == (set() if find_spec("ray") else {"Ray"})
    row = next(row for row in result["rows"] if row["what"] == name)
    assert set(row["lost node"]) == set(row["start-up"]) == SPREAD
    assert 0 < row["start-up"]["median"] < row["lost node"]["median"]
    assert list(tmp_path.iterdir()) == []


def test_the_page_recommends_what_is_measured() -> None:
    page = cluster_page.PAGE.read_text()
    assert f"--rdzv-conf {restarts.TUNED}" in page
    assert "net.ipv4.tcp_retries2=5" in page
