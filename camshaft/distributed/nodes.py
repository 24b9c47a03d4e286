"""Which processes are to be started on which nodes, as users say it."""

from __future__ import annotations

from typing import Any

NODES = ("nnodes", "node_rank", "master_addr", "master_port", "init_method")


def check_count(nproc_per_node: Any) -> None:
    """Check how many processes are to be started.

    Raises:
        ValueError: it is no number above 0.
    """
    _check_above_zero("nproc_per_node", nproc_per_node)


def check_nodes(
    nnodes: Any = None,
    node_rank: Any = None,
    master_addr: str | None = None,
    master_port: int | str | None = None,
    init_method: str | None = None,
) -> None:
    """Check how many nodes there are, and how their processes find each other; ``None`` is what is not given.

    Raises:
        ValueError: a number is out of range, or something is missing or given twice.
    """
    nnodes = 1 if nnodes is None else nnodes
    _check_above_zero("nnodes", nnodes)
    if nnodes > 1 and node_rank is None:
        raise ValueError(f"node_rank must be given with nnodes={nnodes}")
    if node_rank is not None and (not _is_integer(node_rank) or not 0 <= node_rank < nnodes):
        raise ValueError(f"node_rank must be an integer in [0, {nnodes}), got {node_rank!r}")
    if init_method is not None and not isinstance(init_method, str):
        raise ValueError(f"init_method must be 'env://', 'file://...' or 'tcp://...', got {init_method!r}")
    if init_method is not None and not init_method.startswith("env://"):
        if master_addr is not None or master_port is not None:
            raise ValueError(
                f"master_addr and master_port must not be given with init_method={init_method!r}, got "
                f"{master_addr!r} and {master_port!r}"
            )
    elif nnodes > 1 and (master_addr is None or master_port is None):
        raise ValueError(
            f"master_addr and master_port, or init_method, must be given with nnodes={nnodes}, got "
            f"{master_addr!r} and {master_port!r}"
        )
    if master_port is not None and not (str(master_port).isdecimal() and 0 < int(master_port) < 65536):
        raise ValueError(f"master_port must be a number in [1, 65535], got {master_port!r}")


def _check_above_zero(name: str, count: Any) -> None:
    if not _is_integer(count) or count < 1:
        raise ValueError(f"{name} must be an integer above 0, got {count!r}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
