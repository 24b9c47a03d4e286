"""Where a run stands in its data: a few numbers, from which any number of ranks can go on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_NAMES = ("epoch", "consumed", "seed", "order", "steps")


def check_position(position: Mapping[str, Any], *, seed: int | None, order: str) -> None:
    """Refuse a position that is none, or that is one in other data.

    Args:
        position: ``epoch``, the number of the pass over the data; ``consumed``, the samples of it that all ranks
            together have used; ``seed`` and ``order``, what the order of the samples follows from; ``steps``, the
            batches of a whole pass on each rank.
        seed: of the loader that is to go on; ``None`` if any will do.
        order: that of the loader, described.

    Raises:
        ValueError: something is missing, makes no sense or differs.
    """
    if missing := [name for name in _NAMES if name not in position]:
        raise ValueError(f"position lacks {missing}, it has {list(position)}")
    for name in ("epoch", "consumed"):
        if not isinstance(position[name], int) or position[name] < 0:
            raise ValueError(f"{name} of the position must be an integer of at least 0, got {position[name]!r}")
    if not isinstance(position["seed"], int):
        raise ValueError(f"seed of the position must be an integer, got {position['seed']!r}")
    if position["order"] != order:
        raise ValueError(
            f"the position was saved with other data: their order was {position['order']!r}, that of the loader is "
            f"{order!r}; go on with the same data and shuffle= (on by default among several ranks only), or begin "
            "a new epoch: leave 'position' out of the state dict"
        )
    if seed is not None and position["seed"] != seed:
        raise ValueError(
            f"the position was saved with seed {position['seed']}, the loader has seed {seed}: other samples would be "
            f"left; pass seed={position['seed']} to auto_dataloader, or omit seed to use the saved one"
        )


def check_drawn(position: Mapping[str, Any], hashes: Iterator[str], sampler: str) -> None:
    """Refuse a position in the middle of an epoch for which a sampler of the user now gives another order.

    Args:
        position: one that was checked; ``drawn``, if it is there, is the hash of what the sampler gave.
        hashes: of what it gives now, and of what it gives when it is asked again.
        sampler: the name of its type.

    Raises:
        ValueError: the order is another one.
    """
    wanted = position.get("drawn")
    if wanted is None or (now := next(hashes)) == wanted:
        return
    anew = "or begin a new epoch: leave 'position' out of the state dict"
    if next(hashes) == now:
        raise ValueError(
            f"the position was saved in the middle of an epoch, of which {sampler} gives other samples or another "
            f"order now, so samples would be given twice or never; go on with the same sampler, {anew}"
        )
    raise ValueError(
        f"the position was saved in the middle of an epoch, but {sampler} gives another order each time that it is "
        "asked for the same epoch, so samples would be given twice or never: let it take its random numbers from "
        "torch, NumPy or Python, which are seeded for each epoch, or from a torch.Generator in an attribute generator, "
        f"or seed its own in set_epoch(epoch); {anew}"
    )
