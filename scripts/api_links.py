"""Link the names of the API in the text of every page to where they are documented (a hook of mkdocs.yml).

`EarlyStopping`, `Checkpoint.resume_latest`, `idist.device()`, and `Events.COMPLETED(every=2)` become links. A lowercase
word on its own, such as `device` or `send`, is usually an argument or another library's, and does not.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCUMENTED = re.compile(r"^::: (\S+)$", re.MULTILINE)
# what is skipped: blocks of code, links, headings, and names of arguments
PART = re.compile(
    r"<(pre|a|h[1-6]|autoref)\b.*?</\1>|<b><code>.*?</code></b>"
    r"|<code>(?P<prefix>(?:idist\.|camshaft\.(?:\w+\.)*)?)(?P<name>\w+)(?:\.(?P<member>\w+))?(?P<call>\([^<]*\))?</code>",
    re.DOTALL,
)
identifiers: dict[str, str] = {}


def on_config(config: Any) -> None:
    pages = [file.read_text("utf-8") for file in sorted((Path(config.docs_dir) / "api").glob("*.md"))]
    documented = [path for page in pages for path in DOCUMENTED.findall(page)]
    names = [path.rpartition(".")[2] for path in documented]
    identifiers.update((name, path) for name, path in zip(names, documented, strict=True) if names.count(name) == 1)


def on_page_content(html: str, **arguments: Any) -> str:
    return PART.sub(link, html)


def link(part: re.Match[str]) -> str:
    identifier = identifiers.get(part["name"] or "")
    if identifier is None:
        return part[0]
    is_word = part["name"].islower() and "_" not in part["name"]
    if is_word and not part["prefix"] and (not part["call"] or part["member"]):
        return part[0]
    if (member := part["member"]) and not member.isupper():  # a constant, such as an event, is part of its class
        identifier = identifiers.get(member, f"{identifier}.{member}")  # `Checkpoint.resume` is a function of its own
    return f'<autoref optional identifier="{identifier}">{part[0]}</autoref>'
