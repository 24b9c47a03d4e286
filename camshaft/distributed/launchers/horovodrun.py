"""horovodrun, and ``horovod.run``, with its gloo controller; with that of MPI the variables are mpirun's."""

from __future__ import annotations

from collections.abc import Mapping

from camshaft.distributed.launchers.launch import Launch, build
from camshaft.distributed.launchers.variables import Number, master_addr, master_port, numbers, place

_NAMES = {
    "rank": ("HOROVOD_RANK",),
    "world_size": ("HOROVOD_SIZE",),
    "local_rank": ("HOROVOD_LOCAL_RANK",),
    "local_world_size": ("HOROVOD_LOCAL_SIZE",),
}
_NODES = {"node_rank": ("HOROVOD_CROSS_RANK",), "num_nodes": ("HOROVOD_CROSS_SIZE",)}


def read(environ: Mapping[str, str]) -> Launch | None:
    """Read what horovodrun tells its processes; ``None`` when it did not start this one.

    Raises:
        RuntimeError: rank or size is missing, or a number is wrong.

    >>> read({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}).launcher
    'horovodrun'
    """
    if not (said := place(environ, _NAMES)):
        return None
    if said.get("local_rank", Number(1, "")).value == 0:
        # The "cross" numbers count only nodes that have this local rank; every node has the first.
        said |= numbers(environ, _NODES)
    return build(
        "horovodrun",
        said,
        address=master_addr(environ),
        master_port=master_port(environ),
        host=environ.get("HOROVOD_HOSTNAME"),
    )
