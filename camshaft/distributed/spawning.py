"""Starting the processes of a run from within Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from camshaft.distributed.launch import horovod, mpiexec, native, xla
from camshaft.distributed.nodes import check_count
from camshaft.distributed.registry import module_of


def spawn(
    backend: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs_dict: dict[str, Any] | None = None,
    nproc_per_node: int = 1,
    **kwargs: Any,
) -> Any:
    """Start processes on this machine; each initializes the backend, calls a function, and finalizes.

    A process that fails ends the others, and its traceback is the error here. The processes end with this one,
    however it ends.

    Args:
        backend: one of :func:`available_backends`.
        fn: called as ``fn(local_rank, *args, **kwargs_dict)``; importable, as it is named to new processes.
        args: for ``fn``.
        kwargs_dict: for ``fn``.
        nproc_per_node: number of processes.
        kwargs: by backend. For those of torch: ``nnodes``, ``node_rank``, ``master_addr`` and ``master_port`` (a free
            port by default, on one node), ``init_method``, what :func:`initialize` takes, and ``join``, ``daemon``,
            ``start_method`` for the processes, ``"fork"`` in a notebook, where each then computes with one thread: the
            threads of a parent that has computed do not survive a fork. ``"mpi"``: ``timeout`` and ``device``.
            ``"horovod"``: ``hosts``, ``timeout`` and what ``horovod.run`` takes. ``"xla-tpu"``: ``start_method`` and
            ``spmd``. All take ``debug``, as :func:`initialize` does.

    Returns:
        ``None``; with ``join=False`` an object whose ``join(timeout=None)`` waits for the processes.

    Raises:
        ValueError: the backend is not available, or a number of nodes or processes is out of range.
        TypeError: an argument is not known, or ``fn`` and its arguments cannot be pickled.
        torch.multiprocessing.ProcessRaisedException: ``fn`` raised in a process.
        torch.multiprocessing.ProcessExitedException: a process was killed, or exited with another code than 0.
    """
    module_of(backend)  # validates it
    if not callable(fn):
        raise TypeError(f"fn must be callable, got {fn!r}")
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"args must be a tuple, got {args!r}")
    check_count(nproc_per_node)
    start = {"mpi": mpiexec, "horovod": horovod, "xla-tpu": xla}.get(backend, native).spawn
    return start(backend, fn, tuple(args), dict(kwargs_dict or {}), nproc_per_node=nproc_per_node, **kwargs)
