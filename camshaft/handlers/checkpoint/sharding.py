"""States of which each rank holds but a part, as ``fully_shard`` makes them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch


def has_shards(state: Any) -> bool:
    """Say whether there is a tensor in nested containers of which each rank holds a part."""
    kind = _kind()
    if kind is None:
        return False
    if isinstance(state, Mapping):
        return any(has_shards(one) for one in state.values())
    if isinstance(state, (list, tuple)):
        return any(has_shards(one) for one in state)
    return isinstance(state, kind)


def whole(state: Any, keep: bool) -> Any:
    """Bring the parts of every tensor together, in host memory; all ranks take part.

    Args:
        state: tensors in nested containers.
        keep: whether this rank needs the result; else it gives empty tensors in their place.
    """
    kind = _kind()
    if kind is not None and isinstance(state, kind):
        full = state.full_tensor()
        return full.cpu() if keep else torch.empty(0)
    if isinstance(state, Mapping):
        return {key: whole(one, keep) for key, one in state.items()}
    if isinstance(state, (list, tuple)):
        return [whole(one, keep) for one in state]
    return state


def divided(own: Mapping[str, Any], state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Divide the whole state of a module, which every rank has, as its own is."""
    return {name: _divided(value, own.get(name)) for name, value in state.items()}


def divided_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Divide the whole state of an optimizer as the parameters are that it steps."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    owners = dict(zip(numbers, parameters, strict=False))
    divided = {
        number: {name: _divided(value, owners[number]) for name, value in one.items()} if number in owners else one
        for number, one in state["state"].items()
    }
    return {**state, "state": divided}


def _divided(value: Any, like: Any) -> Any:
    """Take this rank's part of a tensor, if the one that it is for is in parts."""
    kind = _kind()
    if kind is None or not isinstance(like, kind) or not isinstance(value, torch.Tensor) or value.shape != like.shape:
        return value
    distribute: Any = sys.modules["torch.distributed.tensor"].distribute_tensor
    return distribute(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def _kind() -> Any:
    """Give the type of such tensors; nobody has one who has not imported it."""
    module = sys.modules.get("torch.distributed.tensor")
    return None if module is None else module.DTensor
