"""Who runs where, and how the processes of a run talk to each other."""

from __future__ import annotations

from camshaft.distributed.collectives import (
    all_gather,
    all_gather_tensors_with_shapes,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    new_group,
    reduce,
    reduce_scatter,
    scatter,
)
from camshaft.distributed.context import finalize, initialize, set_local_rank, sync, use_backend
from camshaft.distributed.ranks import (
    backend,
    device,
    get_local_rank,
    get_nnodes,
    get_node_rank,
    get_nproc_per_node,
    get_rank,
    get_world_size,
    hostname,
    model_name,
    one_rank_first,
    one_rank_only,
    show_config,
)
from camshaft.distributed.registry import available_backends

__all__ = [
    "all_gather",
    "all_gather_tensors_with_shapes",
    "all_reduce",
    "all_to_all",
    "available_backends",
    "backend",
    "barrier",
    "broadcast",
    "device",
    "finalize",
    "gather",
    "get_local_rank",
    "get_nnodes",
    "get_node_rank",
    "get_nproc_per_node",
    "get_rank",
    "get_world_size",
    "hostname",
    "initialize",
    "model_name",
    "new_group",
    "one_rank_first",
    "one_rank_only",
    "reduce",
    "reduce_scatter",
    "scatter",
    "set_local_rank",
    "show_config",
    "sync",
    "use_backend",
]
