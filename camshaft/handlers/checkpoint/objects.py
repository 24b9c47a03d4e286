"""What a checkpoint is made of: objects with a state, in nested mappings and sequences."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from camshaft.handlers.checkpoint.sharding import has_shards, whole
from camshaft.handlers.checkpoint.writer import is_writer, writers

CHECKPOINTER = "checkpointer"
"""The key under which a checkpoint holds the record of the handler that saved it."""

COMPILED = "_orig_mod"
"""The name under which a module made by ``torch.compile`` holds the one it was made of."""


def unwrap(target: Any) -> Any:
    """Give the module within ``DataParallel``, ``DistributedDataParallel`` and what ``torch.compile`` makes.

    >>> layer = nn.Linear(1, 1)
    >>> unwrap(nn.DataParallel(layer)) is layer
    True
    """
    while isinstance(target, nn.Module):
        if isinstance(target, (nn.DataParallel, DistributedDataParallel)):
            target = target.module
        elif isinstance(inner := target._modules.get(COMPILED), nn.Module):
            target = inner
        else:
            break
    return target


def check_objects(objects: Any, attribute: str, where: str) -> None:
    """Raise ``TypeError`` if ``objects``, or something in it, is neither a container nor has the attribute."""
    if hasattr(objects, attribute):
        return
    if not is_container(objects):
        raise TypeError(f"{where} must have {attribute}(), got {objects!r} of type {type(objects).__name__}")
    for key, one in objects.items() if isinstance(objects, Mapping) else enumerate(objects):
        check_objects(one, attribute, f"{where}[{key!r}]")


def check_to_save(to_save: Any, include_self: bool) -> None:
    """Raise ``TypeError`` or ``ValueError`` if this is not what a checkpoint can be made of."""
    if not isinstance(to_save, Mapping):
        raise TypeError(f"to_save must be a mapping, got {to_save!r} of type {type(to_save).__name__}")
    check_objects(dict(to_save), "state_dict", "to_save")
    if include_self and not isinstance(to_save, MutableMapping):
        raise TypeError(
            f"to_save must be a mutable mapping with include_self, got one of type {type(to_save).__name__}"
        )
    if include_self and CHECKPOINTER in to_save:
        raise ValueError(f"to_save must not have the key {CHECKPOINTER!r} with include_self, got {list(to_save)}")


def states_of(objects: Any, save_on_rank: int | str) -> Any:
    """Replace every object in nested containers by its state.

    What the ranks hold in parts is brought together where it is written, in which all ranks take part; the others
    then have nothing to give.
    """
    if hasattr(objects, "state_dict"):
        consolidate = getattr(objects, "consolidate_state_dict", None)
        if consolidate is not None:
            for rank in writers(save_on_rank):
                consolidate(to=rank)
            if not is_writer(save_on_rank):
                return {}
        state = unwrap(objects).state_dict()
        return whole(state, keep=is_writer(save_on_rank)) if has_shards(state) else state
    if isinstance(objects, Mapping):
        return {key: states_of(one, save_on_rank) for key, one in objects.items()}
    return [states_of(one, save_on_rank) for one in objects]


def checkpoint_of(to_save: Mapping[str, Any], save_on_rank: int | str, record: Mapping[str, Any] | None) -> Any:
    """Give what is written: the states by name, or that of the only object; with the record of what was saved."""
    states = {name: states_of(one, save_on_rank) for name, one in to_save.items()}
    checkpoint = next(iter(states.values())) if len(states) == 1 else states
    if record is None:
        return checkpoint
    # The state may be the object's own, so the key goes into a copy.
    checkpoint = copy.copy(checkpoint) if isinstance(checkpoint, MutableMapping) else states
    checkpoint[CHECKPOINTER] = record
    return checkpoint


def needs_all_ranks(objects: Any) -> bool:
    """Say whether all ranks take part in taking the states of objects."""
    if hasattr(objects, "state_dict"):
        if hasattr(objects, "consolidate_state_dict"):
            return True
        return has_shards(list(objects.parameters())) if isinstance(objects, nn.Module) else False
    return any(needs_all_ranks(one) for one in (objects.values() if isinstance(objects, Mapping) else objects))


def objects_in(container: Any) -> Iterator[Any]:
    """Give the objects in nested mappings and sequences."""
    if hasattr(container, "load_state_dict") or not is_container(container):
        yield container
        return
    for one in container.values() if isinstance(container, Mapping) else container:
        yield from objects_in(one)


def is_container(value: Any) -> bool:
    """Say whether a value can hold objects."""
    return isinstance(value, (Mapping, Sequence)) and not isinstance(value, (str, bytes))
