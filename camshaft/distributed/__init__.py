"""Who runs where, and how the processes of a run talk to each other."""

from __future__ import annotations

from camshaft.data.loaders import auto_dataloader
from camshaft.data.samplers import DistributedProxySampler
from camshaft.distributed.backends.registry import available_backends
from camshaft.distributed.collectives.api import (
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
from camshaft.distributed.collectives.point_to_point import irecv, isend, recv, send
from camshaft.distributed.comp_models import (
    has_hvd_support,
    has_native_dist_support,
    has_xla_support,
    registered_computation_models,
)
from camshaft.distributed.job import finalize, initialize, set_local_rank, sync, use_backend
from camshaft.distributed.launch.parallel import Parallel
from camshaft.distributed.launch.spawn import spawn
from camshaft.distributed.models.auto import auto_model, auto_optim
from camshaft.distributed.models.mesh import get_data_parallel_rank, get_data_parallel_size, get_mesh, make_mesh
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

__all__ = [
    "DistributedProxySampler",
    "Parallel",
    "all_gather",
    "all_gather_tensors_with_shapes",
    "all_reduce",
    "all_to_all",
    "auto_dataloader",
    "auto_model",
    "auto_optim",
    "available_backends",
    "backend",
    "barrier",
    "broadcast",
    "device",
    "finalize",
    "gather",
    "get_data_parallel_rank",
    "get_data_parallel_size",
    "get_local_rank",
    "get_mesh",
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
    "irecv",
    "isend",
    "make_mesh",
    "model_name",
    "new_group",
    "one_rank_first",
    "one_rank_only",
    "recv",
    "reduce",
    "reduce_scatter",
    "registered_computation_models",
    "scatter",
    "send",
    "set_local_rank",
    "show_config",
    "spawn",
    "sync",
    "use_backend",
]

from camshaft.distributed import auto as auto
from camshaft.distributed import launcher as launcher
from camshaft.distributed import utils as utils  # last, as it holds all of the above
