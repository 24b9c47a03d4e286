"""Which process of how many this is, and what only one of them does."""

from __future__ import annotations

from camshaft.distributed.ranks import get_local_rank, get_rank, get_world_size, one_rank_only

__all__ = ["get_local_rank", "get_rank", "get_world_size", "one_rank_only"]
