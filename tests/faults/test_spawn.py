"""Whatever happens to a rank of `spawn`, all processes end, and the error names the rank and its line."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.jobs import FAULTS, Case
from tests.faults.matrix import Matrix

pytestmark = pytest.mark.jobs
# rank 0 is the one that hosts the store under other launchers
CASES = [
    case
    for is_debug, rank in ((False, 1), (True, 1), (False, 0))
    for fault in FAULTS.values()
    if "spawn" in fault.launchers and (case := Case(fault, "spawn", is_debug, rank)).is_reported
]


@pytest.fixture(scope="module")
def matrix(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    with Matrix(request, tmp_path_factory.mktemp("faults")) as matrix:
        yield matrix


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_ranks_end_and_the_cause_is_named(matrix: Matrix, case: Case) -> None:
    outcome = matrix.outcome(case)
    assert not outcome.problems(), outcome.report()
