"""Read what a log record or a progress bar shows: metrics, outputs and state attributes, flattened."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch

from camshaft.engine.engine import Engine
from camshaft.engine.state import LazyNumber
from camshaft.handlers.utils import check_callable

Path = tuple[str, ...]


@dataclass(frozen=True)
class Values:
    """What to read from an engine: metrics, its output, attributes of its state.

    Args:
        metric_names: names in ``state.metrics``, or ``"all"``.
        output_transform: called with ``state.output``; returns a mapping, or a value to be named ``output``.
        state_attributes: names of attributes of ``state``.

    Raises:
        TypeError: an argument has the wrong type.
    """

    metric_names: list[str] | str | None = None
    output_transform: Callable[[Any], Any] | None = None
    state_attributes: list[str] | None = None

    def __post_init__(self) -> None:
        if not (self.metric_names is None or self.metric_names == "all" or isinstance(self.metric_names, list)):
            raise TypeError(f"metric_names must be a list of names or 'all', got {self.metric_names!r}")
        check_callable("output_transform", self.output_transform)
        if isinstance(self.state_attributes, str):
            raise TypeError(f"state_attributes must be a list of names, got {self.state_attributes!r}")

    def __bool__(self) -> bool:
        """Return whether there is anything to read."""
        return not (self.metric_names is None and self.output_transform is None and self.state_attributes is None)

    def read(self, engine: Engine[Any, Any], *, text: bool = False) -> dict[Path, Any]:
        """Read the values, which synchronizes with the device if they are tensors.

        Args:
            engine: the engine to read from.
            text: whether to keep strings. Everything else that contains no numbers is skipped with a warning.

        >>> engine = Engine(lambda engine, batch: {"loss": torch.tensor(0.5), "size": (2, 3)})
        >>> state = engine.run([1])
        >>> Values(output_transform=lambda output: output).read(engine)
        {('loss',): 0.5, ('size', '0'): 2, ('size', '1'): 3}
        """
        values: dict[Path, Any] = {}
        for name, value in self._items(engine):
            values.update(_flat((str(name),), value, text))
        fetch(values)
        return values

    def _items(self, engine: Engine[Any, Any]) -> Iterator[tuple[Any, Any]]:
        state = engine.state
        for name in state.metrics if self.metric_names == "all" else self.metric_names or ():
            if name in state.metrics:
                yield name, state.metrics[name]
            else:
                warnings.warn(f"metric {name!r} is not logged: state.metrics has {list(state.metrics)}", stacklevel=2)
        if self.output_transform is not None:
            output = self.output_transform(state.output)
            yield from output.items() if isinstance(output, Mapping) else [("output", output)]
        for name in self.state_attributes or ():
            yield name, getattr(state, name, None)


def _flat(path: Path, value: Any, text: bool) -> Iterator[tuple[Path, Any]]:
    """Yield the numbers in nested containers with their paths."""
    if isinstance(value, LazyNumber):
        yield path, value.read()
    elif isinstance(value, Number) or (text and isinstance(value, str)):
        yield path, value
    elif isinstance(value, torch.Tensor) and value.ndim == 0:
        yield path, value.detach()  # fetched together with the others
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _flat((*path, str(key)), one, text)
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        yield from _flat(path, dict(enumerate(value)), text)
    elif isinstance(value, torch.Tensor) and value.ndim == 1:
        yield from _flat(path, value.tolist(), text)
    else:
        kind = f"tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        warnings.warn(f"{'/'.join(path)} is not logged because it is a {kind}", stacklevel=2)


def peek(value: Any) -> Any:
    """Return the tensor of a ``LazyNumber``, without synchronizing, and any other value as it is."""
    return value.peek() if isinstance(value, LazyNumber) else value


def fetch(values: dict[Any, Any]) -> None:
    """Replace 0-d tensors by numbers, with one transfer per device and dtype.

    >>> values = {"loss": torch.tensor(0.5), "accuracy": torch.tensor(0.25), "size": 3}
    >>> fetch(values)
    >>> values
    {'loss': 0.5, 'accuracy': 0.25, 'size': 3}
    """
    together: dict[tuple[torch.device, torch.dtype], list[Any]] = {}
    for key, value in values.items():
        if isinstance(value, torch.Tensor):
            together.setdefault((value.device, value.dtype), []).append(key)
    for keys in together.values():
        values.update(zip(keys, torch.stack([values[key] for key in keys]).tolist(), strict=True))
