"""Test that TensorBoard's page in a headless browser shows each point of a resumed run once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.limits import HANG
from tests.loggers.scripts import run_script

POINT = re.compile(r"[ML](-?[\d.]+),(-?[\d.]+)")

RUN = """
from camshaft.handlers import TensorboardLogger

def crash():
    raise SystemExit(0)

def run(attempt, start_at=None):
    with TensorboardLogger(log_dir="runs/first") as logger:
        trainer = by_iteration(logger, attempt)
        evaluator = Engine(lambda engine, batch: trainer.state.epoch / 10)
        step = global_step_from_engine(trainer, Events.ITERATION_COMPLETED)
        logger.attach_output_handler(evaluator, Events.COMPLETED, "validation", global_step_transform=step,
                                     output_transform=lambda output: {"accuracy": output})
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([0]))
        if start_at is None:
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=15), crash)
        else:
            trainer.load_state_dict({"iteration": start_at, "epoch_length": 4, "max_epochs": 5})
        trainer.run(range(4), max_epochs=5)

"""

pytestmark = pytest.mark.browser


@pytest.fixture
def server(tmp_path):
    """Start TensorBoard on a free port for a finished run."""
    run_script(tmp_path, f"{RUN}run(attempt=1)")
    run_script(tmp_path, f"{RUN}run(attempt=3, start_at=8)")
    log = tmp_path / "server.log"
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(tmp_path / "runs"), "--host", "127.0.0.1"]
    with open(log, "wb") as output:
        process = subprocess.Popen([*command, "--port", "0"], stdout=output, stderr=output, start_new_session=True)
    try:
        yield until(process, log, lambda: re.search(r"http://127\.0\.0\.1:\d+/", log.read_text()))[0]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(HANG)


def until(process, log, find):
    end = time.monotonic() + HANG
    while not (found := find()):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.2)
    return found


def page(address, profile):
    """Return the DOM of a page after its scripts have run; without WebGL, curves are drawn as paths."""
    command = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-3d-apis",
        "--disable-dev-shm-usage",
    ]
    options = [f"--user-data-dir={profile}", "--window-size=1400,1600", "--virtual-time-budget=30000", "--dump-dom"]
    with subprocess.Popen(
        [*command, *options, address],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as browser:
        try:
            return browser.communicate(timeout=HANG)[0]
        finally:
            if browser.poll() is None:
                os.killpg(browser.pid, signal.SIGKILL)


def curves(content):
    """Return the curves by the titles of their cards, each as the positions of its points."""
    found = {}
    for card in content.split("<scalar-card ")[1:]:
        title = re.search(r'title="([^"]+)"', card)[1]
        paths = [POINT.findall(path) for path in re.findall(r'<path[^>]* d="([ML\d.,-]+)"', card)]
        found[title] = [[(float(x), float(y)) for x, y in path] for path in paths if len(path) > 2]
    return found


def sizes(found):
    """Return the number of points of each card, if all its curves have as many."""
    return {title: len(paths[0]) for title, paths in found.items() if len({len(path) for path in paths}) == 1}


def test_the_page_shows_each_point_of_a_resumed_run_once(tmp_path, server):
    shown, end = {}, time.monotonic() + HANG
    points = {"training/loss": 10, "validation/accuracy": 5}
    while sizes(shown) != points and time.monotonic() < end:  # until the server has read the files
        shown = curves(page(f"{server}#timeseries", tmp_path / "profile"))
    assert sizes(shown) == points
    for title in points:
        for curve in shown[title]:
            assert [x for x, _ in curve] == sorted({x for x, _ in curve})
