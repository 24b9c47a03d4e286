"""The compared trainings: the bare loop and the example's trainer give the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import networks as benchmark
from tests.benchmarks.test_scripts import SPREAD, result_of, run

SMALL = ("--batch_size", "4", "--size", "16", "--iterations", "3", "--repetitions", "1")
CPU = torch.device("cpu")


@pytest.mark.parametrize("options", [(), pytest.param(("--no_amp", "--compile", "aot_eager"), marks=pytest.mark.jobs)])
def test_both_give_the_same_weights(options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "HORIZON", 30)  # short enough for the schedule and the average to have an effect
    networks: list[Any] = []
    make = benchmark.make_network
    monkeypatch.setattr(benchmark, "make_network", lambda *given: networks.append(make(*given)) or networks[-1])
    config = benchmark.parse([*SMALL, *options])
    ready = benchmark.make_ready(config, CPU)
    assert len(ready) == benchmark.READY
    contenders = [benchmark.bare(config, ready, CPU), benchmark.engine("camshaft", config, ready, CPU, ahead=False)]
    before = [one.clone() for one in networks[0].parameters()]
    for contender in contenders:
        assert contender.run(6) > 0
        assert contender.run(3) > 0
    torch.testing.assert_close(dict(networks[0].state_dict()), dict(networks[1].state_dict()))
    assert not all(torch.equal(*pair) for pair in zip(before, networks[0].parameters(), strict=True))


@pytest.mark.jobs
def test_it_measures_both_trainings(tmp_path: Path) -> None:
    result = result_of(run("networks.py", *SMALL, folder=tmp_path))
    assert result["benchmark"] == "networks"
    assert {"bare loop", "camshaft"} <= result["per_second"].keys()
    assert result["times"].keys() == result["verdicts"].keys() == result["per_second"].keys() - {"bare loop"}
    assert all(set(one) == SPREAD for one in (*result["per_second"].values(), *result["times"].values()))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [("--repetitions", "0"), ("--iterations", "0"), ("--batch_size", "0")])
def test_invalid_options_are_refused(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        benchmark.main(arguments)
    assert arguments[0] in capsys.readouterr().err
