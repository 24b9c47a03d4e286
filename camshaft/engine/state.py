"""What an engine knows of its run: counters, targets, the current batch and output, results."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from numbers import Number
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from camshaft.engine.event import CallableEventWithFilter, Events
from camshaft.engine.lazy import LazyNumber, Results

Batch = TypeVar("Batch")
Output = TypeVar("Output")


class State(Generic[Batch, Output]):
    """A plain container of attributes, one for each engine, kept from run to run.

    A new run sets ``iteration``, ``epoch``, the targets and ``epoch_length``; everything else stays, so users
    keep here what belongs to their training.

    Args:
        kwargs: further attributes, or other values for those below.

    Attributes:
        iteration: iterations started so far; the first is 1.
        epoch: the current epoch; the first is 1.
        epoch_length: iterations in an epoch, ``None`` until known.
        max_epochs: the target when counting epochs.
        max_iters: the target when counting iterations.
        output: what the process function gave for the last batch. A value that is still on its way from the
            device is waited for here, when somebody reads it.
        batch: the current batch.
        metrics: results by name.
        dataloader: the data of the run.
        seed: set by ``DeterministicEngine``.
        times: seconds taken by the last epoch (``"EPOCH_COMPLETED"``) and by the run (``"COMPLETED"``).
        event_to_attr: which attribute counts which event. The class holds the built-in ones; a state that
            belongs to an engine also holds what was registered there.

    >>> state = State(learning_rate=0.1)
    >>> state.iteration, state.learning_rate
    (0, 0.1)
    """

    event_to_attr: MutableMapping[Any, str] = {  # noqa: RUF012  # a state of an engine has one of its own
        Events.GET_BATCH_STARTED: "iteration",
        Events.GET_BATCH_COMPLETED: "iteration",
        Events.ITERATION_STARTED: "iteration",
        Events.ITERATION_COMPLETED: "iteration",
        Events.EPOCH_STARTED: "epoch",
        Events.EPOCH_COMPLETED: "epoch",
        Events.STARTED: "epoch",
        Events.COMPLETED: "epoch",
    }

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
        attributes: dict[str, Any] = {
            "iteration": 0,
            "epoch": 0,
            "epoch_length": None,
            "max_epochs": None,
            "max_iters": None,
            "output": None,
            "batch": None,
            "metrics": Results(),
            "dataloader": None,
            "seed": None,
            "times": {Events.EPOCH_COMPLETED.name: None, Events.COMPLETED.name: None},
        }
        for name, value in {**attributes, **kwargs}.items():
            setattr(self, name, value)
        self._add_counters(self.event_to_attr)

    @property
    def output(self) -> Output:
        """What the process function gave last."""
        output: Any = self._output
        if isinstance(output, LazyNumber):
            self._output = output = output.read()
        return output  # type: ignore[no-any-return]  # the loop stores what the process function gives

    @output.setter
    def output(self, value: Output) -> None:
        self._output = value

    def get_event_attrib_value(self, event_name: CallableEventWithFilter | str) -> int:
        """Give the count of an event.

        Raises:
            RuntimeError: nothing counts this event.

        >>> State(iteration=3).get_event_attrib_value(Events.ITERATION_STARTED(every=2))
        3
        """
        if event_name not in self.event_to_attr:
            raise RuntimeError(f"no attribute of the state counts the event {event_name!r}; counted are {_names(self)}")
        count: int = getattr(self, self.event_to_attr[event_name])
        return count

    def _add_counters(self, counters: MutableMapping[Any, str]) -> None:
        """Let attributes count events, from 0 where they are new, for this state alone."""
        if counters is not self.event_to_attr:
            self.event_to_attr = {**self.event_to_attr, **counters}
        for name in counters.values():
            if not hasattr(self, name):
                setattr(self, name, 0)

    def __repr__(self) -> str:
        hidden = {"event_to_attr"}
        shown = {("output" if name == "_output" else name): value for name, value in vars(self).items()}
        lines = [f"\t{name}: {_shown(value)}" for name, value in shown.items() if name not in hidden]
        return "\n".join(["State:", *lines, ""])

    if TYPE_CHECKING:  # users keep attributes of their own here

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...


def _shown(value: Any) -> str:
    if isinstance(value, (Number, str)):
        return str(value)
    return str(dict if isinstance(value, Results) else type(value))


def _names(state: State[Any, Any]) -> str:
    return ", ".join(str(getattr(event, "name", event)) for event in state.event_to_attr)
