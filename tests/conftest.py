"""What holds for every test: it leaves no trace (see guards.py)."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.guards import GUARDS

settings.register_profile("camshaft", deadline=None)  # nothing here depends on how fast a machine is
settings.load_profile("camshaft")

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else torch starts processes that outlive a test

# they have environments of their own (make test-xla, test-horovod, test-loggers, test-docs)
collect_ignore = [
    name
    for name, module in (("xla", "torch_xla"), ("horovod", "horovod"), ("loggers", "mlflow"), ("docs", "mkdocs"))
    if not importlib.util.find_spec(module)
]
if not torch.cuda.is_available():
    collect_ignore.append("gpu")
# they make hosts of their own, which takes root, and Slurm is no package of Python: make test-hosts, make test-slurm
APART = tuple(Path(__file__).parent / name for name in ("hosts", "slurm"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Look for tests in test files only; doctests would have every Python file here imported."""
    if collection_path in APART and not any(
        Path(name).resolve().is_relative_to(collection_path) for name in config.args
    ):
        return True
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
