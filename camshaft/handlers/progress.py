"""A bar of tqdm that follows an engine, and costs next to nothing between two redraws."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from numbers import Number
from time import time
from typing import Any

from camshaft.engine.engine import Engine
from camshaft.engine.events import Events
from camshaft.engine.progress import derived_max_epochs
from camshaft.engine.state import State
from camshaft.handlers.values import Values

_openings = count()


class Progress:
    """The bar of one attachment to one engine: opened at the first advance, closed at the end, and then again.

    Args:
        make_bar: called with ``total``, ``initial`` and ``desc``, gives a new bar of tqdm.
        values: what to show behind the bar.
        event: moves the bar on.
        closing_event: ends it.
        description: first part of the text before the bar; chosen if ``None``.

    Attributes:
        bar: the bar while it is open, else ``None``.
        opened: grows with each bar that is opened, on any engine.
    """

    def __init__(
        self, make_bar: Callable[..., Any], values: Values, event: Any, closing_event: Any, description: str | None
    ) -> None:
        self._make_bar = make_bar
        self._values = values
        self._course = Course(event)
        self._closing = Course(closing_event)
        self._description = description
        self.bar: Any = None
        self.opened = 0
        self._advanced = 0.0

    def advance(self, engine: Engine[Any, Any]) -> None:
        """Move the bar on; read the values and draw only when tqdm is going to."""
        bar = self.bar
        if bar is None:
            self._open(engine)
            return
        if bar.disable:
            return
        now = self._advanced = time()
        bar.n = position = self._course.position(engine, bar.total)
        if position < bar.last_print_n:
            bar.last_print_n = 0  # the next epoch, in the same bar
        # What follows is how tqdm decides; it would ask later, with the values read already.
        if position - bar.last_print_n < bar.miniters:
            return
        if now - bar.last_print_t >= bar.mininterval and now >= bar.start_t + bar.delay:
            self._show_values(engine)
            bar.update(0)

    def finish(self, engine: Engine[Any, Any]) -> None:
        """Fill the bar, and close it."""
        bar = self.bar
        if bar is None:
            return
        if bar.total is None:
            bar.total = self._course.total(engine.state)
        if bar.total is not None:
            bar.n = bar.total
        self.stop(engine)

    def stop(self, engine: Engine[Any, Any]) -> None:
        """Close the bar where it stands, with the last values if it stays to be seen."""
        bar = self.bar
        if bar is not None and not bar.disable and bar.leave and self._has_values(engine):
            self._show_values(engine)
        self.close()

    def fail(self) -> None:
        """Close the bar as it stood after the last advance: the step that failed is not there, nor is its time."""
        bar = self.bar
        if bar is not None and not bar.disable:
            lost = time() - self._advanced
            bar.start_t += lost
            bar.last_print_t += lost
        self.close()

    def close(self) -> None:
        """Close the bar, if it is open."""
        bar, self.bar = self.bar, None
        if bar is not None:
            bar.close()

    def _open(self, engine: Engine[Any, Any]) -> None:
        total = self._course.total(engine.state)
        position = self._course.position(engine, total)
        self.opened = next(_openings)
        bar = self.bar = self._make_bar(total=total, initial=position, desc=f"{self._text(engine)}: ")
        self._advanced = time()
        if not bar.disable and bar.delay <= 0 and self._values:
            self._show_values(engine)
            bar.refresh()

    def _text(self, engine: Engine[Any, Any]) -> str:
        state = engine.state
        text = self._description
        if text is None:
            text = "Iteration" if num_epochs(state) == 1 else "Epoch"
        total = self._closing.total(state)
        if total is None or total == 1:
            return text
        return f"{text} [{self._closing.position(engine, total)}/{total}]"

    def _has_values(self, engine: Engine[Any, Any]) -> bool:
        """Whether there are values now: a run that ends while it fetches a batch has no output."""
        return self._values.output_transform is None or engine.state.output is not None

    def _show_values(self, engine: Engine[Any, Any]) -> None:
        values = self._values.read(engine, text=True)
        texts = (f"{'_'.join(path)}={self._number(value)}" for path, value in values.items())
        self.bar.set_postfix_str(", ".join(texts), refresh=False)

    def _number(self, value: Any) -> str:
        return str(self.bar.format_num(value)) if isinstance(value, Number) else " ".join(str(value).split())


class Course:
    """How far an engine has come on the way to an event that fires once an iteration, an epoch, or a run."""

    def __init__(self, event: Any) -> None:
        self._by_iteration = event in (Events.ITERATION_STARTED, Events.ITERATION_COMPLETED)
        self._by_epoch = event in (Events.EPOCH_STARTED, Events.EPOCH_COMPLETED)

    def total(self, state: State[Any, Any]) -> int | None:
        """Tell how often the event fires, in an epoch or a run, as far as that is known."""
        if self._by_iteration:
            return state.epoch_length
        return num_epochs(state) if self._by_epoch else 1

    def position(self, engine: Engine[Any, Any], total: int | None) -> int:
        """Tell the how-manieth of the ``total`` times it is now."""
        count = engine.iteration_in_epoch if self._by_iteration else engine.state.epoch
        return (count - 1) % total + 1 if total else count


def num_epochs(state: State[Any, Any]) -> int | None:
    """Tell how many epochs the run has, as far as that is known."""
    return derived_max_epochs(state) if state.max_epochs is None else state.max_epochs
