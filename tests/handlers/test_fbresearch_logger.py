"""Test the lines of FBResearchLogger, with every kind of target and length."""

from __future__ import annotations

import gc
import logging
import re
import weakref

import pytest
import torch

from camshaft.engine import Engine
from camshaft.handlers import FBResearchLogger
from camshaft.handlers.timing import Timer
from tests.handlers.clocks import clock_in
from tests.ranks import on_ranks

TIME = re.compile(r"\d+\.\d{4}(?!\d)")
END = "Iter time: T s  Data prep time: T s"


@pytest.fixture
def lines(caplog):
    """Return the lines written so far, with T for each duration."""
    caplog.set_level(logging.INFO, "readable")
    with clock_in(Timer):  # which stands still, as the process may
        yield lambda: [TIME.sub("T", one.getMessage()) for one in caplog.records if one.name == "readable"]


def run(data=range(4), output=None, show_output=False, delimiter="  ", run_options=None, **options):
    trainer = Engine(lambda engine, batch: output)
    logger = FBResearchLogger(logging.getLogger("readable"), delimiter, show_output)
    logger.attach(trainer, "Train", **options)
    trainer.run(data, **(run_options or {}))
    return logger


def test_a_run_of_two_epochs(lines):
    logger = run(every=2, run_options={"max_epochs": 2})
    assert lines() == [
        "Train: start epoch [1/2]",
        f"Epoch [1/2]  [2/4]:  ETA: 0:00:00  {END}",
        f"Epoch [1/2]  [4/4]:  ETA: 0:00:00  {END}",
        "Train: Epoch [1/2]  Total time: 0:00:00 (T s / it)",
        "Train: start epoch [2/2]",
        f"Epoch [2/2]  [2/4]:  ETA: 0:00:00  {END}",
        f"Epoch [2/2]  [4/4]:  ETA: 0:00:00  {END}",
        "Train: Epoch [2/2]  Total time: 0:00:00 (T s / it)",
        "Train: run completed  Total time: 0:00:00",
    ]
    # the times are means over the epoch
    assert (logger.iter_timer.step_count, logger.data_timer.step_count) == (4, 4)
    assert logger.iter_timer.value() == logger.iter_timer.total / 4


def test_outputs_attributes_and_rates(lines):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.25)
    output = {"a": 0.5, "b": torch.tensor(2)}
    run(
        data=[0], output=output, show_output=True, every=1, optimizer=optimizer, state_attributes=["epoch"],
        output_transform=lambda output: {"twice": output["a"] * 2, **output}, delimiter=" | ",
    )  # fmt: skip
    (line,) = [line for line in lines() if "ETA" in line]
    times = END.replace("  ", " | ")
    shown = "lr: 0.25000 | twice: T | a: T | b: T | epoch: T"
    assert line == f"Epoch [1/1] | [1/1]: | ETA: 0:00:00 | {shown} | {times}"


def test_each_group_has_its_rate_and_outputs_are_hidden_by_default(lines):
    groups = [{"params": [torch.zeros(1)], "lr": lr} for lr in (0.5, 0.25)]
    run(data=[0], output={"a": 1}, optimizer=torch.optim.SGD(groups))
    assert f"Epoch [1/1]  [1/1]:  ETA: 0:00:00  lr [g0]: 0.50000  lr [g1]: 0.25000  {END}" in lines()


def test_targets_in_iterations_and_data_of_unknown_length(lines):
    run(data=iter(range(2)), run_options={"max_iters": 2})
    assert lines()[:3] == ["Train: start epoch [1]", f"Epoch [1]  [1]:  {END}", f"Epoch [1]  [2]:  {END}"]
    run(every=3, run_options={"max_iters": 6})
    assert [line for line in lines() if "ETA" in line] == [
        f"Epoch [1/2]  [3/4]:  ETA: 0:00:00  {END}",
        f"Epoch [2/2]  [2/4]:  ETA: 0:00:00  {END}",
    ]


def test_invalid_arguments_attach_nothing():
    with pytest.raises(TypeError, match="logger must be a logging.Logger"):
        FBResearchLogger("text")
    trainer, logger = Engine(lambda engine, batch: None), FBResearchLogger(logging.getLogger("readable"))
    for name, error, value in (
        ("output_transform", TypeError, 3),
        ("every", ValueError, 0),
        ("optimizer", TypeError, 3),
    ):
        with pytest.raises(error, match=name):
            logger.attach(trainer, "Train", **{name: value})
    assert not trainer.has_event_handler(logger.log_epoch_started)


def test_the_logger_does_not_keep_the_engine_alive():
    trainer = Engine(lambda engine, batch: None)
    logger = FBResearchLogger(logging.getLogger("readable"))
    logger.attach(trainer, "Train")
    gone = weakref.ref(trainer)
    gc.disable()
    try:
        del trainer
        assert gone() is None
    finally:
        gc.enable()


@on_ranks(2)
def test_only_rank_0_writes():
    records, log, handler = [], logging.getLogger("readable"), logging.Handler()
    log.setLevel(logging.INFO)
    handler.emit = records.append
    log.addHandler(handler)
    run()
    log.removeHandler(handler)
    log.setLevel(logging.NOTSET)
    assert bool(records) == (torch.distributed.get_rank() == 0)
