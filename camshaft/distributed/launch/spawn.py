"""``spawn``: start the processes of a job from within Python, with any backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from camshaft.distributed.launch import commands, processes, xla
from camshaft.distributed.registry import module_of

_STARTERS = {"mpi": commands.spawn_mpi, "horovod": commands.spawn_horovod, "xla-tpu": xla.spawn}


def spawn(
    backend: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs_dict: dict[str, Any] | None = None,
    nproc_per_node: int = 1,
    **kwargs: Any,
) -> Any:
    """Start processes on this machine; each initializes the backend, calls a function, and finalizes.

    If a process fails, the others are terminated, and the error here contains its traceback. The processes end with
    this one, however it ends.

    Args:
        backend: one of :func:`available_backends`.
        fn: called as ``fn(local_rank, *args, **kwargs_dict)``; it must be importable by new processes.
        args: arguments of ``fn``.
        kwargs_dict: keyword arguments of ``fn``.
        nproc_per_node: number of processes.
        kwargs: depend on the backend. For those of torch: ``nnodes``, ``node_rank``, ``master_addr`` and
            ``master_port`` (by default a free port, on one node), ``init_method``, the options of :func:`initialize`,
            and for the processes ``join``, ``daemon`` and ``start_method``: ``"fork"`` by default in a notebook, where
            each process then computes with one thread, as the threads of the parent do not survive a fork. ``"mpi"``:
            ``timeout`` and ``device``. ``"horovod"``: ``hosts``, ``timeout`` and the options of ``horovod.run``.
            ``"xla-tpu"``: ``start_method`` and ``spmd``. All accept ``debug``, as :func:`initialize` does.

    Returns:
        ``None``; with ``join=False`` an object whose ``join(timeout=None)`` waits for the processes.

    Raises:
        ValueError: the backend is not available, or a number of nodes or processes is out of range.
        TypeError: an argument is unknown, or ``fn`` and its arguments cannot be pickled.
        torch.multiprocessing.ProcessRaisedException: ``fn`` raised in a process.
        torch.multiprocessing.ProcessExitedException: a process was killed, or exited with another code than 0.
    """
    module_of(backend)  # raises if it is not available
    if not callable(fn):
        raise TypeError(f"fn must be callable, got {fn!r}")
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"args must be a tuple, got {args!r}")
    processes.check_positive("nproc_per_node", nproc_per_node)
    start = _STARTERS.get(backend, processes.spawn)
    return start(backend, (fn, tuple(args), dict(kwargs_dict or {})), nproc_per_node, **kwargs)
