"""Types shared by all layers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from numbers import Integral
from typing import Any, Protocol, runtime_checkable

import torch

DeviceLike = str | int | torch.device
PathLike = str | os.PathLike[str]


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be saved and restored: a module, an optimizer, a scheduler, a sampler, an engine.

    >>> isinstance(torch.nn.Linear(1, 1), Stateful), isinstance([], Stateful)
    (True, False)
    """

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Restore a state."""


def is_integer(value: Any) -> bool:
    """Return whether ``value`` is an integer of any kind, such as ``int`` or ``numpy.int64``."""
    return isinstance(value, Integral)
