"""A progress bar in the terminal or the notebook."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

from camshaft.distributed import get_rank
from camshaft.engine.engine import Engine
from camshaft.engine.event import EventLike, Events, FailureEvents, translated
from camshaft.engine.handle import RemovableEventHandle
from camshaft.handlers.base_logger import BaseLogger
from camshaft.handlers.plain_bar import SECONDS, in_lines, is_terminal
from camshaft.handlers.progress import Progress
from camshaft.handlers.utils import check_engine, global_step_from_engine, joined, load_optional
from camshaft.handlers.values import Values

__all__ = ["ProgressBar", "global_step_from_engine"]

_ORDER = (
    Events.STARTED,
    Events.EPOCH_STARTED,
    Events.ITERATION_STARTED,
    Events.ITERATION_COMPLETED,
    Events.EPOCH_COMPLETED,
    Events.COMPLETED,
)


class ProgressBar(BaseLogger):
    """Shows with tqdm how far an engine is, and values of it. Only rank 0 draws.

    Where the output is no terminal, it writes lines, one in ten seconds and one at the end.

    The values are read when the bar is redrawn, by default ten times a second, and when it is closed; between
    that the bar waits for nothing.

    Args:
        persist: leave the bar in the terminal when it is closed.
        bar_format: of tqdm.
        tqdm_kwargs: for tqdm; ``desc`` is the text before the bar, by default ``Epoch``, or ``Iteration`` if
            there is but one epoch.

    Raises:
        ModuleNotFoundError: tqdm is not installed.

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
        self.persist = persist
        self.bar_format = bar_format
        self.tqdm_kwargs = tqdm_kwargs
        self._shown: weakref.WeakSet[Progress] = weakref.WeakSet()

    def attach(  # type: ignore[override]  # as the API has it: a bar logs one thing, so there is no handler to name
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
            output_transform: called with the engine's output; gives a dict to show, or what to show as ``output``.
            event_name: moves the bar on; may have a filter.
            closing_event_name: fills and closes the bar. The end of the run in any other way closes it too.
            state_attributes: attributes of the engine's state to show.

        Returns:
            A handle that takes the bar off the engine.

        Raises:
            TypeError: ``metric_names`` is neither a list nor ``"all"``, or ``output_transform`` is not callable.
            ValueError: the events are not two of those that fire once a run, an epoch or an iteration, in this
                order, or the closing one has a filter.
        """
        check_engine("engine", engine)
        event_name, closing_event_name = translated(event_name), translated(closing_event_name)
        _check_events(engine, event_name, closing_event_name)
        values = Values(metric_names, output_transform, state_attributes)
        progress = Progress(self._make_bar, values, event_name, closing_event_name, self.tqdm_kwargs.get("desc"))
        self._shown.add(progress)
        handles = [
            engine.add_event_handler(event_name, progress.advance),
            engine.add_event_handler(closing_event_name, progress.finish),
            engine.add_event_handler(Events.TERMINATE | Events.COMPLETED | Events.INTERRUPT, progress.stop),
            engine.add_event_handler(FailureEvents.ERROR_MET, progress.fail),
        ]
        return joined(handles, event_name, progress.advance, engine)

    @property
    def pbar(self) -> Any:
        """The bar of tqdm that was opened last of those that are open, or ``None``."""
        shown = [progress for progress in self._shown if progress.bar is not None]
        return max(shown, key=lambda progress: progress.opened).bar if shown else None

    def attach_output_handler(
        self, engine: Engine[Any, Any], event_name: EventLike, *args: Any, **kwargs: Any
    ) -> RemovableEventHandle:
        """Attach the bar itself, which shows outputs; the remaining arguments are those of :meth:`attach`."""
        return self.attach(engine, *args, event_name=event_name, **kwargs)  # type: ignore[misc]  # attach checks

    def attach_opt_params_handler(  # type: ignore[override]  # there is nothing to take off
        self, engine: Engine[Any, Any], event_name: EventLike, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: a bar has no room for it. Show the parameters with ``state_attributes``."""

    def log_message(self, message: str) -> None:
        """Write a line on rank 0, above the bar."""
        if get_rank() == 0:
            self._tqdm.write(message, file=self.tqdm_kwargs.get("file"))

    def close(self) -> None:
        """Close the bars that are open."""
        for progress in list(self._shown):
            progress.close()

    def _make_bar(self, **options: Any) -> Any:
        given = {name: value for name, value in self.tqdm_kwargs.items() if name != "desc"}
        given = {"leave": self.persist, "bar_format": self.bar_format, **options, **given}
        if get_rank() != 0:
            return self._tqdm(**{**given, "disable": True})
        lines = in_lines(self._tqdm)
        if lines is self._tqdm or is_terminal(given.get("file") or sys.stderr):
            return self._tqdm(**given)
        return lines(**{"mininterval": SECONDS, **given, "leave": True})

    def _create_output_handler(self, *args: Any, **kwargs: Any) -> Callable[..., object]:
        raise TypeError("a ProgressBar has no handlers: use attach")

    def _create_opt_params_handler(self, *args: Any, **kwargs: Any) -> Callable[..., object]:
        raise TypeError("a ProgressBar has no handlers: use attach")


def _check_events(engine: Engine[Any, Any], event_name: Any, closing_event_name: Any) -> None:
    for name, event in (("event_name", event_name), ("closing_event_name", closing_event_name)):
        if not engine.has_registered_events(event) or event not in _ORDER:
            allowed = ", ".join(one.name for one in _ORDER)
            raise ValueError(f"{name} must be one of {allowed}, got {event!r}")
    if getattr(closing_event_name, "filter", None) is not None:
        raise ValueError(f"closing_event_name must have no filter, got {closing_event_name!r}")
    if _ORDER.index(event_name) >= _ORDER.index(closing_event_name):
        raise ValueError(f"event_name must fire before closing_event_name {closing_event_name!r}, got {event_name!r}")
