"""Run the code of a page of Markdown, block by block, in one process.

    python tests/docs/pages.py docs/how-to/events.md FOLDER

A block with a title is appended to that file in the folder. Other blocks depend on their language: `python` runs in
one namespace per page, `sh` runs with `bash -e`, `yaml` and `toml` are parsed, and `console`, `text` and `diff` are
ignored. Blocks in a comment run, too: they check what the page shows. Line numbers in tracebacks are those of the page.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from markdown_it import MarkdownIt

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent.parent
SHOWN = ("console", "text", "diff")
TRIES_OF_TORCH_ALONE = 10


@dataclass
class Block:
    language: str
    title: str | None
    line: int  # of the first line of code on the page, counted from 1
    code: str


class PageError(Exception):
    """An error on the page, with its line."""


def run(page: Path) -> None:
    """Run the blocks in order in the working directory; raise if one fails."""
    sys.modules["__main__"] = script = types.ModuleType("__main__")  # where pickle looks for the page's functions
    ways: dict[str, Callable[[Block], object]] = {
        "python": lambda block: run_python(page, block, script.__dict__),
        "sh": lambda block: run_shell(page, block),
        "yaml": lambda block: list(yaml.safe_load_all(block.code)),
        "toml": lambda block: tomllib.loads(block.code),
        **dict.fromkeys(SHOWN, lambda block: None),
    }
    for block in blocks(page.read_text("utf-8")):
        print(f"--- {shown(page)}:{block.line} {block.language} {block.title or ''}".rstrip(), flush=True)
        try:
            if block.title:
                write(Path(block.title), block.code)
            elif block.language in ways:
                ways[block.language](block)
            else:
                raise PageError(f"a block must be one of {', '.join(ways)} or have a title, not {block.language!r}")
        except (Exception, SystemExit) as error:
            line = line_of(error, page) or block.line
            raise PageError(f"{shown(page)}:{line}: {type(error).__name__}: {error}") from error


def blocks(text: str, line: int = 1) -> Iterator[Block]:
    """Yield the fenced blocks, including those indented inside a note or a tab."""
    for token in MarkdownIt().parse(text):
        start = line + token.map[0] if token.map else 0
        if token.type == "fence":
            language, *options = shlex.split(token.info) or [""]
            titles = [option.removeprefix("title=") for option in options if option.startswith("title=")]
            yield Block(language, titles[0] if titles else None, start + 1, token.content)
        elif token.type == "code_block":
            yield from blocks(token.content, start)
        elif token.type == "html_block" and token.content.startswith("<!--"):
            yield from blocks(token.content.removeprefix("<!--").replace("-->", ""), start)
        elif token.type == "inline" and "```" in token.content:
            raise PageError(f"line {start}: a block of code must follow an empty line")


def write(file: Path, code: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    before = file.read_text("utf-8") + "\n" if file.exists() else ""
    file.write_text(before + code, "utf-8")


def run_python(page: Path, block: Block, namespace: dict[str, object]) -> None:
    exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), namespace)


def run_shell(page: Path, block: Block) -> None:
    """Run a script, padded with empty lines so that the shell reports the line numbers of the page."""
    report = """trap 'echo "$0:$LINENO: exit code $?" >&2' ERR"""
    tries = 1
    if is_torch_alone(block):
        tries = TRIES_OF_TORCH_ALONE
        report += (
            """; trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT"""  # agents wait for minutes for one that failed
        )
    script = report + "\n" * (block.line - 1) + block.code
    for _ in range(tries):
        code = subprocess.run(["bash", "-e", "-c", script, shown(page)]).returncode
        if not code:
            return
    raise PageError(f"exit code {code}")


def is_torch_alone(block: Block) -> bool:
    """Return whether the scripts that a block runs do not use camshaft.

    Their processes may abort when Python shuts down, after all work is done (docs/reference/distributed.md, "How a
    process exits"): gloo's threads cause this in a few percent of runs.
    """
    scripts = [Path(name) for name in re.findall(r"[\w/]+\.py\b", block.code)]
    return bool(scripts) and all(one.is_file() and "camshaft" not in one.read_text("utf-8") for one in scripts)


def line_of(error: BaseException, page: Path) -> int | None:
    """Return the innermost line of the page in the traceback."""
    if isinstance(error, SyntaxError) and error.filename == str(page):
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno for frame in reversed(frames) if frame.filename == str(page)), None)


def shown(page: Path) -> str:
    return str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else str(page)


def main(page: str, folder: str) -> None:
    path = Path(page).resolve()
    os.chdir(folder)
    sys.path[0] = os.getcwd()
    warnings.filterwarnings("error", module=r"__main__$|camshaft(\.|$)")
    try:
        run(path)
    except PageError as error:
        if error.__cause__ and not isinstance(error.__cause__, PageError):
            traceback.print_exception(error.__cause__)
        sys.exit(str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
