"""Values from a function."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType
from typing import Any

from camshaft.handlers.state_param_scheduler.base import StateParamScheduler


class LambdaStateScheduler(StateParamScheduler):
    """Asks a function for the values.

    Args:
        lambda_obj: called with the index, from 1. If it is an object with attributes, these are saved with the
            state; a function is not.
        param_name, save_history, create_new: as in ``StateParamScheduler``.

    Raises:
        ValueError: ``lambda_obj`` cannot be called.

    >>> LambdaStateScheduler.simulate_values(3, lambda_obj=lambda index: 10 * index, param_name="level")
    [[0, 10], [1, 20], [2, 30]]
    """

    _state_dict_all_req_keys = (*StateParamScheduler._state_dict_all_req_keys, "lambda_obj")

    def __init__(
        self, lambda_obj: Callable[[int], Any], param_name: str, save_history: bool = False, create_new: bool = False
    ) -> None:
        super().__init__(param_name, save_history, create_new)
        if not callable(lambda_obj):
            raise ValueError(f"lambda_obj must be callable, got {lambda_obj!r}")
        self.lambda_obj = lambda_obj

    def get_param(self) -> Any:
        """Ask for the value for ``event_index``."""
        return self.lambda_obj(self.event_index)

    def state_dict(self) -> OrderedDict[str, Any]:
        """Give the count, and the attributes of ``lambda_obj`` if it is an object with attributes."""
        attributes = copy.deepcopy(_attributes_of(self.lambda_obj))
        return OrderedDict(event_index=self.event_index, param_name=self.param_name, lambda_obj=attributes)

    def _restore(self, state_dict: Mapping[str, Any]) -> None:
        attributes = _attributes_of(self.lambda_obj)
        if attributes is not None and state_dict["lambda_obj"] is not None:
            attributes.update(copy.deepcopy(state_dict["lambda_obj"]))
        self.event_index, self.param_name = state_dict["event_index"], state_dict["param_name"]


def _attributes_of(function: Callable[..., Any]) -> dict[str, Any] | None:
    """Give the state of an object that can be called; functions have none, and could not be read back safely."""
    attributes = getattr(function, "__dict__", None)
    if isinstance(function, (FunctionType, MethodType)) or not isinstance(attributes, dict):
        return None
    return None if "__wrapped__" in attributes else attributes
