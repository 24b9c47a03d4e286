"""Base classes of objects with a state, and of handlers that can be reset."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, ClassVar

from camshaft.arguments import check_type

__all__ = ["ResettableHandler", "Serializable"]


class Serializable:
    """Base class of objects whose state is a dict with known keys.

    Subclasses define the keys, and call ``super().load_state_dict`` before they change anything.

    >>> class Counter(Serializable):
    ...     _state_dict_all_req_keys = ("name",)
    ...     _state_dict_one_of_opt_keys = (("iteration", "epoch"),)
    >>> Counter().load_state_dict({"name": "train", "epoch": 1})
    >>> Counter().load_state_dict({"name": "train"})
    Traceback (most recent call last):
    ValueError: state_dict must hold exactly one of ('iteration', 'epoch'), got keys ['name']
    """

    # Required keys, and groups of keys of which exactly one is required.
    _state_dict_all_req_keys: ClassVar[tuple[str, ...]] = ()
    _state_dict_one_of_opt_keys: ClassVar[tuple[tuple[str, ...], ...] | tuple[str, ...]] = ()

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return the state. Subclasses define it."""
        raise NotImplementedError(f"{type(self).__name__} must define state_dict()")

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Check the keys of ``state_dict``.

        Raises:
            TypeError: it is not a mapping.
            ValueError: a required key is missing, or a group has not exactly one key.
        """
        check_type("state_dict", state_dict, Mapping, "a mapping")
        for key in self._state_dict_all_req_keys:
            if key not in state_dict:
                raise ValueError(f"state_dict must hold {key!r}, got keys {list(state_dict)}")
        groups: Any = self._state_dict_one_of_opt_keys
        is_flat = bool(groups) and all(isinstance(group, str) for group in groups)
        for group in (groups,) if is_flat else groups:
            if sum(key in state_dict for key in group) != 1:
                raise ValueError(f"state_dict must hold exactly one of {group}, got keys {list(state_dict)}")


class ResettableHandler(ABC):
    """Base class of handlers that can be reset and attach themselves to an engine."""

    @abstractmethod
    def reset(self) -> None:
        """Restore the state after construction."""

    @abstractmethod
    def attach(self, engine: Any, *args: Any, **kwargs: Any) -> None:
        """Register handlers on events of ``engine``."""
