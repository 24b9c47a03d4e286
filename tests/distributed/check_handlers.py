"""Handlers do the right thing on every backend without being told the rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

import camshaft.distributed as idist
from camshaft.engine import Engine, Events
from camshaft.handlers import Checkpoint, DiskSaver, EarlyStopping, TerminateOnNan, stop_together
from tests.distributed.check_training import SAMPLES, model_of, numbers_of
from tests.distributed.checking import check, equal, folder, place, same


@check
def what_one_rank_saves_also_in_the_background_every_rank_goes_on_from() -> None:
    rank, _ = place()
    for asynchronous in (False, True):
        model = idist.auto_model(model_of(0))
        optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5))
        objects = {"model": model, "optimizer": optimizer}
        with folder() as path:
            checkpoint = Checkpoint(objects, DiskSaver(path), asynchronous=asynchronous)
            trainer: Engine[Any, None] = Engine(lambda engine, batch: None)
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), checkpoint)
            trainer.run(range(3))
            equal(checkpoint.last_checkpoint, path / "checkpoint_2.pt")
            idist.barrier()
            wanted = numbers_of(model)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(rank)
            optimizer.param_groups[0]["lr"] = 0.5
            equal(Checkpoint.resume(objects, path), path / "checkpoint_2.pt")
            for got, one in zip(numbers_of(model), wanted, strict=True):
                same(got, one)
            equal(optimizer.param_groups[0]["lr"], 0.25)


@check
def without_improvement_every_rank_stops_at_the_end_of_the_epoch() -> None:
    trainer: Engine[int, Any] = Engine(lambda engine, batch: idist.all_reduce(batch))
    evaluator: Engine[int, None] = Engine(lambda engine, batch: None)
    EarlyStopping(2, lambda engine: 1.0, trainer).attach(evaluator)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([0]))
    trainer.run(range(SAMPLES), max_epochs=9)
    equal((trainer.state.epoch, trainer.state.iteration), (3, 3 * SAMPLES))


@check
def a_rank_that_requests_a_stop_or_computes_nan_ends_the_run_on_all_after_the_same_iteration() -> None:
    rank, size = place()

    def step(engine: Engine[int, Any], batch: int) -> Any:
        idist.all_reduce(1)
        return end() if batch == 3 and rank == size - 1 else 0.5

    for is_requested in (True, False):
        trainer = Engine(step)
        end: Callable[[], Any] = stop_together(trainer) if is_requested else lambda: math.nan
        if not is_requested:
            trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
        trainer.run(range(10_000))
        ended = idist.all_gather(trainer.state.iteration)
        equal(set(ended if size > 1 else [trainer.state.iteration]), {trainer.state.iteration})
        assert 4 <= trainer.state.iteration < 10_000
