"""Numbers that are still being computed on a device, and are waited for when they are read."""

from __future__ import annotations

import functools
import numbers
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

from torch import Tensor


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
        self._tensor: Tensor | None = tensor.detach()
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

    def __hash__(self) -> int:
        return hash(self.read())

    def __repr__(self) -> str:
        return repr(self.read())

    def __format__(self, specification: str) -> str:
        return format(self.read(), specification)

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self.read(),)


class Results(dict[str, Any]):
    """Results by name. A :class:`LazyNumber` becomes the number when it is read.

    Writing does not wait for the device, and code that needs numbers, such as ``json.dumps``, reads numbers.

    >>> import torch
    >>> results = Results(loss=LazyNumber(torch.tensor(0.25)))
    >>> type(results["loss"]), dict(results), results.copy()
    (<class 'float'>, {'loss': 0.25}, {'loss': 0.25})
    """

    def _read(self) -> None:
        for name, value in super().items():
            if isinstance(value, LazyNumber):
                self[name] = value.read()

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if isinstance(value, LazyNumber):
            self[name] = value = value.read()
        return value

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()  # defined here so that dict(results) copies through items()

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of ``name``."""
        return self[name] if name in self else default  # noqa: SIM401  # get() of dict would return the LazyNumber

    def copy(self) -> Results:
        """Return a copy."""
        return Results(self)

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Results:
        return Results(deepcopy(dict(self.items()), memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (list(self.items()),)  # loads with weights_only=True


def _reading(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(dict, name))
    def method(self: Results, *args: Any) -> Any:
        self._read()
        return getattr(super(Results, self), name)(*args)

    return method


for _name in ("items", "values", "pop", "popitem", "setdefault"):
    setattr(Results, _name, _reading(_name))


def _same(value: Any) -> Any:
    return value


def _forward(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: LazyNumber, *others: Any) -> Any:
        return function(self.read(), *(one.read() if isinstance(one, LazyNumber) else one for one in others))

    return method


def _reflected(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: LazyNumber, other: Any) -> Any:
        return function(other, self.read())

    return method


_UNARY: dict[str, Callable[..., Any]] = {
    **{kind.__name__: kind for kind in (float, int, complex, bool)},
    "round": round,
    "trunc": int,
    "abs": abs,
    "neg": operator.neg,
    "pos": operator.pos,
}
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_ARITHMETIC = ("divmod", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow")

for _name, _function in _UNARY.items():
    setattr(LazyNumber, f"__{_name}__", _forward(_function))
for _name in (*_COMPARISONS, *_ARITHMETIC):
    setattr(LazyNumber, f"__{_name}__", _forward(getattr(operator, _name, divmod)))
for _name in _ARITHMETIC:
    setattr(LazyNumber, f"__r{_name}__", _reflected(getattr(operator, _name, divmod)))
numbers.Real.register(LazyNumber)
