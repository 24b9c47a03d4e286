"""Which processes write: one of the job, or one of each node."""

from __future__ import annotations

from camshaft.distributed import all_gather, get_local_rank, get_rank, get_world_size

NODE = "node"
"""As ``save_on_rank``: the first process of each node."""


def check_save_on_rank(save_on_rank: int | str) -> None:
    """Raise ``ValueError`` if this is neither a rank nor ``"node"``."""
    is_rank = isinstance(save_on_rank, int) and not isinstance(save_on_rank, bool) and save_on_rank >= 0
    if save_on_rank != NODE and not is_rank:
        raise ValueError(f"save_on_rank must be an integer >= 0 or {NODE!r}, got {save_on_rank!r}")


def check_rank_exists(save_on_rank: int | str) -> None:
    """Raise ``ValueError`` if no process of the job has this rank."""
    if isinstance(save_on_rank, int) and save_on_rank >= get_world_size():
        raise ValueError(
            f"save_on_rank must be a rank of the job, which has {get_world_size()} processes, got {save_on_rank}: "
            "nothing would be saved"
        )


def is_writer(save_on_rank: int | str) -> bool:
    """Say whether this process writes."""
    return get_local_rank() == 0 if save_on_rank == NODE else get_rank() == save_on_rank


def writers(save_on_rank: int | str) -> list[int]:
    """Give the ranks that write; with ``"node"`` all ranks take part."""
    if isinstance(save_on_rank, int):
        return [save_on_rank]
    if get_world_size() == 1:
        return [0]
    firsts: list[int] = all_gather(int(get_local_rank() == 0))
    return [rank for rank, is_first in enumerate(firsts) if is_first]
