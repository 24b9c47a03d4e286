"""Loading a checkpoint into objects."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from camshaft.errors import DamagedCheckpointError, annotate
from camshaft.handlers.checkpoint.manifest import problem_of
from camshaft.handlers.checkpoint.objects import CHECKPOINTER, COMPILED, check_objects, is_container, unwrap
from camshaft.handlers.checkpoint.sharding import divided, divided_optimizer_state, has_shards
from camshaft.handlers.checkpoint.weights import is_weights_file, read_weights


def load_objects(
    to_load: Mapping[str, Any],
    checkpoint: Mapping[str, Any] | str | PathLike[str],
    *,
    map_location: Any = None,
    **kwargs: Any,
) -> None:
    """Load objects from a checkpoint. When one of them is not in it, none is loaded.

    A file is read without running code from it. What the checkpoint holds besides does not matter. That of
    one object alone may be the state of that object.

    Args:
        to_load: objects with ``load_state_dict()``, by name, as they were saved.
        checkpoint: what was saved, or the path of its file.
        map_location: for ``torch.load``; by default all goes to the CPU first, and from there to where the
            objects are.
        kwargs: such as ``strict=False``, handed to ``load_state_dict`` of modules.

    Raises:
        TypeError: an argument is of the wrong kind.
        DamagedCheckpointError: the file is not what the manifest beside it says.
        ValueError: a key is missing, or a list is of another length.

    >>> source, target = nn.Linear(1, 1), nn.Linear(1, 1)
    >>> load_objects({"model": target}, {"model": source.state_dict(), "other": {}})
    >>> bool(source.weight == target.weight)
    True
    """
    if not isinstance(to_load, Mapping):
        raise TypeError(f"to_load must be a mapping, got {to_load!r} of type {type(to_load).__name__}")
    check_objects(dict(to_load), "load_state_dict", "to_load")
    content: Any = checkpoint
    if isinstance(checkpoint, (str, PathLike)):
        damaged: list[str] = []
        problem = problem_of(Path(checkpoint), damaged)
        for text in damaged:
            warnings.warn(text, stacklevel=2)
        if problem:
            raise DamagedCheckpointError(f"the checkpoint '{checkpoint!s}' {problem}")
        content = read_checkpoint(checkpoint, map_location)
    elif not isinstance(checkpoint, Mapping):
        raise TypeError(f"checkpoint must be a mapping, a str or a Path, got one of type {type(checkpoint).__name__}")
    for where, target, state in list(_pairs(to_load, _by_name(to_load, content), "checkpoint")):
        try:
            _load(target, state, kwargs)
        except Exception as error:
            annotate(error, f"raised while loading {where}")
            raise


def read_checkpoint(path: str | PathLike[str], map_location: Any = None) -> Any:
    """Read a checkpoint without running code from it, to the CPU unless ``map_location`` says otherwise."""
    location = "cpu" if map_location is None else map_location
    try:
        if is_weights_file(path):
            return read_weights(path, location)
        return torch.load(path, map_location=location, weights_only=True)
    except (EOFError, RuntimeError) as error:  # what torch raises for half a file
        raise DamagedCheckpointError(f"the checkpoint '{path!s}' cannot be read: {error or 'it is empty'}") from error
    except Exception as error:
        annotate(error, f"raised while reading the checkpoint '{path!s}'")
        raise


def _by_name(to_load: Mapping[str, Any], checkpoint: Any) -> Any:
    """Put a checkpoint that is the state of one object alone under the name of that object.

    The record of the handler that saved it may lie inside of such a state.
    """
    names = [name for name in to_load if name != CHECKPOINTER]
    record = checkpoint.get(CHECKPOINTER) if isinstance(checkpoint, Mapping) else None
    alone = len(names) == 1 and (len(to_load) == 1 or record is not None)
    if not alone or (isinstance(checkpoint, Mapping) and names[0] in checkpoint):
        return checkpoint
    if isinstance(record, Mapping) and "_saved" in record:
        checkpoint = copy.copy(checkpoint)  # not a new dict: the state of a module has attributes
        del checkpoint[CHECKPOINTER]
    return {names[0]: checkpoint, CHECKPOINTER: record}


def _pairs(targets: Any, states: Any, where: str) -> Iterator[tuple[str, Any, Any]]:
    """Walk through both at once, and give each object with its state."""
    if hasattr(targets, "load_state_dict"):
        yield where, targets, states
        return
    for key, target in _entries(targets):
        if isinstance(targets, Mapping):
            _check_mapping(states, key, targets, where)
        else:
            _check_list(states, targets, where)
        yield from _pairs(target, states[key], f"{where}[{key!r}]")


def _entries(container: Any) -> Iterator[tuple[Any, Any]]:
    return iter(container.items()) if isinstance(container, Mapping) else enumerate(container)


def _check_mapping(states: Any, key: Any, targets: Mapping[Any, Any], where: str) -> None:
    if not isinstance(states, Mapping):
        raise ValueError(f"{where} must be a mapping with the keys {list(targets)}, got a {type(states).__name__}")
    if key not in states:
        raise ValueError(f"{where} lacks the key {key!r} of to_load, it has {list(states)}")


def _check_list(states: Any, targets: Sequence[Any], where: str) -> None:
    if isinstance(states, Mapping) or not is_container(states):
        raise ValueError(f"{where} must be a list of length {len(targets)}, got a {type(states).__name__}")
    if len(states) != len(targets):
        raise ValueError(f"{where} must be a list of length {len(targets)}, got one of length {len(states)}")


def _load(target: Any, state: Any, module_options: Mapping[str, Any]) -> None:
    target = unwrap(target)
    if isinstance(target, nn.Module):
        state = _of_uncompiled(state)
        if has_shards(own := target.state_dict()):
            state = divided(own, state)
        target.load_state_dict(state, **module_options)
    elif isinstance(target, torch.optim.Optimizer) and has_shards(target.param_groups):
        target.load_state_dict(divided_optimizer_state(target, state))
    else:
        target.load_state_dict(state)


def _of_uncompiled(state: Any) -> Any:
    """Rename the entries of a state that somebody took from a compiled module as it was."""
    prefix = f"{COMPILED}."
    if not (isinstance(state, Mapping) and state and all(str(key).startswith(prefix) for key in state)):
        return state
    renamed: Any = copy.copy(state)
    if hasattr(state, "_metadata"):
        renamed._metadata = copy.copy(state._metadata)
    consume_prefix_in_state_dict_if_present(renamed, prefix)
    return renamed
