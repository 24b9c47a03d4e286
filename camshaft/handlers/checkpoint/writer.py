"""Which processes write: one of the job, or one of each node."""

from __future__ import annotations

import sys
import warnings

from camshaft.distributed import all_gather, get_local_rank, get_rank, get_world_size

NODE = "node"
"""As ``save_on_rank``: the first process of each node."""


def check_save_on_rank(save_on_rank: int | str) -> None:
    """Raise ``ValueError`` if this is neither a rank of the job nor ``"node"``."""
    is_rank = isinstance(save_on_rank, int) and not isinstance(save_on_rank, bool) and save_on_rank >= 0
    if save_on_rank != NODE and not is_rank:
        raise ValueError(f"save_on_rank must be an integer >= 0 or {NODE!r}, got {save_on_rank!r}")
    size = get_world_size()
    if isinstance(save_on_rank, int) and size > 1 and save_on_rank >= size:
        raise ValueError(
            f"save_on_rank must be a rank of the job, which has {size} processes, got {save_on_rank}: nothing would be "
            "saved"
        )


def warn_if_alone(save_on_rank: int | str) -> None:
    """Warn if the rank that is to write does not exist because the job is a single process, which then writes."""
    if get_world_size() == 1 and save_on_rank not in (0, NODE):
        level, frame = 1, sys._getframe()
        while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(f"{__package__}."):
            level, frame = level + 1, frame.f_back  # a Checkpoint may construct the DiskSaver
        warnings.warn(
            f"save_on_rank is {save_on_rank}, but the job has a single process: rank 0 saves instead", stacklevel=level
        )


def is_writer(save_on_rank: int | str) -> bool:
    """Return whether this process writes; the only process of a job always does."""
    if get_world_size() == 1:
        return True
    return get_local_rank() == 0 if save_on_rank == NODE else get_rank() == save_on_rank


def writers(save_on_rank: int | str) -> list[int]:
    """Return the ranks that write; with ``"node"`` all ranks must call this."""
    if get_world_size() == 1:
        return [0]
    if isinstance(save_on_rank, int):
        return [save_on_rank]
    firsts: list[int] = all_gather(int(get_local_rank() == 0))
    return [rank for rank, is_first in enumerate(firsts) if is_first]
