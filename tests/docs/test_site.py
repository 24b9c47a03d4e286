"""The site is built strictly without the network, has no dead link, and works in a browser of a phone's width."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest

from tests.docs.browser import Report, look_at
from tests.test_public_names import PUBLIC

ROOT = Path(__file__).resolve().parent.parent.parent
# mkdocs, in a process that cannot reach the network
BUILD = """
import sys

def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo"):
        raise RuntimeError(f"the build asks the network: {event} {arguments}")

sys.addaudithook(refuse)
from mkdocs.__main__ import cli
cli(["build", "--strict", "--site-dir", sys.argv[1]])
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-c", BUILD, str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    build = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert build.returncode == 0, build.stdout + build.stderr
    return folder


@pytest.fixture(scope="module")
def report(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    return look_at(site, tmp_path_factory.mktemp("browser"), search="Checkpoint", width=375)


class Page(HTMLParser):
    """The anchors of a page, and where its links and pictures point."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.anchors: list[str] = []
        self.targets: list[str] = []
        self.feed(file.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.append(value)
            elif name in ("href", "src") and value:
                self.targets.append(value)


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {file: Page(file) for file in sorted(site.rglob("*.html"))}


def test_no_link_is_dead(site: Path, pages: dict[Path, Page]) -> None:
    dead = []
    for file, page in pages.items():
        for target in page.targets:
            address, anchor = urldefrag(target)
            if urlsplit(address).scheme or address.startswith("//") or file.name == "404.html":
                continue
            found = (file.parent / unquote(address)).resolve() if address else file
            found = found / "index.html" if found.is_dir() else found
            if not found.is_file() or (anchor and found in pages and unquote(anchor) not in pages[found].anchors):
                dead.append(f"{file.relative_to(site)}: {target}")
    assert dead == []


def test_every_public_name_is_described_once(pages: dict[Path, Page]) -> None:
    anchors = [anchor for page in pages.values() for anchor in set(page.anchors) if anchor.startswith("camshaft.")]
    described = Counter(found for anchor in anchors if (found := find(*anchor.rpartition("."))))
    times = {
        f"{module}.{name}": described[find(module, ".", name)]  # by whatever module it is described
        for module, names in PUBLIC.items()
        for name in names
    }
    assert {name: count for name, count in times.items() if count != 1} == {}


def find(module: str, dot: str, name: str) -> tuple[str, int] | None:
    """Resolve a name of our modules; None for methods and attributes, which no module has."""
    try:
        return name, id(getattr(importlib.import_module(module), name))
    except ModuleNotFoundError:
        return None


def test_the_start_page_shows(report: Report) -> None:
    assert report["title"] == "camshaft"
    assert report["pictures"] != []
    assert all(width > 100 for width in report["pictures"])


def test_the_search_finds_what_is_typed(report: Report) -> None:
    assert any("how-to/checkpoints/" in address for address in report["found"])
    assert any("api/checkpoint/" in address for address in report["found"])


def test_no_page_is_wider_than_a_phone(report: Report, pages: dict[Path, Page]) -> None:
    assert len(report["widths"]) == len(pages)
    assert {page: width for page, width in report["widths"].items() if width > 375} == {}


def test_no_request_leaves_the_machine(report: Report) -> None:
    assert report["refused"] == []
