"""The code of every page runs, in order and with the results that the page shows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests import guards
from tests.guards import link_target, outlasting
from tests.limits import HANG

ROOT = Path(__file__).resolve().parent.parent.parent
RUNNER = Path(__file__).with_name("pages.py")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def run_page(page: Path, folder: Path) -> str | None:
    """Run the code of a page; return None, or the output if it fails."""
    folder.mkdir()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "PYTHONWARNINGS": "error:::__main__",
        "MPLBACKEND": "Agg",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-u", str(RUNNER), str(page), str(folder)]
    with open(folder.with_suffix(".log"), "w+") as log:
        with subprocess.Popen(command, stdout=log, stderr=log, env=environment) as process:
            try:
                code = process.wait(timeout=HANG)
                left = outlasting(lambda: processes_in(folder))
                error = f"processes still run: {left}" if left else f"exit code {code}" if code else None
            except subprocess.TimeoutExpired:
                error = f"still running after {HANG:.0f} s"
            finally:
                while left := processes_in(folder):
                    end(left)
        log.seek(0)
        return error and f"{log.read()}\n{error}"


def processes_in(folder: Path) -> list[int]:
    """Return the processes whose working directory is the folder, including those in other sessions."""
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    return [pid for pid in pids if Path(link_target(f"/proc/{pid}/cwd")).is_relative_to(folder)]


def end(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_runs(page: Path, tmp_path: Path) -> None:
    if printed := run_page(page, tmp_path / "page"):
        pytest.fail(printed, pytrace=False)


def check(tmp_path: Path, text: str) -> str | None:
    page = tmp_path / "page.md"
    page.write_text(text, "utf-8")
    return run_page(page, tmp_path / "folder")


def test_blocks_run_in_order_and_share_names_and_a_folder(tmp_path: Path) -> None:
    page = """
```python title="part.py"
first = 1
```
```python
from part import first
```
```python title="part.py"
second = first + 1
```
=== "a tab"

    ```sh
    python -c "from part import second; print(second)" >printed
    ```

```console
$ false
```
```python
assert open("printed").read() == f"{first + 1}\\n"
```
"""
    assert check(tmp_path, page) is None


@pytest.mark.parametrize(
    ("block", "line", "error"),
    [
        ("```python\none = 1\none / 0\n```", 3, "ZeroDivisionError"),
        ("```python\none = 1\none +\n```", 3, "SyntaxError"),
        ("```python\nraise SystemExit(0)\n```", 2, "SystemExit"),
        ("```python\nimport warnings\nwarnings.warn('old')\n```", 3, "UserWarning: old"),
        ("```sh\ntrue\nfalse\ntrue\n```", 3, "exit code 1"),
        ("```yaml\n}\n```", 2, "ParserError"),
        ("```\nfirst = 1\n```", 2, "a block must be one of"),
    ],
)
def test_a_failing_block_is_reported_with_its_line(tmp_path: Path, block: str, line: int, error: str) -> None:
    printed = check(tmp_path, block)
    assert f"{tmp_path / 'page.md'}:{line}: " in str(printed)
    assert error in str(printed)


def test_a_process_that_outlives_its_page_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "GRACE", 1.0)
    assert "processes still run" in str(check(tmp_path, "```sh\nsetsid sleep 9000 &\n```"))
