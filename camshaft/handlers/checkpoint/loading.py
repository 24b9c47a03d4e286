"""Load checkpoints into objects, from memory or from files, which are read without running code from them."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from camshaft.errors import DamagedCheckpointError, annotate
from camshaft.handlers.checkpoint.manifest import Manifest
from camshaft.handlers.checkpoint.names import SAFETENSORS
from camshaft.handlers.checkpoint.savers import safetensors
from camshaft.handlers.checkpoint.state import CHECKPOINTER, check_objects, fits, is_container, load_state
from camshaft.types import PathLike


def load_objects(
    to_load: Mapping[str, Any], checkpoint: Mapping[str, Any] | PathLike, *, map_location: Any = None, **kwargs: Any
) -> None:
    """Load objects from a checkpoint.

    A file is read without running code from it. Other contents of the checkpoint are ignored. The checkpoint of a
    single object may be the state of that object. If the checkpoint lacks an object, none is changed; if the state of a
    model or optimizer does not fit, no other object is changed.

    Args:
        to_load: objects with ``load_state_dict()``, by name, as they were saved.
        checkpoint: what was saved, or the path of its file.
        map_location: for ``torch.load``; by default tensors are loaded to the CPU first, and from there to where the
            objects are.
        kwargs: passed to ``load_state_dict`` of modules, for example ``strict=False``.

    Raises:
        TypeError: an argument is of the wrong type.
        DamagedCheckpointError: the file does not match its entry in the manifest.
        ValueError: a key is missing, or a list has another length.

    >>> source, target = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    >>> load_objects({"model": target}, {"model": source.state_dict(), "other": {}})
    >>> bool(source.weight == target.weight)
    True
    """
    check_objects(to_load, "load_state_dict", "to_load")
    content: Any = checkpoint
    if isinstance(checkpoint, (str, os.PathLike)):
        damaged: list[str] = []
        path = Path(checkpoint)
        problem = Manifest(path.parent).problem(path.name, damaged)
        for text in damaged:
            warnings.warn(text, stacklevel=2)
        if problem:
            raise DamagedCheckpointError(f"the checkpoint '{checkpoint!s}' {problem}")
        content = read_checkpoint(checkpoint, map_location)
    elif not isinstance(checkpoint, Mapping):
        raise TypeError(f"checkpoint must be a mapping, a str or a Path, got one of type {type(checkpoint).__name__}")
    pairs = list(_pairs(to_load, _by_name(to_load, content), "checkpoint"))
    # What does not seem to fit comes first, so that its error leaves the others unchanged.
    pairs.sort(key=lambda pair: fits(pair[1], pair[2], kwargs.get("strict", True)))
    for where, target, state in pairs:
        try:
            load_state(target, state, kwargs)
        except Exception as error:
            annotate(error, f"raised while loading {where}")
            raise


def read_checkpoint(path: PathLike, map_location: Any = None) -> Any:
    """Read a checkpoint without running code from it, by default to the CPU."""
    location = "cpu" if map_location is None else map_location
    try:
        if Path(path).suffix == SAFETENSORS:
            return safetensors().load_file(path, device=str(location))
        return torch.load(path, map_location=location, weights_only=True)
    except (EOFError, RuntimeError) as error:  # what torch raises for truncated files
        raise DamagedCheckpointError(f"the checkpoint '{path!s}' cannot be read: {error or 'it is empty'}") from error
    except Exception as error:
        annotate(error, f"raised while reading the checkpoint '{path!s}'")
        raise


def _by_name(to_load: Mapping[str, Any], checkpoint: Any) -> Any:
    """Put a checkpoint that is the state of a single object under the name of that object.

    Such a state may contain the record of the handler that saved it.
    """
    names = [name for name in to_load if name != CHECKPOINTER]
    record = checkpoint.get(CHECKPOINTER) if isinstance(checkpoint, Mapping) else None
    is_alone = len(names) == 1 and (len(to_load) == 1 or record is not None)
    if not is_alone or (isinstance(checkpoint, Mapping) and names[0] in checkpoint):
        return checkpoint
    if isinstance(record, Mapping) and "_saved" in record:
        checkpoint = copy.copy(checkpoint)  # not a new dict: the state of a module has attributes
        del checkpoint[CHECKPOINTER]
    return {names[0]: checkpoint, CHECKPOINTER: record}


def _pairs(targets: Any, states: Any, where: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield each object in nested containers with its path and its state."""
    if hasattr(targets, "load_state_dict"):
        yield where, targets, states
        return
    if isinstance(targets, Mapping):
        if not isinstance(states, Mapping):
            raise ValueError(f"{where} must be a mapping with the keys {list(targets)}, got a {type(states).__name__}")
        missing = [key for key in targets if key not in states]
        if missing:
            raise ValueError(f"{where} lacks the key {missing[0]!r} of to_load, it has {list(states)}")
    elif isinstance(states, Mapping) or not is_container(states):
        raise ValueError(f"{where} must be a list of length {len(targets)}, got a {type(states).__name__}")
    elif len(states) != len(targets):
        raise ValueError(f"{where} must be a list of length {len(targets)}, got one of length {len(states)}")
    for key, target in targets.items() if isinstance(targets, Mapping) else enumerate(targets):
        yield from _pairs(target, states[key], f"{where}[{key!r}]")
