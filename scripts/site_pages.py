"""Finish the pages of the site (hooks of mkdocs.yml): link names of the API, and make wide tables and headings fit.

`EarlyStopping`, `Checkpoint.resume_latest`, `idist.device()`, and `Events.COMPLETED(every=2)` become links. A lowercase
word on its own, such as `device` or `send`, is usually an argument or another library's, and does not.

A table of three or more columns with code and text does not fit on a phone, where its cells are stacked (site.css):
each cell gets the heading of its column as a label. The path in a heading of the API may wrap after its dots.

The table of contents leaves out methods that many classes have, such as `state_dict`.
"""

from __future__ import annotations

import re
from itertools import cycle
from pathlib import Path
from typing import Any

DOCUMENTED = re.compile(r"^::: (\S+)$", re.MULTILINE)
# what is skipped: blocks of code, links, headings, and names of arguments
PART = re.compile(
    r"<(pre|a|h[1-6]|autoref)\b.*?</\1>|<b><code>.*?</code></b>"
    r"|<code>(?P<prefix>(?:idist\.|camshaft\.(?:\w+\.)*)?)(?P<name>\w+)(?:\.(?P<member>\w+))?(?P<call>\([^<]*\))?</code>",
    re.DOTALL,
)
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
CELL = re.compile(r"<t([hd])([^>]*)>(.*?)</t\1>", re.DOTALL)
TAG = re.compile(r"<[^>]+>")
PATH = re.compile(r"(?<=doc-object-name )([^>]*>)([\w.]+)")
COMMON = ("__call__", "load_state_dict", "state_dict")  # methods that are not listed in a table of contents
identifiers: dict[str, str] = {}


def on_config(config: Any) -> None:
    pages = [file.read_text("utf-8") for file in sorted((Path(config.docs_dir) / "api").glob("*.md"))]
    documented = [path for page in pages for path in DOCUMENTED.findall(page)]
    names = [path.rpartition(".")[2] for path in documented]
    identifiers.update((name, path) for name, path in zip(names, documented, strict=True) if names.count(name) == 1)


def on_page_content(html: str, **arguments: Any) -> str:
    html = PATH.sub(lambda name: name[1] + name[2].replace(".", ".<wbr>"), html)
    return PART.sub(link, TABLE.sub(labelled, html))


def on_page_context(context: dict[str, Any], page: Any, **arguments: Any) -> None:
    def prune(entries: list[Any]) -> None:
        entries[:] = [one for one in entries if one.id.rpartition(".")[2] not in COMMON]
        for one in entries:
            prune(one.children)

    prune(page.toc.items)


def labelled(table: re.Match[str]) -> str:
    head, end, body = table[0].partition("</thead>")
    headings, cells = ([TAG.sub("", cell[3]) for cell in CELL.finditer(part)] for part in (head, body))
    has_text = any(len(cell) > 12 for number, cell in enumerate(cells) if number % len(headings))
    if len(headings) < 3 or "<code>" not in body or not has_text:  # numbers are to be compared
        return table[0]
    columns = cycle(headings)
    return head + end + CELL.sub(lambda cell: f'<td{cell[2]} data-label="{next(columns)}">{cell[3]}</td>', body)


def link(part: re.Match[str]) -> str:
    identifier = identifiers.get(part["name"] or "")
    if identifier is None or not identifier.startswith(part["prefix"].replace("idist", "camshaft.distributed")):
        return part[0]
    is_word = part["name"].islower() and "_" not in part["name"]
    if is_word and not part["prefix"] and (not part["call"] or part["member"]):
        return part[0]
    if (member := part["member"]) and not member.isupper():  # a constant, such as an event, is part of its class
        identifier = identifiers.get(member, f"{identifier}.{member}")  # `Checkpoint.resume` is a function of its own
    return f'<autoref optional identifier="{identifier}">{part[0]}</autoref>'
