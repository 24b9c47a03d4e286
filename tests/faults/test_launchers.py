"""The same under real torchrun and mpirun, for faults that the launcher could hide or fail to end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.jobs import FAULTS, Case
from tests.faults.matrix import Matrix

pytestmark = pytest.mark.jobs
NAMES = {
    "torchrun": ("step", "exit-0", "SIGKILL", "order", "terminate", "swallowed"),
    # it kills the other ranks of one that was killed
    "mpirun": (
        *("step", "exit-0", "alone"),
        *("uneven", "skipped-step", "terminate", "swallowed"),
    ),
}
CASES = [Case(FAULTS[name], launcher) for launcher, names in NAMES.items() for name in names]


@pytest.fixture(scope="module")
def matrix(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    with Matrix(request, tmp_path_factory.mktemp("faults"), at_once=2) as matrix:
        yield matrix


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_ranks_end_and_the_cause_is_named(matrix: Matrix, case: Case) -> None:
    outcome = matrix.outcome(case)
    assert not outcome.problems(), outcome.report()
