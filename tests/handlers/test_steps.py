"""global_step_from_engine."""

from __future__ import annotations

import pytest

from camshaft.engine import EventEnum, Events
from camshaft.handlers import global_step_from_engine, tqdm_logger
from tests.handlers.parts import at


class Own(EventEnum):
    COUNTED = "counted"
    UNCOUNTED = "uncounted"


@pytest.mark.parametrize(
    ("event", "options", "step"),
    [
        (Events.ITERATION_COMPLETED(every=5), {}, 12),
        (Events.COMPLETED, {}, 3),
        ("ITERATION_STARTED", {}, 12),
        (Own.COUNTED, {}, 99),
        (Own.UNCOUNTED, {}, 3),
        (Events.TERMINATE, {"fallback_attr": "iteration"}, 12),
        (Events.COMPLETED, {"custom_event_name": Events.ITERATION_COMPLETED}, 12),
    ],
)
def test_the_step_is_the_counter_of_the_event_or_the_fallback(event, options, step):
    trainer = at(iteration=12, epoch=3)
    trainer.register_events(*Own, event_to_attr={Own.COUNTED: "words"})
    trainer.state.words = 99
    assert global_step_from_engine(trainer, **options)(at(iteration=1), event) == step
    assert tqdm_logger.global_step_from_engine is global_step_from_engine  # as in all modules of loggers
