"""Train with a deliberate bug on one rank, to see how camshaft reports it.

    python examples/hang.py --list
    python examples/hang.py --bug shapes --backend gloo --nproc_per_node 2
    torchrun --nproc_per_node 2 examples/hang.py --bug terminate --backend gloo

You see the report of the bug: which rank did what in which line, and what the other ranks were waiting for. Without
camshaft, most of these runs would hang until PyTorch's timeout of 30 minutes. gloo aborts the process where a reduction
of DDP meets another collective; with CAMSHAFT_DEBUG=1, the calls are compared first.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import camshaft.distributed as idist
from camshaft.engine import Engine, Events
from camshaft.handlers import Checkpoint, DiskSaver
from camshaft.utils import manual_seed

WHEN = 25  # the iteration of the bug
Step = Callable[[Engine, list[Tensor]], Tensor]
Bug = Callable[[Engine], None]  # a handler of that iteration


def different(trainer: Engine) -> None:
    """The ranks call different collectives: RankDivergenceError with a table of who called what, from which line."""
    if idist.get_rank() == 0:
        idist.barrier()
    else:
        idist.all_reduce(trainer.state.output)


def alone(trainer: Engine) -> None:
    """Only rank 0 calls a collective: gloo aborts, the last calls are named; with debugging, RankDivergenceError."""
    if idist.get_rank() == 0:
        print(idist.all_reduce(trainer.state.output))


def shapes(trainer: Engine) -> None:
    """The ranks reduce tensors of different shapes: RankDivergenceError, where gloo would abort the process."""
    idist.all_reduce(torch.ones(4 if idist.get_rank() == 0 else 3))


def terminate(trainer: Engine) -> None:
    """The last rank calls terminate(): RankDivergenceError with the line, and how to stop all ranks."""
    if idist.get_rank() == idist.get_world_size() - 1:
        trainer.terminate()


def swallowed(trainer: Engine) -> None:
    """The last rank raises an error that the script ignores: RankDivergenceError with the error and its line."""
    if idist.get_rank() == idist.get_world_size() - 1:
        raise ValueError("the loss is not finite")


def skipped(trainer: Engine) -> None:
    """The last rank skips a step: gloo aborts, the last calls are named; with debugging, RankDivergenceError."""


def fails(trainer: Engine) -> None:
    """The last rank raises an error: RankFailedError on the others, with the traceback of that rank."""
    if idist.get_rank() == idist.get_world_size() - 1:
        raise LookupError("there is no such label")


def waits(trainer: Engine) -> None:
    """The last rank is busy for long: the log of the others names it, with its line and stack, and they go on."""
    if idist.get_rank() == idist.get_world_size() - 1:
        time.sleep(20)


def saving(trainer: Engine) -> None:
    """Rank 0 saves for long, which is no bug: the log of the others says so once, and no warning is issued."""


BUGS: dict[str, Bug] = {
    function.__name__: function
    for function in (different, alone, shapes, terminate, swallowed, skipped, fails, waits, saving)
}


class SlowSaver(DiskSaver):
    """Takes as long as a large model on a slow disk."""

    def __call__(self, *args: object, **kwargs: object) -> None:
        if idist.get_rank() == 0:  # the rank that writes
            time.sleep(20)
        super().__call__(*args, **kwargs)  # type: ignore[arg-type]


def training(local_rank: int, config: argparse.Namespace) -> None:
    """Train; runs in every process."""
    manual_seed(config.seed)
    if idist.get_world_size() < 2:
        raise SystemExit("this takes two processes: add --backend gloo --nproc_per_node 2")
    is_last = idist.get_rank() == idist.get_world_size() - 1
    inputs = torch.randn(800, 8)
    loader = idist.auto_dataloader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16, shuffle=True)
    model = idist.auto_model(nn.Linear(8, 1))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.01))

    def step(engine: Engine, batch: list[Tensor]) -> Tensor:
        if config.bug == "skipped" and is_last and engine.state.iteration == WHEN:
            return torch.zeros(())
        x, y = (part.to(idist.device()) for part in batch)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    trainer = Engine(step)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=WHEN), BUGS[config.bug])

    @trainer.on(Events.EPOCH_COMPLETED)
    def show(engine: Engine) -> None:
        loss = idist.all_reduce(engine.state.output) / idist.get_world_size()
        idist.one_rank_only()(print)(f"epoch {engine.state.epoch}: loss {loss:.4f}", flush=True)

    if config.bug == "saving":
        saver = SlowSaver(config.output, require_empty=False)
        trainer.add_event_handler(Events.EPOCH_COMPLETED(once=1), Checkpoint({"model": model}, saver))
    logging.basicConfig(format="%(message)s")
    logging.getLogger("camshaft.distributed").setLevel(logging.INFO)  # waits that are no alarm
    try:
        trainer.run(loader, max_epochs=3)
    except ValueError as error:  # part of the bug named swallowed: the other ranks still train
        print(f"rank {idist.get_rank()} ignores {error!r}", flush=True)
    idist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bug", choices=list(BUGS), default="different")
    parser.add_argument("--list", action="store_true", help="explain the bugs, and exit")
    parser.add_argument("--backend", help="gloo, nccl, mpi, or auto")
    parser.add_argument("--nproc_per_node", type=int, help="processes to start; omit under a launcher")
    parser.add_argument("--report_after", type=float, default=10.0, help="seconds until a wait is logged (default: 10)")
    parser.add_argument("--output", type=Path, default=Path("runs/hang"), help="folder for the checkpoint of saving")
    parser.add_argument("--seed", type=int, default=17)
    config = parser.parse_args()
    if config.list:
        for name, bug in BUGS.items():
            print(f"{name:10} {bug.__doc__}")
        return
    options = {"hang_report_after": config.report_after} if config.backend else {}
    with idist.Parallel(backend=config.backend, nproc_per_node=config.nproc_per_node, **options) as parallel:
        parallel.run(training, config)


if __name__ == "__main__":
    main()
