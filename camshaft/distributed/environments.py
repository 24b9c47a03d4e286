"""Which launcher started this process, and the place it gave it: environment variables, read as a value."""

from __future__ import annotations

import operator
import os
import re
import socket
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from camshaft.distributed.topology import Launch, Topology, complete
from camshaft.text import table

_PLACE: tuple[str, ...] = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_RENDEZVOUS = (*_PLACE, "MASTER_ADDR", "MASTER_PORT")

# The variables of each launcher, in the order of the fields of a topology. Open MPI and MPICH do not set the index of
# the node: OMPI_COMM_WORLD_NODE_RANK is the index of the process on its node.
_NUMBERS = ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes")
_TORCH = (*_PLACE, "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
_VARIABLES = {
    "torchrun": _TORCH,
    "environment": _TORCH,
    "horovodrun": (
        *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
        *("HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE"),
    ),
    "openmpi": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # and its derivatives, such as Intel MPI
}
_LAUNCHERS = ("horovodrun", "openmpi", "mpich")  # with variables of their own, from the inside out
_HOSTS = {"horovodrun": "HOROVOD_HOSTNAME", "openmpi": "PMIX_HOSTNAME", "mpich": "PMI_HOSTNAME"}
_TORCHRUN_MODULES = ("-m", "torch.distributed.run"), ("-m", "torch.distributed.launch")
_FIRST_INTERNAL_STEP = 0xFFFFFFF0  # the script of sbatch, the shell of salloc
_SHELLS = {"ash", "bash", "csh", "dash", "fish", "ksh", "sh", "tcsh", "zsh"}


def detect(environ: Mapping[str, str]) -> Launch | None:
    """Return how this process was started, or ``None`` if no launcher started it.

    Launchers nest, and the innermost counts: the others start torchrun, and horovodrun and mpirun run within steps of
    srun. Variables set by hand, ``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE``, count where there is no launcher; next to
    one, they must agree with it or describe processes that the launcher's processes started.

    Args:
        environ: environment variables, such as ``os.environ``. Only the address of Slurm's rank 0, looked up when
            :attr:`Launch.master_addr` is read, and a terminal that srun opened need more than these.

    Raises:
        RuntimeError: a variable is missing or not an integer, or variables contradict each other; the message contains
            the values of each source.

    >>> detect({}) is None
    True
    >>> print(
    ...     detect(
    ...         {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ...     ).topology
    ... )
    rank=1, world_size=2, local_rank=1, local_world_size=2, node_rank=0, num_nodes=1
    """
    # a process that a worker of torchrun started may have only the id of the run
    if "TORCHELASTIC_RUN_ID" in environ and any(name in environ for name in _PLACE):
        return read("torchrun", environ)
    launch = next(filter(None, (read(launcher, environ) for launcher in _LAUNCHERS)), None)
    needed = _RENDEZVOUS if launch is None else _PLACE
    if (launch := launch or _read_slurm(environ)) is None:
        return read("environment", environ)
    present, missing = [name for name in needed if name in environ], [name for name in needed if name not in environ]
    if not missing and (by_hand := read("environment", environ)):
        return _settle(launch, by_hand)
    if present:
        warnings.warn(
            f"{launch.launcher} started this process: {', '.join(present)} in the environment ignored, as "
            f"{', '.join(missing)} is not set; set all of them, or none",
            stacklevel=2,
        )
    return launch


def infer(
    environ: Mapping[str, str], rank: int, world_size: int, local_rank: int | None = None
) -> tuple[Topology, tuple[str, ...]]:
    """Infer the topology of a process whose group was created elsewhere, without communication.

    Args:
        environ: environment variables; used as far as they fit the rank and world size.
        rank: rank of the process.
        world_size: number of processes.
        local_rank: used where the environment does not set it.

    Returns:
        The topology, and the names of the numbers that are assumed.

    Raises:
        ValueError: ``local_rank`` is out of range.
    """
    known = {"rank": rank, "world_size": world_size} | ({} if local_rank is None else {"local_rank": local_rank})
    launch, here = None, {}
    with suppress(RuntimeError):  # contradictory, or incomplete: whoever created the group knew rank and world size
        launch = detect(environ)
    try:
        if launch is None:
            names = dict(zip(_NUMBERS[2:], _TORCH[2:], strict=True))
            here = {number: _integer(environ, name) for number, name in names.items() if name in environ}
        elif (launch.topology.rank, launch.topology.world_size) == (rank, world_size):
            here = {number: getattr(launch.topology, number) for number in launch.sources}
        if here and "node_rank" not in here and "NODE_RANK" in environ:  # Ray Train sets no GROUP_RANK
            with suppress(RuntimeError, ValueError):
                return complete(known | here | {"node_rank": _integer(environ, "NODE_RANK")})
        return complete(known | here)
    except (RuntimeError, ValueError):  # the variables are invalid, or those of another job
        return complete(known)


def torch_variables(launch: Launch) -> dict[str, str]:
    """Return the variables of torch.distributed that describe a launch."""
    values = {name: str(getattr(launch.topology, number)) for number, name in zip(_NUMBERS, _TORCH, strict=True)}
    address = {"MASTER_ADDR": launch.master_addr, "MASTER_PORT": launch.master_port}
    values |= {name: str(value) for name, value in address.items() if value is not None}
    return values | {"TORCHELASTIC_USE_AGENT_STORE": str(launch.agent_store)}


def torchrun_agent(environ: Mapping[str, str]) -> int | None:
    """Return the process id of the torchrun that started this process as a worker; ``None`` if anything else did.

    On Linux, the command line of the parent process is checked, because a script that a worker starts inherits the
    worker's variables.
    """
    parent = os.getppid()
    if "TORCHELASTIC_RUN_ID" in environ:
        with suppress(OSError):  # no /proc, or it has ended
            words = Path(f"/proc/{parent}/cmdline").read_text(errors="replace").split("\0")
            as_module = any(pair in pairwise(words) for pair in _TORCHRUN_MODULES)
            return parent if as_module or "torchrun" in [Path(word).name for word in words[:2]] else None
    return None


# --- launchers ---------------------------------------------------------------------------------------------------


def read(launcher: str, environ: Mapping[str, str]) -> Launch | None:
    """Return what a launcher sets: horovodrun (with the gloo controller), or the mpirun of Open MPI or MPICH.

    The variables of torch.distributed count as those of ``"torchrun"`` or, whoever set them, of the ``"environment"``.
    For torchrun, a node is one torchrun agent: two of them on one machine are two nodes.

    Returns:
        The launch, or ``None`` if this launcher did not start this process.

    Raises:
        RuntimeError: rank or size is missing, or a value is invalid.

    >>> read(
    ...     "openmpi", {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    ... ).topology.world_size
    2
    """
    names, is_of_torch = _VARIABLES[launcher], launcher not in _LAUNCHERS
    required = _PLACE if is_of_torch else names[:2]
    if launcher == "mpich" and "MPI_LOCALRANKID" not in environ and "SLURM_STEP_ID" in environ:
        return None  # srun --mpi=pmi2 sets these as well, and Slurm's own variables contain more
    if launcher == "horovodrun" and environ.get("HOROVOD_LOCAL_RANK", "").strip() != "0":
        names = names[:4]  # the "cross" numbers count only nodes that have this local rank, and every node has 0
    present, missing = [name for name in required if name in environ], [one for one in required if one not in environ]
    if not present:
        return None
    if missing:
        raise RuntimeError(
            f"the environment has {', '.join(f'{name}={environ[name]}' for name in present)} but not "
            f"{', '.join(missing)}: set all of {', '.join(required)}, or none"
        )
    port = _integer(environ, "MASTER_PORT") if environ.get("MASTER_PORT") else None
    if port is not None and not 0 <= port <= 65535:
        raise RuntimeError(f"environment variable MASTER_PORT must be in [0, 65535], got {port}")
    return _launch(
        launcher,
        _numbers(environ, names),
        address=environ.get("MASTER_ADDR") or None,
        master_port=port,
        agent_store=is_of_torch and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        mpi=launcher in ("openmpi", "mpich"),
        host=None if is_of_torch else environ.get(_HOSTS[launcher]),
    )


def _read_slurm(environ: Mapping[str, str]) -> Launch | None:
    """Return what srun sets for the task of a step, or ``None`` if it did not start this process.

    The variables of a job alone do not mean several processes: ``python`` in an sbatch script or under salloc is a
    single process, although it sees how many tasks the job may start. So is ``python`` in the shell of ``srun --pty
    bash``: only the first task has a terminal, and the shells of the others have ended at once.

    Rank 0 listens on the first host of the step: on port 15000 plus the last four digits of the job id in the first
    step of a job, and in later ones on a port from 25000 that depends on the job and the step.
    """
    is_step = "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ
    if not is_step or (step := _integer(environ, "SLURM_STEP_ID")) >= _FIRST_INTERNAL_STEP:
        return None
    if "SLURM_PTY_PORT" in environ and is_interactive(_task_of_step()):
        return None

    def of_step(name: str, otherwise: str) -> str:  # the job may have more nodes and tasks
        return name if name in environ else otherwise

    nodelist = of_step("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    size = of_step("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    nodes = of_step("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES")
    if missing := [name for name in ("SLURM_JOB_ID", size, nodes, "SLURM_LOCALID", nodelist) if name not in environ]:
        raise RuntimeError(f"the environment has some of srun's variables, but not {', '.join(missing)}")
    found = _numbers(environ, ("SLURM_PROCID", size, "SLURM_LOCALID", "", "SLURM_NODEID", nodes))
    if ranks_here := environ.get("SLURM_GTIDS"):
        found["local_world_size"] = ranks_here.count(",") + 1, f"SLURM_GTIDS={ranks_here}"
    job = _integer(environ, "SLURM_JOB_ID")
    return _launch(
        "slurm",
        found,
        address=partial(_slurm_address, environ[nodelist], environ.get("SLURM_LAUNCH_NODE_IPADDR")),
        # Another step of this job, or a job before or after it, has another port. All are below the range that systems
        # use for outgoing connections.
        master_port=15_000 + job % 10_000 if step == 0 else 25_000 + (100 * job + step) % 7_000,
        # Set by srun --mpi=pmi2 or pmix; without, each task is an MPI world of its own.
        mpi=any(environ.get(name) == environ["SLURM_PROCID"] for name in ("PMI_RANK", "PMIX_RANK")),
        host=environ.get("SLURMD_NODENAME"),
    )


def _task_of_step() -> list[str]:
    """Return the command line of the task of srun that this process is or descends from; empty if it is unknown."""
    pid = os.getpid()
    with suppress(OSError, ValueError):  # no /proc, or an ancestor has ended
        while pid > 1:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if Path(f"/proc/{parent}/comm").read_text().startswith("slurmstepd"):
                return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")[:-1]
            pid = parent
    return []


def is_interactive(words: Sequence[str]) -> bool:
    """Return whether a command line is that of a shell that reads commands from a terminal.

    >>> is_interactive(["/bin/bash", "-l"]), is_interactive(["bash", "train.sh"])
    (True, False)
    """
    is_shell = bool(words) and Path(words[0]).name.removeprefix("-") in _SHELLS
    return is_shell and all(word.startswith("-") and word != "-c" for word in words[1:])


def slurm_job(environ: Mapping[str, str]) -> str | None:
    """Return the number of the Slurm job that this process belongs to, or ``None``."""
    return environ.get("SLURM_JOB_ID")


def _slurm_address(nodelist: str, host_of_srun: str | None) -> str:
    """Return the first host of a node list, or where that is not a host name, the best guess: the host of srun."""
    host = first_host(nodelist)
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        return host_of_srun or host
    return host


def first_host(nodelist: str) -> str:
    """Return the first host of a node list of Slurm.

    Raises:
        RuntimeError: it is not a node list.

    >>> first_host("rack[1-2]n[098-100,7],login")
    'rack1n098'
    """
    entry = re.split(r",(?![^\[\]]*\])", "".join(nodelist.split()))[0]
    host = re.sub(r"\[([0-9]+)[0-9,-]*\]", r"\1", entry)  # groups of numbers and ranges
    if not host or "[" in host or "]" in host:
        raise RuntimeError(f"Slurm's node list must name hosts, such as 'node[01-04],login', got {nodelist!r}")
    return host


# --- numbers -----------------------------------------------------------------------------------------------------

_Numbers = dict[str, tuple[int, str]]  # for each number of a topology its value, and the variable: (1, "RANK=1")


def _numbers(environ: Mapping[str, str], names: tuple[str, ...]) -> _Numbers:
    return {
        number: (_integer(environ, name), f"{name}={environ[name]}")
        for number, name in zip(_NUMBERS, names, strict=False)
        if name in environ
    }


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise RuntimeError(f"environment variable {name} must be an integer, got {environ[name]!r}") from None


def _launch(launcher: str, found: _Numbers, **fields: Any) -> Launch:
    """Return a launch with these numbers; raise ``RuntimeError`` if they contradict each other."""
    sources = {number: source for number, (_, source) in found.items()}
    try:
        topology, assumed = complete({number: value for number, (value, _) in found.items()})
    except ValueError as error:
        raise RuntimeError(f"the environment is contradictory: {error}\n{table({launcher: sources})}") from error
    return Launch(launcher, topology, assumed=assumed, sources=sources, **fields)


def _settle(launch: Launch, by_hand: Launch) -> Launch:
    """Choose between a launcher and variables set by hand, which also contain the address."""
    outer, inner = launch.topology, by_hand.topology
    places = [(one.rank, one.local_rank, one.world_size) for one in (outer, inner)]
    if places[0] == places[1]:
        port = launch.master_port if by_hand.master_port is None else by_hand.master_port
        return replace(launch, address=by_hand.address or launch.address, master_port=port)
    # The processes of the launcher, all on one node or one per node, may have started the others.
    has_grown = inner.world_size > outer.world_size and all(map(operator.le, *places))
    if has_grown and outer.num_nodes in (1, outer.world_size):
        return by_hand
    values = table({one.launcher: one.sources for one in (launch, by_hand)})
    raise RuntimeError(
        f"the environment is contradictory: {launch.launcher} and {by_hand.launcher} disagree, and neither can have "
        f"started the other; unset the variables of one of them\n{values}"
    )
