"""horovodrun and ``horovod.run`` with the gloo controller; with the MPI controller, mpirun sets the variables."""

from __future__ import annotations

from collections.abc import Mapping

from camshaft.distributed.environments.variables import read_launch
from camshaft.distributed.topology import Launch

_NAMES = {
    "rank": ("HOROVOD_RANK",),
    "world_size": ("HOROVOD_SIZE",),
    "local_rank": ("HOROVOD_LOCAL_RANK",),
    "local_world_size": ("HOROVOD_LOCAL_SIZE",),
}
_NODES = {"node_rank": ("HOROVOD_CROSS_RANK",), "num_nodes": ("HOROVOD_CROSS_SIZE",)}


def read(environ: Mapping[str, str]) -> Launch | None:
    """Return what horovodrun sets, or ``None`` if it did not start this process.

    Raises:
        RuntimeError: rank or size is missing, or a value is invalid.

    >>> read({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}).launcher
    'horovodrun'
    """
    # The "cross" numbers count only nodes that have this local rank, and every node has local rank 0.
    names = _NAMES | _NODES if environ.get("HOROVOD_LOCAL_RANK", "").strip() == "0" else _NAMES
    return read_launch("horovodrun", environ, names, host=environ.get("HOROVOD_HOSTNAME"))
