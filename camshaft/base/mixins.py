"""Base classes of what can be saved, and of handlers that can start afresh."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, ClassVar, cast

__all__ = ["ResettableHandler", "Serializable"]


class Serializable:
    """Something whose state is a dict with known keys.

    A subclass names the keys, and calls ``super().load_state_dict`` before it changes anything.

    >>> class Counter(Serializable):
    ...     _state_dict_all_req_keys = ("name",)
    ...     _state_dict_one_of_opt_keys = (("iteration", "epoch"),)
    >>> Counter().load_state_dict({"name": "train", "epoch": 1})
    >>> Counter().load_state_dict({"name": "train"})
    Traceback (most recent call last):
    ValueError: state_dict must hold exactly one of ('iteration', 'epoch'), got keys ['name']
    """

    # Keys that must all be there, and groups of keys of which exactly one must be there.
    _state_dict_all_req_keys: ClassVar[tuple[str, ...]] = ()
    _state_dict_one_of_opt_keys: ClassVar[tuple[tuple[str, ...], ...] | tuple[str, ...]] = ()

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return the state; for subclasses to define."""
        raise NotImplementedError(f"{type(self).__name__} must define state_dict()")

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Check the keys of ``state_dict``.

        Raises:
            TypeError: it is not a mapping.
            ValueError: a required key is missing, or of a group of keys not exactly one is there.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict must be a mapping, got {state_dict!r} of type {type(state_dict).__name__}")
        for key in self._state_dict_all_req_keys:
            if key not in state_dict:
                raise ValueError(f"state_dict must hold {key!r}, got keys {list(state_dict)}")
        for group in self._groups():
            if sum(key in state_dict for key in group) != 1:
                raise ValueError(f"state_dict must hold exactly one of {group}, got keys {list(state_dict)}")

    def _groups(self) -> tuple[tuple[str, ...], ...]:
        groups = self._state_dict_one_of_opt_keys
        is_flat = bool(groups) and all(isinstance(group, str) for group in groups)
        return cast("tuple[tuple[str, ...], ...]", (groups,) if is_flat else groups)  # all() narrows nothing


class ResettableHandler(ABC):
    """A handler that can return to how it was when made, and that attaches itself to an engine."""

    @abstractmethod
    def reset(self) -> None:
        """Return to the state after construction."""

    @abstractmethod
    def attach(self, engine: Any, *args: Any, **kwargs: Any) -> None:
        """Register with the events of ``engine``."""
