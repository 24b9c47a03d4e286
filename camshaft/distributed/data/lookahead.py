"""Loaders around loaders, which read batches before anybody asks for them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from camshaft.types import Stateful


class LookingAhead:
    """Has all that the loader has inside, and reads ahead of whoever reads it.

    Args:
        loader: gives batches.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self._reached: Mapping[str, Any] | None = None  # the loader's state behind the batch that was given last

    def __getattr__(self, name: str) -> Any:
        if name == "_loader" or name.startswith("__"):  # copying asks before there is a loader
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        return getattr(self._loader, name)

    def _read(self) -> Iterator[tuple[Any, Mapping[str, Any] | None]]:
        """Give each batch with the state behind it, which the loader may go on to change."""
        stateful = self._loader if isinstance(self._loader, Stateful) else None
        for batch in self._loader:
            yield batch, None if stateful is None else copy.deepcopy(stateful.state_dict())


class WithState:
    """For those of them whose loader has a state: it is that of the batches given, not of those read ahead."""

    _loader: Any
    _reached: Mapping[str, Any] | None

    def state_dict(self) -> Mapping[str, Any]:
        """Give the state of the loader behind the batch that was given last; an empty one is that of a new pass."""
        state: Mapping[str, Any] = self._loader.state_dict() if self._reached is None else self._reached
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._reached = None if state_dict else {}
        if state_dict:
            self._loader.load_state_dict(state_dict)
