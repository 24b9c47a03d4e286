"""The variables of torch.distributed: set by torchrun and ``python -m torch.distributed.launch``, or by hand."""

from __future__ import annotations

from collections.abc import Mapping

from camshaft.distributed.environments.variables import read_launch
from camshaft.distributed.topology import Launch

PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
RENDEZVOUS = (*PLACE, "MASTER_ADDR", "MASTER_PORT")
LOCAL_NAMES = {
    "local_rank": ("LOCAL_RANK",),
    "local_world_size": ("LOCAL_WORLD_SIZE",),
    "node_rank": ("GROUP_RANK",),
    "num_nodes": ("GROUP_WORLD_SIZE",),
}
_NAMES = {"rank": ("RANK",), "world_size": ("WORLD_SIZE",), **LOCAL_NAMES}


def is_worker(environ: Mapping[str, str]) -> bool:
    """Return True if torchrun started this process; a process that a worker started may have only its run id."""
    return "TORCHELASTIC_RUN_ID" in environ and any(name in environ for name in PLACE)


def read(environ: Mapping[str, str]) -> Launch | None:
    """Return what the variables say, whoever set them; ``None`` if none of the three of the place is set.

    For torchrun, a node is one torchrun agent: two of them on one machine are two nodes.

    Raises:
        RuntimeError: some of the variables are missing, or a value is invalid.

    >>> read({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}).topology.rank
    1
    """
    return read_launch(
        "torchrun" if is_worker(environ) else "environment",
        environ,
        _NAMES,
        required=("rank", "local_rank", "world_size"),
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def variables(launch: Launch) -> dict[str, str]:
    """Return the variables from which :func:`read` reads this launch."""
    values = {name: str(getattr(launch.topology, number)) for number, (name,) in _NAMES.items()}
    address = {"MASTER_ADDR": launch.master_addr, "MASTER_PORT": launch.master_port}
    values |= {name: str(value) for name, value in address.items() if value is not None}
    return values | {"TORCHELASTIC_USE_AGENT_STORE": str(launch.agent_store)}
