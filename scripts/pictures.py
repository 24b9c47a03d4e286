"""Draw the pictures of docs/images: a run in a terminal, curves, schedules, collectives, events, layouts, and modules.

    python scripts/pictures.py [FOLDER]

The pictures are the same each time, except for the times in the terminal, and on other machines the last digits of
computed numbers.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from html import escape
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from torch import Tensor, nn

from camshaft.engine import Engine, create_supervised_trainer
from camshaft.handlers import (
    ConcatScheduler,
    CosineAnnealingScheduler,
    FastaiLRFinder,
    LinearCyclicalScheduler,
    PiecewiseLinear,
)
from tests.docs.pages import blocks
from tests.docs.titled import titled

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
COLORS = ("#7aa6c2", "#e0a458", "#8fb37a", "#c98bb9")  # one per rank
MIXED, DARK, PALE = "#d9d9d9", "#333333", "#f4f4f4"
SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "camshaft",
    "svg.fonttype": "none",  # keep text as text: smaller, and searchable
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
COMMAND, COLUMNS = "python examples/mnist.py --epochs 3", 88  # the run in the terminal
RANKS = 4
OWN = [[letter] for letter in "abcd"]
ALL = list("abcd")
SUM = ["a+b+c+d"]
NOTHING: list[str] = []
# what each rank has before and after
COLLECTIVES: dict[str, tuple[list[list[str]], list[list[str]]]] = {
    "broadcast": ([["a"], NOTHING, NOTHING, NOTHING], [["a"]] * RANKS),
    "scatter": ([ALL, NOTHING, NOTHING, NOTHING], OWN),
    "gather": (OWN, [ALL, NOTHING, NOTHING, NOTHING]),
    "all_gather": (OWN, [ALL] * RANKS),
    "reduce": (OWN, [SUM, NOTHING, NOTHING, NOTHING]),
    "all_reduce": (OWN, [SUM] * RANKS),
    "reduce_scatter": (
        [[f"{letter}{part}" for part in range(RANKS)] for letter in ALL],
        [["+".join(f"{letter}{part}" for letter in ALL)] for part in range(RANKS)],
    ),
    "all_to_all": (
        [[f"{letter}{part}" for part in range(RANKS)] for letter in ALL],
        [[f"{letter}{part}" for letter in ALL] for part in range(RANKS)],
    ),
}
# sizes along dp_replicate, dp_shard, and tp
LAYOUTS = {"ddp": (4, 1, 1), "fsdp": (1, 4, 1), "hsdp": (2, 2, 1), "tp": (1, 1, 4), "fsdp-tp": (1, 2, 2)}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in pictures():
        with matplotlib.rc_context(SETTINGS):
            figure = draw()
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight")
            pyplot.close(figure)
    (folder / "terminal.svg").write_text(terminal(output_in_terminal(COMMAND)), "utf-8")


def output_in_terminal(command: str) -> str:
    """Run a command in a terminal and return the final contents of the screen."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    script, *options = command.split()[1:]
    # the picture has its own colors, and its numbers depend on the number of threads
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    written = b""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [sys.executable, str(ROOT / script), *options]
        with subprocess.Popen(arguments, cwd=folder, env=environment, stdout=follower, stderr=follower) as process:
            os.close(follower)
            while chunk := read(leader):
                written += chunk
    os.close(leader)
    if process.returncode:
        raise RuntimeError(f"{command} failed:\n{written.decode()}")
    lines = written.decode().replace("\r\n", "\n").split("\n")
    return "\n".join(line.rpartition("\r")[2].rstrip() for line in lines).rstrip()  # \r redraws the line


def read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # on Linux, the end of a terminal
        return b""


def terminal(output: str) -> str:
    """Draw a terminal that shows a command and its output, with the bars of tqdm as rectangles."""
    width, height, size = 8, 20, 13  # of a character, of a line, and of the font
    shapes = []
    for row, line in enumerate([f"$ {COMMAND}", *output.split("\n")]):
        y = 56 + row * height
        for part in re.finditer(r"█+|[^█\s](?:[^█]*[^█\s])?", line):
            x, length = 20 + part.start() * width, len(part[0]) * width
            if part[0][0] == "█":
                shapes.append(f'<rect class="bar" x="{x}" y="{y - 11}" width="{length}" height="14"/>')
            else:
                kind = ' class="command"' if row == 0 else ""
                shapes.append(f'<text{kind} x="{x}" y="{y}" textLength="{length}">{escape(part[0])}</text>')
    size_of_image = f'width="{COLUMNS * width + 40}" height="{y + 24}"'
    buttons = "".join(f'<circle cx="{22 + 18 * n}" cy="20" r="5.5" fill="#4a5c69"/>' for n in range(3))
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size_of_image} viewBox="0 0 {COLUMNS * width + 40} {y + 24}">
<title>A run in a terminal</title>
<style>
text {{ font: {size}px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #d8e1e7; white-space: pre }}
.command {{ fill: #8fc98a }}
.bar {{ fill: #e0902c }}
</style>
<rect width="100%" height="100%" rx="8" fill="#17222b"/>
{buttons}
{chr(10).join(shapes)}
</svg>
"""


def pictures() -> Iterator[tuple[str, Callable[[], Figure]]]:
    """Yield the name of each picture and the function that draws it."""
    yield "loss", loss_curve
    yield "lr-finder", lr_finder
    yield "schedules", schedules
    yield "events", events_of_a_run
    yield "concepts", concepts
    yield "inside-layers", layers
    yield "inside-batch", way_of_a_batch
    yield "inside-save", way_of_a_save
    yield "inside-failure", way_of_a_failure
    yield "ring-all_reduce", ring
    for name, (before, after) in COLLECTIVES.items():
        yield f"collective-{name}", partial(collective, name, before, after)
    for name, sizes in LAYOUTS.items():
        yield f"layout-{name}", partial(layout, *sizes)
    yield "layout-costs", layout_costs


def make_trainer(lr: float) -> tuple[Engine[tuple[Tensor, Tensor], float], dict[str, Any]]:
    """Return a trainer that learns which points lie above a diagonal, with its model and optimizer."""
    model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    trainer = create_supervised_trainer(model, optimizer, nn.functional.cross_entropy)
    return trainer, {"model": model, "optimizer": optimizer}


def make_batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    inputs = torch.rand(256, 2)
    return list(zip(inputs.reshape(8, 32, 2), (inputs.sum(dim=1) > 1).long().reshape(8, 32), strict=True))


def loss_curve() -> Figure:
    """Draw the losses of the page that shows the curve, without its own plot."""
    page = (ROOT / "docs" / "tutorials" / "train.md").read_text("utf-8")
    names: dict[str, Any] = {}
    for block in [one for one in blocks(page) if one.language == "python"][:-1]:
        exec(block.code, names)
    losses = names["losses"]
    figure, axes = pyplot.subplots(figsize=(6, 3))
    axes.plot(range(1, len(losses) + 1), losses, color=COLORS[0])
    axes.set(xlabel="iteration", ylabel="loss", ylim=(0, None))
    return figure


def lr_finder() -> Figure:
    batches = make_batches()
    trainer, objects = make_trainer(lr=1e-4)
    finder = FastaiLRFinder()
    with finder.attach(trainer, objects, num_iter=100, start_lr=1e-4, end_lr=100.0) as searching:
        searching.run(batches)
    figure, axes = pyplot.subplots(figsize=(6, 3))
    finder.plot(ax=axes)
    return figure


def schedules() -> Figure:
    figure, axes = pyplot.subplots(2, 2, figsize=(7, 4), sharex=True, sharey=True, layout="constrained")
    cycle = {"param_name": "lr", "start_value": 1.0, "end_value": 0.1, "cycle_size": 40}
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    parts = [
        LinearCyclicalScheduler(optimizer, "lr", start_value=0.0, end_value=1.0, cycle_size=40),
        CosineAnnealingScheduler(optimizer, "lr", start_value=1.0, end_value=0.0, cycle_size=80),
    ]
    rows = {
        "LinearCyclicalScheduler": LinearCyclicalScheduler.simulate_values(100, **cycle),
        "CosineAnnealingScheduler": CosineAnnealingScheduler.simulate_values(100, **cycle),
        "PiecewiseLinear": PiecewiseLinear.simulate_values(
            100, param_name="lr", milestones_values=[(10, 0.2), (30, 1.0), (60, 0.4), (90, 0.1)]
        ),
        "ConcatScheduler: a warm-up, then a cosine": ConcatScheduler.simulate_values(100, parts, [20]),
    }
    for place, (title, values) in zip(axes.flat, rows.items(), strict=True):
        place.plot([event for event, _ in values], [value for _, value in values], color=COLORS[0])
        place.set_title(title, fontsize=10)
    figure.supxlabel("event")
    figure.supylabel("lr")
    return figure


def collective(name: str, before: list[list[str]], after: list[list[str]]) -> Figure:
    figure, axes = canvas(width=9.2, height=RANKS, scale=0.6)
    for rank in range(RANKS):
        y = RANKS - 1 - rank
        axes.text(-0.2, y + 0.4, f"rank {rank}", ha="right", va="center", color=DARK)
        row(axes, 0, y, before[rank])
        row(axes, 5.2, y, after[rank])
    arrow(axes, (4.2, RANKS / 2 - 0.1), (5.0, RANKS / 2 - 0.1))
    axes.text(4.6, RANKS, name, ha="center", va="bottom", color=DARK)
    return figure


def row(axes: Axes, x: float, y: float, values: Sequence[str]) -> None:
    """Draw the values of a rank: four cells, a wide one for a sum, or none."""
    box(axes, x, y, 4, 0.8, "", PALE)
    for index, value in enumerate(values):
        if "+" in value:
            box(axes, x, y, 4, 0.8, value, MIXED)
        else:
            box(axes, x + index, y, 1, 0.8, value, COLORS["abcd".index(value[0])])


def layout(dp_replicate: int, dp_shard: int, tp: int) -> Figure:
    """Draw the samples of each rank, and its parts of two weights, which tp splits by rows and by columns."""
    figure, axes = canvas(width=11, height=6.1, scale=0.6)
    names = (("samples", 5.35), ("up", 3.2), ("down", 0.5))
    for name, y in names:
        axes.text(-0.2, y, name, ha="right", va="center", color=DARK)
    for rank in range(RANKS):
        x, split, share = 0.2 + 2.8 * rank, rank % tp, rank // tp
        shard = share % dp_shard
        axes.text(x + 1.1, 6.0, f"rank {rank}", ha="center", va="bottom", color=DARK)
        samples, rows, columns = RANKS // (dp_replicate * dp_shard), RANKS // dp_shard, RANKS // tp
        part = COLORS[shard * tp + split]
        cells(axes, (x, 5.1), (2.2, 0.5), (1, 4), (0, samples * share), (1, samples), COLORS[share])
        cells(
            axes, (x + 0.4, 1.8), (1.4, 2.8), (4, 1), (columns * split + shard * rows // tp, 0), (rows // tp, 1), part
        )
        cells(axes, (x, 0.0), (2.2, 1.0), (4, 4), (rows * shard, columns * split), (rows, columns), part)
    return figure


def cells(
    axes: Axes, place: tuple[float, float], size: tuple[float, float], shape: tuple[int, int],
    start: tuple[int, int], held: tuple[int, int], color: str,
) -> None:  # fmt: skip
    """Draw a tensor as rows and columns of cells, and color those that a rank holds."""
    height, width = size[1] / shape[0], size[0] / shape[1]
    for row, column in product(range(shape[0]), range(shape[1])):
        is_held = 0 <= row - start[0] < held[0] and 0 <= column - start[1] < held[1]
        corner = place[0] + width * column, place[1] + size[1] - height * (row + 1)
        axes.add_patch(Rectangle(corner, width, height, facecolor=color if is_held else PALE, edgecolor="white"))


def layout_costs() -> Figure:
    """Plot the costs that the page on layouts computes."""
    costs: dict[str, Any] = {"__name__": "costs"}
    exec(titled("how-to/choosing-a-layout.md", "costs.py"), costs)
    figure, (above, below) = pyplot.subplots(2, figsize=(6, 6), layout="constrained", height_ratios=(1, 2))
    names = list(costs["LAYOUTS"])
    above.bar(names, [costs["memory"](**sizes) / 1e9 for sizes in costs["LAYOUTS"].values()], color=COLORS[0])
    above.set(ylabel="memory per rank, GB")
    batches = [2**power for power in range(8)]
    for name, color in zip(names, (*COLORS, DARK), strict=True):
        sent = [costs["traffic"](sequences, **costs["LAYOUTS"][name]) / 1e9 for sequences in batches]
        below.plot(batches, sent, color=color, label=name, marker="o", markersize=3)
    below.set(xlabel="sequences per step", ylabel="sent per rank and step, GB", xscale="log", yscale="log")
    below.set_xticks(batches, list(map(str, batches)))
    below.set_yticks(ticks := [1, 3, 10, 30, 100], list(map(str, ticks)))
    below.minorticks_off()
    below.legend(frameon=False)
    return figure


def ring() -> Figure:
    """Draw how each rank sends one chunk to its right neighbor while it receives another from its left neighbor."""
    figure, axes = canvas(width=8, height=5, scale=0.6)
    places = [(0.0, 4.0), (5.0, 4.0), (5.0, 0.0), (0.0, 0.0)]
    for rank, (x, y) in enumerate(places):
        axes.text(x + 1.5, y + 1.0, f"rank {rank}", ha="center", va="bottom", color=DARK)
        for chunk in range(RANKS):
            box(axes, x + 0.75 * chunk, y, 0.75, 0.8, str(chunk), COLORS[rank] if chunk == rank else PALE)
    arrow(axes, (3.2, 4.4), (4.8, 4.4))
    arrow(axes, (6.5, 3.8), (6.5, 1.6))
    arrow(axes, (4.8, 0.4), (3.2, 0.4))
    arrow(axes, (1.5, 1.6), (1.5, 3.8))
    axes.text(4.0, 2.6, "all send at once,\neach a different chunk", ha="center", va="center", color=DARK, fontsize=9)
    return figure


def events_of_a_run() -> Figure:
    figure, axes = canvas(width=10, height=9, scale=0.6)
    box(axes, 0.4, 1.0, 5.6, 7.1, "", PALE)
    box(axes, 1.2, 2.0, 4.6, 4.8, "", "white")
    axes.text(0.6, 7.85, "for each epoch", va="center", color=DARK, fontsize=8)
    axes.text(1.4, 6.55, "for each batch", va="center", color=DARK, fontsize=8)
    rows = (  # from the top: x, y, width, text, color, and what handlers do there
        (0.0, 8.2, 6.0, "STARTED", COLORS[0], "show the configuration"),
        (0.8, 7.0, 5.0, "EPOCH_STARTED", COLORS[2], ""),
        (1.6, 5.7, 4.0, "GET_BATCH_STARTED", COLORS[1], ""),
        (1.6, 5.0, 4.0, "GET_BATCH_COMPLETED", COLORS[1], ""),
        (1.6, 4.3, 4.0, "ITERATION_STARTED", COLORS[1], "set the learning rate"),
        (1.6, 3.2, 4.0, "your function", MIXED, ""),
        (1.6, 2.1, 4.0, "ITERATION_COMPLETED", COLORS[1], "log, stop on NaN"),
        (0.8, 1.1, 5.0, "EPOCH_COMPLETED", COLORS[2], "evaluate, save"),
        (0.0, 0.0, 6.0, "COMPLETED", COLORS[0], "close the log"),
    )
    for x, y, width, text, color, handlers in rows:
        box(axes, x, y, width, 0.6, text, color, size=8)
        if handlers:
            arrow(axes, (6.2, y + 0.3), (7.0, y + 0.3))
            axes.text(7.1, y + 0.3, handlers, va="center", color=DARK)
    axes.text(7.1, 9.1, "your handlers", va="center", color=DARK, style="italic")
    return figure


def concepts() -> Figure:
    """Draw two ranks, each with its part of a batch, an engine, a state, and handlers."""
    figure, axes = canvas(width=7.9, height=9.0, scale=0.8)
    for rank in range(2):
        y = 5.0 * (1 - rank)
        box(axes, 0.0, y, 7.9, 4.0, "", PALE)
        axes.text(0.2, y + 3.75, f"rank {rank}", va="center", color=DARK, fontsize=9)
        box(axes, 0.2, y + 2.2, 2.2, 0.6, "share of the batch", COLORS[rank], size=7)
        box(axes, 2.9, y + 1.7, 2.1, 1.6, "", "white")
        axes.text(3.95, y + 3.05, "engine", ha="center", va="center", color=DARK, fontsize=9)
        box(axes, 3.1, y + 1.85, 1.7, 0.8, "your function", MIXED, size=7)
        box(axes, 5.8, y + 2.1, 1.9, 0.8, "handlers", COLORS[2])
        box(axes, 2.9, y + 0.2, 4.8, 0.7, "state: epoch, iteration, output, metrics", "white", size=8)
        arrow(axes, (2.4, y + 2.5), (2.9, y + 2.5))
        arrow(axes, (5.0, y + 2.5), (5.8, y + 2.5))
        axes.text(5.4, y + 2.7, "events", ha="center", va="center", color=DARK, fontsize=7)
        arrow(axes, (3.95, y + 1.7), (3.95, y + 0.9))
        axes.text(3.85, y + 1.3, "counters, output", ha="right", va="center", color=DARK, fontsize=7)
        arrow(axes, (6.6, y + 2.1), (6.6, y + 0.9))
        arrow(axes, (6.9, y + 0.9), (6.9, y + 2.1))
    for start, end in ((4.0, 5.0), (5.0, 4.0)):
        arrow(axes, (3.95, start), (3.95, end))
    axes.text(4.1, 4.5, "collectives", va="center", color=DARK, fontsize=7)
    return figure


def layers() -> Figure:
    figure, axes = column(height=6.2)
    box(axes, 0.0, 2.5, 3.3, 2.3, "", PALE)
    for x, y, width, text, color in (
        (0.0, 5.3, 6.0, "handlers: checkpoint, loggers,\nschedules, stopping, profiling", COLORS[2]),
        (0.1, 3.8, 3.1, "engine: supervised,\ndeterministic, metrics", COLORS[0]),
        (0.1, 2.6, 3.1, "core: events, dispatch,\nplan, loop, sources", COLORS[0]),
        (3.6, 3.8, 2.4, "data: orders,\nsamplers, loaders", COLORS[1]),
        (1.3, 1.3, 4.7, "distributed: ranks, collectives,\nbackends, launch, failures", COLORS[3]),
        (0.0, 0.0, 6.0, "shared modules: errors, types,\ntree, seeding, files, text", MIXED),
    ):
        box(axes, x, y, width, 0.9, text, color)
    for x, start, end in (
        (1.65, 5.3, 4.7), (4.8, 5.3, 4.7), (1.65, 3.8, 3.5), (4.8, 3.8, 2.2), (0.7, 2.6, 0.9), (3.65, 1.3, 0.9),
    ):  # fmt: skip
        arrow(axes, (x, start), (x, end))
    arrow(axes, (3.15, 3.9), (3.9, 2.2))
    return figure


def way_of_a_batch() -> Figure:
    figure, axes = column(height=8.7)
    box(axes, 0.0, 0.9, 6.0, 4.95, "", PALE)
    axes.text(2.4, 5.6, "for each batch", va="center", color=DARK, style="italic", fontsize=9)
    steps(
        axes,
        (8.05, "run(data)", "engine.py", MIXED),
        (7.1, "where does the run start?", "plan.py", MIXED),
        (6.15, "STARTED, EPOCH_STARTED", "loop.py", COLORS[0]),
        (4.55, "GET_BATCH_STARTED\nnext(data)", "sources.py", COLORS[1]),
        (3.35, "ITERATION_STARTED\nyour function", "loop.py", COLORS[1]),
        (2.4, "the iteration is done", "progress.py", COLORS[1]),
        (1.2, "ITERATION_COMPLETED\nhandlers, in order", "dispatch.py", COLORS[1]),
        (0.0, "EPOCH_COMPLETED, COMPLETED", "loop.py", COLORS[0]),
    )
    return figure


def way_of_a_save() -> Figure:
    figure, axes = column(height=6.0)
    box(axes, 0.0, 2.0, 6.0, 2.85, "", PALE)
    axes.text(2.4, 2.25, "a crash here changes nothing", va="center", color=DARK, style="italic", fontsize=9)
    steps(
        axes,
        (5.1, "due, and better than\nthose that are kept?", "handler.py", MIXED),
        (3.75, "states, without\nprefixes of wrappers", "state.py", COLORS[1]),
        (2.55, "write to a temporary name,\nflush, rename", "savers.py", COLORS[1]),
        (0.95, "checksum, size, step, score\ninto .manifest", "manifest.py", COLORS[0]),
        (0.0, "remove the oldest or worst", "retention.py", COLORS[2]),
    )
    return figure


def way_of_a_failure() -> Figure:
    figure, axes = column(height=7.4)
    for y, height, name in ((5.05, 2.35, "rank 1"), (0.0, 3.5, "every other rank")):
        box(axes, 0.0, y, 6.0, height, "", PALE)
        axes.text(2.4, y + height - 0.25, name, va="center", color=DARK, style="italic", fontsize=9)
    steps(
        axes,
        (6.25, "raises an error", "", COLORS[3]),
        (5.3, "tells the others", "watcher.py", COLORS[1]),
        (3.85, "the store of the job\nkeeps the first failure", "board.py", COLORS[0]),
        (2.4, "asks once per second", "board.py", COLORS[1]),
        (1.45, "releases what waits", "watcher.py", COLORS[1]),
        (0.25, "all_reduce raises\nRankFailedError", "", COLORS[3]),
    )
    return figure


def steps(axes: Axes, *rows: tuple[float, str, str, str]) -> None:
    """Draw steps from the top down, and beside each its module."""
    above = None
    for y, text, module, color in rows:
        height = 0.85 if "\n" in text else 0.6
        box(axes, 0.1, y, 4.2, height, text, color)
        axes.text(4.4, y + height / 2, module, va="center", color=DARK, fontsize=9)
        if above is not None:
            arrow(axes, (2.25, above), (2.25, y + height))
        above = y


def column(*, height: float) -> tuple[Figure, Axes]:
    """Return empty axes six units wide, which fit on a phone."""
    figure, axes = canvas(width=6, height=height, scale=0.6)
    axes.set(xlim=(0, 6), ylim=(0, height))
    figure.subplots_adjust(0, 0, 1, 1)
    return figure, axes


def canvas(*, width: float, height: float, scale: float) -> tuple[Figure, Axes]:
    """Return empty axes of this size in units of ``scale`` inches."""
    figure, axes = pyplot.subplots(figsize=(width * scale, height * scale))
    axes.set(xlim=(-1.2, width + 0.2), ylim=(-0.2, height + 0.4), aspect="equal")
    axes.axis("off")
    return figure, axes


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str, color: str, size: float = 9) -> None:
    shape = FancyBboxPatch(
        (x + 0.05, y),
        width - 0.1,
        height,
        boxstyle="round,pad=0,rounding_size=0.08",
        facecolor=color,
        edgecolor="white",
    )
    axes.add_patch(shape)
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", color=DARK, fontsize=size)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, color=DARK))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES)
