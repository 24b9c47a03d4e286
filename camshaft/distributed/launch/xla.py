"""Start processes on XLA, one per device of this machine."""

from __future__ import annotations

from typing import Any

from camshaft.distributed.backend import Backend
from camshaft.distributed.launch.worker import Task, work
from camshaft.distributed.registry import module_of
from camshaft.distributed.run import abandon

_OPTIONS = ("nnodes", "node_rank", "master_addr", "master_port", "start_method", "spmd", "debug")


def spawn(name: str, task: Task, nproc_per_node: int, **options: Any) -> None:
    """Start one process, which is this one, or one per device; see :func:`camshaft.distributed.spawn`.

    The runtime finds other nodes by itself: ``node_rank``, ``master_addr`` and ``master_port`` have no effect.
    """
    if unknown := sorted(set(options) - set(_OPTIONS)):
        raise TypeError(f"{unknown} are unknown to backend {name!r}, whose spawn accepts {list(_OPTIONS)}")
    import torch_xla.distributed.xla_multiprocessing as multiprocessing
    import torch_xla.runtime as runtime

    kind, spmd = runtime.device_type(), options.get("spmd", False)
    if nproc_per_node > 1 and (spmd or kind == "CPU"):
        raise ValueError(
            f"nproc_per_node must be 1 {'with spmd=True' if spmd else f'on XLA devices of type {kind!r}'}, got "
            f"{nproc_per_node}; spmd=True makes one process use all devices"
        )
    expected = (nproc_per_node, options.get("nnodes", 1))
    arguments = (name, (*task, {"spmd": spmd, "debug": options.get("debug")}), expected)
    if spmd:
        _run(0, *arguments)
    else:
        count, method = 1 if nproc_per_node == 1 else None, options.get("start_method", "fork")
        multiprocessing.spawn(_run, arguments, nprocs=count, start_method=method)


def _run(rank: int, name: str, task: Any, expected: tuple[int, int]) -> None:
    """Run in each process; torch_xla reports failures."""

    def create(**options: Any) -> Backend:
        backend: Backend = module_of(name).create(name, None, **options)
        found = backend.topology.local_world_size, backend.topology.num_nodes
        if found != expected:
            backend.close()
            raise ValueError(
                f"nproc_per_node must be 1 or {found[0]} and nnodes {found[1]}, as XLA found the devices, got "
                f"{expected[0]} and {expected[1]}"
            )
        return backend

    try:
        work(rank, lambda: task, create, lambda failure: None)
    except BaseException:
        abandon()
        raise
