"""Starting the processes of a run on XLA, one for each device of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from camshaft.distributed.backends.xla import create
from camshaft.distributed.environments import detect
from camshaft.distributed.run import abandon, current, finalize, install


def spawn(
    name: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    nproc_per_node: int = 1,
    nnodes: int = 1,
    node_rank: int = 0,
    master_addr: str | None = None,
    master_port: int | str | None = None,
    start_method: str = "fork",
    spmd: bool = False,
    debug: bool | None = None,
    **options: Any,
) -> None:
    """Start the processes of this node, and wait for them; see :func:`camshaft.distributed.spawn`.

    A single process is this one.

    Args:
        nproc_per_node: 1, or the number of devices of this machine.
        nnodes: the number of machines, which the runtime finds by itself.
        node_rank: of no use, as ``master_addr`` and ``master_port`` are.
        start_method: of ``multiprocessing``.
        spmd: one process for all devices.
        debug: argument of ``initialize``.
        options: none.

    Raises:
        TypeError: an option is not known.
        ValueError: there cannot be so many processes.
    """
    if options:
        raise TypeError(
            f"spawn knows nnodes, node_rank, start_method, spmd and debug for {name!r}, got {sorted(options)}"
        )
    import torch_xla.distributed.xla_multiprocessing as multiprocessing
    import torch_xla.runtime as runtime

    kind = runtime.device_type()
    if nproc_per_node > 1 and (spmd or kind == "CPU"):
        raise ValueError(
            f"nproc_per_node must be 1 {'with spmd=True' if spmd else f'on XLA devices of type {kind!r}'}, got "
            f"{nproc_per_node}; spmd=True makes one process use all devices"
        )
    task = (name, function, args, kwargs, (nproc_per_node, nnodes), spmd, debug)
    if spmd:
        _run(0, *task)
    else:
        multiprocessing.spawn(_run, task, nprocs=1 if nproc_per_node == 1 else None, start_method=start_method)


def _run(
    rank: int,
    name: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    wanted: tuple[int, int],
    spmd: bool,
    debug: bool | None,
) -> None:
    """What each process does."""
    install(lambda: create(name, detect(os.environ), spmd=spmd), debug)
    try:
        topology = current().topology
        found = topology.local_world_size, topology.num_nodes
        if found != wanted:
            raise ValueError(
                f"nproc_per_node must be 1 or {found[0]} and nnodes {found[1]}, as XLA found the devices, got "
                f"{wanted[0]} and {wanted[1]}"
            )
        function(topology.local_rank, *args, **kwargs)
    except BaseException:
        abandon()
        raise
    finalize()
