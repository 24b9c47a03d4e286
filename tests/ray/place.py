"""Write what Ray and camshaft say of the places of three workers on two nodes, with room for two and one, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ray
import ray.train
import ray.train.torch
from ray.cluster_utils import Cluster

import camshaft.distributed as idist

NAMES = ("world_rank", "world_size", "local_rank", "local_world_size", "node_rank")


def tell(config: dict[str, str]) -> None:
    context = ray.train.get_context()
    theirs = [getattr(context, f"get_{name}")() for name in NAMES]
    queries = (
        idist.get_rank,
        idist.get_world_size,
        idist.get_local_rank,
        idist.get_nproc_per_node,
        idist.get_node_rank,
    )
    Path(config["folder"], f"{theirs[0]}.json").write_text(json.dumps([theirs, [query() for query in queries]]))


cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
cluster.add_node(num_cpus=1, node_ip_address="127.0.0.2")
try:
    cluster.connect()
    ray.train.torch.TorchTrainer(
        tell,
        train_loop_config={"folder": sys.argv[1]},
        scaling_config=ray.train.ScalingConfig(num_workers=3),
        torch_config=ray.train.torch.TorchConfig(backend="gloo"),
        run_config=ray.train.RunConfig(storage_path=sys.argv[1]),
    ).fit()
finally:
    ray.shutdown()
    cluster.shutdown()
