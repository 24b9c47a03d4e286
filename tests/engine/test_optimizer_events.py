"""Steps of the optimizer are events: fired once for each, counted, saved, and used by schedules and other handlers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler as native

from camshaft.contrib.engines import create_supervised_tbptt_trainer
from camshaft.engine import (
    Engine,
    Events,
    OptimizerEvents,
    count_optimizer_steps,
    create_supervised_trainer,
    supervised_training_step,
)
from camshaft.handlers import (
    Checkpoint,
    ConcatScheduler,
    CosineAnnealingScheduler,
    EMAHandler,
    LinearCyclicalScheduler,
    LRScheduler,
    ParamGroupScheduler,
    PiecewiseLinear,
    Throughput,
    create_lr_scheduler_with_warmup,
)

STEPPED = OptimizerEvents.STEP_COMPLETED
BATCH = (torch.ones(2, 1), torch.zeros(2, 1))


class Optimizer(torch.optim.SGD):
    """Remembers the rate of each step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.rates: list[float] = []

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.rates.append(round(self.param_groups[0]["lr"], 6))


def trainer_of(size: int = 1, **options: Any) -> tuple[Engine[Any, Any], Optimizer]:
    model = nn.Linear(1, 1)
    optimizer = Optimizer(model)
    loss_fn = nn.functional.mse_loss
    return (
        create_supervised_trainer(model, optimizer, loss_fn, gradient_accumulation_steps=size, **options),
        optimizer,
    )


sizes = st.integers(1, 5)


@given(size=sizes, length=st.integers(1, 12), epochs=st.integers(1, 3), limit=st.none() | st.integers(1, 30))
def test_each_step_of_the_optimizer_is_fired_counted_and_predicted(
    size: int, length: int, epochs: int, limit: int | None
) -> None:
    trainer, optimizer = trainer_of(size)
    fired: list[int] = []
    trainer.add_event_handler(STEPPED, lambda: fired.append(trainer.state.optimizer_steps))
    target = {"max_epochs": epochs} if limit is None else {"max_iters": limit}
    trainer.run([BATCH] * length, **target)
    steps = count_optimizer_steps(range(length), **target, gradient_accumulation_steps=size)
    assert fired == list(range(1, steps + 1))
    assert len(optimizer.rates) == trainer.state.optimizer_steps == steps
    assert steps == count_optimizer_steps(None, **target, epoch_length=length, gradient_accumulation_steps=size)


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({"data": None}, ValueError, "data"),
        ({"data": iter([1])}, ValueError, "data"),
        ({"data": []}, ValueError, "data"),
        ({"data": [1], "max_epochs": 0}, ValueError, "max_epochs"),
        ({"data": [1], "max_iters": 0}, ValueError, "max_iters"),
        ({"data": [1], "max_epochs": 1, "max_iters": 1}, ValueError, "max_iters"),
        ({"data": [1], "epoch_length": 0}, ValueError, "epoch_length"),
        ({"data": [1], "gradient_accumulation_steps": 1.5}, TypeError, "gradient_accumulation_steps"),
    ],
)
def test_steps_that_cannot_be_counted_are_an_error(
    arguments: dict[str, Any], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        count_optimizer_steps(**arguments)


def test_an_epoch_of_unknown_length_fires_its_last_step_too() -> None:
    trainer, optimizer = trainer_of(2)
    trainer.run(iter([BATCH] * 5))
    assert trainer.state.optimizer_steps == len(optimizer.rates) == 3


def test_filters_count_steps_and_the_same_event_may_be_nested_in_an_iteration() -> None:
    trainer, _ = trainer_of(3)
    seen: list[tuple[int, int]] = []

    def see() -> None:
        seen.append((trainer.state.optimizer_steps, trainer.state.iteration))

    trainer.add_event_handler(STEPPED(every=2) | STEPPED(once=3), see)
    trainer.run([BATCH] * 7, max_epochs=2)  # windows of 3, 3, and 1
    assert seen == [(2, 6), (3, 7), (4, 10), (6, 14)]


def test_a_step_of_ones_own_counts_with_one_call_and_a_step_without_an_engine_does_not_fail() -> None:
    def step(engine: Engine[Any, Any], batch: Any) -> None:
        engine.fire_event(batch)

    trainer = Engine(step)
    assert trainer.run([STEPPED, STEPPED(every=2), "STEP_COMPLETED"]).optimizer_steps == 3
    model = nn.Linear(1, 1)
    supervised_training_step(model, Optimizer(model), nn.functional.mse_loss)(None, BATCH)


def test_a_step_that_never_fires_the_event_is_reported_where_the_run_was_started() -> None:
    trainer = Engine(lambda engine, batch: None)
    schedule = PiecewiseLinear(torch.optim.SGD([torch.zeros(1)], 0.1), "lr", [(0, 0.0), (6, 0.6)])
    schedule.attach(trainer, STEPPED)
    with pytest.warns(UserWarning, match="never ran.*fire_event") as caught:
        trainer.run([1, 2])
    assert [one.filename for one in caught] == [__file__]
    other, _ = trainer_of(4)
    other.add_event_handler(STEPPED, lambda: None)
    other.add_event_handler(Events.ITERATION_COMPLETED(once=2), other.terminate)
    other.run([BATCH] * 4)  # ends inside of a window, which is no reason to warn


def test_truncated_backpropagation_steps_once_per_chunk() -> None:
    model = nn.RNN(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = create_supervised_tbptt_trainer(model, optimizer, nn.functional.mse_loss, tbtt_step=2)
    assert trainer.run([(torch.ones(5, 1, 1), torch.zeros(5, 1, 1))] * 2).optimizer_steps == 6


def test_a_step_that_a_scaler_skips_counts() -> None:
    trainer, optimizer = trainer_of(
        amp_mode="amp", amp_dtype=torch.bfloat16, scaler=torch.amp.GradScaler("cpu", init_scale=1e38)
    )
    trainer.run([(torch.full((2, 1), 1e30), torch.zeros(2, 1)), BATCH])
    assert (trainer.state.optimizer_steps, len(optimizer.rates)) == (2, 1)


def test_the_count_is_saved_resumed_and_reset_by_a_new_run() -> None:
    trainer, _ = trainer_of(2)
    assert "optimizer_steps" not in trainer.state_dict()
    trainer.run([BATCH] * 3, max_epochs=2)
    saved = trainer.state_dict()
    assert saved["optimizer_steps"] == 4
    assert trainer.run([BATCH] * 3, max_epochs=3).optimizer_steps == 6
    trainer.state.max_epochs = None
    assert trainer.run([BATCH] * 3).optimizer_steps == 2
    other, _ = trainer_of(2)
    other.load_state_dict(saved)
    assert other.state.optimizer_steps == 4
    assert other.run([BATCH] * 3, max_epochs=3).optimizer_steps == 6
    del saved["optimizer_steps"]  # as from PyTorch-Ignite
    other.load_state_dict(saved)
    assert other.state.optimizer_steps == 0
    with pytest.raises(ValueError, match="optimizer_steps"):
        other.load_state_dict({**saved, "optimizer_steps": -1})


# --- schedules ---------------------------------------------------------------------------------------------------


def _group(optimizer: Any) -> Any:
    rate = PiecewiseLinear(optimizer, "lr", [(0, 0.0), (6, 0.6)])
    return ParamGroupScheduler([rate, PiecewiseLinear(optimizer, "momentum", [(0, 0.0), (6, 0.6)])])


def _chain(optimizer: Any) -> Any:
    rise = PiecewiseLinear(optimizer, "lr", [(0, 0.0), (1, 0.5)])
    cycles = LinearCyclicalScheduler(optimizer, "lr", 0.5, 0.1, cycle_size=3)
    return ConcatScheduler([rise, cycles], durations=[1])


SCHEDULES: dict[str, Any] = {
    "PiecewiseLinear": lambda optimizer: PiecewiseLinear(optimizer, "lr", [(0, 0.0), (6, 0.6)]),
    "CosineAnnealing": lambda optimizer: CosineAnnealingScheduler(optimizer, "lr", 0.5, 0.1, cycle_size=3),
    "ConcatScheduler": _chain,
    "ParamGroupScheduler": _group,
    "LRScheduler": lambda optimizer: LRScheduler(native.ExponentialLR(optimizer, 0.5)),
    "warm-up": lambda optimizer: create_lr_scheduler_with_warmup(
        native.ExponentialLR(optimizer, 0.5), warmup_start_value=0.0, warmup_duration=3
    ),
}


def rates_of(make: Any, size: int, event: Any, stops: tuple[int, ...] = (3,)) -> list[float]:
    """Train for three epochs, in new objects from saved states after some of them; return the rate of each step."""
    states: dict[str, Any] = {}
    rates: list[float] = []
    for epochs in stops:
        trainer, optimizer = trainer_of(size)
        objects = {"trainer": trainer, "optimizer": optimizer, "schedule": make(optimizer)}
        objects["schedule"].attach(trainer, *event)
        for name, state in states.items():
            objects[name].load_state_dict(state)
        trainer.run([BATCH] * 3 if size > 1 else [BATCH] * 2, max_epochs=epochs)
        states = {name: one.state_dict() for name, one in objects.items()}
        rates += optimizer.rates
    return rates


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_steps_see_the_rates_that_they_see_without_accumulation(name: str) -> None:
    wanted = rates_of(SCHEDULES[name], 1, ())
    assert len(set(wanted)) > 2
    assert rates_of(SCHEDULES[name], 2, (STEPPED,)) == wanted
    assert rates_of(SCHEDULES[name], 2, (STEPPED,), stops=(1, 2, 3)) == wanted


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_that_was_added_as_a_plain_handler_works_or_says_how_to_attach_it(name: str) -> None:
    trainer, optimizer = trainer_of(2)
    trainer.add_event_handler(STEPPED, SCHEDULES[name](optimizer))
    if name == "LRScheduler":  # torch has set the first rate
        trainer.run([BATCH] * 3, max_epochs=3)
        assert optimizer.rates == rates_of(SCHEDULES[name], 1, ())
    else:
        with pytest.raises(ValueError, match="attach"):
            trainer.run([BATCH] * 3, max_epochs=3)
        assert len(optimizer.rates) == 1


@pytest.mark.parametrize("by_handle", [True, False])
def test_a_schedule_that_was_removed_sets_nothing(by_handle: bool) -> None:
    trainer, optimizer = trainer_of()
    schedule = PiecewiseLinear(optimizer, "lr", [(0, 0.0), (6, 0.6)])
    handle = schedule.attach(trainer, STEPPED)
    if by_handle:
        handle.remove()
    else:
        trainer.remove_event_handler(schedule, STEPPED)
    trainer.run([BATCH] * 3)
    assert optimizer.rates == [0.1] * 3


@pytest.mark.parametrize("event", [Events.STARTED, Events.EPOCH_STARTED(once=2)])
def test_a_schedule_that_is_attached_in_the_run_sets_the_next_step(event: Any) -> None:
    trainer, optimizer = trainer_of()
    schedule = PiecewiseLinear(optimizer, "lr", [(0, 0.0), (6, 0.6)])
    trainer.add_event_handler(event, lambda: schedule.attach(trainer, STEPPED))
    trainer.run([BATCH] * 2, max_epochs=2)
    assert optimizer.rates == ([0.0, 0.1, 0.2, 0.3] if event is Events.STARTED else [0.1, 0.1, 0.0, 0.1])


# --- other handlers ----------------------------------------------------------------------------------------------


def test_averages_and_throughput_follow_the_steps() -> None:
    trainer, _ = trainer_of(2)
    model = nn.Linear(1, 1)
    ema, updates = EMAHandler(model), []
    ema.update = updates.append  # type: ignore[method-assign]
    ema.attach(trainer, event=STEPPED)
    throughput = Throughput(samples=2)
    throughput.attach(trainer, STEPPED(every=2))
    published: list[int] = []
    trainer.add_event_handler(STEPPED, lambda: published.append(trainer.state.metrics["steps_per_second"] > 0))
    trainer.run([BATCH] * 7)
    assert len(updates) == 4
    assert published == [False, True, True, True]


def test_a_checkpoint_on_a_step_is_taken_at_the_end_of_the_iteration(tmp_path: Path) -> None:
    trainer, optimizer = trainer_of(2)
    checkpoint = Checkpoint({"trainer": trainer, "optimizer": optimizer}, tmp_path, n_saved=None)
    trainer.add_event_handler(STEPPED(every=2), checkpoint)
    trainer.run([BATCH] * 8)
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["checkpoint_4.pt", "checkpoint_8.pt"]
    saved = torch.load(tmp_path / "checkpoint_4.pt")["trainer"]
    assert (saved["iteration"], saved["optimizer_steps"]) == (4, 2)
