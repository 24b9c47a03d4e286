"""Visit a site in a headless browser.

The site is served on loopback, together with a page whose script opens the others in a frame, types a search,
measures widths, and posts a report. The browser may load nothing from other hosts and reports what it blocked.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.limits import HANG

POLICY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; report-uri /refused"
BROWSER = [
    "chromium",
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--window-size=1400,1000",
]
SCRIPT = """<!doctype html><body><script>
const wait = milliseconds => new Promise(done => setTimeout(done, milliseconds));
const frame = document.body.appendChild(document.createElement("iframe"));
const content = () => frame.contentDocument;
const STILL = "<style>* { transition: none !important }</style>";  // a menu on its way would widen the page

function open(page, width) {
    frame.style = `width: ${width}px; height: 800px; border: 0`;
    const loaded = new Promise(done => frame.addEventListener("load", done, {once: true}));
    frame.src = page;
    return loaded;
}

async function search(words) {
    const field = content().querySelector("[data-md-component=search-query]");
    const links = () => [...content().querySelectorAll("[data-md-component=search-result] a")].map(link => link.href);
    const before = String(links());
    for (;;) {
        field.value = words;
        ["focus", "input", "keyup"].forEach(name => field.dispatchEvent(new Event(name, {bubbles: true})));
        await wait(500);
        if (links().length && String(links()) !== before) return links();
    }
}

async function filter({page, words}) {
    await open(page, 1300);
    const field = content().querySelector(".filter");
    field.value = words;
    field.dispatchEvent(new Event("input"));
    return [...content().querySelectorAll("tbody tr")].filter(row => row.offsetHeight).map(row => row.textContent);
}

async function visit({pages, searches, filtered, widths}) {
    const seen = {widths: {}, cut: [], wide: [], found: []};
    for (const width of widths) seen.widths[width] = {};
    for (const page of pages) {
        await open(page, widths[0]);
        content().head.append(content().createRange().createContextualFragment(STILL));
        for (const width of widths) {
            frame.style.width = `${width}px`;
            seen.widths[width][page] = content().scrollingElement.scrollWidth;
        }
        const wider = selector =>  // at the last, largest width
            [...content().querySelectorAll(selector)].filter(part => part.scrollWidth > part.clientWidth);
        for (const code of wider("pre > code")) seen.cut.push([page, code.textContent]);
        for (const table of wider(".md-typeset__scrollwrap")) seen.wide.push([page, table.textContent]);
    }
    seen.terminals = [];
    for (const width of widths) {
        await open("/index.html", width);
        const parts = [content().querySelector("article img"), content().querySelector("article .language-text")];
        seen.terminals.push(parts.map(part => part.offsetHeight > 0));
    }
    await open("/index.html", 1200);
    seen.title = content().querySelector("article h1").firstChild.textContent;
    seen.pictures = [...content().querySelectorAll("article img")].map(picture => picture.naturalWidth);
    for (const words of searches) seen.found.push(await search(words));
    seen.rows = await filter(filtered);
    return seen;
}

fetch("/task").then(answer => answer.json()).then(visit).catch(error => ({error: String(error)}))
    .then(seen => fetch("/seen", {method: "POST", body: JSON.stringify(seen)}));
</script>"""

Report = dict[str, Any]


class Handler(SimpleHTTPRequestHandler):
    """Serve the site, the script and its task, and receive the browser's reports."""

    def __init__(self, *arguments: Any, task: Report, posts: queue.Queue[tuple[str, Any]], **more: Any) -> None:
        self.own = {"/script": SCRIPT, "/task": json.dumps(task)}
        self.posts = posts
        super().__init__(*arguments, **more)

    def do_GET(self) -> None:
        if self.path in self.own:
            self.answer(self.own[self.path])
        else:
            super().do_GET()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer("")
        self.posts.put((self.path, json.loads(body)))

    def answer(self, text: str) -> None:
        body = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def end_headers(self) -> None:
        self.send_header("Content-Security-Policy", POLICY)
        super().end_headers()

    def log_message(self, *arguments: Any) -> None:
        pass


def visit(site: Path, scratch: Path, *, searches: list[str], filtered: tuple[str, str], widths: list[int]) -> Report:
    """Open all pages of a site at these widths, type searches and a filter, and return the browser's report.

    Args:
        site: its folder.
        scratch: a folder for the browser.
        searches: typed on the start page.
        filtered: a page, and what is typed in the field that filters the rows of its tables.
        widths: in pixels.
    """
    pages = [f"/{file.relative_to(site)}" for file in sorted(site.rglob("*.html"))]
    posts: queue.Queue[tuple[str, Any]] = queue.Queue()
    page, words = filtered
    task = {"pages": pages, "searches": searches, "filtered": {"page": page, "words": words}, "widths": widths}
    refused = []
    with (
        served(partial(Handler, task=task, posts=posts, directory=str(site))) as address,
        running([*BROWSER, f"--user-data-dir={scratch}", f"{address}/script"], scratch / "browser.log"),
    ):
        while (post := posts.get(timeout=HANG))[0] != "/seen":
            refused.append(post[1])
    report: Report = post[1] | {"refused": refused}
    assert "error" not in report, report
    return report


@contextmanager
def served(handler: Any) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def running(command: list[str], log: Path) -> Iterator[None]:
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        try:
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
