"""srun: the variables of a job step.

The variables of a job alone start nothing: a plain ``python`` in an sbatch script or under salloc is one process,
though it sees how many tasks the job may start.
"""

from __future__ import annotations

import functools
import re
import socket
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace

from camshaft.distributed.launchers import hostlist, plain
from camshaft.distributed.launchers.conflict import settle
from camshaft.distributed.launchers.launch import Launch, build
from camshaft.distributed.launchers.variables import RENDEZVOUS, Number, given, integer, numbers

# Of the step if it is told, else of the job, which may have more nodes and tasks than this step.
_NAMES = {
    "rank": ("SLURM_PROCID",),
    "world_size": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    "local_rank": ("SLURM_LOCALID",),
    "num_nodes": ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES"),
}
_NODE_RANK = {"node_rank": ("SLURM_NODEID",)}
_TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_NODELIST = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
_REQUIRED = (*_NAMES.values(), _NODELIST, ("SLURM_JOB_ID",))

# From here on numbers mean steps of Slurm's own: that of an sbatch script, the shell of salloc.
_OWN_STEPS = 0xFFFFFFF0
_FIRST_PORT = 15_000  # of the first steps of jobs
_FIRST_PORT_OF_OTHERS = 25_000  # of the steps after it; both end below what systems give to outgoing connections
_SCONTROL_SECONDS = 10
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", re.ASCII)


def expand(nodelist: str) -> list[str]:
    """List the hosts as ``scontrol`` does, or by ourselves where it is missing or fails.

    Raises:
        ValueError: it is not a list of hosts.
    """
    command = ["scontrol", "show", "hostnames", nodelist]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SCONTROL_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return hostlist.expand(nodelist)
    # It also ends well, and without a word on its standard output, for what it cannot read.
    return done.stdout.split() or hostlist.expand(nodelist)


def resolves(host: str) -> bool:
    """Tell whether a host name has an address."""
    try:
        return bool(socket.getaddrinfo(host, None))
    except (OSError, UnicodeError):
        return False


def read(
    environ: Mapping[str, str],
    *,
    expand: Callable[[str], list[str]] = expand,
    resolves: Callable[[str], bool] = resolves,
) -> Launch | None:
    """Read what srun tells its tasks; ``None`` when it did not start this process.

    If all of ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` are set, they must say the
    same as the step, or come from what its tasks started. If only some are, they are ignored with a warning. Without
    them rank 0 listens on the first host, on port 15000 plus the last four digits of the job's number; in steps after
    the first one of the job, on a port from 25000 that follows from both numbers.

    Args:
        environ: the variables.
        expand: lists the hosts of a list of Slurm's; called when the address is asked for.
        resolves: whether a host name has an address; the same.

    Raises:
        RuntimeError: a variable is missing or wrong, or they contradict each other.
    """
    if not _is_step(environ):
        return None
    if missing := [names[-1] for names in _REQUIRED if not given(environ, names)]:
        raise RuntimeError(f"the environment has a part of srun's variables, but not {', '.join(missing)}")
    said = numbers(environ, _NAMES | _NODE_RANK)
    if (tasks := _tasks_here(environ, said)) is not None:
        if _is_inherited(environ, tasks.value):
            return None
        said["local_world_size"] = tasks
    launch = build("slurm", said, mpi=_serves_mpi(environ), host=environ.get("SLURMD_NODENAME"))
    return _with_address(launch, environ, expand, resolves)


def _is_step(environ: Mapping[str, str]) -> bool:
    names = ("SLURM_STEP_ID", "SLURM_PROCID")
    return len(given(environ, names)) == 2 and integer(environ, "SLURM_STEP_ID") < _OWN_STEPS


def _is_inherited(environ: Mapping[str, str], tasks_here: int) -> bool:
    """Tell whether this is the script of a job that was submitted from a step, and still sees that step's variables."""
    ranks_here = environ.get("SLURM_GTIDS", "")
    return re.fullmatch(r"[0-9]+(,[0-9]+)*", ranks_here) is not None and ranks_here.count(",") + 1 != tasks_here


def _tasks_here(environ: Mapping[str, str], said: Mapping[str, Number]) -> Number | None:
    """Find how many tasks this node has, where a variable says it and fits the other numbers."""
    world_size, num_nodes = said["world_size"].value, said["num_nodes"].value
    for name in given(environ, _TASKS_PER_NODE) if "node_rank" in said else []:
        counts = _counts(name, environ[name])
        if (sum(counts), len(counts)) == (world_size, num_nodes) and 0 <= said["node_rank"].value < num_nodes:
            return Number(counts[said["node_rank"].value], f"{name}={environ[name]}")
    return None


def _counts(name: str, text: str) -> list[int]:
    """Expand ``2(x2),1`` to ``[2, 2, 1]``."""
    found = [_COUNT.fullmatch(part) for part in text.split(",")]
    if None in found:
        raise RuntimeError(f"the environment variable {name} must be tasks per node like '2(x2),1', got {text!r}")
    return [int(part[1]) for part in found if part is not None for _ in range(int(part[2] or 1))]


def _serves_mpi(environ: Mapping[str, str]) -> bool:
    """Tell whether srun also set up MPI, as with ``--mpi=pmi2``; else each task is an MPI world of its own."""
    return any(environ.get(name) == environ["SLURM_PROCID"] for name in ("PMI_RANK", "PMIX_RANK"))


def _with_address(
    launch: Launch, environ: Mapping[str, str], expand: Callable[[str], list[str]], resolves: Callable[[str], bool]
) -> Launch:
    if by_hand := plain.read_beside("srun", environ, RENDEZVOUS):
        return settle(launch, by_hand)
    find = functools.partial(_address, dict(environ), expand, resolves)
    return replace(launch, address=find, master_port=_port(environ))


def _port(environ: Mapping[str, str]) -> int:
    """Choose a port that other steps, of this job and of those before and after it, do not choose."""
    job, step = integer(environ, "SLURM_JOB_ID"), integer(environ, "SLURM_STEP_ID")
    if step == 0:
        return _FIRST_PORT + job % 10_000
    return _FIRST_PORT_OF_OTHERS + (100 * job + step) % 7_000


def _address(environ: Mapping[str, str], expand: Callable[[str], list[str]], resolves: Callable[[str], bool]) -> str:
    name = given(environ, _NODELIST)[0]
    try:
        hosts = expand(environ[name])
    except ValueError as error:
        raise RuntimeError(f"the environment variable {name} is no list of hosts: {error}") from error
    if not hosts:
        raise RuntimeError(f"the environment variable {name} must name a host, got {environ[name]!r}")
    # Where Slurm's names of nodes are no host names, the host of srun is the best guess.
    return hosts[0] if resolves(hosts[0]) else environ.get("SLURM_LAUNCH_NODE_IPADDR") or hosts[0]
