"""Run the cases of a test file in another process, several at once, while its tests wait for one after the other."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults.jobs import Case, Outcome

ROOT = Path(__file__).resolve().parents[2]


class Matrix:
    """Run the selected cases within the ``with`` block.

    Args:
        request: of a fixture of the module, whose tests have a parameter named ``case``.
        folder: for the outcomes.
        at_once: how many jobs run at once.
    """

    def __init__(self, request: pytest.FixtureRequest, folder: Path, at_once: int = 6) -> None:
        items = [item for item in request.session.items if item.path == request.path]
        cases = [item.callspec.params["case"] for item in items]  # type: ignore[attr-defined]
        self._folder = folder
        self._command = [sys.executable, "-m", "tests.faults", "--at_once", str(at_once), "--output", str(folder)]
        for case in cases:
            self._command += ["--case", str(case)]

    def __enter__(self) -> Matrix:
        self._file = (self._folder / "log").open("w")
        self._process = subprocess.Popen(self._command, cwd=ROOT, stdout=self._file, stderr=subprocess.STDOUT)
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._file.close()

    def outcome(self, case: Case) -> Outcome:
        """Wait for a case and return its outcome."""
        path = self._folder / f"{case}.pickle"
        while not path.exists():
            assert self._process.poll() in (None, 0), (self._folder / "log").read_text()
            time.sleep(0.05)
        outcome: Outcome = pickle.loads(path.read_bytes())
        return outcome
