"""What an engine gave in an epoch, kept until its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from camshaft.engine.engine import Engine
from camshaft.engine.event import Events
from camshaft.engine.lazy import LazyNumber
from camshaft.handlers.utils import check_callable, check_engine, check_is_no_counter, check_text
from camshaft.handlers.values import fetch

__all__ = ["EpochOutputStore"]


def _same(output: Any) -> Any:
    return output


class EpochOutputStore:
    """Keeps the outputs of an epoch in a list, a new one for each epoch.

    Tensors are kept as they are: cut them from their graph, and move them off the GPU, in ``output_transform`` if
    memory matters. Numbers that are still on their way from a GPU are fetched together at the end of the epoch.

    Args:
        output_transform: called with the output of an iteration, gives what is kept.

    Raises:
        TypeError: ``output_transform`` cannot be called.

    Attributes:
        data: the list of the epoch.

    >>> evaluator = Engine(lambda engine, batch: (batch, batch % 2))
    >>> EpochOutputStore(lambda output: output[1]).attach(evaluator, "is_odd")
    >>> evaluator.run([1, 2, 3]).is_odd
    [1, 0, 1]
    """

    def __init__(self, output_transform: Callable[[Any], Any] = _same) -> None:
        check_callable("output_transform", output_transform)
        self.output_transform = _same if output_transform is None else output_transform
        self.data: list[Any] = []

    def reset(self) -> None:
        """Begin a new list."""
        self.data = []

    def update(self, engine: Engine[Any, Any]) -> None:
        """Keep the output of the iteration."""
        # not `state.output`, which waits for the device
        self.data.append(self.output_transform(engine.state._output))

    def store(self, engine: Engine[Any, Any]) -> list[Any]:
        """Return the list, with the numbers that were still on their way."""
        on_their_way = {
            index: one.peek().reshape(()) if isinstance(one.peek(), Tensor) else one.peek()
            for index, one in enumerate(self.data)
            if isinstance(one, LazyNumber)
        }
        fetch(on_their_way)
        for index, number in on_their_way.items():
            self.data[index] = number
        return self.data

    def attach(self, engine: Engine[Any, Any], name: str | None = None) -> None:
        """Keep the outputs of an engine from now on.

        Args:
            engine: the engine.
            name: the attribute of ``engine.state`` that is the list when an epoch is over. An attribute of the engine's
                own, such as ``"output"``, is replaced.

        Raises:
            TypeError: ``name`` is no name.
            ValueError: the engine counts by the attribute ``name``.
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
