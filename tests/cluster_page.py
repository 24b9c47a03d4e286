"""The files shown in docs/how-to/clusters.md."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "how-to" / "clusters.md"


def write(folder: Path, *names: str) -> None:
    """Write files shown on the page to a folder."""
    for name in names:
        (folder / name).write_text(text(name))


def text(name: str) -> str:
    """Return the content of a file shown on the page."""
    (found,) = re.findall(rf'^```\w+ title="{name}"\n(.*?)^```$', PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return str(found)
