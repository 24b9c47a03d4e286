"""The functions of :mod:`camshaft.distributed`, under the name that they also have in the API."""

from __future__ import annotations

from camshaft.distributed.collectives import (
    all_gather,
    all_gather_tensors_with_shapes,
    all_reduce,
    barrier,
    broadcast,
    new_group,
)
from camshaft.distributed.comp_models import registered_computation_models
from camshaft.distributed.launch import spawn
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
from camshaft.distributed.registry import (
    available_backends,
    has_hvd_support,
    has_native_dist_support,
    has_xla_support,
)
from camshaft.distributed.run import finalize, initialize, set_local_rank, sync

__all__ = [
    "all_gather",
    "all_gather_tensors_with_shapes",
    "all_reduce",
    "available_backends",
    "backend",
    "barrier",
    "broadcast",
    "device",
    "finalize",
    "get_local_rank",
    "get_nnodes",
    "get_node_rank",
    "get_nproc_per_node",
    "get_rank",
    "get_world_size",
    "has_hvd_support",
    "has_native_dist_support",
    "has_xla_support",
    "hostname",
    "initialize",
    "model_name",
    "new_group",
    "one_rank_first",
    "one_rank_only",
    "registered_computation_models",
    "set_local_rank",
    "show_config",
    "spawn",
    "sync",
]
