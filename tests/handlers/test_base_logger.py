"""What loggers share: reading values into flat names, steps, and attaching."""

from __future__ import annotations

from collections import namedtuple

import numpy
import pytest
import torch

from camshaft.engine import Engine, EventEnum, Events
from camshaft.engine.lazy import LazyNumber
from camshaft.handlers.base_logger import BaseLogger, BaseOutputHandler
from tests.handlers.parts import at

Pair = namedtuple("Pair", "x y")


class OutputHandler(BaseOutputHandler):
    """Writes to a list."""

    def __call__(self, engine, logger, event_name, *extra, **more):
        values = self._setup_output_metrics_state_attrs(engine, key_tuple=False)
        logger.lines.append((self.global_step(engine, event_name), values, *extra, *more.values()))


class ListLogger(BaseLogger):
    def __init__(self):
        self.lines = []
        self.closed = 0

    def close(self):
        self.closed += 1

    def _create_output_handler(self, *args, **kwargs):
        return OutputHandler(*args, **kwargs)

    def _create_opt_params_handler(self, optimizer):
        return lambda engine, logger, event_name: logger.lines.append(optimizer)


def read(engine, text=False, **options):
    handler = OutputHandler("tag", **options)
    return handler._setup_output_metrics_state_attrs(engine, log_text=text)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.5, {(): 0.5}),
        (True, {(): True}),
        (numpy.float32(0.5), {(): 0.5}),
        (torch.tensor(3), {(): 3}),
        (LazyNumber(torch.tensor(0.5)), {(): 0.5}),
        (torch.tensor([1, 2]), {("0",): 1, ("1",): 2}),
        ([1, (2, 3)], {("0",): 1, ("1", "0"): 2, ("1", "1"): 3}),
        (Pair(1, y=2), {("0",): 1, ("1",): 2}),
        ({"b": {"c": [4]}, 5: 6}, {("b", "c", "0"): 4, ("5",): 6}),
        ({}, {}),
    ],
)
def test_numbers_in_containers_and_tensors_are_found_with_their_path(value, expected):
    values = read(at(a=value), metric_names=["a"])
    assert values == {("tag", "a", *path): number for path, number in expected.items()}
    assert all(type(number) in (int, float, bool, numpy.float32) for number in values.values())


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, "NoneType"),
        ("text", "str"),
        (b"text", "bytes"),
        (torch.zeros(2, 3), r"tensor of shape \(2, 3\)"),
        ({1, 2}, "set"),
        (numpy.zeros(2), "ndarray"),
    ],
)
def test_what_is_no_number_is_left_out_with_a_warning(value, kind):
    with pytest.warns(UserWarning, match=f"a/b is not logged, because it is a {kind}"):
        assert read(at(a={"b": value, "c": 1}), metric_names="all") == {("tag", "a", "c"): 1}


def test_text_is_a_value_for_loggers_that_log_it():
    assert read(at(a=["text", 1]), text=True, metric_names="all") == {("tag", "a", "0"): "text", ("tag", "a", "1"): 1}


def test_metrics_outputs_and_attributes_come_in_this_order():
    engine = at(loss=1, accuracy=2)
    engine.state.output, engine.state.rate = 4, 5
    options = {"output_transform": lambda output: output * 2, "state_attributes": ["rate"]}
    assert list(read(engine, metric_names="all", **options).items()) == [
        (("tag", "loss"), 1),
        (("tag", "accuracy"), 2),
        (("tag", "output"), 8),
        (("tag", "rate"), 5),
    ]
    assert read(engine, output_transform=lambda output: {"twice": 8}) == {("tag", "twice"): 8}


def test_a_metric_or_attribute_that_is_missing_is_left_out_with_a_warning():
    with pytest.warns(UserWarning, match=r"no metric 'acc' to log, but only \['loss'\]"):
        assert read(at(loss=1), metric_names=["acc", "loss"]) == {("tag", "loss"): 1}
    with pytest.warns(UserWarning, match="speed is not logged, because it is a NoneType"):
        assert read(at(), state_attributes=["speed"]) == {}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ValueError, "at least one of metric_names, output_transform and state_attributes"),
        ({"metric_names": "loss"}, TypeError, "metric_names must be a list of names or 'all', got 'loss'"),
        ({"metric_names": ("loss",)}, TypeError, "metric_names"),
        ({"output_transform": 3}, TypeError, "output_transform must be callable, got 3"),
        ({"state_attributes": "lr"}, TypeError, "state_attributes must be a list of names, got 'lr'"),
        ({"metric_names": "all", "global_step_transform": 3}, TypeError, "global_step_transform must be callable"),
    ],
)
def test_wrong_arguments_of_an_output_handler_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        OutputHandler("tag", **options)


@pytest.mark.parametrize("step", [7, numpy.int64(7)])
def test_any_integer_is_a_step(step):
    handler = OutputHandler("tag", "all", global_step_transform=lambda engine, event: step)
    assert type(handler.global_step(at(), Events.COMPLETED)) is int
    assert handler.global_step(at(), Events.COMPLETED) == 7


@pytest.mark.parametrize("step", [7.0, "7", None])
def test_what_is_no_integer_is_no_step(step):
    handler = OutputHandler("tag", "all", global_step_transform=lambda engine, event: step)
    with pytest.raises(TypeError, match="global_step_transform must give an integer"):
        handler.global_step(at(), Events.COMPLETED)


# --- attaching ---------------------------------------------------------------------------------------------


def run(engine):
    engine.run(range(4), max_epochs=2)


@pytest.fixture
def trainer():
    return Engine(lambda engine, batch: engine.state.iteration * 10)


def test_each_event_of_a_list_is_handed_over_by_itself_with_the_extra_arguments(trainer):
    logger = ListLogger()
    handler = OutputHandler("t", output_transform=lambda output: output)
    events = Events.EPOCH_COMPLETED | Events.ITERATION_COMPLETED(every=3)
    with logger.attach(trainer, handler, events, "extra", more=1):
        run(trainer)
    run(trainer)  # the handle removed both
    assert logger.lines == [
        (3, {"t/output": 30}, "extra", 1),
        (1, {"t/output": 40}, "extra", 1),
        (6, {"t/output": 60}, "extra", 1),
        (2, {"t/output": 80}, "extra", 1),
    ]


def test_output_and_optimizer_handlers_are_made_from_the_remaining_arguments(trainer):
    logger = ListLogger()
    logger.attach_output_handler(trainer, Events.COMPLETED, "tag", state_attributes=["epoch"])
    logger.attach_opt_params_handler(trainer, Events.COMPLETED, optimizer="optimizer")
    run(trainer)
    assert logger.lines == [(2, {"tag/epoch": 2}), "optimizer"]


class Own(EventEnum):
    COUNTED = "counted"
    UNCOUNTED = "uncounted"


def test_events_need_a_counter_which_may_be_the_engines_own(trainer):
    logger = ListLogger()
    handler = OutputHandler("tag", "all")
    trainer.register_events(*Own, event_to_attr={Own.COUNTED: "words"})
    for event in (Own.UNCOUNTED, Events.EXCEPTION_RAISED, Events.COMPLETED | Own.UNCOUNTED):
        with pytest.raises(RuntimeError, match=r"event_name must be an event that is counted"):
            logger.attach(trainer, handler, event)
    assert not trainer.has_event_handler(handler)
    logger.attach(trainer, handler, Own.COUNTED)
    trainer.state.words = 5
    trainer.fire_event(Own.COUNTED)
    assert logger.lines == [(5, {})]


def test_a_logger_is_closed_at_the_end_of_a_with_block():
    with ListLogger() as logger:
        assert logger.closed == 0
    assert logger.closed == 1
