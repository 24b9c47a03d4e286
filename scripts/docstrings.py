"""Convert docstrings to Markdown for the site (see mkdocs.yml), where `>>>` would start a quotation, not an example."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^( *)>>> (?:.+\n?)+", re.MULTILINE)  # up to an empty line
DIRECTIVE = re.compile(r" *# doctest: .*")
ROLE = re.compile(
    r":(?:attr|class|func|meth):`(?:~[\w.]+\.)?([^`<]+?)(?: <[^`>]+>)?`"
)  # also `~path.name`, `name <path>`


class Docstrings(griffe.Extension):  # type: ignore[misc]  # griffe is not installed in the environment of mypy
    def on_object(self, *, obj: griffe.Object, **arguments: Any) -> None:
        if obj.docstring:
            obj.docstring.value = ROLE.sub(r"`\1`", EXAMPLE.sub(fenced, obj.docstring.value))


def fenced(example: re.Match[str]) -> str:
    indent = example[1]
    return f"{indent}```pycon\n{DIRECTIVE.sub('', example[0]).rstrip()}\n{indent}```\n"
