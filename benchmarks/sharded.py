#!/usr/bin/env python3
"""What do checkpoints and steps of a sharded model cost, compared with torch's own calls and with other libraries?

Gloo ranks share a model that is sharded by FSDP2, and its optimizer, and save them: torch with
torch.distributed.checkpoint, camshaft with Checkpoint(sharded=True), and Lightning and Accelerate, if installed, with
their own functions. Each layout that the ranks allow takes steps. Each time is that of the slowest rank.

python benchmarks/sharded.py --width 512 --repetitions 5
python benchmarks/sharded.py --ranks 4
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
from benchmarks.measuring import Contender, Spread, importable, interleave, report, seconds_of, verdict
from camshaft.engine import Engine, create_supervised_trainer
from camshaft.handlers import Checkpoint, DiskSaver

MILLISECOND = 1e-3
CLIP = 1.0  # norm of the gradients
SAVE, BLOCKING, COMPLETE = "save", "asynchronous save, blocking", "asynchronous save, until complete"
TORCH, TORCH_ASYNC = "torch, save", "torch, async_save"
# Neither can do more on the CPU: Lightning's FSDPStrategy is for GPUs only, and Accelerate ignores its FSDP plugin.
FABRIC, ACCELERATE = "Lightning (Fabric)", "Accelerate, not sharded"
PEERS = {"lightning": FABRIC, "accelerate": ACCELERATE}
SAVES = {  # what is compared with whom, and the target: the ratio to it
    (SAVE, TORCH): 1.1,
    (SAVE, FABRIC): None,
    (SAVE, ACCELERATE): None,
    (BLOCKING, TORCH_ASYNC): 1.0,
    (BLOCKING, TORCH): 0.15,
    (BLOCKING, FABRIC): None,
    (BLOCKING, ACCELERATE): None,
    (COMPLETE, TORCH_ASYNC): None,
}
STEP_TARGET = 1.05

Trained = tuple[nn.Module, torch.optim.Optimizer]
Sizes = dict[str, int]
Pairs = dict[tuple[str, str], tuple[list[float], list[float]]]  # seconds of the other and of camshaft in each round


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


def layouts(ranks: int) -> dict[str, Sizes]:
    """Return the sizes of the mesh of each layout."""
    found = {"ddp": {"dp_replicate": ranks}, "fsdp": {"dp_shard": ranks}, "tp": {"tp": ranks}}
    if ranks % 2 == 0 and ranks > 2:
        found["hsdp"] = {"dp_replicate": 2, "dp_shard": ranks // 2}
        found["fsdp+tp"] = {"dp_shard": ranks // 2, "tp": 2}
    return found


def plan() -> dict[str, Any]:
    styles: Any = import_module("torch.distributed.tensor.parallel")
    return {"*.up": styles.ColwiseParallel(), "*.down": styles.RowwiseParallel()}


def by_hand(options: argparse.Namespace, sizes: Sizes) -> Trained:
    """Distribute a model with torch's bare calls."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    model = make_network(options)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if "tp" in sizes:
        parallelize_module(model, mesh["tp"], plan())
    if "dp_shard" in sizes:
        for block in (*model.children(), model):
            fully_shard(block, mesh=mesh["dp_shard"] if "tp" in sizes else mesh)
    if sizes.keys() == {"dp_replicate"}:
        model = nn.parallel.DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters())


def ours(options: argparse.Namespace, sizes: Sizes) -> Trained:
    mesh, tensor_plan = idist.make_mesh(**sizes), plan() if "tp" in sizes else None
    shard = [Block] if "dp_shard" in sizes else None
    model = idist.auto_model(make_network(options), mesh=mesh, shard=shard, tensor_plan=tensor_plan)
    return model, idist.auto_optim(torch.optim.AdamW(model.parameters()))


def clip_by_hand(parameters: list[nn.Parameter]) -> None:
    """Clip as torch's documentation does; its norm does not take gradients on several meshes at once."""
    meshes: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        meshes.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    if len(meshes) == 1:
        nn.utils.clip_grad_norm_(parameters, CLIP)
        return
    norms: list[Any] = [nn.utils.get_total_norm([one.grad for one in group]) for group in meshes.values()]  # type: ignore[misc]
    total = torch.stack([norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]).norm()
    for group in meshes.values():
        nn.utils.clip_grads_with_norm_(group, CLIP, total)


def of_the_slowest_rank(seconds: float) -> float:
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def bare_steps(name: str, trained: Trained, batch: tuple[Tensor, Tensor], clip: float | None) -> Contender:
    (model, optimizer), (x, y) = trained, batch
    parameters = list(model.parameters())

    def loop(iterations: int) -> None:
        model.train()
        for _ in range(iterations):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            if clip is not None:
                clip_by_hand(parameters)
            optimizer.step()

    return Contender(name, lambda iterations: of_the_slowest_rank(seconds_of(lambda: loop(iterations))))


def our_steps(name: str, trained: Trained, batch: tuple[Tensor, Tensor], clip: float | None) -> Contender:
    trainer = create_supervised_trainer(
        *trained, nn.functional.mse_loss, output_transform=lambda x, y, y_pred, loss: loss, clip_grad_norm=clip
    )

    def run(iterations: int) -> float:
        data = repeat(batch, iterations)
        return of_the_slowest_rank(seconds_of(lambda: trainer.run(data, max_epochs=1, epoch_length=iterations)))

    return Contender(name, run)


def measured_steps(options: argparse.Namespace, layout: str, bare: Trained, engine: Trained) -> Pairs:
    torch.manual_seed(0)  # peers along tp need the same batch
    x, y = torch.randn(2, options.batch_size, options.width)
    contenders = []
    for clip in (None, CLIP):
        contenders.append(bare_steps(f"torch, {clip}", bare, (x, y), clip))
        contenders.append(our_steps(f"camshaft, {clip}", engine, (x, y), clip))
    seconds = interleave(contenders, options.iterations, options.repetitions)
    whats = {None: f"step, {layout}", CLIP: f"step, {layout}, clipped gradients"}
    return {(what, "torch"): (seconds[f"torch, {clip}"], seconds[f"camshaft, {clip}"]) for clip, what in whats.items()}


# --- saves ------------------------------------------------------------------------------------------------------------


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
            self.durations.append(of_the_slowest_rank(perf_counter() - began))
            if dist.get_rank() == 0:
                self.tidy()
        return of_the_slowest_rank(blocking)


def deleting(folder: Path, write: Callable[[Path], Callable[[], object] | None]) -> Saves:
    """Time saves to folders that are deleted afterwards; ``write`` may return a function that waits for its save."""
    numbers = count()
    current = folder

    def save() -> Callable[[], object]:
        nonlocal current
        current = folder / str(next(numbers))
        return write(current) or (lambda: None)

    return Saves(save, tidy=lambda: shutil.rmtree(current))


def torch_saves(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, asynchronous: bool) -> Saves:
    dcp: Any = import_module("torch.distributed.checkpoint")

    def save(path: Path) -> Callable[[], object] | None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if asynchronous:
            wait: Callable[[], object] = dcp.async_save(state, checkpoint_id=path).result
            return wait
        dcp.save(state, checkpoint_id=path)
        return None

    return deleting(folder, save)


def our_saves(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, asynchronous: bool) -> Saves:
    engine: Engine[Any, Any] = Engine(lambda engine, batch: None)
    objects = {"model": model, "optimizer": optimizer}
    checkpoint = Checkpoint(objects, DiskSaver(folder), sharded=True, asynchronous=asynchronous)

    def save() -> Callable[[], object]:
        engine.state.iteration += 1
        checkpoint(engine)
        return checkpoint.state_dict  # waits for the pending save

    return Saves(save)


def stepped(model: Any, optimizer: Any, options: argparse.Namespace) -> None:
    """Fill the state of an optimizer."""
    model(torch.ones(1, options.width)).sum().backward()
    optimizer.step()


def fabric_saves(options: argparse.Namespace, folder: Path) -> Saves:
    from torch.distributed.fsdp import fully_shard

    def sharded(model: nn.Module, mesh: Any) -> nn.Module:
        for block in (*model.children(), model):
            fully_shard(block, mesh=mesh["data_parallel"])
        return model

    strategy = import_module("lightning.fabric.strategies").ModelParallelStrategy(
        parallelize_fn=sharded, data_parallel_size=options.ranks, tensor_parallel_size=1
    )
    fabric = import_module("lightning.fabric").Fabric(accelerator="cpu", devices=options.ranks, strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(make_network(options))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))
    stepped(model, optimizer, options)
    return deleting(folder, lambda path: fabric.save(path, {"model": model, "optimizer": optimizer}))


def accelerate_saves(options: argparse.Namespace, folder: Path) -> Saves:
    accelerator = import_module("accelerate").Accelerator(cpu=True)
    torch.set_num_threads(1)  # which it has changed
    model = make_network(options)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    stepped(model, optimizer, options)

    def save(path: Path) -> None:
        accelerator.save_state(path)  # returns the path

    return deleting(folder, save)


def measured_saves(
    options: argparse.Namespace, folder: Path, bare: Trained, engine: Trained
) -> tuple[Pairs, dict[str, str]]:
    """Return the seconds, and the libraries that are skipped."""
    present, skipped = importable({"lightning": "lightning.fabric", "accelerate": "accelerate"})
    saves = {
        TORCH: torch_saves(*bare, folder / "save", asynchronous=False),
        TORCH_ASYNC: torch_saves(*bare, folder / "async_save", asynchronous=True),
        SAVE: our_saves(*engine, folder / "camshaft", asynchronous=False),
        BLOCKING: our_saves(*engine, folder / "camshaft_asynchronous", asynchronous=True),
    }
    if "lightning" in present:
        saves[FABRIC] = fabric_saves(options, folder / "fabric")
    if "accelerate" in present:
        saves[ACCELERATE] = accelerate_saves(options, folder / "accelerate")
    seconds = interleave([Contender(name, one) for name, one in saves.items()], 1, options.repetitions)
    pairs = {
        (what, other): (seconds[other], seconds[what]) for what, other in SAVES if what != COMPLETE and other in saves
    }
    complete = [
        saves[name].durations[-options.repetitions :] for name in (TORCH_ASYNC, BLOCKING)
    ]  # without the warm-up
    return pairs | {(COMPLETE, TORCH_ASYNC): (complete[0], complete[1])}, skipped


def on_rank(rank: int, folder: str, options: argparse.Namespace) -> None:
    """Measure on each rank; rank 0 stores the results."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    idist.initialize("gloo", init_method=f"file://{folder}/initialized", rank=rank, world_size=options.ranks)
    # for the other libraries, which join the process group
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": options.ranks, "LOCAL_WORLD_SIZE": options.ranks}
    os.environ.update({name: str(value) for name, value in place.items()})
    saves: Pairs = {}
    steps: Pairs = {}
    skipped: dict[str, str] = {}
    for layout, sizes in layouts(options.ranks).items():
        bare, engine = by_hand(options, sizes), ours(options, sizes)
        steps |= measured_steps(options, layout, bare, engine)
        if layout == "fsdp":  # the steps have filled the states of the optimizers
            saves, skipped = measured_saves(options, Path(folder), bare, engine)
    idist.finalize()
    if rank == 0:
        Path(folder, "results").write_bytes(pickle.dumps((saves | steps, skipped)))


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        spawn(on_rank, (folder, options), nprocs=options.ranks)
        results, skipped = pickle.loads(Path(folder, "results").read_bytes())
    with torch.device("meta"):
        weights = sum(one.numel() for one in make_network(options).parameters())
    megabytes = round(3 * 4 * weights / 1e6, 1)  # AdamW has two values for each weight
    lines, rows = [], []
    for (what, other), (theirs, camshaft) in results.items():
        target = SAVES.get((what, other), STEP_TARGET if what.startswith("step") else None)
        times = Spread.of([one / base for one, base in zip(camshaft, theirs, strict=True)])
        ms = {"other": Spread.of(theirs, MILLISECOND), "camshaft": Spread.of(camshaft, MILLISECOND)}
        reached = "" if target is None else verdict(times, target)
        lines.append([what, other, str(ms["other"]), str(ms["camshaft"]), str(times)])
        rows.append({"what": what, "other": other, "ms": ms, "times": times, "target": target, "verdict": reached})
    print(
        f"milliseconds on {options.ranks} gloo ranks, with {megabytes} MB of weights and optimizer state, and the ratio"
    )
    print(f"medians of {options.repetitions}, and quartiles")
    head = ["what", "compared with", "other", "camshaft", "times other"]
    report("sharded", head, lines, skipped, ranks=options.ranks, megabytes=megabytes, rows=rows)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="gloo processes; 4 for layouts of two axes (%(default)s)")
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
    if options.ranks < 2:
        parser.error("--ranks must be at least 2")
    return options


if __name__ == "__main__":
    main()
