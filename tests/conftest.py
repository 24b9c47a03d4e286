"""What holds for every test: it leaves no trace (see guards.py)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.guards import GUARDS

# torch_xla has an environment of its own (make test-xla)
collect_ignore = [] if importlib.util.find_spec("torch_xla") else ["xla"]


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Look for tests in test files only; doctests would have every Python file here imported."""
    return True if collection_path.suffix == ".py" and not collection_path.name.startswith("test_") else None


@pytest.fixture(autouse=True)
def leaves_no_trace() -> Iterator[None]:
    watching = [guard() for guard in GUARDS]
    for guard in watching:
        next(guard)
    yield
    complaints = [complaint for guard in reversed(watching) if (complaint := next(guard))]
    if complaints:
        pytest.fail("the test leaves something behind: " + "; ".join(complaints), pytrace=False)
