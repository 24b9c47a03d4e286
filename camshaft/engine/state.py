"""State of an engine: counters, targets, the current batch and output, results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from numbers import Number
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from camshaft.engine.lazy import LazyNumber, Results

if TYPE_CHECKING:
    from camshaft.engine.events import CallableEventWithFilter

Batch = TypeVar("Batch")
Output = TypeVar("Output")


class State(Generic[Batch, Output]):
    """A plain container of attributes, one per engine, kept from run to run.

    A new run sets ``iteration``, ``epoch``, the targets and ``epoch_length``. All other attributes stay, so users can
    store their own here.

    Args:
        kwargs: further attributes, or other values for those below.

    Attributes:
        iteration: iterations started so far; the first is 1.
        epoch: current epoch; the first is 1.
        epoch_length: iterations per epoch, ``None`` until known.
        max_epochs: target in epochs.
        max_iters: target in iterations.
        output: what the process function returned for the last batch. A value that is still being computed on a
            device is waited for when it is read.
        batch: current batch.
        metrics: results by name.
        dataloader: data of the run.
        seed: set by ``DeterministicEngine``.
        times: seconds taken by the last epoch (``"EPOCH_COMPLETED"``) and by the run (``"COMPLETED"``).
        event_to_attr: attribute that counts each event. The class holds those of the built-in events; the state of an
            engine also holds those registered with the engine.

    >>> state = State(learning_rate=0.1)
    >>> state.iteration, state.learning_rate
    (0, 0.1)
    """

    event_to_attr: MutableMapping[Any, str]  # camshaft.engine.events sets that of the class
    _output: Any
    iteration: int
    epoch: int
    epoch_length: int | None
    max_epochs: int | None
    max_iters: int | None
    batch: Batch
    metrics: dict[str, Any]
    dataloader: Iterable[Batch] | None
    seed: int | None
    times: dict[str, float | None]

    def __init__(self, **kwargs: Any) -> None:
        self.iteration = self.epoch = 0
        self.epoch_length = self.max_epochs = self.max_iters = None
        self._output = self.batch = None  # type: ignore[assignment]  # none yet
        self.metrics = Results()
        self.dataloader = self.seed = None
        self.times = {"EPOCH_COMPLETED": None, "COMPLETED": None}
        for name, value in kwargs.items():
            setattr(self, name, value)
        self._add_counters(self.event_to_attr)

    @property
    def output(self) -> Output:
        """What the process function returned last."""
        output: Any = self._output
        if isinstance(output, LazyNumber):
            self._output = output = output.read()
        return output  # type: ignore[no-any-return]  # the loop stores what the process function returns

    @output.setter
    def output(self, value: Output) -> None:
        self._output = value

    def get_event_attrib_value(self, event_name: CallableEventWithFilter | str) -> int:
        """Return the count of an event.

        Raises:
            RuntimeError: no attribute counts this event.

        >>> from camshaft.engine import Events
        >>> State(iteration=3).get_event_attrib_value(Events.ITERATION_STARTED(every=2))
        3
        """
        if event_name not in self.event_to_attr:
            counted = ", ".join(str(getattr(event, "name", event)) for event in self.event_to_attr)
            raise RuntimeError(f"no attribute of the state counts the event {event_name!r}; counted are {counted}")
        count: int = getattr(self, self.event_to_attr[event_name])
        return count

    def _add_counters(self, counters: Mapping[Any, str]) -> None:
        """Add attributes that count events; new ones start at 0."""
        if counters is not self.event_to_attr:
            self.event_to_attr = {**self.event_to_attr, **counters}
        for name in counters.values():
            if not hasattr(self, name):
                setattr(self, name, 0)

    def __repr__(self) -> str:
        lines = ["State:"]
        for name, value in vars(self).items():
            if isinstance(value, (Number, str)):
                shown = str(value)
            else:
                shown = str(dict if isinstance(value, Results) else type(value))
            if name != "event_to_attr":
                lines.append(f"\t{'output' if name == '_output' else name}: {shown}")
        return "\n".join([*lines, ""])

    if TYPE_CHECKING:  # users store attributes of their own here

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...
