"""Check that every test cleans up after itself (see guards.py)."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.guards import GUARDS

# results do not depend on the speed of the machine; the suite runs often, with other examples each time
settings.register_profile("camshaft", deadline=None, max_examples=50)
settings.load_profile("camshaft")

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # otherwise, torch starts processes that outlive a test
# torch asks the name server for the name of each peer that it connects to; a lost answer takes 1 s then, not 5
os.environ.setdefault("RES_OPTIONS", "timeout:1")

# these have their own environments (make test-xla, test-horovod, test-loggers, test-clients, test-ray, test-docs)
NEEDED = {
    "xla": "torch_xla",
    "horovod": "horovod",
    "loggers": "mlflow",
    "clients": "monai",
    "ray": "ray",
    "docs": "mkdocs",
}
collect_ignore = [folder for folder, module in NEEDED.items() if not importlib.util.find_spec(module)]
# these need root to create hosts, a system package for Slurm, and GPUs: make test-hosts, make test-slurm, make test-gpu
SEPARATE = tuple(Path(__file__).parent / name for name in ("hosts", "slurm", "gpu"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collect test files only; otherwise, doctests would import every Python file in this folder."""
    if collection_path in SEPARATE and not any(
        Path(name).resolve().is_relative_to(collection_path) for name in config.args
    ):
        return True
    return True if collection_path.suffix == ".py" and not collection_path.name.startswith("test_") else None


signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs that a shell starts in the background ignore it
gc.disable()  # until the tests have been collected


def pytest_collection_finish() -> None:
    """Let garbage collections skip what was imported: each would visit a million objects."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def leaves_no_trace() -> Iterator[None]:
    watching = [guard() for guard in GUARDS]
    for guard in watching:
        next(guard)
    yield
    messages = [message for guard in reversed(watching) if (message := next(guard))]
    if messages:
        pytest.fail("the test did not clean up: " + "; ".join(messages), pytrace=False)
