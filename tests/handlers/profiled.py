"""Random runs for profilers: handlers that take whole seconds, filters, and all the ways in which a run can end."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import strategies as st

from camshaft.engine import Engine, EventEnum, Events
from camshaft.handlers import BasicTimeProfiler
from tests.handlers.clocks import clock_in

PROCESS, FETCH, STOP = 7, 3, 1000
REGULAR = (
    Events.STARTED,
    Events.EPOCH_STARTED,
    Events.GET_BATCH_STARTED,
    Events.GET_BATCH_COMPLETED,
    Events.ITERATION_STARTED,
    Events.ITERATION_COMPLETED,
    Events.EPOCH_COMPLETED,
    Events.COMPLETED,
)


def profilers_clock():
    """Yield a clock for the profilers."""
    return clock_in(BasicTimeProfiler)


class Own(EventEnum):
    HALF = "half"


FILTERS = (
    {},
    {"every": 2},
    {"once": 3},
    {"after": 1, "before": 5},
    {"event_filter": lambda engine, count: count % 3 == 1},
)
ENDS = ("whole", "terminate", "terminate_epoch", "interrupt", "fail", "fail handled")


@dataclass
class Plan:
    """What happens in a run."""

    handlers: list[tuple[Events, dict, int]]
    length: int
    epochs: int
    sized: bool
    end: str
    at: int  # the iteration in which it ends
    event: Events  # in which a stop is requested


PLANS = st.builds(
    Plan,
    st.lists(
        st.tuples(st.sampled_from([*REGULAR, Own.HALF]), st.sampled_from(FILTERS), st.integers(1, 50)), max_size=8
    ),
    length=st.integers(1, 4),
    epochs=st.integers(1, 3),
    sized=st.booleans(),
    end=st.sampled_from(ENDS),
    at=st.integers(1, 8),
    event=st.sampled_from([Events.GET_BATCH_COMPLETED, Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED]),
)


@dataclass
class Course:
    """A run according to the plan, and the actual durations."""

    clock: object
    plan: Plan
    calls: Counter = field(default_factory=Counter)  # by number of the handler
    fired: Counter = field(default_factory=Counter)  # by event
    processed: int = 0
    fetched: int = 0

    def __post_init__(self):
        self.engine = Engine(self._process)
        self.engine.register_events(Own.HALF, event_to_attr={Own.HALF: "halves"})
        for event in REGULAR:
            self.engine.add_event_handler(event, self._count, event)
        for number, (event, given, seconds) in enumerate(self.plan.handlers):
            self.engine.add_event_handler(event(**given) if given else event, self._take, number, seconds)
        self.engine.add_event_handler(Events.DATALOADER_STOP_ITERATION, self.clock.take, STOP)
        if self.plan.end in ("terminate", "terminate_epoch", "interrupt"):
            self.engine.add_event_handler(self.plan.event(event_filter=lambda *_: self._is_time()), self._stop)
        if self.plan.end == "fail handled":
            self.engine.add_event_handler(Events.EXCEPTION_RAISED, lambda error: None)

    def run(self):
        """Run, and resume after pauses, which take time."""
        with contextlib.suppress(KeyError):
            self.engine.run((SizedData if self.plan.sized else Data)(self), max_epochs=self.plan.epochs)
            while self.engine._run is not None:
                self.clock.take(100_000)
                self.engine.run()

    @property
    def handlers_seconds(self):
        return sum(self.plan.handlers[number][2] * count for number, count in self.calls.items())

    def seconds_on(self, event):
        return sum(
            self.plan.handlers[number][2] * count
            for number, count in self.calls.items()
            if self.plan.handlers[number][0] == event
        )

    def _is_time(self):
        return self.engine.state.iteration == self.plan.at

    def _stop(self):
        getattr(self.engine, self.plan.end)()

    def _count(self, event):
        self.fired[event] += 1

    def _take(self, number, seconds):
        self.calls[number] += 1
        self.clock.take(seconds)

    def _process(self, engine, batch):
        if self.plan.end.startswith("fail") and self._is_time():
            raise KeyError("on purpose")
        self.clock.take(PROCESS)
        self.processed += 1
        engine.state.halves += 1
        engine.fire_event(Own.HALF)


class Data:
    """Batches that take time to fetch, without a length."""

    def __init__(self, course):
        self.course = course

    def __iter__(self):
        for number in range(self.course.plan.length):
            self.course.clock.take(FETCH)
            self.course.fetched += 1
            yield number


class SizedData(Data):
    def __len__(self):
        return self.course.plan.length
