"""Each benchmark runs with tiny numbers and prints the documented JSON as its last line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import engine_overhead, handlers, sharded

ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = pytest.mark.jobs
SPREAD = {"low", "median", "high"}


def run(script: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a benchmark as a user would, from any directory."""
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def result_of(finished: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert finished.returncode == 0, finished.stderr
    *shown, last = finished.stdout.splitlines()
    assert "target" not in "".join(shown), "a table has figures; a target is in the JSON"
    result: dict[str, Any] = json.loads(last)
    assert set(result["machine"]) == {"date", "processor", "cores", "python", "torch"}
    for peer, reason in result["skipped"].items():
        assert f"skipped: {peer} ({reason})" in finished.stdout
    return result


def test_engine_overhead_measures_all_rows(tmp_path: Path) -> None:
    result = result_of(run("engine_overhead.py", "--repetitions", "1", "--iterations", "20", folder=tmp_path))
    assert result["benchmark"] == "engine_overhead"
    assert [row["row"] for row in result["rows"]] == [1, 2, 3, 4]
    assert [row["target"] for row in result["rows"]] == [0.2, 0.5, 0.25, 3.0]
    peers = {"pytorch-ignite", "lightning", "accelerate"} - set(result["skipped"])
    for row in result["rows"]:
        able = peers if row["row"] == 4 else peers & {"pytorch-ignite"}
        assert set(row["us"]) == {"bare loop", "camshaft", *able}
        assert row["verdict"] in ("reached", "missed")
        assert all(set(spread) == SPREAD for spread in row["us"].values())
        assert row["us"]["bare loop"]["median"] > 0
    assert list(tmp_path.iterdir()) == []


def test_watching_measures_all_rows(tmp_path: Path) -> None:
    few = ("--iterations", "3", "--rounds", "3", "--ranks", "8", "64", "--processes", "2")
    result = result_of(run("watching.py", *few, folder=tmp_path))
    assert result["benchmark"] == "watching"
    share, iteration = (row for row in result["rows"] if row["what"].startswith("watcher: "))
    assert 0 <= share["minimum"] <= share["percent"]["high"] < 100
    assert share["percent"]["high"] > 0  # in some round, the watcher has looked
    assert set(iteration["on"]) == set(iteration["off"]) == SPREAD
    requests = [row for row in result["rows"] if row["what"].startswith("requests to the store: ")]
    assert [(row["nodes"], row["requests_per_second"]) for row in requests] == [(1, 8.0), (8, 64.0)]
    assert [row["computed"]["polling handlers"] for row in requests] == [480, 3840]
    assert list(tmp_path.iterdir()) == []


def test_collectives_measures_all_rows(tmp_path: Path) -> None:
    result = result_of(run("collectives.py", "--repetitions", "1", "--iterations", "3", folder=tmp_path))
    assert result["benchmark"] == "collectives"
    peers = {"pytorch-ignite"} - set(result["skipped"])
    for row in result["rows"]:
        alone = row["what"] == "get_rank, in one process"
        assert ({"camshaft"} if alone else {"camshaft", "bare call"}) <= set(row["us"])
        assert set(row["us"]) <= {"bare call", "camshaft", "torch's own", *peers}
        assert row["verdict"] in ("reached", "missed")
        assert row["target"] == (1.1 if "times" in row else 0.3)
        assert all(set(spread) == SPREAD for spread in row["us"].values())
    assert len(result["rows"]) == 15
    assert list(tmp_path.iterdir()) == []


def test_launching_measures_steps_and_starts(tmp_path: Path) -> None:
    few = ("--repetitions", "1", "--iterations", "2", "--starting", "1")
    result = result_of(run("launching.py", *few, folder=tmp_path))
    assert result["benchmark"] == "launching"
    assert [set(row["ms"]) - {"Parallel"} for row in result["rows"]] == [{"torchrun"}, *[{"torch's spawn"}] * 2]
    assert [row["target"] for row in result["rows"]] == [1.1, 0.4, 0.1]
    for row in result["rows"]:
        assert row["verdict"] in ("reached", "missed")
        assert all(set(spread) == SPREAD and spread["median"] > 0 for spread in (*row["ms"].values(), row["times"]))
    assert list(tmp_path.iterdir()) == []


def test_handlers_measures_the_set_and_each_handler(tmp_path: Path) -> None:
    result = result_of(run("handlers.py", "--repetitions", "1", "--iterations", "20", folder=tmp_path))
    assert result["benchmark"] == "handlers"
    [row] = result["rows"]
    peers = {"pytorch-ignite"} - set(result["skipped"])
    assert set(row["us"]) == {"bare loop", "camshaft", *peers}
    assert (row["row"], row["target"]) == (5, 12.0)
    assert row["verdict"] in ("reached", "missed")
    assert [one["what"] for one in result["handlers"]] == list(handlers.ALONE)
    assert all("camshaft" in one["us"] and set(one["us"]) <= {"camshaft", *peers} for one in result["handlers"])
    assert all(set(spread) == SPREAD for one in (row, *result["handlers"]) for spread in one["us"].values())
    assert list(tmp_path.iterdir()) == []


def test_checkpoint_measures_both_modes(tmp_path: Path) -> None:
    options = ("--repetitions", "1", "--sizes", "0.001", "0.002", "--folder", str(tmp_path))
    result = result_of(run("checkpoint.py", *options, folder=tmp_path))
    assert result["benchmark"] == "checkpoint"
    peers = {"pytorch-ignite", "lightning"} - set(result["skipped"])
    for row, size in zip(result["rows"], (0.001, 0.002), strict=True):
        assert row["gigabytes"] == size
        assert set(row["seconds"]) == {"torch.save and fsync", "camshaft", "camshaft, asynchronous", *peers}
        assert all(set(spread) == SPREAD for spread in (*row["seconds"].values(), *row["times"].values()))
        assert len(row["verdicts"]) == 2
    assert list(tmp_path.iterdir()) == []


def test_sharded_measures_saves_and_steps_of_each_layout(tmp_path: Path) -> None:
    few = ("--repetitions", "2", "--iterations", "1", "--blocks", "2", "--width", "32", "--batch_size", "2")
    result = result_of(run("sharded.py", "--ranks", "4", *few, "--folder", str(tmp_path), folder=tmp_path))
    assert (result["benchmark"], result["ranks"]) == ("sharded", 4)
    rows = {(row["what"], row["other"]): row for row in result["rows"]}
    absent = {other for library, other in sharded.PEERS.items() if library in result["skipped"]}
    saves = {key: target for key, target in sharded.SAVES.items() if key[1] not in absent}
    names = ("ddp", "fsdp", "tp", "hsdp", "fsdp+tp")
    steps = [(f"step, {name}{clip}", "torch") for name in names for clip in ("", ", clipped gradients")]
    assert {key: row["target"] for key, row in rows.items()} == saves | dict.fromkeys(steps, 1.05)
    for row in rows.values():
        assert set(row["ms"]) == {"other", "camshaft"}
        assert all(set(spread) == SPREAD and spread["median"] > 0 for spread in (*row["ms"].values(), row["times"]))
        assert row["verdict"] in (("reached", "missed") if row["target"] else ("",))
    blocking, complete = (rows[what, sharded.TORCH_ASYNC]["ms"] for what in (sharded.BLOCKING, sharded.COMPLETE))
    for name in ("other", "camshaft"):
        assert blocking[name]["high"] <= complete[name]["high"]
    assert result["megabytes"] == 0.2
    assert list(tmp_path.iterdir()) == []


def rehearse(what: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run scripts/gpu.py on the CPU, as on a machine that has torch and pytest only."""
    absent = ("numpy", "hypothesis", "torchvision", "tqdm", "ignite", "lightning")
    script = f"import runpy, sys; sys.modules.update(dict.fromkeys({absent})); sys.argv = ['gpu.py', *sys.argv[1:]]; "
    script += f"runpy.run_path({str(ROOT / 'scripts' / 'gpu.py')!r}, run_name='__main__')"
    command = [sys.executable, "-c", script, what, "--device", "cpu"]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_the_tests_for_gpus_are_rehearsed_on_the_cpu(tmp_path: Path) -> None:
    finished = rehearse("test", tmp_path)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert " 14 passed, 2 skipped" in finished.stdout.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_the_benchmarks_for_gpus_are_rehearsed_on_the_cpu(tmp_path: Path) -> None:
    finished = rehearse("bench", tmp_path)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    result = json.loads(finished.stdout.splitlines()[-1])
    assert (result["benchmark"], result["device"]) == ("gpu", "cpu")
    networks = [one for one in result["results"] if one["benchmark"] == "networks"]
    assert [(one["unit"], one["options"]["compile"]) for one in networks] == [
        ("images", None), ("tokens", None), ("images", "eager"),
    ]  # fmt: skip
    assert all({"bare loop", "camshaft"} == one["per_second"].keys() for one in networks)
    assert [one["device"] for one in result["results"]] == ["cpu"] * 4  # which have no errors
    assert list(tmp_path.iterdir()) == []


def test_import_time_measures_profiles_and_finds_only_torch(tmp_path: Path) -> None:
    finished = run("import_time.py", "--repetitions", "1", "--profile", "3", folder=tmp_path)
    result = result_of(finished)
    assert result["benchmark"] == "import_time"
    assert {"torch", "camshaft"} <= set(result["ms"])
    assert all(set(spread) == SPREAD for spread in result["ms"].values())
    assert result["target"] == 40.0
    assert result["loaded"] == []
    assert "ms  camshaft" in finished.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments", [("--rows", "5"), ("--repetitions", "0"), ("--iterations", "0"), ("--rows", "1", "--what")]
)
def test_invalid_options_are_refused(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        engine_overhead.main(arguments)
    assert arguments[-2 if len(arguments) == 2 else -1] in capsys.readouterr().err


def test_compiled_measures_all_widths(tmp_path: Path) -> None:
    few = ("--iterations", "2", "--repetitions", "2", "--widths", "64", "8", "--backend", "eager")
    result = result_of(run("compiled.py", *few, folder=tmp_path))
    assert [(row["width"], row["target"]) for row in result["rows"]] == [(64, 0.65), (8, 1.0)]
    for row in result["rows"]:
        assert set(row["ms"]) == {"eager", "compiled", "compiled loop"}
        assert set(row["times_eager"]) == {"compiled", "compiled loop"}
        assert row["verdict"] in ("reached", "missed")
