"""The example finds a learning rate that works, and shows that loading takes the time."""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib
import pytest
import sklearn  # noqa: F401  # sets environment variables when it is first imported

from examples import profile_and_tune


@pytest.mark.jobs
def test_it_suggests_a_rate_that_works_and_saves_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    matplotlib.use("agg")
    config = profile_and_tune.parse(["--epochs", "2", "--output", str(tmp_path)])
    assert profile_and_tune.training(config) > 0.4  # 0.1 by chance
    shown = capsys.readouterr().out
    assert 1e-4 < float(re.findall(r"learning rate ([\d.]+)", shown)[0]) < 1
    assert "Dataflow" in shown
    for name in ("learning_rate.png", "time.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
