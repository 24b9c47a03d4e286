"""Starting the processes of a run of torch.distributed on this machine."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from camshaft.distributed.backends.native.backend import check_options, create
from camshaft.distributed.launch.parent_watchdog import end_with_parent
from camshaft.distributed.launch.processes import Processes, Report
from camshaft.distributed.nodes import check_nodes
from camshaft.distributed.ranks import annotate_departures
from camshaft.distributed.run import abandon, current, finalize, install
from camshaft.distributed.topology import Launch, Topology

_HALF = 8_000  # characters of a traceback that are told from each of its ends


@dataclass(frozen=True)
class Plan:
    """What the processes of one node need to know to find each other.

    Args:
        backend: its name.
        nproc_per_node: processes on each node.
        nnodes: number of nodes.
        node_rank: number of this node.
        master_addr: where rank 0, or the parent, listens.
        master_port: the port.
        hosted: the parent holds the store at that address.
        debug: argument of ``initialize``.
        options: its further arguments, for the backend.
    """

    backend: str
    nproc_per_node: int
    nnodes: int
    node_rank: int
    master_addr: str | None
    master_port: int | None
    hosted: bool
    debug: bool | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def launch(self, local_rank: int) -> Launch:
        """Say where one of the processes stands."""
        topology = Topology(
            rank=self.node_rank * self.nproc_per_node + local_rank,
            world_size=self.nnodes * self.nproc_per_node,
            local_rank=local_rank,
            local_world_size=self.nproc_per_node,
            node_rank=self.node_rank,
            num_nodes=self.nnodes,
        )
        return Launch("spawn", topology, self.master_addr, self.master_port, agent_store=self.hosted)

    def variables(self, local_rank: int) -> dict[str, str]:
        """Say the same as torchrun does, for what else reads the environment."""
        topology = self.launch(local_rank).topology
        numbers = {
            "RANK": topology.rank,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": topology.world_size,
            "LOCAL_WORLD_SIZE": self.nproc_per_node,
            "GROUP_RANK": self.node_rank,
            "GROUP_WORLD_SIZE": self.nnodes,
        }
        address = {} if self.master_addr is None else {"MASTER_ADDR": self.master_addr, "MASTER_PORT": self.master_port}
        hosted = {"TORCHELASTIC_USE_AGENT_STORE": self.hosted}  # also if this process has it from its own launcher
        return {name: str(value) for name, value in {**numbers, **address, **hosted}.items()}


def spawn(
    name: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    nproc_per_node: int = 1,
    nnodes: int = 1,
    node_rank: int | None = None,
    master_addr: str | None = None,
    master_port: int | str | None = None,
    init_method: str | None = None,
    join: bool = True,
    daemon: bool = False,
    start_method: str | None = None,
    debug: bool | None = None,
    **options: Any,
) -> Processes | None:
    """Start the processes of this node, and wait for them; see :func:`camshaft.distributed.spawn`."""
    check_nodes(nnodes, node_rank, master_addr, master_port, init_method)
    if own := {"rank", "world_size"} & set(options):
        raise TypeError(
            f"{sorted(own)} follow from nproc_per_node, nnodes and node_rank, and must not be given to spawn"
        )
    check_options(name, options)
    processes_of = multiprocessing.get_context(start_method or _usual_start_method())
    _check_importable(function, processes_of.get_start_method())
    if init_method is not None:
        options["init_method"] = init_method
    processes, hosted = Processes(), False
    try:
        if init_method is None or init_method.startswith("env://"):
            if nnodes == 1 and master_port is None:  # the port is taken before anybody is told of it
                master_addr, master_port = processes.listen()
                hosted = True
            master_addr = master_addr or "127.0.0.1"
        port = None if master_port is None else int(master_port)
        plan = Plan(name, nproc_per_node, nnodes, node_rank or 0, master_addr, port, hosted, debug, options)
        for _ in range(nproc_per_node):
            processes.start(processes_of, _run, (plan, function, args, kwargs), daemon)
        processes.open_store()
    except BaseException as error:
        processes.end()
        if isinstance(error, (AttributeError, TypeError, pickle.PicklingError)):
            raise TypeError(
                "fn and its arguments must be importable and picklable to be handed to new processes, got "
                f"{function!r} with {args!r} and {kwargs!r}: {error}"
            ) from error
        raise
    return None if join and processes.join() else processes


def _usual_start_method() -> str:
    return "fork" if hasattr(sys, "ps1") or "ipykernel" in sys.modules else "spawn"


def _check_importable(function: Callable[..., Any], start_method: str) -> None:
    main = sys.modules["__main__"]
    if start_method != "fork" and getattr(function, "__module__", None) == "__main__" and not hasattr(main, "__file__"):
        raise TypeError(
            f"fn must be importable by new processes, but {function!r} was typed in: put it into a file, or give "
            "start_method='fork'"
        )


def _run(
    local_rank: int,
    reports: Connection,
    plan: Plan,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """What each process does."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "it was started by multiprocessing"
    end_with_parent(parent.sentinel)
    try:
        os.environ.update(plan.variables(local_rank))  # the process ends with the function
        install(lambda: create(plan.backend, plan.launch(local_rank), **plan.options), plan.debug)
        _call(function, local_rank, *args, **kwargs)
        finalize()
    except BaseException as error:  # also KeyboardInterrupt, which would be told on the screen only
        annotate_departures(error, current())
        code = _exit_code(error) if isinstance(error, SystemExit) else None
        reports.send(Report(time.monotonic(), code, _shortened(_text_of(error))))
        abandon()
        sys.exit(1 if code is None else code)


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Call the function; it may end by ``sys.exit()``."""
    try:
        function(*args, **kwargs)
    except SystemExit as error:
        if _exit_code(error):
            raise


def _exit_code(error: SystemExit) -> int:
    return error.code if isinstance(error.code, int) else 0 if error.code is None else 1


def _text_of(error: BaseException) -> str:
    """Format an error that is being handled, with its notes, which Python 3.10 leaves out."""
    notes = getattr(error, "__notes__", ()) if sys.version_info < (3, 11) else ()
    return "".join([traceback.format_exc(), *(f"{note}\n" for note in notes)])


def _shortened(text: str) -> str:
    """Leave out the middle of a long text: where nobody reads from the pipe, it holds 64 KB."""
    left_out = len(text) - 2 * _HALF
    return text if left_out <= 0 else f"{text[:_HALF]}\n... {left_out} characters ...\n{text[-_HALF:]}"
