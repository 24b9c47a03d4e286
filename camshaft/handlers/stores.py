"""Keep the outputs of an epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from camshaft.arguments import check_callable, check_text, identity
from camshaft.engine.engine import Engine, check_engine
from camshaft.engine.events import Events
from camshaft.engine.state import LazyNumber, check_is_no_counter, fetch, peek

__all__ = ["EpochOutputStore"]


class EpochOutputStore:
    """Keeps the outputs of an epoch in a list, a new one for each epoch.

    Tensors are kept as they are: detach them, and move them off the GPU, in ``output_transform`` if memory matters.
    Losses that are still on the GPU are fetched together at the end of the epoch.

    Args:
        output_transform: called with the output of an iteration, returns what to keep.

    Raises:
        TypeError: ``output_transform`` is not callable.

    Attributes:
        data: the list of the epoch.

    >>> evaluator = Engine(lambda engine, batch: (batch, batch % 2))
    >>> EpochOutputStore(lambda output: output[1]).attach(evaluator, "is_odd")
    >>> evaluator.run([1, 2, 3]).is_odd
    [1, 0, 1]
    """

    def __init__(self, output_transform: Callable[[Any], Any] = identity) -> None:
        check_callable("output_transform", output_transform)
        self.output_transform = identity if output_transform is None else output_transform
        self.data: list[Any] = []

    def reset(self) -> None:
        """Start a new list."""
        self.data = []

    def update(self, engine: Engine[Any, Any]) -> None:
        """Append the output of the iteration."""
        self.data.append(self.output_transform(engine.state._output))  # `state.output` synchronizes

    def store(self, engine: Engine[Any, Any]) -> list[Any]:
        """Return the list, after fetching numbers that are still on the device."""
        pending = {index: peek(one) for index, one in enumerate(self.data) if isinstance(one, LazyNumber)}
        numbers = {index: one.reshape(()) if isinstance(one, Tensor) else one for index, one in pending.items()}
        fetch(numbers)
        for index, number in numbers.items():
            self.data[index] = number
        return self.data

    def attach(self, engine: Engine[Any, Any], name: str | None = None) -> None:
        """Keep the outputs of an engine.

        Args:
            engine: the engine.
            name: the attribute of ``engine.state`` to set to the list at the end of an epoch. An attribute of the
                engine itself, such as ``"output"``, is replaced.

        Raises:
            TypeError: ``name`` is not a string.
            ValueError: ``name`` is a counter of the engine.
        """
        check_engine("engine", engine)
        check_text("name", name, optional=True)
        if name is not None:
            check_is_no_counter("name", name, engine.state)
        engine.add_event_handler(Events.EPOCH_STARTED, self.reset)
        engine.add_event_handler(Events.ITERATION_COMPLETED, self.update)
        engine.add_event_handler(Events.EPOCH_COMPLETED, self._completed, name)

    def _completed(self, engine: Engine[Any, Any], name: str | None) -> None:
        data = self.store(engine)
        if name is not None:
            setattr(engine.state, name, data)
