"""The list of examples has all of them, with commands that exist, and pictures that are there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
LONGEST = {"imagenet.py": 200, "resnet.py": 180, "hang.py": 165}  # lines; the others may have 150


def rows() -> dict[str, tuple[str, str]]:
    """Return what is seen and the command, by file."""
    found = re.findall(
        r"^\| \[(\S+)\]\(\1\): .* \| (.*) \| (`.*`) \|$", (EXAMPLES / "README.md").read_text("utf-8"), re.M
    )
    return {name: (seen, command) for name, seen, command in found}


def test_every_example_is_listed_with_a_line_or_a_picture_and_its_command() -> None:
    files = {file.name for file in EXAMPLES.iterdir() if file.suffix in (".py", ".ipynb")}
    assert rows().keys() == files | {"native"}
    for name, (seen, command) in rows().items():
        assert "`" in seen or "<img" in seen, name
        path = next(word for word in shlex.split(command.strip("`")) if word.startswith("examples/"))
        assert (EXAMPLES.parent / path).is_file()
        assert path.startswith(f"examples/{name}")


def test_the_pictures_exist_and_are_small() -> None:
    pictures = [EXAMPLES / path for seen, _ in rows().values() for path in re.findall(r'src="(.*?)"', seen)]
    assert set(pictures) == set((EXAMPLES / "images").iterdir())
    assert all(picture.stat().st_size < 20_000 for picture in pictures)


def test_examples_are_short() -> None:
    lengths = {file.name: len(file.read_text("utf-8").splitlines()) for file in EXAMPLES.glob("*.py")}
    assert {name: length for name, length in lengths.items() if length > LONGEST.get(name, 150)} == {}


def test_scripts_start_with_a_docstring_that_shows_their_command() -> None:
    docstrings = {file.name: file.read_text("utf-8").split('"""')[1] for file in EXAMPLES.glob("*.py")}
    assert [name for name, docstring in docstrings.items() if f"examples/{name}" not in docstring] == []
