"""What fails in the tests of exceptions, and where: each event of a run of two epochs over a list of two."""

from __future__ import annotations

from camshaft.engine import Events
from tests.engine.traces import traced

DATA, EPOCHS = [1, 2], 2


def whole():
    engine, trace = traced()
    engine.run(DATA, max_epochs=EPOCHS)
    return trace.take().split()


EVENTS = whole()  # what fires without any error
FLAT = [position for position, name in enumerate(EVENTS) if name in ("GS", "STOP", "GC", "IS", "IC")]
INSIDE = [position for position, name in enumerate(EVENTS[:-4]) if name not in ("S", "EC")]  # of begun iterations
OUTSIDE = [position for position, name in enumerate(EVENTS) if name in ("S", "ES", "EC", "C")]


def failing(error, at_iteration=2):
    """A process function that fails in one iteration, the first time it gets there."""
    left = [error]

    def step(engine, batch):
        if engine.state.iteration == at_iteration and left:
            raise left.pop()
        return batch

    return step


def raising(error):
    def fail(engine):
        raise error

    return fail


def catch(engine):
    """Register a handler that keeps the errors it gets, and so swallows them."""
    errors = []
    engine.add_event_handler(Events.EXCEPTION_RAISED, lambda error: errors.append(error))
    return errors


def notes(error):
    return " ".join(error.__notes__)


class Broken:
    """Data that fails at a fetch, or where a pass begins."""

    def __init__(self, error, at_fetch=None, at_pass=None):
        self.error, self.at_fetch, self.at_pass, self.passes = error, at_fetch, at_pass, 0

    def __len__(self):
        return 2

    def __iter__(self):
        self.passes += 1
        if self.passes == self.at_pass:
            raise self.error
        return self.fetch()

    def fetch(self):
        for number in range(2):
            if number == self.at_fetch:
                raise self.error
            yield number
