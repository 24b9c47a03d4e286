#!/usr/bin/env python3
"""How much time do handlers add per iteration: a typical set to a bare training loop, and each one to an engine?

python benchmarks/handlers.py --only "a typical set" TerminateOnNan
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this clone, installed or not

from benchmarks import training
from benchmarks.measuring import Contender, Spread, importable, interleave, over, report, seconds_of, table, verdict

MICROSECOND = 1e-6
PEERS = {"pytorch-ignite": "ignite"}
PACKAGES = {"camshaft": "camshaft", **PEERS}
SET = "a typical set"
TARGET = 12.0


class Screen:
    """A dummy terminal."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True


@dataclass(frozen=True)
class Place:
    """What handlers are attached to: a package, its engine, an optimizer, a folder, and a stack that closes them."""

    package: str
    engine: Any
    optimizer: torch.optim.Optimizer
    folder: str
    stack: ExitStack

    def module(self, name: str) -> Any:
        return import_module(f"{self.package}.{name}")

    def handler(self, name: str) -> Any:
        return getattr(self.module("handlers"), name)

    def on(self, event: str, handler: Any) -> None:
        self.engine.add_event_handler(getattr(self.module("engine").Events, event), handler)


def progress_bar(place: Place) -> None:
    place.handler("ProgressBar")(file=Screen()).attach(place.engine)


def progress_bar_with_loss(place: Place) -> None:
    place.handler("ProgressBar")(file=Screen()).attach(place.engine, output_transform=lambda loss: {"loss": loss})


def tensorboard(place: Place) -> None:
    logger = place.stack.enter_context(place.handler("TensorboardLogger")(log_dir=place.folder))
    every = place.module("engine").Events.ITERATION_COMPLETED(every=100)
    logger.attach_output_handler(place.engine, every, tag="training", output_transform=lambda loss: {"loss": loss})


def nan_check(place: Place) -> None:
    place.on("ITERATION_COMPLETED", place.handler("TerminateOnNan")())


def piecewise_linear(place: Place) -> None:
    milestones = [(0, 0.1), (1000, 0.2), (1_000_000, 0.01)]
    place.on("ITERATION_STARTED", place.handler("PiecewiseLinear")(place.optimizer, "lr", milestones))


def cosine(place: Place) -> None:
    place.on("ITERATION_STARTED", place.handler("CosineAnnealingScheduler")(place.optimizer, "lr", 0.1, 0.01, 1000))


def torch_schedule(place: Place) -> None:
    schedule = torch.optim.lr_scheduler.StepLR(place.optimizer, 1000, gamma=0.999)
    place.on("ITERATION_STARTED", place.handler("LRScheduler")(schedule))


def state_schedule(place: Place) -> None:
    schedule = place.handler("ExpStateScheduler")(1.0, 0.999, "noise", create_new=True)
    schedule.attach(place.engine, place.module("engine").Events.ITERATION_COMPLETED)


def running_average(place: Place) -> None:
    name = "handlers" if place.package == "camshaft" else "metrics"
    place.module(name).RunningAverage(output_transform=lambda loss: loss).attach(place.engine, "loss")


def average_of_weights(num_layers: int) -> Callable[[Place], None]:
    def attach(place: Place) -> None:
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(num_layers)))
        place.handler("EMAHandler")(model).attach(place.engine)

    return attach


def output_store(place: Place) -> None:
    place.handler("EpochOutputStore")().attach(place.engine)


def time_limit(place: Place) -> None:
    place.on("ITERATION_COMPLETED", place.handler("TimeLimit")(100_000))


def timer(place: Place) -> None:
    events = place.module("engine").Events
    place.handler("Timer")(average=True).attach(
        place.engine,
        start=events.STARTED,
        resume=events.ITERATION_STARTED,
        pause=events.ITERATION_COMPLETED,
        step=events.ITERATION_COMPLETED,
    )


def basic_profiler(place: Place) -> None:
    place.handler("BasicTimeProfiler")().attach(place.engine)


def handlers_profiler(place: Place) -> None:
    place.handler("HandlersTimeProfiler")().attach(place.engine)


def throughput(place: Place) -> None:
    place.handler("Throughput")().attach(place.engine)


ALONE: dict[str, Callable[[Place], None]] = {
    "ProgressBar": progress_bar,
    "ProgressBar with the loss": progress_bar_with_loss,
    "TensorboardLogger, every 100": tensorboard,
    "TerminateOnNan": nan_check,
    "PiecewiseLinear": piecewise_linear,
    "CosineAnnealingScheduler": cosine,
    "LRScheduler of a StepLR": torch_schedule,
    "ExpStateScheduler": state_schedule,
    "RunningAverage": running_average,
    "EMAHandler, 2 tensors": average_of_weights(1),
    "EMAHandler, 100 tensors": average_of_weights(50),
    "EpochOutputStore": output_store,
    "TimeLimit": time_limit,
    "Timer": timer,
    "BasicTimeProfiler": basic_profiler,
    "HandlersTimeProfiler": handlers_profiler,
    "Throughput": throughput,
}
TYPICAL = (progress_bar_with_loss, tensorboard, nan_check, piecewise_linear)


def with_set(name: str, stack: ExitStack) -> Contender:
    """Return a supervised trainer with the typical set of handlers."""
    package = PACKAGES[name]
    model, optimizer = training.tiny()
    trainer = import_module(f"{package}.engine").create_supervised_trainer(model, optimizer, cross_entropy)
    place = Place(package, trainer, optimizer, stack.enter_context(TemporaryDirectory()), stack)
    for attach in TYPICAL:
        attach(place)
    return Contender(name, lambda iterations: seconds_of(lambda: trainer.run(training.Batches(iterations))))


def constant_step(engine: Any, batch: Any) -> float:
    return 0.25


def alone(name: str, attach: Callable[[Place], None] | None, stack: ExitStack) -> Contender:
    """Return an engine with an empty step and at most one handler."""
    package = PACKAGES[name]
    engine = import_module(f"{package}.engine").Engine(constant_step)
    if attach is not None:
        attach(Place(package, engine, training.tiny()[1], stack.enter_context(TemporaryDirectory()), stack))
    label = f"{name} without" if attach is None else name
    return Contender(label, lambda iterations: seconds_of(lambda: engine.run(range(iterations), max_epochs=1)))


def measure_set(peers: Sequence[str], iterations: int, repetitions: int) -> dict[str, Spread]:
    """Return the bare loop's time per iteration, and the additional time of each contender."""
    with ExitStack() as stack:
        contenders = [training.bare(), *(with_set(name, stack) for name in ("camshaft", *peers))]
        seconds = interleave(contenders, iterations, repetitions)
    baseline = seconds.pop("bare loop")
    overheads = {name: Spread.of(over(baseline, sample), MICROSECOND) for name, sample in seconds.items()}
    return {"bare loop": Spread.of(baseline, MICROSECOND), **overheads}


def measure_alone(what: str, peers: Sequence[str], iterations: int, repetitions: int) -> dict[str, Spread]:
    """Return the additional time of an engine with the handler, compared with the same engine without it."""
    with ExitStack() as stack:
        names = [name for name in ("camshaft", *peers) if has(name, what)]
        contenders = [alone(name, attach, stack) for name in names for attach in (None, ALONE[what])]
        seconds = interleave(contenders, iterations, repetitions)
    return {name: Spread.of(over(seconds[f"{name} without"], seconds[name]), MICROSECOND) for name in names}


def has(name: str, what: str) -> bool:
    """Return whether a library has a handler; handlers that other libraries lack are measured too."""
    submodules = ("handlers", "metrics") if name == "pytorch-ignite" else ("handlers",)
    modules = [import_module(f"{PACKAGES[name]}.{submodule}") for submodule in submodules]
    return any(hasattr(module, what.split()[0].rstrip(",")) for module in modules)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    peers, skipped = importable(PEERS)
    columns = ["camshaft", *peers]
    lines, results = [], []
    for what in (one for one in ALONE if one in options.only):
        spreads = measure_alone(what, peers, options.iterations, options.repetitions)
        lines.append([what, *(str(spreads.get(column, "")) for column in columns)])
        results.append({"what": what, "us": spreads})
    print("microseconds per iteration of one handler on an engine with an empty step")
    print(f"medians of {options.repetitions}, and quartiles")
    print(table(["handler", *columns], lines) + "\n")
    rows, sets = [], []
    if SET in options.only:
        spreads = measure_set(peers, max(1, options.iterations // 2), options.repetitions)
        verdict_ = verdict(spreads["camshaft"], TARGET)
        cells = [str(spreads.get(column, "")) for column in ("bare loop", *columns)]
        rows.append(["5", "a supervised step with a typical set of handlers", *cells])
        sets.append({"row": 5, "what": SET, "target": TARGET, "verdict": verdict_, "us": spreads})
    print("microseconds per iteration: the time of the bare loop, and the additional time of each contender")
    report("handlers", ["", "what", "bare loop", *columns], rows, skipped, rows=sets, handlers=results)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=20, help="rounds that are measured (%(default)s)")
    parser.add_argument(
        "--iterations", type=int, default=4000, help="iterations per run; half for the set (%(default)s)"
    )
    choices = [SET, *ALONE]
    parser.add_argument("--only", nargs="+", choices=choices, default=choices, help="which (all)", metavar="NAME")
    options = parser.parse_args(arguments)
    if min(options.repetitions, options.iterations) < 1:
        parser.error("--repetitions and --iterations must be at least 1")
    return options


if __name__ == "__main__":
    main()
