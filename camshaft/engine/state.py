"""State of an engine: counters, targets, the current batch and output, results, and numbers that are read lazily."""

from __future__ import annotations

import functools
import math
import numbers
import operator
from collections import ChainMap, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from camshaft.dtensors import full_value
from camshaft.errors import annotate
from camshaft.interop import ignite_class

Batch = TypeVar("Batch")
Output = TypeVar("Output")


class State(Generic[Batch, Output]):
    """A plain container of attributes, one per engine, kept from run to run.

    A new run sets ``iteration``, ``epoch``, ``optimizer_steps``, the targets and ``epoch_length``. All other attributes
    stay, so users can store their own here.

    Args:
        kwargs: further attributes, or other values for those below.

    Attributes:
        iteration: iterations started so far; the first is 1.
        epoch: current epoch; the first is 1.
        optimizer_steps: steps of the optimizer so far, if the process function fires ``OptimizerEvents``.
        epoch_length: iterations per epoch, ``None`` until known.
        max_epochs: target in epochs.
        max_iters: target in iterations.
        output: what the process function returned for the last batch. A value that is still being computed on a
            device is waited for when it is read.
        batch: current batch.
        metrics: results by name. A value that is still being computed on a device is waited for when it is read.
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
    metrics: dict[str, Any]
    iteration: int
    epoch: int
    optimizer_steps: int
    epoch_length: int | None
    max_epochs: int | None
    max_iters: int | None
    batch: Batch
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

    def get_event_attrib_value(self, event_name: Any) -> int:
        """Return the count of an event.

        Raises:
            RuntimeError: no attribute counts this event.

        >>> from camshaft.engine import Events
        >>> State(iteration=3).get_event_attrib_value(Events.ITERATION_STARTED(every=2))
        3
        """
        if event_name not in self.event_to_attr:
            counted = f"counted are {', '.join(str(getattr(event, 'name', event)) for event in self.event_to_attr)}"
            if ignite_class(event_name) is not None:
                counted = "it comes from PyTorch-Ignite, and so does the handler: import it from camshaft.handlers"
            raise RuntimeError(f"no attribute of the state counts the event {event_name!r}; {counted}")
        count: int = getattr(self, self.event_to_attr[event_name])
        return count

    def _add_counters(self, counters: Mapping[Any, str]) -> None:
        """Add attributes that count events; new ones start at 0."""
        if counters and counters is not self.event_to_attr:
            self.event_to_attr = ChainMap(dict(counters), self.event_to_attr)
        for name in counters.values():
            if not hasattr(self, name):
                setattr(self, name, 0)

    def __repr__(self) -> str:
        lines = ["State:"]
        for name, value in vars(self).items():
            if name != "event_to_attr":
                kind = dict if isinstance(value, Results) else type(value)
                shown = value if isinstance(value, (numbers.Number, str)) else kind
                lines.append(f"\t{name.removeprefix('_')}: {shown}")
        return "\n".join([*lines, ""])

    if TYPE_CHECKING:  # users store attributes of their own here

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...


# --- numbers that are still being computed on a device ------------------------------------------------------------


class LazyNumber:
    """The value of a one-element tensor, as a Python number that is read on first use.

    ``loss.item()`` makes every step wait for the device. This keeps the detached tensor instead, and behaves like the
    number in arithmetic, comparison, conversion and formatting.

    >>> import torch
    >>> loss = LazyNumber(torch.tensor(0.25))
    >>> f"{loss:.2f}", loss + 1, loss < 1, float(loss)
    ('0.25', 1.25, True, 0.25)
    """

    __slots__ = ("_tensor", "_value")

    def __init__(self, tensor: Tensor) -> None:
        # of a DTensor the whole: all ranks may be here, but not where the number is read
        self._tensor: Tensor | None = full_value(tensor.detach())
        self._value: Any = None

    def read(self) -> Any:
        """Return the number. The first call waits for the device."""
        tensor = self._tensor  # another thread may read at the same time
        if tensor is not None:
            self._value = tensor.item()
            self._tensor = None
        return self._value

    def peek(self) -> Any:
        """Return the tensor without waiting, or the number if it has been read already."""
        tensor = self._tensor
        return self._value if tensor is None else tensor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.read(), name)  # what a number has: real, is_integer, ...

    def __reduce__(self) -> tuple[Any, ...]:
        value = self.read()
        return type(value), (value,)


def peek(value: Any) -> Any:
    """Return the tensor of a ``LazyNumber``, without synchronizing, and any other value as it is."""
    return value.peek() if isinstance(value, LazyNumber) else value


def fetch(values: dict[Any, Any]) -> None:
    """Replace 0-d tensors by numbers, with one transfer per device and dtype.

    >>> import torch
    >>> values = {"loss": torch.tensor(0.5), "accuracy": torch.tensor(0.25), "size": 3}
    >>> fetch(values)
    >>> values
    {'loss': 0.5, 'accuracy': 0.25, 'size': 3}
    """
    together: dict[tuple[torch.device, torch.dtype], list[Any]] = {}
    for key, value in values.items():
        if isinstance(value, Tensor):
            together.setdefault((value.device, value.dtype), []).append(key)
    for keys in together.values():
        values.update(zip(keys, torch.stack([values[key] for key in keys]).tolist(), strict=True))


def check_has_output(reader: str, state: State[Any, Any], error: Exception) -> None:
    """Raise a ``TypeError`` that says so if ``error`` was raised because there is no output to read."""
    if state._output is None:
        problem = "needs engine.state.output, which is None: return a value from the process function"
        raise TypeError(f"{reader} {problem}") from error


def _number(value: Any) -> Any:
    return value.read() if isinstance(value, LazyNumber) else value


def _forward(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: LazyNumber, *others: Any) -> Any:
        return function(self.read(), *map(_number, others))

    return method


def _reflected(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: LazyNumber, other: Any) -> Any:
        return function(other, self.read())

    return method


# Each of these functions has the name of the method that it calls.
_OF_ONE = (float, int, complex, bool, hash, repr, format, round, math.trunc, abs, operator.neg, operator.pos)
_COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
_ARITHMETIC = (
    divmod, operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow,
)  # fmt: skip

for _function in (*_OF_ONE, *_COMPARISONS, *_ARITHMETIC):
    setattr(LazyNumber, f"__{_function.__name__}__", _forward(_function))
for _function in _ARITHMETIC:
    setattr(LazyNumber, f"__r{_function.__name__}__", _reflected(_function))
numbers.Real.register(LazyNumber)


def _reading(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def read(*arguments: Any) -> Any:
        return _number(method(*arguments))

    return read


class Results(dict[str, Any]):
    """Results by name. A :class:`LazyNumber` becomes the number when it is read.

    Writing does not wait for the device, and code that needs numbers, such as ``json.dumps``, reads numbers.

    >>> import torch
    >>> results = Results(loss=LazyNumber(torch.tensor(0.25)))
    >>> type(results["loss"]), dict(results), results.copy()
    (<class 'float'>, {'loss': 0.25}, {'loss': 0.25})
    """

    if not TYPE_CHECKING:
        __getitem__ = _reading(dict.__getitem__)
        get = _reading(dict.get)
        pop = _reading(dict.pop)
        setdefault = _reading(dict.setdefault)

    def __missing__(self, name: str) -> Any:
        error = KeyError(name)
        hint = "attach the metric to the engine whose metrics are read, run that engine first, or correct the name"
        annotate(error, f"engine.state.metrics has {list(self)}: {hint}")
        raise error

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()  # defined here so that dict(results) copies through __getitem__

    def _read(self) -> None:
        for name in tuple(self):
            self[name] = self[name]

    def items(self) -> Any:
        """Return the names and values."""
        self._read()
        return super().items()

    def values(self) -> Any:
        """Return the values."""
        self._read()
        return super().values()

    def popitem(self) -> tuple[str, Any]:
        """Remove the last name and value, and return them."""
        name, value = super().popitem()
        return name, _number(value)

    def copy(self) -> Results:
        """Return a copy."""
        return Results(self)

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Results:
        return Results(deepcopy(dict(self), memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (list(self.items()),)  # loads with weights_only=True


def check_is_no_counter(argument: str, name: str, state: State[Any, Any]) -> None:
    """Raise ``ValueError`` if ``name`` is an attribute that the engine uses as a counter.

    >>> check_is_no_counter("param_name", "epoch", State())
    Traceback (most recent call last):
    ValueError: param_name must not be 'epoch', which is a counter of the engine; choose another name
    """
    if name in state.event_to_attr.values():
        raise ValueError(f"{argument} must not be {name!r}, which is a counter of the engine; choose another name")


def missing_metric(needed_by: str, name: str, metrics: Mapping[str, Any]) -> str:
    """Return the message that a metric, which an argument needs, does not exist."""
    hint = "correct the name, or attach metric and handler to the same engine, usually the evaluator"
    return f"{needed_by} needs the metric {name!r}, but engine.state.metrics has {list(metrics)}: {hint}"
