"""Training on Horovod ranks matches one process that trains on all of the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

import camshaft.distributed as idist
from camshaft.engine import Engine, Events, create_supervised_trainer
from tests.distributed.checking import check, equal, place, same
from tests.engine.windows import RATE, Batch, Weighted, batches_of, expected, samples, squared, weights_of

EPOCHS = 2


class Odd(nn.Module):
    """A model with tensors that Horovod cannot broadcast."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.low = nn.Parameter(torch.full((2, 2), float(rank), dtype=torch.bfloat16))
        self.turned = nn.Parameter(torch.full((3, 2), float(rank)).t())
        self.register_buffer("flag", torch.tensor([rank == 0, rank != 0]))
        self.register_buffer("count", torch.tensor(rank), persistent=False)
        self.register_buffer("nothing", torch.empty(0))


@check
def parameters_and_buffers_are_broadcast_from_rank_0() -> None:
    rank, _ = place()
    model = idist.auto_model(Odd(rank))
    assert isinstance(model, Odd)
    wanted = Odd(0)
    for (name, got), one in zip(model.state_dict(keep_vars=True).items(), wanted.state_dict().values(), strict=True):
        equal(name in dict(model.named_parameters()), isinstance(got, nn.Parameter))
        same(got.contiguous(), one.contiguous())
    same(model.count, torch.tensor(0))
    equal(model.turned.stride(), wanted.turned.stride())


def data_of(sizes: Sequence[Sequence[int]]) -> list[list[Batch]]:
    """Return the batches of each rank."""
    return [batches_of(*own, seed=rank) for rank, own in enumerate(sizes)]


def trainer_of(passes: int = 1, **options: Any) -> tuple[nn.Module, Engine[Any, Any]]:
    """Return a model, initialized differently on every rank, and its trainer."""
    model = Weighted()
    nn.init.constant_(model.weight, idist.get_rank()) if idist.get_rank() else None
    model = idist.auto_model(model)
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), RATE), backward_passes_per_step=passes)
    return model, create_supervised_trainer(model, optimizer, squared, gradient_accumulation_steps=passes, **options)


def windows_of(data: list[list[Batch]], size: int) -> list[list[Batch]]:
    """Return the batches of all ranks that make up each step."""
    count = len(data[0])
    starts = range(0, count, size)
    return [[batch for own in data for batch in own[start : start + size]] for start in starts] * EPOCHS


def agree(model: nn.Module, wanted: torch.Tensor) -> None:
    got = weights_of(model)
    torch.testing.assert_close(got, wanted)
    for other in idist.all_gather(got.tolist()):
        equal(other, got.tolist())


@check
def training_matches_one_process_also_with_windows_and_clipping() -> None:
    """The last window of the accumulated gradients is short; clipping waits until Horovod has reduced the gradients."""
    rank, size = place()
    data = data_of([[4] * 5] * size)
    cases: tuple[tuple[dict[str, float], Any], ...] = (
        ({}, lambda parameters: None),
        ({"clip_grad_norm": 0.3}, lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.3)),
        ({"clip_grad_value": 0.2}, lambda parameters: nn.utils.clip_grad_value_(parameters, 0.2)),
    )
    for passes in (1, 2):
        for options, clip in cases:
            model, trainer = trainer_of(passes, **options)
            trainer.run(data[rank], max_epochs=EPOCHS)
            agree(model, expected(windows_of(data, passes), clip))


@check
def weighted_gradients_match_one_process_with_different_weights_per_rank() -> None:
    rank, size = place()
    data = data_of([(5, 1, 2, 3, 1), (1, 4, 2, 1, 3)] * size)[:size]
    for passes in (1, 2):
        model, trainer = trainer_of(passes, batch_weight=samples)
        trainer.run(data[rank], max_epochs=EPOCHS)
        agree(model, expected(windows_of(data, passes)))


@check
def a_discarded_accumulation_window_does_not_affect_the_next_run() -> None:
    rank, size = place()
    data = data_of([[4] * 4] * size)
    model, trainer = trainer_of(passes=2)
    with trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda engine: engine.terminate()):
        trainer.run(data[rank], max_epochs=1)
    trainer.run(data[rank], max_epochs=1)
    agree(model, expected([*windows_of(data, 2)[:1], *windows_of(data, 2)[:2]]))


@check
def scaled_gradients_match_one_process_and_all_ranks_skip_an_overflowing_step() -> None:
    rank, size = place()
    data = data_of([[4] * 4] * size)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    model, trainer = trainer_of(amp_mode="amp", scaler=scaler, clip_grad_norm=0.3)
    bad = [(x * torch.inf if rank == size - 1 and number == 1 else x, y) for number, (x, y) in enumerate(data[rank])]
    trainer.run(bad, max_epochs=1)
    kept = [window for number, window in enumerate(windows_of(data, 1)[:4]) if number != 1]
    agree(model, expected(kept, lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.3)))
    equal(scaler.get_scale(), 2.0**9)


@check
def a_group_trains_a_model_while_the_other_ranks_do_something_else() -> None:
    rank, size = place()
    group = idist.new_group([0])
    model = Weighted()
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), RATE), process_set=group)
    if rank == 0:
        x, y = data_of([[4]])[0][0]
        squared(model(x), y).backward()
    optimizer.step()
    assert (weights_of(model).tolist() != weights_of(Weighted()).tolist()) == (rank == 0)
    assert hvd.is_initialized()
    equal(idist.all_reduce(1), size)
