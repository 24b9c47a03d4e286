"""A progress bar in the terminal or the notebook."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from numbers import Number
from time import time
from typing import Any
from weakref import WeakKeyDictionary

from camshaft.arguments import check_keywords, load_optional
from camshaft.engine.engine import Engine, check_engine
from camshaft.engine.events import EventLike, Events, FailureEvents, RemovableEventHandle, joined, translated
from camshaft.engine.plan import num_epochs
from camshaft.engine.state import State
from camshaft.handlers.base_logger import BaseLogger, BaseOutputHandler
from camshaft.handlers.steps import global_step_from_engine
from camshaft.text import Look

__all__ = ["ProgressBar", "global_step_from_engine"]

_PER_EPOCH = (Events.EPOCH_STARTED, Events.EPOCH_COMPLETED)
_PER_ITERATION = (Events.ITERATION_STARTED, Events.ITERATION_COMPLETED)
_ORDER = (Events.STARTED, _PER_EPOCH[0], *_PER_ITERATION, _PER_EPOCH[1], Events.COMPLETED)


class ProgressBar(BaseLogger):
    """Shows the progress of an engine, and values, with tqdm. Only rank 0 draws.

    If the output is not a terminal, the bar writes lines, one every ten seconds and one at the end.

    Values are read when the bar is redrawn, by default ten times per second, and when it is closed; in between, the
    bar does not synchronize with the device.

    Args:
        persist: leave the bar in the terminal when it is closed.
        bar_format: of tqdm.
        tqdm_kwargs: for tqdm; ``desc`` is the text before the bar, by default ``Epoch``, or ``Iteration`` if
            there is only one epoch.

    Raises:
        ModuleNotFoundError: tqdm is not installed.
        TypeError: ``tqdm`` does not accept the ``tqdm_kwargs``.

    >>> import io
    >>> from camshaft.engine import Engine
    >>> trainer = Engine(lambda engine, batch: 0.25)
    >>> output = io.StringIO()
    >>> bar = ProgressBar(persist=True, bar_format="{desc}{n_fmt}/{total_fmt}{postfix}", file=output)
    >>> handle = bar.attach(trainer, output_transform=lambda loss: {"loss": loss})
    >>> state = trainer.run(range(10), max_epochs=2)
    >>> print(output.getvalue(), end="")
    Epoch [1/2]: 10/10, loss=0.25
    Epoch [2/2]: 10/10, loss=0.25
    """

    def __init__(
        self,
        persist: bool = False,
        bar_format: str = "{desc}[{n_fmt}/{total_fmt}] {percentage:3.0f}%|{bar}{postfix} [{elapsed}<{remaining}]",
        **tqdm_kwargs: Any,
    ) -> None:
        self._tqdm = load_optional("tqdm.auto", extra="progress", needed_by="ProgressBar").tqdm
        if self._tqdm.__module__ in ("tqdm.asyncio", "tqdm.auto"):  # and no other code has replaced the class
            parent = load_optional("tqdm.std", extra="progress", needed_by="ProgressBar").tqdm
            keywords = {*tqdm_kwargs} - {"display"}  # of a bar in a notebook
            check_keywords(ProgressBar, keywords, parent.__init__, "self", "kwargs")
        self.persist = persist
        self.bar_format = bar_format
        self.tqdm_kwargs = tqdm_kwargs
        self._open_bars: WeakKeyDictionary[_Bar, None] = WeakKeyDictionary()  # in the order of opening

    def attach(  # type: ignore[override]  # as in the API: a bar has no log handlers
        self,
        engine: Engine[Any, Any],
        metric_names: list[str] | str | None = None,
        output_transform: Callable[[Any], Any] | None = None,
        event_name: EventLike = Events.ITERATION_COMPLETED,
        closing_event_name: EventLike = Events.EPOCH_COMPLETED,
        state_attributes: list[str] | None = None,
    ) -> RemovableEventHandle:
        """Show the progress of an engine.

        Args:
            engine: the engine.
            metric_names: metrics to show, or ``"all"``.
            output_transform: called with the engine's output; returns a mapping, or a value to show as ``output``.
            event_name: advances the bar; may have a filter.
            closing_event_name: closes the bar, filled unless the epoch was cut. The end of the run closes it in any
                case.
            state_attributes: attributes of the engine's state to show.

        Returns:
            A handle that removes the bar from the engine.

        Raises:
            TypeError: ``metric_names`` is neither a list nor ``"all"``, or ``output_transform`` is not callable.
            ValueError: the events are not two, in this order, of those that fire once per run, epoch or iteration,
                or the closing event has a filter.
        """
        check_engine("engine", engine)
        event_name, closing_event_name = translated(event_name), translated(closing_event_name)
        for name, event in (("event_name", event_name), ("closing_event_name", closing_event_name)):
            if event not in _ORDER:
                allowed = ", ".join(one.name for one in _ORDER)
                raise ValueError(f"{name} must be one of {allowed}, got {event!r}")
        if getattr(closing_event_name, "filter", None) is not None:
            raise ValueError(f"closing_event_name must have no filter, got {closing_event_name!r}")
        if _ORDER.index(event_name) >= _ORDER.index(closing_event_name):
            raise ValueError(
                f"event_name must fire before closing_event_name {closing_event_name!r}, got {event_name!r}"
            )
        values = None
        if (metric_names, output_transform, state_attributes) != (None, None, None):
            values = BaseOutputHandler("bar", metric_names, output_transform, None, state_attributes)
        bar = _Bar(self, values, event_name, closing_event_name)
        handles = [
            engine.add_event_handler(event_name, bar.advance),
            engine.add_event_handler(closing_event_name, bar.finish),
            engine.add_event_handler(Events.TERMINATE | Events.COMPLETED | Events.INTERRUPT, bar.stop),
            engine.add_event_handler(FailureEvents.ERROR_MET, bar.close),
        ]
        handle = joined(handles, event_name, bar.advance, engine)
        if not self.writes_here:
            handle.remove()
        return handle

    @property
    def pbar(self) -> Any:
        """The open tqdm bar, the last one opened if there are several, or ``None``."""
        bars = list(self._open_bars)
        return bars[-1].tqdm if bars else None

    def attach_output_handler(
        self, engine: Engine[Any, Any], event_name: EventLike, *args: Any, **kwargs: Any
    ) -> RemovableEventHandle:
        """Attach the bar, which shows outputs itself; the remaining arguments are those of :meth:`attach`."""
        return self.attach(engine, *args, event_name=event_name, **kwargs)  # type: ignore[misc]  # attach checks

    def attach_opt_params_handler(  # type: ignore[override]  # there is nothing to remove
        self, engine: Engine[Any, Any], event_name: EventLike, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: show parameters with ``state_attributes`` instead."""

    def log_message(self, message: str) -> None:
        """Write a line above the bar, on rank 0."""
        if self.writes_here:
            # in one piece: tqdm writes the end of the line separately, and another process may write in between
            self._attempt(self._tqdm.write, f"{message}\n", file=self.tqdm_kwargs.get("file"), end="")

    def close(self) -> None:
        """Close the open bars."""
        for bar in list(self._open_bars):
            bar.close()

    def _make_bar(self, desc: str, **options: Any) -> Any:
        own = {"leave": self.persist, "bar_format": self.bar_format}
        options = {**own, **options, **self.tqdm_kwargs, "desc": desc}
        look = Look.of(options.get("file") or sys.stderr)
        if any("notebook" in base.__module__ for base in self._tqdm.__mro__):
            return self._tqdm(**options)
        if look.width is not None:
            return self._tqdm(**{"colour": "green" if look.has_colors else None, **options})
        # with a delay, tqdm writes no line for the beginning
        bar = _line_writer(self._tqdm)(**{"mininterval": 10.0, "delay": 1e-9, **options, "leave": True})
        bar._instances.discard(bar)  # or tqdm writes it again after each message
        return bar


class _Bar:
    """The bar of one attachment to one engine: opened at the first advance, closed at the end, and opened again.

    Redraws cost time, so it reads values and redraws only when tqdm would.
    """

    def __init__(self, owner: ProgressBar, values: BaseOutputHandler | None, event: Any, closing_event: Any) -> None:
        self.tqdm: Any = None  # while the bar is open
        self._owner = owner
        self._values = values
        self._event = event
        self._closing_event = closing_event
        self._counts_iterations = event in _PER_ITERATION
        self._spans_epoch = self._counts_iterations and closing_event not in _PER_ITERATION

    def advance(self, engine: Engine[Any, Any]) -> None:
        bar = self.tqdm
        if bar is None:
            self._open(engine)
            return
        if bar.disable:
            return
        bar.n = position = _position(engine, bar.total, self._counts_iterations)
        if position < bar.last_print_n:
            bar.last_print_n = 0  # the next epoch, in the same bar
        # the conditions of tqdm, which evaluates them only after the values are read
        if position - bar.last_print_n < bar.miniters:
            return
        now = time()
        if now - bar.last_print_t >= bar.mininterval and now >= bar.start_t + bar.delay:
            self._show_values(engine)
            bar.update(0)

    def finish(self, engine: Engine[Any, Any]) -> None:
        """Close the bar, filled unless the epoch was cut."""
        bar = self.tqdm
        if bar is not None:
            if bar.total is None:
                bar.total = _total(self._event, engine.state)
            length, done = engine.state.epoch_length, engine.iteration_in_epoch
            if self._spans_epoch and length is not None and done < length:
                bar.n = done
            elif bar.total is not None:
                bar.n = bar.total
            self.stop(engine)

    def stop(self, engine: Engine[Any, Any]) -> None:
        """Close the bar at its position, with the last values if it remains visible."""
        bar, values = self.tqdm, self._values
        if bar is not None and values is not None and bar.leave and not bar.disable:
            is_fetching = engine.state.output is None  # a run that ends while it fetches a batch has no output
            if not (is_fetching and values.output_transform):
                self._show_values(engine)
        self.close()

    def close(self) -> None:
        bar, self.tqdm = self.tqdm, None
        self._owner._open_bars.pop(self, None)
        if bar is not None:
            bar.close()

    def _open(self, engine: Engine[Any, Any]) -> None:
        state, total = engine.state, _total(self._event, engine.state)
        text = self._owner.tqdm_kwargs.get("desc")
        if text is None:
            text = "Iteration" if num_epochs(state) == 1 else "Epoch"
        times = _total(self._closing_event, state)
        if times not in (None, 1):
            text += f" [{_position(engine, times, self._closing_event in _PER_ITERATION)}/{times}]"
        position = _position(engine, total, self._counts_iterations)
        self.tqdm = self._owner._make_bar(f"{text}: ", total=total, initial=position)
        self._owner._open_bars[self] = None
        if self._values is not None and not self.tqdm.disable and self.tqdm.delay <= 0:
            self._show_values(engine)
            self.tqdm.refresh()

    def _show_values(self, engine: Engine[Any, Any]) -> None:
        if self._values is not None:
            texts = []
            for path, value in self._values._setup_output_metrics_state_attrs(engine, log_text=True).items():
                text = self.tqdm.format_num(value) if isinstance(value, Number) else " ".join(str(value).split())
                texts.append(f"{'_'.join(path[1:])}={text}")
            self.tqdm.set_postfix_str(", ".join(texts), refresh=False)


def _total(event: Any, state: State[Any, Any]) -> int | None:
    """Return how often an event fires in an epoch or a run, if known."""
    if event in _PER_ITERATION:
        return state.epoch_length
    return num_epochs(state) if event in _PER_EPOCH else 1


def _position(engine: Engine[Any, Any], total: int | None, counts_iterations: bool) -> int:
    """Return the 1-based position among ``total``."""
    count = engine.iteration_in_epoch if counts_iterations else engine.state.epoch
    return (count - 1) % total + 1 if total else count


@lru_cache
def _line_writer(bar_class: Any) -> Any:
    """Return a class of bars that write a line for each redraw, and one at the end."""

    class LineWriter(bar_class):  # type: ignore[misc]  # tqdm's class is known at run time
        shown: tuple[Any, ...] = ()

        def display(self, msg: str | None = None, pos: int | None = None) -> bool:
            now = (self.n, self.postfix)
            if msg is None and now != self.shown:
                self.shown = now
                with suppress(OSError):  # a full disk; warnings would go there too
                    self.fp.write(f"{self}\n")
                    self.fp.flush()
            return False

        def close(self) -> None:
            if not self.disable:
                self.display()
                self.leave = False  # or tqdm ends another line
            super().close()

    return LineWriter
