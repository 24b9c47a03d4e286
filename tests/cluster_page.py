"""The files that the page on clusters has its readers write."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "how-to" / "clusters.md"


def write(folder: Path, *names: str) -> None:
    """Write files of the page into a folder."""
    for name in names:
        (folder / name).write_text(text(name))


def text(name: str) -> str:
    """Return what the page has in a file."""
    (found,) = re.findall(rf'^```\w+ title="{name}"\n(.*?)^```$', PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return str(found)
