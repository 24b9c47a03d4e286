"""What programs and handlers print: tables that fit, and colors, on a terminal; whole lines without codes in a file."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import struct
import sys
import termios
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import camshaft.distributed as idist
from camshaft import checkpoint
from camshaft.distributed import __main__ as distributed
from camshaft.distributed.failures import Snapshot
from camshaft.engine import Engine, Events
from camshaft.handlers import DiskSaver, HandlersTimeProfiler, ProgressBar
from camshaft.text import RED, Look, aligned
from camshaft.utils import setup_logger

VARIABLES = ("FORCE_COLOR", "NO_COLOR", "PYTHON_COLORS")
LONG = "_".join(["a-long-name"] * 10)
CODES = re.compile("\x1b\\[[0-9;]*m")


@pytest.fixture(autouse=True)
def usual_environment(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def read_all(controller):
    data = b""
    try:
        while chunk := os.read(controller, 65536):
            data += chunk
    except OSError:  # on Linux, the end of a terminal
        pass
    os.close(controller)
    return data.decode().replace("\r\n", "\n")


def shown(monkeypatch, write, columns=80):
    """Return what a function shows on a terminal, to which it writes as standard output and error."""
    controller, controlled = os.openpty()
    fcntl.ioctl(controlled, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_all, controller)
        with open(controlled, "w", encoding="utf-8") as terminal, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", terminal)
            patch.setattr(sys, "stderr", terminal)
            write()
        return reading.result(60)


def written(monkeypatch, write, path):
    """Return what a function writes to a file."""
    with open(path, "w", encoding="utf-8") as file, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        patch.setattr(sys, "stderr", file)
        write()
    return path.read_text(encoding="utf-8")


# --- how it looks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "on_terminal", "in_file"),
    [
        ({}, True, False),
        ({"TERM": "dumb"}, False, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"NO_COLOR": ""}, True, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, True, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
        ({"PYTHON_COLORS": "1", "NO_COLOR": "1"}, True, True),
        ({"PYTHON_COLORS": "0", "FORCE_COLOR": "1"}, False, False),
    ],
)
def test_the_environment_decides_about_colors(monkeypatch, tmp_path, variables, on_terminal, in_file):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    looks = []
    shown(monkeypatch, lambda: looks.append(Look.of(sys.stdout)), columns=70)
    written(monkeypatch, lambda: looks.append(Look.of(sys.stdout)), tmp_path / "file")
    assert looks == [Look(70, on_terminal), Look(None, in_file)]


def test_a_terminal_without_a_size_has_80_columns_and_no_stream_is_a_file(monkeypatch):
    looks = []
    shown(monkeypatch, lambda: looks.append(Look.of(sys.stdout)), columns=0)
    assert looks == [Look(80, True)]
    assert Look.of(None) == Look()


@pytest.mark.parametrize("width", [40, 60, 79])
def test_a_table_that_is_too_wide_is_wrapped_and_loses_nothing(width):
    path = f"/home/user/{LONG}/train.py:12"
    rows = [["", "line", "problem"], ["rank 0", f"{path} in main", "is incomplete: its save was interrupted"]]
    rows.append(["rank 1", "-", "-"])
    lines = aligned(rows, Look(width)).split("\n")
    assert max(map(len, lines)) <= width
    starts = [lines[0].index(heading) for heading in rows[0][1:]]
    columns = [
        [line[begin:end].strip() for line in lines[1:-1]]
        for begin, end in zip(starts, (*starts[1:], None), strict=True)
    ]
    assert "".join("".join(columns[0]).split()) == f"{path}inmain"
    assert " ".join(columns[1]).strip() == rows[1][2]
    assert lines[-1].split() == rows[2][0].split() + ["-", "-"]
    assert aligned(rows, Look(300)) == aligned(rows)


def test_styles_are_those_of_cells_and_columns_and_do_not_move_anything():
    rows = [["name", "state", "problem"], ["a", "dead", "-"], ["bb", "alive", "it failed " * 9]]
    styled = aligned(rows, Look(40, has_colors=True), {"dead": RED, "problem": RED})
    assert CODES.sub("", styled) == aligned(rows, Look(40))
    first, second, *rest = styled.split("\n")
    assert first == "\x1b[1mname\x1b[0m  \x1b[1mstate\x1b[0m  \x1b[1mproblem\x1b[0m"
    assert second == "a     \x1b[31mdead\x1b[0m   -"
    assert len(rest) > 2
    assert all(line.endswith("\x1b[0m") and line.count("\x1b") == 2 for line in rest)


# --- what is printed ----------------------------------------------------------------------------------------------


def checkpoints(tmp_path):
    """Write an intact checkpoint and a damaged one with a long name."""
    save = DiskSaver(tmp_path / "checkpoints", require_empty=False)
    for name in ("a.pt", f"{LONG}.pt"):
        save({"weight": torch.ones(2)}, name, {"step": 1})
    path = tmp_path / "checkpoints" / f"{LONG}.pt"
    path.write_bytes(path.read_bytes()[1:])
    return str(path.parent)


def of_distributed(tmp_path):
    return lambda: distributed.main([]), {"\x1b[1mrank 0 of 1", "\x1b[32myes", "\x1b[1mversion"}


def of_inspect(tmp_path):
    one = Snapshot(tmp_path, "job", 0, 2, pid=7, is_alive=False, host="here", status={})
    return lambda: sys.stdout.write(distributed.jobs_text([one], Look.of(sys.stdout))), {
        "\x1b[1mjob job: 1 of 2 ranks ran",
        "\x1b[31mdead",
    }


def of_checkpoint_list(tmp_path):
    folder = checkpoints(tmp_path)
    return lambda: checkpoint.main(["list", folder]), {"\x1b[1mcheckpoint", "\x1b[31m"}


def of_checkpoint_error(tmp_path):
    return lambda: checkpoint.main(["list", "missing"]), {"\x1b[31merror:\x1b[0m DIR must be"}


def of_profiler(tmp_path):
    engine, profiler = Engine(lambda engine, batch: None), HandlersTimeProfiler()
    engine.add_event_handler(Events.EPOCH_COMPLETED, of_profiler_with_a_long_name)
    profiler.attach(engine)
    engine.run([1])
    return lambda: profiler.print_results(profiler.get_results()), {"\x1b[1mHandler"}


def of_profiler_with_a_long_name():
    pass


def of_progress_bar(tmp_path):
    pytest.importorskip("tqdm")

    def train():
        engine = Engine(lambda engine, batch: 0.5)
        ProgressBar(persist=True).attach(engine, output_transform=lambda loss: {"loss": loss})
        engine.run([1, 2])

    return train, {"100%|\x1b[32m"}


def of_show_config(tmp_path):
    def show():
        path = tmp_path / "log.txt"
        logger = setup_logger("camshaft", format="%(asctime)s %(levelname)s: %(message)s", filepath=path, reset=True)
        idist.show_config()
        for handler in tuple(logger.handlers):
            logger.removeHandler(handler)
            handler.close()
        logger.setLevel(logging.NOTSET)
        logger.propagate = True
        assert "INFO: device:                    cpu" in path.read_text()
        assert "\x1b" not in path.read_text()

    return show, {" \x1b[32mINFO\x1b[0m: backend:                   None"}


WRAPPED = [of_show_config, of_distributed, of_inspect, of_checkpoint_list, of_profiler, of_progress_bar]


@pytest.mark.parametrize("make", [*WRAPPED, of_checkpoint_error], ids=lambda make: make.__name__)
def test_what_is_printed_fits_the_terminal_and_is_plain_in_a_file(monkeypatch, tmp_path, make):
    write, styles = make(tmp_path)
    on_terminal, in_file = shown(monkeypatch, write), written(monkeypatch, write, tmp_path / "output.txt")
    assert [style for style in styles if style not in on_terminal] == []
    assert "\x1b" not in in_file
    assert "\r" not in in_file
    if make in WRAPPED:
        drawn = re.split("[\r\n]", CODES.sub("", on_terminal))
        assert max(map(len, drawn)) <= 80
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in shown(monkeypatch, write)
