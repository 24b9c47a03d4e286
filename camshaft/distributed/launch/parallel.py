"""``Parallel``: run a function in every process of a job, whoever starts the processes."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

from camshaft.arguments import check_takes
from camshaft.distributed.backends.registry import available_backends, choose
from camshaft.distributed.environments import detect
from camshaft.distributed.failures import publish
from camshaft.distributed.job import abandon, current, finalize, initialize, warn_if_one_of_many
from camshaft.distributed.launch.spawn import check_nodes, check_not_launched, check_options, check_positive, spawn
from camshaft.distributed.ranks import get_local_rank, get_rank, get_world_size
from camshaft.text import counted

__all__ = ["Parallel"]

_FOR_SPAWN = ("nnodes", "node_rank", "master_addr", "master_port", "join", "daemon", "start_method", "hosts")


class Parallel:
    """Run a function in one process, in the processes of a launcher, or in new processes.

    - Without arguments, :meth:`run` calls the function in this process.
    - With ``backend``, a launcher (torchrun, srun, mpirun, horovodrun) has started this process and others: the
      backend is initialized for the ``with`` block.
    - With ``backend`` and ``nproc_per_node``, :meth:`run` starts processes with :func:`spawn`. Each imports the
      script, which needs ``if __name__ == "__main__":`` around its main code.

    Args:
        backend: one of :func:`available_backends`, ``None``, or ``"auto"`` to choose one by launcher and devices,
            which logs the choice with its reason.
        nproc_per_node: number of processes to start on this node.
        nnodes: number of nodes, on each of which the script is started.
        node_rank: index of this node.
        master_addr: address of the first node.
        master_port: a free port there.
        init_method: ``"env://"``, ``"file://..."`` or ``"tcp://..."`` instead of address and port.
        spawn_kwargs: options of :func:`spawn`; without ``nproc_per_node``, options of :func:`initialize`, where those
            about processes are ignored with a warning.

    Raises:
        ValueError: an argument is out of range, or is given without those that it needs.
        RuntimeError: ``nproc_per_node`` is given, but a launcher has already started several processes.
        TypeError: the backend does not know an option.

    >>> def training(local_rank, epochs):
    ...     return f"{epochs} epochs on local rank {local_rank}"
    >>> with Parallel() as parallel:
    ...     parallel.run(training, 3)
    '3 epochs on local rank 0'
    """

    def __init__(
        self,
        backend: str | None = None,
        nproc_per_node: int | None = None,
        nnodes: int | None = None,
        node_rank: int | None = None,
        master_addr: str | None = None,
        master_port: int | str | None = None,
        init_method: str | None = None,
        **spawn_kwargs: Any,
    ) -> None:
        self._logger = logging.getLogger("camshaft.distributed.launcher.Parallel")
        nodes = _given(nnodes=nnodes, node_rank=node_rank, master_addr=master_addr, master_port=master_port)
        needing_backend = _given(nproc_per_node=nproc_per_node) | nodes
        if backend is None and needing_backend:
            problem = f"must be given with {', '.join(needing_backend)}, got None and {needing_backend}"
            raise ValueError(f"backend {problem}: pass 'auto' or one of {available_backends()}")
        if nproc_per_node is not None:
            check_positive("nproc_per_node", nproc_per_node)
            check_nodes(**nodes, init_method=init_method)
            check_not_launched(nnodes)
        options = nodes | _given(init_method=init_method) | spawn_kwargs
        is_one_of_many = backend is not None and nproc_per_node is None
        if is_one_of_many and (ignored := {name: options.pop(name) for name in _FOR_SPAWN if name in options}):
            warnings.warn(
                f"{', '.join(ignored)} ignored without nproc_per_node, as no processes are started, got {ignored}",
                stacklevel=2,
            )
        if backend == "auto":
            launch = detect(os.environ)
            backend, why = choose(os.environ, launch, nproc_per_node, available_backends())
            if launch is None or launch.topology.rank == 0:
                self._logger.info("backend 'auto' is %r: %s", backend, why)
        if backend is not None:
            check_options(backend, options, nproc_per_node)
        self.backend = backend
        self.init_method = init_method
        self._nproc_per_node = nproc_per_node
        self._options = options
        self._entered = False

    def __enter__(self) -> Parallel:
        if self.backend is not None and self._nproc_per_node is None:
            initialize(self.backend, **self._options)
            self._log("%r is initialized, with %s", self.backend, counted(get_world_size(), "process"))
        elif self.backend is not None:
            self._log("processes will be started for %r:", self.backend)
            for name, value in {"nproc_per_node": self._nproc_per_node, **self._options}.items():
                self._log("    %s: %s", name, value)
        else:
            remedy = 'pass backend="auto", or the name of a backend, to run them as one job'
            warn_if_one_of_many("backend is None", remedy)
        self._entered = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._entered = False
        if self.backend is not None and self._nproc_per_node is None:
            is_first = get_rank() == 0
            if error is None:
                finalize()
            else:
                found = publish(error, current())
                if isinstance(found, Exception):
                    _record_for_torchrun(found)
                abandon()  # other ranks may be gone
                if found is not error:
                    raise found from found.__cause__
            if is_first:
                self._logger.info("%r is finalized", self.backend)

    def run(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``func(local_rank, *args, **kwargs)`` in each process.

        Returns:
            What ``func`` returns, or ``None`` if it runs in new processes.

        Raises:
            RuntimeError: called outside the ``with`` block.
        """
        if not self._entered:
            raise RuntimeError("run must be called within the block: with Parallel(...) as parallel: parallel.run(...)")
        check_takes("func", func, "(local_rank, *args, **kwargs)", (0, *args), kwargs)
        if self.backend is None or self._nproc_per_node is None:
            self._log("%s starts in %s", func, counted(get_world_size(), "process"))
            result = func(get_local_rank(), *args, **kwargs)
        else:
            size = self._nproc_per_node * self._options.get("nnodes", 1)
            self._log("%s starts in %s", func, counted(size, "new process"))
            result = spawn(self.backend, func, args, kwargs, self._nproc_per_node, **self._options)
        self._log("%s has ended", func)
        return result

    def _log(self, message: str, *args: Any) -> None:
        if get_rank() == 0 and self._options.get("node_rank", 0) == 0:
            self._logger.info(message, *args)


def _given(**arguments: Any) -> dict[str, Any]:
    """Return the arguments that are not ``None``."""
    return {name: value for name, value in arguments.items() if value is not None}


def _record_for_torchrun(error: Exception) -> None:
    """Record the error in torchrun's error file, if there is one, as decorating main with its ``record`` would.

    torchrun reports the process that failed first, so this comes before other processes can notice.
    """
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        errors = import_module("torch.distributed.elastic.multiprocessing.errors")  # takes 50 ms
        with suppress(OSError):
            errors.get_error_handler().record_exception(error)
