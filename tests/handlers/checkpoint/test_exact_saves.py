"""A run that was killed anywhere and resumes from a save that was due anywhere ends equal to the last bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

from camshaft.engine import Engine, EventEnum, Events, create_supervised_trainer
from camshaft.handlers import Checkpoint, CosineAnnealingScheduler, EMAHandler, LRScheduler, RunningAverage
from camshaft.handlers.stopping import StopTogether
from camshaft.utils import manual_seed

LENGTH, EPOCHS = 7, 2


class Killed(BaseException):
    pass


class StepEvents(EventEnum):
    STEPPED = "stepped"


class Training:
    """Everything that has a state: batch norm, dropout, averages, schedules, a scaler, and keys of the user."""

    def __init__(self, folder, size):
        manual_seed(3)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.trainer = create_supervised_trainer(
            self.model, optimizer, nn.functional.mse_loss, deterministic=True, amp_mode="amp",
            scaler=True, amp_dtype=torch.bfloat16, gradient_accumulation_steps=size,
        )  # fmt: skip
        trainer = self.trainer
        trainer.register_events(*StepEvents)
        optimizer.register_step_post_hook(lambda *_: trainer.fire_event(StepEvents.STEPPED))
        trainer.state_dict_user_keys.append("seen")
        trainer.state.seen = 0
        trainer.add_event_handler(Events.GET_BATCH_COMPLETED, lambda engine: setattr(engine.state, "seen", self.seen()))
        average = RunningAverage()
        average.attach(trainer, "loss")
        ema = EMAHandler(self.model, momentum=0.5)
        ema.attach(trainer, event=StepEvents.STEPPED)
        by_iteration = CosineAnnealingScheduler(optimizer, "lr", 0.1, 0.01, cycle_size=10)
        by_iteration.attach(trainer, Events.ITERATION_STARTED)
        by_step = LRScheduler(ExponentialLR(torch.optim.SGD(self.model.parameters(), 1.0), 0.9))
        trainer.add_event_handler(StepEvents.STEPPED, by_step)
        self.parts = {
            "trainer": trainer, "model": self.model, "optimizer": optimizer, "scaler": trainer.state.scaler,
            "average": average, "ema": ema, "by_iteration": by_iteration, "by_step": by_step,
        }  # fmt: skip
        self.checkpoint = Checkpoint(self.parts, folder)

    def seen(self):
        return self.trainer.state.seen + 1

    def run(self):
        generator = torch.Generator().manual_seed(1)
        samples = TensorDataset(torch.randn(28, 4, generator=generator), torch.randn(28, 1, generator=generator))
        manual_seed(5)
        self.trainer.run(DataLoader(samples, batch_size=4, shuffle=True), max_epochs=EPOCHS)
        return self

    def state(self):
        states = {name: part.state_dict() for name, part in self.parts.items()}
        states["random"] = torch.get_rng_state()
        return states


def kill():
    raise Killed


def check_equal(one, other, where="state"):
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            check_equal(one[key], other[key], f"{where}[{key!r}]")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            check_equal(a, b, f"{where}[{index}]")
    else:
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, where


def evaluating(training, checkpoint):
    """Save on an evaluator, which runs after each iteration of the trainer."""
    evaluator = Engine(lambda engine, batch: None)
    evaluator.add_event_handler(Events.COMPLETED, checkpoint)
    training.trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: evaluator.run([0]))


def on(event):
    return lambda training, checkpoint: training.trainer.add_event_handler(event, checkpoint)


DUE = {
    "batch": on(Events.GET_BATCH_COMPLETED),
    "start": on(Events.ITERATION_STARTED),
    "step": on(StepEvents.STEPPED),
    "end": on(Events.ITERATION_COMPLETED),
    "every second": on(Events.ITERATION_COMPLETED(every=2)),
    "evaluator": evaluating,
}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("due", DUE)
def test_a_run_that_was_killed_anywhere_ends_equal(tmp_path, due, size):
    whole = Training(tmp_path / "whole", size).run().state()
    windows = {*range(0, LENGTH, size), LENGTH}
    for iteration in (2, 3, 5, 7, 8, 10, 13):
        killed = Training(tmp_path / str(iteration), size)
        DUE[due](killed, killed.checkpoint)
        killed.trainer.add_event_handler(Events.ITERATION_STARTED(once=iteration), kill, order=1)
        with pytest.raises(Killed):
            killed.run()
        again = Training(tmp_path / str(iteration), size)
        if again.checkpoint.resume_latest() is None:  # before the end of the first window
            assert iteration <= max(size, 2)
            continue
        done = again.trainer.state.iteration
        assert (done % LENGTH or LENGTH) in windows
        assert due == "evaluator" or killed.checkpoint.last_checkpoint.name == f"checkpoint_{done}.pt"
        check_equal(again.run().state(), whole)


def test_a_save_due_several_times_in_a_window_is_taken_once(tmp_path):
    training, saved = Training(tmp_path, 3), []
    training.trainer.add_event_handler(Events.ITERATION_STARTED | Events.ITERATION_COMPLETED, training.checkpoint)
    training.trainer.add_event_handler(
        Checkpoint.SAVED_CHECKPOINT, lambda: saved.append(training.checkpoint.last_checkpoint.name)
    )
    training.run()
    assert saved == [f"checkpoint_{iteration}.pt" for iteration in (3, 6, 7, 10, 13, 14)]


def test_all_ranks_stop_at_the_end_of_a_window(tmp_path):
    training, together = Training(tmp_path, 3), StopTogether()
    together.surround(training.trainer)
    training.trainer.add_event_handler(Events.ITERATION_STARTED(once=4), lambda: together.request())
    training.run()
    assert training.trainer.state.iteration == 6


def test_a_trainer_inside_the_step_of_another_engine_saves_as_it_does_alone(tmp_path):
    training = Training(tmp_path, 1)
    training.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), training.checkpoint)
    training.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), kill, order=1)
    with pytest.raises(Killed):
        Engine(lambda engine, batch: training.run()).run([0])
    assert training.checkpoint.last_checkpoint.name == "checkpoint_2.pt"
