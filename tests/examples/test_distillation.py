"""A student learns more from its teacher than from few labels."""

from __future__ import annotations

import pytest
import sklearn  # noqa: F401  # sets environment variables when it is first imported

from examples import distillation


@pytest.mark.jobs
def test_the_distilled_student_is_better_than_the_one_that_learns_alone(capsys: pytest.CaptureFixture[str]) -> None:
    accuracy = distillation.training(distillation.parse(["--steps", "200"]))
    assert accuracy["alone"] + 0.03 < accuracy["distilled"] <= accuracy["teacher"] + 0.03
    assert accuracy["teacher"] > 0.9
    assert "student, distilled: 2,922 weights, accuracy" in capsys.readouterr().out
