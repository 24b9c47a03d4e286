#!/usr/bin/env python3
"""What do checkpoints and steps of a sharded model cost, compared with torch's own calls?

Two gloo ranks share a model that is sharded by FSDP2, and its optimizer. Both libraries save the same state: torch with
torch.distributed.checkpoint, camshaft with Checkpoint(sharded=True). Each time is that of the slower rank.

python benchmarks/sharded.py --width 512 --repetitions 5
"""

from __future__ import annotations

import argparse
import logging
import os
import pickle
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import count, repeat
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this clone, installed or not

import camshaft.distributed as idist
from benchmarks.measuring import Contender, Spread, interleave, report, seconds_of, verdict
from camshaft.engine import Engine, create_supervised_trainer
from camshaft.handlers import Checkpoint, DiskSaver

MILLISECOND = 1e-3
CLIP = 1.0  # norm of the gradients
STEP, CLIPPED_STEP = "step", "step with clipped gradients"
TARGETS = {  # ratio to torch; the second asynchronous save is compared with torch's synchronous one
    "save": 1.1,
    "asynchronous save, blocking": 1.0,
    "asynchronous save, blocking, against torch's save": 0.15,
    "asynchronous save, until complete": None,
    STEP: 1.05,
    CLIPPED_STEP: 1.05,
}

Sharded = tuple[nn.Module, torch.optim.Optimizer]


class Block(nn.Module):
    """The feed-forward part of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return output


def make_network(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(options.width) for _ in range(options.blocks)))


def by_hand(options: argparse.Namespace) -> Sharded:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = make_network(options), init_device_mesh("cpu", (2,))
    for block in (*model.children(), model):
        fully_shard(block, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters())


def ours(options: argparse.Namespace) -> Sharded:
    model = idist.auto_model(make_network(options), mesh=idist.make_mesh(dp_shard=2), shard=[Block])
    return model, idist.auto_optim(torch.optim.AdamW(model.parameters()))


def of_the_slower_rank(seconds: float) -> float:
    slower = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slower, dist.ReduceOp.MAX)
    return slower.item()


def bare_steps(
    name: str, model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], clip: float | None
) -> Contender:
    x, y = batch

    def loop(iterations: int) -> None:
        model.train()
        for _ in range(iterations):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()

    return Contender(name, lambda iterations: of_the_slower_rank(seconds_of(lambda: loop(iterations))))


def our_steps(
    name: str, model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], clip: float | None
) -> Contender:
    trainer = create_supervised_trainer(
        model, optimizer, nn.functional.mse_loss, output_transform=lambda x, y, y_pred, loss: loss, clip_grad_norm=clip
    )

    def run(iterations: int) -> float:
        data = repeat(batch, iterations)
        return of_the_slower_rank(seconds_of(lambda: trainer.run(data, max_epochs=1, epoch_length=iterations)))

    return Contender(name, run)


class Saves:
    """Times saves: how long each blocks training, and how long it takes until the checkpoint is complete.

    Args:
        save: returns a function that waits until the checkpoint is complete.
        tidy: called on rank 0 after each save, and not timed.
    """

    def __init__(self, save: Callable[[], Callable[[], object]], tidy: Callable[[], object] = lambda: None) -> None:
        self.save, self.tidy = save, tidy
        self.durations: list[float] = []

    def __call__(self, saves: int) -> float:
        blocking = 0.0
        for _ in range(saves):
            if dist.get_rank() == 0:
                os.sync()  # no pending writes of others
            dist.barrier()
            began = perf_counter()
            wait = self.save()
            blocking += perf_counter() - began
            wait()
            self.durations.append(of_the_slower_rank(perf_counter() - began))
            if dist.get_rank() == 0:
                self.tidy()
        return of_the_slower_rank(blocking)


def torch_saves(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, asynchronous: bool) -> Saves:
    dcp: Any = import_module("torch.distributed.checkpoint")

    numbers = count()
    current = folder

    def save() -> Callable[[], object]:
        nonlocal current
        current = folder / str(next(numbers))
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if asynchronous:
            pending: Any = dcp.async_save(state, checkpoint_id=current)
            wait: Callable[[], object] = pending.result
            return wait
        dcp.save(state, checkpoint_id=current)
        return lambda: None

    return Saves(save, tidy=lambda: shutil.rmtree(current))


def our_saves(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, asynchronous: bool) -> Saves:
    engine: Engine[Any, Any] = Engine(lambda engine, batch: None)
    objects = {"model": model, "optimizer": optimizer}
    checkpoint = Checkpoint(objects, DiskSaver(folder), sharded=True, asynchronous=asynchronous)

    def save() -> Callable[[], object]:
        engine.state.iteration += 1
        checkpoint(engine)
        return checkpoint.state_dict  # waits for the pending save

    return Saves(save)


def measured_steps(
    options: argparse.Namespace, bare: Sharded, engine: Sharded
) -> dict[str, tuple[list[float], list[float]]]:
    """Return the seconds per step of torch and of camshaft in each round."""
    torch.manual_seed(dist.get_rank())
    x, y = torch.randn(2, options.batch_size, options.width)
    contenders = []
    for what, clip in ((STEP, None), (CLIPPED_STEP, CLIP)):
        contenders.append(bare_steps(f"torch, {what}", *bare, (x, y), clip))
        contenders.append(our_steps(f"camshaft, {what}", *engine, (x, y), clip))
    seconds = interleave(contenders, options.iterations, options.repetitions)
    return {what: (seconds[f"torch, {what}"], seconds[f"camshaft, {what}"]) for what in (STEP, CLIPPED_STEP)}


def measured_saves(
    options: argparse.Namespace, folder: Path, bare: Sharded, engine: Sharded
) -> dict[str, tuple[list[float], list[float]]]:
    """Return the seconds of torch and of camshaft in each round."""
    saves = {
        "save": torch_saves(*bare, folder / "save", asynchronous=False),
        "async_save": torch_saves(*bare, folder / "async_save", asynchronous=True),
        "camshaft": our_saves(*engine, folder / "camshaft", asynchronous=False),
        "camshaft, asynchronous": our_saves(*engine, folder / "camshaft_asynchronous", asynchronous=True),
    }
    contenders = [Contender(name, one) for name, one in saves.items()]
    blocking = interleave(contenders, 1, options.repetitions)
    torch_async, our_async = blocking["async_save"], blocking["camshaft, asynchronous"]
    complete = [saves[name].durations[1:] for name in ("async_save", "camshaft, asynchronous")]  # without the warm-up
    pairs = [(blocking["save"], blocking["camshaft"]), (torch_async, our_async), (blocking["save"], our_async)]
    return dict(zip(TARGETS, [*pairs, (complete[0], complete[1])], strict=False))


def on_rank(rank: int, folder: str, options: argparse.Namespace) -> None:
    """Measure on each of the two ranks; rank 0 stores the results."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    idist.initialize("gloo", init_method=f"file://{folder}/initialized", rank=rank, world_size=2)
    bare, engine = by_hand(options), ours(options)
    steps = measured_steps(options, bare, engine)  # fills the states of the optimizers
    results = measured_saves(options, Path(folder), bare, engine) | steps
    idist.finalize()
    if rank == 0:
        Path(folder, "results").write_bytes(pickle.dumps(results))


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        spawn(on_rank, (folder, options), nprocs=2)
        results = pickle.loads(Path(folder, "results").read_bytes())
    with torch.device("meta"):
        weights = sum(one.numel() for one in make_network(options).parameters())
    megabytes = round(3 * 4 * weights / 1e6, 1)  # AdamW has two values for each weight
    lines, rows = [], []
    for what, target in TARGETS.items():
        bare, camshaft = results[what]
        times = Spread.of([one / base for one, base in zip(camshaft, bare, strict=True)])
        ms = {"torch": Spread.of(bare, MILLISECOND), "camshaft": Spread.of(camshaft, MILLISECOND)}
        reached = "" if target is None else verdict(times, target)
        goal = "" if target is None else f"<= {target}"
        lines.append([what, str(ms["torch"]), str(ms["camshaft"]), str(times), goal, reached])
        rows.append({"what": what, "ms": ms, "times": times, "target": target, "verdict": reached})
    print(f"milliseconds on 2 gloo ranks, with {megabytes} MB of weights and optimizer state, and the ratio to torch")
    print(f"medians of {options.repetitions}, and quartiles")
    head = ["what", "torch", "camshaft", "times torch", "target", "camshaft"]
    report("sharded", head, lines, {}, megabytes=megabytes, rows=rows)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=15, help="rounds that are measured (%(default)s)")
    parser.add_argument("--iterations", type=int, default=5, help="steps per round (%(default)s)")
    parser.add_argument("--blocks", type=int, default=4, help="blocks of the model (%(default)s)")
    parser.add_argument("--width", type=int, default=1024, help="features between the blocks (%(default)s)")
    parser.add_argument("--batch_size", type=int, default=16, help="samples per rank and step (%(default)s)")
    parser.add_argument(
        "--folder", type=Path, default=Path.cwd(), help="folder on the disk to measure (current folder)"
    )
    options = parser.parse_args(arguments)
    if min(options.repetitions, options.iterations, options.blocks, options.width, options.batch_size) < 1:
        parser.error("--repetitions, --iterations, --blocks, --width and --batch_size must be at least 1")
    return options


if __name__ == "__main__":
    main()
