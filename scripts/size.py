#!/usr/bin/env python3
"""Print the size of the package per folder: files, lines, lines of code, and lines of imports.

    python scripts/size.py            folders of camshaft/
    python scripts/size.py tests      folders of another tree
    python scripts/size.py --files    every file

Lines of code are lines with a token of a statement, excluding blank lines, comments, and docstrings.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def measure(source: str) -> Counter[str]:
    """Count the lines of one file."""
    tree = ast.parse(source)
    docstrings, imports = set[int](), set[int]()
    for node in ast.walk(tree):
        lines = range(getattr(node, "lineno", 1), (getattr(node, "end_lineno", None) or 0) + 1)
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.update(lines)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(lines)
    code = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    return Counter(files=1, lines=len(source.splitlines()), code=len(code - docstrings), imports=len(imports))


def main(*arguments: str) -> None:
    by_file = "--files" in arguments
    folders = [argument for argument in arguments if argument != "--files"] or ["camshaft"]
    sizes: dict[str, Counter[str]] = {}
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        place = path if by_file else path.parent
        sizes.setdefault(str(place.relative_to(ROOT)), Counter()).update(measure(path.read_text("utf-8")))
    sizes["total"] = sum(sizes.values(), Counter())
    width = max(map(len, sizes))
    print(f"{'':{width}} {'files':>6} {'lines':>7} {'code':>7} {'imports':>8}")
    for name, size in sizes.items():
        print(f"{name:{width}} {size['files']:6} {size['lines']:7} {size['code']:7} {size['imports']:8}")


if __name__ == "__main__":
    main(*sys.argv[1:])
