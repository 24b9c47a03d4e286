"""The state of objects in nested mappings and sequences: taking it, and loading it back, sharded tensors included."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from camshaft.arguments import check_is_no_class, check_type, described
from camshaft.distributed import all_gather, get_rank, get_world_size
from camshaft.dtensors import any_dtensor, is_dtensor
from camshaft.handlers.checkpoint.chunks import Chunk, Chunks, like, own_chunk
from camshaft.text import counted

_RANKS = "ranks"  # the key of the state of an engine that holds what is different on each rank
CHECKPOINTER = "checkpointer"
"""The key under which a checkpoint holds the record of the handler that saved it."""
_COMPILED = "_orig_mod"  # under which a module made by torch.compile holds the original


def walk(value: Any, attribute: str = "", where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what nested mappings and sequences hold, with its path; what has ``attribute`` is not entered.

    >>> list(walk({"a": [1, 2]}, where="state"))
    [("state['a'][0]", 1), ("state['a'][1]", 2)]
    """
    if not is_container(value) or (attribute and hasattr(value, attribute)):
        yield where, value
        return
    for key, one in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from walk(one, attribute, f"{where}[{key!r}]")


def is_container(value: Any) -> bool:
    """Return whether a value is a mapping or a sequence of objects."""
    return isinstance(value, (Mapping, Sequence)) and not isinstance(value, (str, bytes, bytearray, memoryview, range))


def check_objects(objects: Any, attribute: str, argument: str) -> None:
    """Raise ``TypeError`` if this is not a mapping of objects with an attribute."""
    check_type(argument, objects, Mapping, "a mapping of names to objects, such as {'model': model}")
    for where, one in walk(dict(objects), attribute, argument):
        check_is_no_class(where, one)
        if not hasattr(one, attribute):
            hint = ": pass the object itself, not its state_dict()" if isinstance(one, torch.Tensor) else ""
            raise TypeError(f"{where} must have {attribute}(), as models and optimizers do, got {described(one)}{hint}")


def check_to_save(to_save: Any, include_self: bool) -> None:
    """Raise ``TypeError`` or ``ValueError`` if a checkpoint cannot be made of this."""
    check_objects(to_save, "state_dict", "to_save")
    if include_self:
        check_type("to_save", to_save, MutableMapping, "a mutable mapping with include_self")
    if include_self and CHECKPOINTER in to_save:
        raise ValueError(f"to_save must not have the key {CHECKPOINTER!r} with include_self, got {list(to_save)}")


def unwrap(target: Any) -> Any:
    """Return the module inside ``DataParallel``, ``DistributedDataParallel`` and the result of ``torch.compile``.

    >>> layer = nn.Linear(1, 1)
    >>> unwrap(nn.DataParallel(layer)) is layer
    True
    """
    while isinstance(target, nn.Module) and (name := _wrapped_name(target)):
        target = target._modules[name]
    return target


def state_of(target: Any) -> Any:
    """Return the state of an object; the names in that of a module are those without any wrappers in it."""
    target = unwrap(target)
    state = target.state_dict()
    wrappers = _wrappers(target)
    return _renamed(state, partial(_without, wrappers)) if wrappers and _has_names(state) else state


def differs_by_rank(objects: Any) -> bool:
    """Return whether nested containers hold an engine whose state is different on each rank."""
    return get_world_size() > 1 and any(getattr(one, "_keys_of_ranks", ()) for _, one in walk(objects, "state_dict"))


def take_state(objects: Any, keep: bool, gather: bool = True, of_ranks: bool = False) -> Any:
    """Replace every object in nested containers by its state.

    Sharded state is gathered on the ranks that keep it, unless ``gather`` is false; all ranks take part, and the others
    return placeholders. With ``of_ranks``, engines whose state :func:`differs_by_rank` have that of all ranks.
    """

    def state_here(one: Any) -> Any:
        if hasattr(one, "consolidate_state_dict"):  # ZeroRedundancyOptimizer
            for rank, (writes,) in enumerate(all_gather((keep,))):
                if writes:
                    one.consolidate_state_dict(to=rank)
            return one.state_dict() if keep else {}
        state = state_of(one)
        if of_ranks and (keys := getattr(one, "_keys_of_ranks", ())):
            state[_RANKS] = all_gather({key: state.get(key) for key in keys})
        return _replaced(lambda _, leaf: _gathered(leaf, keep), state) if gather and _is_sharded(state) else state

    return _replaced(lambda _, one: state_here(one), objects, "state_dict")


def load_state(target: Any, state: Any, module_options: Mapping[str, Any]) -> None:
    """Load the state of an object; a tensor goes where it is needed, sharded as the one that it replaces."""
    target = unwrap(target)
    if hasattr(target, "_keys_of_ranks") and isinstance(state, Mapping):
        _check_own_states(state.get(_RANKS) or [state])
    if hasattr(target, "_keys_of_ranks") and isinstance(state, Mapping) and state.get(_RANKS):
        ranks, rank = state[_RANKS], get_rank()
        # A new rank starts a new pass: with the random numbers of another rank, it would only repeat them.
        state = {**state, **(ranks[rank] if rank < len(ranks) else {**ranks[0], "rng_states": None})}
    if isinstance(target, nn.Module):
        own = target.state_dict()
        state = _named_like(own, target, state)
        if _is_sharded(own) or _has_chunks(state):
            state = copy.copy(state)  # not a new dict: the state of a module has attributes
            state.update({name: like(own.get(name), value) for name, value in state.items()})
        target.load_state_dict(state, **module_options)
    elif isinstance(target, torch.optim.Optimizer) and (_is_sharded(target.param_groups) or _has_chunks(state)):
        target.load_state_dict({**state, "state": _sharded_optimizer_state(target, state)})
    elif _has_chunks(state):
        own = dict(walk(target.state_dict())) if hasattr(target, "state_dict") else {}
        target.load_state_dict(_replaced(lambda where, leaf: like(own.get(where), leaf), state))
    else:
        target.load_state_dict(state)


def _check_own_states(ranks: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``ValueError`` if loaders that save their own state were those of another number of ranks."""
    is_own = any(isinstance(position := one.get("position"), Mapping) and "state" in position for one in ranks)
    if is_own and len(ranks) != get_world_size():
        raise ValueError(
            f"the checkpoint has the states of the loaders of {counted(len(ranks), 'rank')}, which other loaders would "
            f"misunderstand, but this job has {counted(get_world_size(), 'rank')}: resume on as many ranks, or restart "
            "the epoch: load the checkpoint by hand, without 'position' and 'ranks' in the state of the engine"
        )


def split(state: Any, is_first: bool) -> dict[str, Any]:
    """Return what this rank holds of a state: its chunks of sharded tensors and, on one rank, everything else.

    Returns:
        ``chunks``, by path; ``shapes`` of the full tensors; ``state``, with tensors without data in place of the
        sharded ones, or ``None`` on the other ranks.
    """
    sharded = {where: leaf for where, leaf in walk(state) if is_dtensor(leaf)}
    found = {where: own_chunk(leaf) for where, leaf in sharded.items()}

    def placeholder(where: str, leaf: Any) -> Any:
        if where not in sharded:
            return leaf
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta" if leaf.numel() else None)

    return {
        "chunks": {where: chunk for where, chunk in found.items() if chunk is not None},
        "shapes": {where: tuple(leaf.shape) for where, leaf in sharded.items()},
        "state": _replaced(placeholder, state) if is_first else None,
    }


def joined(shards: Iterable[Mapping[str, Any]]) -> Any:
    """Return the state that :func:`split` has split, with :class:`Chunks` in place of sharded tensors.

    >>> joined([split({"a": torch.ones(2), "b": (1, 2)}, is_first=True)])
    {'a': tensor([1., 1.]), 'b': (1, 2)}
    """
    chunks = defaultdict[str, list[Chunk]](list)
    state = None
    for shard in shards:
        state = shard["state"] if shard["state"] is not None else state
        for where, chunk in shard["chunks"].items():
            chunks[where].append(chunk)

    def in_chunks(where: str, leaf: Any) -> Any:
        return Chunks(where, leaf, chunks[where]) if where in chunks else leaf

    return _replaced(in_chunks, state)


def read_chunks(state: Any) -> Any:
    """Return a state with all :class:`Chunks` read."""
    return _replaced(lambda where, leaf: like(None, leaf), state)


def _replaced(function: Callable[[str, Any], Any], value: Any, attribute: str = "", where: str = "") -> Any:
    """Apply a function to the paths and values that :func:`walk` yields; keep containers in which nothing changes."""
    if not is_container(value) or (attribute and hasattr(value, attribute)):
        return function(where, value)
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    new = [(key, one, _replaced(function, one, attribute, f"{where}[{key!r}]")) for key, one in items]
    if all(one is changed for _, one, changed in new):
        return value
    return {key: one for key, _, one in new} if isinstance(value, Mapping) else [one for _, _, one in new]


# The names in the state of a module. Wrappers add a component to them, wherever they are in it: DistributedDataParallel
# and DataParallel `module`, and torch.compile `_orig_mod`. In a module, its own structure tells which components these
# are; in a file, they are the only ones where they stand, and the module to load has others there.


def _has_names(state: Any) -> bool:
    """Return whether this may be the state of a module, rather than what its own ``state_dict`` makes up."""
    return isinstance(state, Mapping) and all(isinstance(key, str) for key in state)


def _wrapped_name(module: nn.Module) -> str:
    """Return the name of the module inside a wrapper; empty if this is none."""
    if isinstance(module, (nn.DataParallel, DistributedDataParallel)):
        return "module"
    return _COMPILED if isinstance(module._modules.get(_COMPILED), nn.Module) else ""


def _wrappers(target: Any) -> set[str]:
    """Return the paths of the modules that are directly inside a wrapper."""
    if not isinstance(target, nn.Module):
        return set()
    modules = target.named_modules(remove_duplicate=False)
    return {f"{path}.{name}".lstrip(".") for path, module in modules if (name := _wrapped_name(module))}


def _wrappers_in(names: Iterable[str], own: Iterable[str], path: str = "") -> Iterator[str]:
    """Yield the paths in the names of a file at which a wrapper was, but none is in the names of a module."""
    theirs, ours = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for tree, members in ((theirs, names), (ours, own)):
        for head, _, rest in (name.partition(".") for name in members):
            tree[head].append(rest)
    for head, rests in theirs.items():
        if head in ("module", _COMPILED) and len(theirs) == 1 and all(rests) and ours.keys() not in (set(), {head}):
            yield f"{path}{head}"
            yield from _wrappers_in(rests, own, f"{path}{head}.")
        elif head in ours and all(rests):
            yield from _wrappers_in(rests, ours[head], f"{path}{head}.")


def _without(wrappers: Collection[str], name: str) -> str:
    """Remove the components of wrappers from a name.

    >>> _without({"0._orig_mod"}, "0._orig_mod.weight")
    '0.weight'
    """
    parts = name.split(".")
    return ".".join(part for number, part in enumerate(parts, 1) if ".".join(parts[:number]) not in wrappers)


def _named_like(own: Mapping[str, Any], target: nn.Module, state: Any) -> Any:
    """Rename the entries of a state like those of a module, whichever wrappers were and are in it."""
    if not _has_names(state) or state.keys() == own.keys():
        return state
    here = _wrappers(target)
    plain = {_without(here, name): name for name in own}
    there = set(_wrappers_in(state, plain))
    if not here and not there:
        return state

    def rename(name: str) -> str:
        bare = _without(there, name)
        return plain.get(bare, bare)

    renamed = _renamed(state, rename)
    if hasattr(state, "_metadata"):  # of modules, wrappers included
        versions = {_without(there, path): one for path, one in state._metadata.items()}
        paths = [path for path, _ in target.named_modules(remove_duplicate=False)]
        renamed._metadata = {path: versions[name] for path in paths if (name := _without(here, path)) in versions}
    return renamed


def _renamed(state: Any, rename: Callable[[str], str]) -> Any:
    renamed: Any = OrderedDict((rename(name), one) for name, one in state.items())
    if hasattr(state, "_metadata"):
        renamed._metadata = OrderedDict((rename(path), one) for path, one in state._metadata.items())
    return renamed


# Sharded tensors, as fully_shard makes them. torch.distributed.checkpoint.state_dict does not help here: it needs the
# model of each optimizer and names the optimizer's state by parameters; these files are those of unsharded optimizers.


def _has_chunks(state: Any) -> bool:
    return any(isinstance(leaf, Chunks) for _, leaf in walk(state))


def _is_sharded(state: Any) -> bool:
    return any_dtensor(leaf for _, leaf in walk(state))


def _gathered(leaf: Any, keep: bool) -> Any:
    """Gather a sharded tensor in host memory, or return an empty one where it is not needed."""
    if not is_dtensor(leaf):
        return leaf
    full = leaf.full_tensor()
    return full.cpu() if keep else torch.empty(0)


def _sharded_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[Any, Any]:
    """Shard the state of an optimizer like its parameters."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    owners = dict(zip(numbers, parameters, strict=False))
    return {
        number: {name: like(owners.get(number), value) for name, value in one.items()}
        for number, one in state["state"].items()
    }
