"""What can be checked about the pages without running them: they are short, and their pictures small."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
PICTURES = sorted((ROOT / "docs" / "images").iterdir())
GUIDES = ("how-to", "migrating", "tutorials")
MOST_LINES = 110  # of the README
MOST_WORDS = 1200  # of a guide with its code, or of the text of a tutorial; what is longer belongs in a reference page
LARGEST = 60_000  # bytes of a picture


def words(page: Path) -> int:
    """Count the words that a reader sees: without comments, and in tutorials without code."""
    text = re.sub(r"<!--.*?-->", "", page.read_text("utf-8"), flags=re.S)
    if page.parent.name == "tutorials":
        text = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.S | re.M)
    return len(text.split())


def test_the_readme_is_short() -> None:
    assert len(README.read_text("utf-8").splitlines()) <= MOST_LINES


def test_guides_are_short() -> None:
    counts = {page.name: words(page) for page in PAGES if page.parent.name in GUIDES}
    assert counts
    assert {name: count for name, count in counts.items() if count > MOST_WORDS} == {}


def test_pictures_are_small() -> None:
    assert PICTURES
    assert [picture.name for picture in PICTURES if picture.stat().st_size > LARGEST] == []


def test_comments_stand_above_their_line() -> None:
    after_bracket = re.compile(r"^ *[])}]+[:,]?  # (?!fmt: )", re.MULTILINE)  # where the formatter leaves them
    found = [page for page in (README, *PAGES) if after_bracket.search(page.read_text("utf-8"))]
    assert [str(page.relative_to(ROOT)) for page in found] == []
