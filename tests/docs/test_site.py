"""The site builds in strict mode without the network, has no dead links, and works on a phone."""

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

from camshaft.engine import Engine
from tests.docs.browser import Report, visit
from tests.test_public_names import PUBLIC

pytestmark = pytest.mark.xdist_group("site")
ROOT = Path(__file__).resolve().parent.parent.parent
# mkdocs, in a process that cannot reach the network
BUILD = """
import sys

def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo"):
        raise RuntimeError(f"the build used the network: {event} {arguments}")

sys.addaudithook(refuse)
from mkdocs.__main__ import cli
cli(["build", "--strict", "--quiet", "--site-dir", sys.argv[1]])
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-c", BUILD, str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    build = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert build.returncode == 0, build.stdout + build.stderr
    assert build.stdout + build.stderr == ""
    return folder


@pytest.fixture(scope="module")
def report(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    return visit(
        site,
        tmp_path_factory.mktemp("browser"),
        searches=["Checkpoint", "patience"],
        filtered=("/reference/pytorch-ignite/index.html", "terminate epoch"),
        widths=[375, 1300],
    )


class Page(HTMLParser):
    """Collect the anchors of a page, the targets of its links and pictures, and the code in its text without a link."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.anchors: list[str] = []
        self.targets: list[str] = []
        self.unlinked: list[str] = []
        self.inside: list[str] = []  # which of these elements
        self.feed(file.read_text("utf-8"))

    def handle_endtag(self, tag: str) -> None:
        if self.inside[-1:] == [tag]:
            self.inside.pop()

    def handle_data(self, data: str) -> None:
        if self.inside == ["code"]:
            self.unlinked.append(data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("a", "b", "code", "h1", "h2", "h3", "h4", "pre"):  # `b`: the names of arguments
            self.inside.append(tag)
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.append(value)
            elif name in ("href", "src") and value:
                self.targets.append(value)


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {file: Page(file) for file in sorted(site.rglob("*.html"))}


def test_there_are_no_dead_links(site: Path, pages: dict[Path, Page]) -> None:
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


def test_every_public_name_is_documented_once(pages: dict[Path, Page]) -> None:
    anchors = [anchor for page in pages.values() for anchor in set(page.anchors) if anchor.startswith("camshaft.")]
    described = Counter(found for anchor in anchors if (found := find(*anchor.rpartition("."))))
    times = {
        f"{module}.{name}": described[find(module, ".", name)]  # whichever module it is documented under
        for module, names in PUBLIC.items()
        for name in names
    }
    assert {name: count for name, count in times.items() if count != 1} == {}


def test_names_in_the_text_link_to_the_api(site: Path, pages: dict[Path, Page]) -> None:
    modules = Counter(name for names in PUBLIC.values() for name in set(names))
    shared = {"OptimizerParamsHandler", "OutputHandler"}  # by several loggers
    plain = {name for name in modules if not name.islower() or "_" in name} - shared
    unlinked = {
        f"{file.relative_to(site)}: {name}"
        for file, page in pages.items()
        for name in plain.intersection(page.unlinked)
        if not name.endswith(("HistHandler", "ScalarHandler"))  # by several loggers, too
    }
    assert unlinked == set()


def test_every_method_of_an_engine_is_documented(site: Path, pages: dict[Path, Page]) -> None:
    members = {name for name, value in vars(Engine).items() if callable(value) or isinstance(value, property)}
    expected = {f"camshaft.engine.Engine.{name}" for name in members if not name.startswith("_")}
    assert expected - set(pages[site / "api" / "engine" / "index.html"].anchors) == set()


def test_no_module_is_documented_in_place_of_a_function_of_its_name(site: Path) -> None:
    pages = [file.read_text("utf-8") for file in site.glob("api/*/index.html")]
    assert pages != []
    assert not any('class="doc doc-object doc-module"' in page for page in pages)


def find(module: str, dot: str, name: str) -> tuple[str, int] | None:
    """Resolve a name in a module of camshaft; return None for methods and attributes."""
    try:
        return name, id(getattr(importlib.import_module(module), name))
    except ModuleNotFoundError:
        return None


def test_the_start_page_has_a_title_and_pictures(report: Report) -> None:
    assert report["title"] == "camshaft"
    assert report["pictures"] != []
    assert all(width > 100 for width in report["pictures"])


def test_the_terminal_is_text_on_a_phone(report: Report) -> None:
    assert report["terminals"] == [[False, True], [True, False]]  # whether the picture and the text are visible


def test_the_search_finds_pages(report: Report) -> None:
    checkpoint, patience = report["found"]
    assert any("how-to/checkpoints/" in address for address in checkpoint)
    assert any("api/checkpoint/" in address for address in checkpoint)
    assert any("#camshaft.handlers.EarlyStopping" in address for address in patience)


def test_the_tables_of_the_migration_guide_can_be_filtered(report: Report) -> None:
    assert 0 < len(report["rows"]) < 20
    assert all("terminate" in row.lower() and "epoch" in row.lower() for row in report["rows"])


def test_no_page_scrolls_sideways_on_a_phone_or_a_screen(report: Report, pages: dict[Path, Page]) -> None:
    assert report["widths"].keys() == {"375", "1300"}
    for width, seen in report["widths"].items():
        assert len(seen) == len(pages)
        assert {page: needed for page, needed in seen.items() if needed > int(width)} == {}


def test_no_code_is_wider_than_a_screen(report: Report) -> None:
    longest = [(page, max(code.splitlines(), key=len)) for page, code in report["cut"]]
    assert not longest


def test_no_table_is_wider_than_a_screen(report: Report) -> None:
    assert [(page, " ".join(table.split())[:80]) for page, table in report["wide"]] == []


def test_no_request_leaves_the_machine(report: Report) -> None:
    assert report["refused"] == []
