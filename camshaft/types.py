"""Types shared by all layers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch

DeviceLike = str | int | torch.device
PathLike = str | os.PathLike[str]


@runtime_checkable
class Stateful(Protocol):
    """Whatever can hand out its state and take it back: modules, optimizers, schedulers, samplers, engines.

    >>> isinstance(torch.nn.Linear(1, 1), Stateful), isinstance([], Stateful)
    (True, False)
    """

    def state_dict(self) -> Mapping[str, Any]:
        """Return all that is needed to go on from here."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Go on from what ``state_dict()`` returned."""
