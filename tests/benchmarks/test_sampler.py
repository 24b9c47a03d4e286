"""Samplers do the same work, each rank reads its shard of an epoch, and the verdicts are right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import sampler
from benchmarks.measuring import Spread


@pytest.mark.parametrize("name", sampler.CONTENDERS)
def test_each_contender_reads_the_shard_of_one_rank(name: str) -> None:
    make, ranks = sampler.CONTENDERS[name]
    length = 64 * 8 * 50
    epochs = make(length, ranks)
    first, second = list(epochs(0)), list(epochs(1))
    assert len(set(first)) == len(first) == length // ranks
    assert max(first) < length
    assert first != second


@pytest.mark.jobs
def test_all_figures_are_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sampler, "memory_of", lambda name, length: 0.5)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(sampler, "LONGEST_READ", 1000)
    few = {what: (lambda: range(70), make) for what, (_, make) in sampler.LOADED.items()}
    monkeypatch.setattr(sampler, "LOADED", few)
    sampler.main(["--lengths", "1000", "100000000", "--repetitions", "1"])
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    figures = ["first index, ms", "memory, MB", "million indices per s"]
    orders, loaders = result["rows"][: 2 * len(figures)], result["rows"][2 * len(figures) :]
    assert [(row["length"], row["what"]) for row in orders] == [
        (length, what) for length in (1000, 10**8) for what in figures
    ]
    assert [row["what"] for row in loaders] == [f"{what}: thousand samples per s" for what in sampler.LOADED]
    for row in loaders:
        assert set(row["figures"]) == {"torch", "camshaft"}
        assert row["verdict"] == ("reached" if row["ratio"]["median"] >= sampler.LOADED_OF_PEER else "missed")
    ours = {name for name in sampler.CONTENDERS if name.startswith("camshaft")}
    for row in orders:
        assert set(row["figures"]) == (ours if row["length"] == 10**8 else set(sampler.CONTENDERS))
    assert "skipped: torch's samplers at 1e08 (--peers-up-to is 1e07)" in printed


@pytest.mark.jobs
def test_memory_is_measured_in_a_process_of_its_own() -> None:
    command = [sys.executable, str(Path(sampler.__file__)), "--memory-of", "camshaft", "--lengths", "1000"]
    assert float(subprocess.run(command, check=True, capture_output=True, text=True).stdout) >= 0


@pytest.mark.parametrize(
    ("what", "length", "ours", "expected"),
    [
        ("first index, ms", 10**8, [1.0, 5.0, 2.0], "reached"),
        ("first index, ms", 10**12, [1.0, 2.0, 5.1], "missed"),
        ("memory, MB", 10**8, [5.1, 1.0, 1.0], "missed"),
        ("memory, MB", 10**6, [5.1, 1.0, 1.0], ""),
        ("million indices per s", 10**6, [5.0, 10.0, 10.0], "reached"),
        ("million indices per s", 10**6, [4.9, 10.0, 10.0], "missed"),
        ("million indices per s", 10**6, [5.0, 10.0, 9.9], "missed"),
        ("million indices per s", 10**8, [0.1, 0.1, 0.1], ""),
    ],
)
def test_figures_are_compared_with_the_targets(what: str, length: int, ours: list[float], expected: str) -> None:
    names = ["camshaft", "camshaft, 1 of 2", "camshaft, 1 of 8"]
    medians = dict(zip(names, ours, strict=True)) | {name: 10.0 for name in sampler.CONTENDERS if name not in names}
    spreads = {name: Spread(0.0, median, 100.0) for name, median in medians.items()}
    if what in sampler.CEILINGS:
        spreads = {name: spread for name, spread in spreads.items() if name in names}
    assert sampler.judge(what, length, spreads)[1] == expected


@pytest.mark.parametrize("what", sampler.LOADED)
def test_the_loaders_load_the_same_samples(what: str) -> None:
    make_data, make_ours = sampler.LOADED[what]
    data = torch.utils.data.Subset(make_data(), range(130))
    batches = list(make_ours(data))
    assert [len(batch[0] if isinstance(batch, list) else batch) for batch in batches] == [64, 33, 33]


@pytest.mark.parametrize("arguments", [("--lengths", "0"), ("--repetitions", "0")])
def test_invalid_options_are_refused(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        sampler.main(arguments)
    assert arguments[0] in capsys.readouterr().err
