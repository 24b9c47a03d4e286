"""Decide between sources that speak about the same process, and refuse those that contradict each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from camshaft.distributed.launchers.launch import Launch
from camshaft.distributed.launchers.table import table

_COMPARED = ("rank", "local_rank", "world_size")


def check(launches: Sequence[Launch]) -> Launch:
    """Choose among launchers of one kind: the first if they agree, else the one that was started by the others.

    Raises:
        RuntimeError: they disagree, and neither can have started the other.
    """
    chosen = launches[0]
    for other in launches[1:]:
        if _agree(chosen, other) or _may_have_started(other, chosen):
            continue
        if not _may_have_started(chosen, other):
            raise _contradiction(chosen, other)
        chosen = other
    return chosen


def settle(launch: Launch, by_hand: Launch) -> Launch:
    """Choose between a launcher and complete variables beside it, which also tell the address.

    They may say the same as the launcher, or be set by something that the launcher's processes started.

    Raises:
        RuntimeError: neither is so.
    """
    if _agree(launch, by_hand):
        address, port = by_hand.address or launch.address, by_hand.master_port
        return replace(launch, address=address, master_port=launch.master_port if port is None else port)
    if _may_have_started(launch, by_hand):
        return by_hand
    raise _contradiction(launch, by_hand)


def _place(launch: Launch) -> tuple[int, ...]:
    return tuple(getattr(launch.topology, what) for what in _COMPARED)


def _agree(one: Launch, other: Launch) -> bool:
    return _place(one) == _place(other)


def _may_have_started(outer: Launch, inner: Launch) -> bool:
    """Tell whether processes of ``outer`` may have started those of ``inner``: on one node, or one on each."""
    if inner.topology.world_size == outer.topology.world_size:
        return False
    grown = all(mine <= its for mine, its in zip(_place(outer), _place(inner), strict=True))
    return grown and outer.topology.num_nodes in (1, outer.topology.world_size)


def _contradiction(one: Launch, other: Launch) -> RuntimeError:
    said = table({launch.launcher: launch.sources for launch in (one, other)})
    return RuntimeError(
        f"the environment contradicts itself: {one.launcher} and {other.launcher} do not say the same, and neither "
        f"can have started the other; unset the variables of one of them\n{said}"
    )
