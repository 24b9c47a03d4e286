"""Everything as it was before: what a trial run changes is put back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy, deepcopy
from typing import Any

from camshaft.engine.engine import Engine
from camshaft.seeding import preserved_random_state

_OF_THE_RUN = ("dataloader", "batch", "_output")  # large, and never changed in place


@contextmanager
def restored(engine: Engine[Any, Any], objects: Mapping[str, Any]) -> Iterator[None]:
    """Run a block, and put objects, an engine and random states back afterwards, also when it raises.

    Args:
        engine: not in the middle of a run.
        objects: with ``state_dict`` and ``load_state_dict``.

    Raises:
        RuntimeError: a run of the engine is under way or interrupted.
    """
    if engine._run is not None:
        raise RuntimeError("the trainer is in the middle of a run: search before it, or when it is over")
    with ExitStack() as stack:  # what is entered last is restored first, and all of it in any case
        stack.callback(_restore_engine, engine, *_contents(engine))
        for one in objects.values():
            stack.callback(one.load_state_dict, deepcopy(one.state_dict()))
        stack.enter_context(preserved_random_state())
        yield


def _contents(engine: Engine[Any, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Note all attributes of an engine and of its state, which no state dict holds in full."""
    own = {name: copy(value) if isinstance(value, set) else value for name, value in vars(engine).items()}
    of_state = {
        name: deepcopy(value) if isinstance(value, (dict, list)) and name not in _OF_THE_RUN else value
        for name, value in vars(engine.state).items()
    }
    return own, of_state


def _restore_engine(engine: Engine[Any, Any], own: dict[str, Any], of_state: dict[str, Any]) -> None:
    for target, contents in ((engine, own), (own["_state"], of_state)):
        vars(target).clear()
        vars(target).update(contents)
