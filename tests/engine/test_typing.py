"""A type checker finds wrong uses of the engine and of the distributed layer, and accepts the right ones."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest
from mypy import api

ROOT = Path(__file__).parents[2]
CHECKED = {"expected_errors.py": 40, "expected_distributed_errors.py": 10}  # and at least so many errors
MARK = re.compile(r"# error: ([a-z, -]+)$")
REPORT = re.compile(r":(\d+): error: .*\[([a-z-]+)\]$")

SETTINGS = """
[mypy]
python_version = 3.10
strict = true
explicit_package_bases = true
enable_error_code = ignore-without-code
[mypy-torch.*]
follow_imports = skip
"""
"""Strict as for the package; torch itself, which is large, plays no part here."""


@pytest.fixture(params=CHECKED)
def checked(request):
    return ROOT / "tests" / "typing" / request.param


@pytest.fixture
def report(checked, tmp_path, monkeypatch):
    """What mypy says about the file."""
    settings = tmp_path / "mypy.ini"
    settings.write_text(SETTINGS)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("MYPY_CONFIG_FILE_DIR", str(tmp_path))  # mypy sets it too, and leaves it
    threshold = gc.get_threshold()
    cache = ROOT / ".mypy_cache" / "expected_errors"
    text, failure, _ = api.run(["--config-file", str(settings), "--cache-dir", str(cache), str(checked)])
    gc.set_threshold(*threshold)  # mypy changes it
    assert failure == ""
    return [line for line in text.splitlines() if line.startswith(str(checked.relative_to(ROOT)))]


def test_a_type_checker_finds_the_marked_errors_and_no_others(checked, report):
    lines = checked.read_text("utf-8").splitlines()
    marks = ((number, MARK.search(line)) for number, line in enumerate(lines, start=1))
    marked = {(number, code) for number, mark in marks if mark for code in mark[1].split(", ")}
    found = {(int(match[1]), match[2]) for match in map(REPORT.search, report) if match}
    missing = [f"{number}: [{code}] {lines[number - 1]}" for number, code in sorted(marked - found)]
    surprising = [f"{number}: [{code}] {lines[number - 1]}" for number, code in sorted(found - marked)]
    assert (missing, surprising) == ([], [])
    assert len(found) > CHECKED[checked.name]
