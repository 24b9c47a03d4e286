"""Read titled code blocks of a page, for test suites that run in other environments."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent

from tests.limits import HANG

ROOT = Path(__file__).resolve().parents[2]


def titled(page: str, title: str) -> str:
    """Return the blocks of a page of ``docs/`` with this title, joined.

    Raises:
        ValueError: the page has no such block.
    """
    text = (ROOT / "docs" / page).read_text("utf-8")
    blocks = re.findall(rf'^( *)```python title="{re.escape(title)}"\n(.*?)^\1```$', text, re.MULTILINE | re.DOTALL)
    if not blocks:
        raise ValueError(f"{page} has no block with the title {title!r}")
    return "\n".join(dedent(code) for _, code in blocks)


def run(launch: Sequence[str], script: Path, code: str) -> None:
    """Write a script and run it with a launcher; the exit code must be 0."""
    script.write_text(code, "utf-8")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [*launch, str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=HANG,
    )
    assert done.returncode == 0, done.stdout.decode(errors="replace")[-6000:]
