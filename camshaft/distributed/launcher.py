"""One way to run a function distributed, whoever starts the processes."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

from camshaft.distributed.diagnostics.auto_backend import choose
from camshaft.distributed.environments import detect
from camshaft.distributed.nodes import NODES, check_count, check_nodes
from camshaft.distributed.ranks import annotate_departures, get_local_rank, get_rank, get_world_size
from camshaft.distributed.registry import available_backends, module_of
from camshaft.distributed.run import abandon, current, finalize, initialize
from camshaft.distributed.spawning import spawn

__all__ = ["Parallel"]

_FOR_PROCESSES = ("join", "daemon", "start_method", "hosts")


class Parallel:
    """Run a function in one process, in the processes of a launcher, or in new processes.

    - Without arguments, :meth:`run` calls the function in this process.
    - With ``backend``, a launcher (torchrun, srun, mpirun, horovodrun) started this process and others: the backend is
      initialized for the ``with`` block.
    - With ``backend`` and ``nproc_per_node``, :meth:`run` starts the processes with :func:`spawn`, and the script needs
      ``if __name__ == "__main__":`` around it, as each of them imports the script.

    Args:
        backend: one of :func:`available_backends`, ``None``, or ``"auto"`` for the one that fits the launcher and the
            devices; the log says which, and why.
        nproc_per_node: processes to start on this node.
        nnodes: number of nodes, on each of which the script is started.
        node_rank: number of this node.
        master_addr: address of the first node.
        master_port: a free port there.
        init_method: ``"env://"``, ``"file://..."`` or ``"tcp://..."`` instead of address and port.
        spawn_kwargs: for :func:`spawn`; without ``nproc_per_node`` for :func:`initialize`, except for those about
            processes.

    Raises:
        ValueError: an argument is out of range, or is given without those that it needs.

    Warns:
        UserWarning: no backend is given to a process that a launcher started with others: each runs alone.

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
        self._logger = logging.getLogger(f"{__name__}.Parallel")
        nodes: dict[str, Any] = dict(
            zip(NODES, (nnodes, node_rank, master_addr, master_port, init_method), strict=True)
        )
        nodes = {name: value for name, value in nodes.items() if value is not None}
        if backend is None:
            given = {"nproc_per_node": nproc_per_node, **nodes, "init_method": None}
            if given := {name: value for name, value in given.items() if value is not None}:
                raise ValueError(f"backend must be given with {', '.join(given)}, got None and {given}")
        if nproc_per_node is not None:
            check_count(nproc_per_node)
            check_nodes(**nodes)
        options = {**nodes, **spawn_kwargs}
        if backend is not None and nproc_per_node is None:
            options = _for_initialize(options)
        if backend == "auto":
            launch = detect(os.environ)
            backend, why = choose(os.environ, launch, nproc_per_node, available_backends())
            if launch is None or launch.topology.rank == 0:
                self._logger.info("backend 'auto' is %r: %s", backend, why)
        if backend is not None:
            module_of(backend)  # refuses one that is not there
        self.backend = backend
        self.init_method = init_method
        self._nproc_per_node = nproc_per_node
        self._options = options
        self._entered = False

    def __enter__(self) -> Parallel:
        if self._is_one_of_many:
            assert self.backend is not None
            initialize(self.backend, **self._options)
            self._log("%r is initialized, with %d processes", self.backend, get_world_size())
        elif self.backend is None:
            _warn_if_started_with_others()
        else:
            self._log("processes will be started for %r:", self.backend)
            for name, value in {"nproc_per_node": self._nproc_per_node, **self._options}.items():
                self._log("    %s: %s", name, value)
        self._entered = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._entered = False
        if self._is_one_of_many:
            first = get_rank() == 0
            if error is None:
                finalize()
            else:
                annotate_departures(error, current())
                if isinstance(error, Exception):
                    _record_for_torchrun(error)
                abandon()  # the others may not be there any more
            if first:
                self._logger.info("%r is finalized", self.backend)

    def run(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``func(local_rank, *args, **kwargs)`` in each process.

        Returns:
            What ``func`` returns, ``None`` where it ran in new processes.

        Raises:
            RuntimeError: this is not within the ``with`` block.
        """
        if not self._entered:
            raise RuntimeError("run must be called within the block: with Parallel(...) as parallel: parallel.run(...)")
        if self.backend is None or self._nproc_per_node is None:
            self._log("%s starts in %d processes", func, get_world_size())
            result = func(get_local_rank(), *args, **kwargs)
        else:
            count = self._nproc_per_node * self._options.get("nnodes", 1)
            self._log("%s starts in %d new processes", func, count)
            result = spawn(self.backend, func, args, kwargs, self._nproc_per_node, **self._options)
        self._log("%s has ended", func)
        return result

    @property
    def _is_one_of_many(self) -> bool:
        """Whether this process was started together with the others."""
        return self.backend is not None and self._nproc_per_node is None

    def _log(self, message: str, *args: Any) -> None:
        if get_rank() == 0 and self._options.get("node_rank", 0) == 0:
            self._logger.info(message, *args)


def _for_initialize(options: dict[str, Any]) -> dict[str, Any]:
    """Leave out what is for new processes only, and say so."""
    ignored = {name: value for name, value in options.items() if name in (*NODES[:-1], *_FOR_PROCESSES)}
    if ignored:
        warnings.warn(
            f"{', '.join(ignored)} are ignored without nproc_per_node, as no processes are started, got {ignored}",
            stacklevel=3,
        )
    return {name: value for name, value in options.items() if name not in ignored}


def _warn_if_started_with_others() -> None:
    """Say that the processes of a launcher know nothing of each other: they may write the same files."""
    launch = None
    with suppress(RuntimeError):  # the environment contradicts itself, which matters to nobody here
        launch = detect(os.environ)
    if launch is not None and launch.topology.world_size > 1 == get_world_size():
        warnings.warn(
            f"a launcher started {launch.topology.world_size} processes, but backend is None, so each of them runs "
            'alone: give backend="auto", or one by name, to let them work together',
            stacklevel=3,
        )


def _record_for_torchrun(error: Exception) -> None:
    """Record the error in torchrun's error file, if there is one, as decorating main with its ``record`` would.

    torchrun reports the process that failed first, so this comes before other processes can notice.
    """
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        errors = import_module("torch.distributed.elastic.multiprocessing.errors")  # takes 50 ms
        with suppress(OSError):
            errors.get_error_handler().record_exception(error)
