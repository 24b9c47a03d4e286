"""The values of an engine that a log line or a progress bar shows, as a flat dict."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch

from camshaft.engine.engine import Engine
from camshaft.engine.lazy import LazyNumber
from camshaft.handlers.utils import check_callable

Path = tuple[str, ...]


@dataclass(frozen=True)
class Values:
    """What to read from an engine: metrics, its output, attributes of its state.

    Args:
        metric_names: of ``state.metrics``, or ``"all"``.
        output_transform: called with ``state.output``; gives a dict, or what is to be called ``output``.
        state_attributes: names of attributes of ``state``.

    Raises:
        TypeError: one of the three is of another kind.
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
        """Whether there is anything to read."""
        return not (self.metric_names is None and self.output_transform is None and self.state_attributes is None)

    def read(self, engine: Engine[Any, Any], *, text: bool = False) -> dict[Path, Any]:
        """Read the values now. This is when the device is waited for, if they are still on their way.

        Args:
            engine: whose values they are.
            text: whether strings are values too; else they are left out with a warning, as is all that is
                neither a number nor made of numbers.

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
        if self.metric_names is not None:
            yield from _metrics(state.metrics, self.metric_names)
        if self.output_transform is not None:
            output = self.output_transform(state.output)
            yield from output.items() if isinstance(output, Mapping) else [("output", output)]
        for name in self.state_attributes or ():
            yield name, getattr(state, name, None)


def _metrics(metrics: Mapping[str, Any], names: list[str] | str) -> Iterator[tuple[str, Any]]:
    for name in metrics if names == "all" else names:
        if name in metrics:
            yield name, metrics[name]
        else:
            warnings.warn(f"there is no metric {name!r} to log, but only {list(metrics)}", stacklevel=2)


def _flat(path: Path, value: Any, text: bool) -> Iterator[tuple[Path, Any]]:
    """Walk through nested containers, and give the numbers in them with their paths."""
    if isinstance(value, LazyNumber):
        yield path, value.read()
    elif isinstance(value, Number) or (text and isinstance(value, str)):
        yield path, value
    elif isinstance(value, torch.Tensor) and value.ndim == 0:
        yield path, value.detach()  # fetched with the others
    else:
        for key, one in _entries(path, value):
            yield from _flat((*path, str(key)), one, text)


def _entries(path: Path, value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return iter(value.items())
    if isinstance(value, torch.Tensor) and value.ndim == 1:
        return enumerate(value.tolist())
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return enumerate(value)
    kind = f"tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    warnings.warn(f"{'/'.join(path)} is not logged, because it is a {kind}", stacklevel=2)
    return iter(())


def fetch(values: dict[Any, Any]) -> None:
    """Put numbers in the place of tensors without dimensions: one transfer for those of a device and a type.

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
