"""srun: the variables of a job step.

Those of a job alone do not mean several processes: ``python`` in an sbatch script or under salloc is a single process,
although it sees how many tasks the job may start.
"""

from __future__ import annotations

import functools
import itertools
import re
import socket
import subprocess
from collections.abc import Mapping

from camshaft.distributed.environments.variables import Number, build, integer, numbers
from camshaft.distributed.topology import Launch

# Variables of the step come first: the job may have more nodes and tasks.
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

_FIRST_INTERNAL_STEP = 0xFFFFFFF0  # the script of sbatch, the shell of salloc
_SCONTROL_TIMEOUT = 10  # seconds
_TASK_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", re.ASCII)
_COMMA_OUTSIDE_BRACKETS = re.compile(r",(?![^\[\]]*\])")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?", re.ASCII)


def read(environ: Mapping[str, str]) -> Launch | None:
    """Return what srun sets, or ``None`` if it did not start this process.

    Rank 0 listens on the first host of the step: on port 15000 plus the last four digits of the job id in the first
    step of a job, and in later ones on a port from 25000 that depends on the job and the step.

    Raises:
        RuntimeError: a variable is missing or invalid, or variables contradict each other.
    """
    is_step = "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ
    if not is_step or integer(environ, "SLURM_STEP_ID") >= _FIRST_INTERNAL_STEP:
        return None
    if missing := [names[-1] for names in _REQUIRED if not any(name in environ for name in names)]:
        raise RuntimeError(f"the environment has some of srun's variables, but not {', '.join(missing)}")
    found = numbers(environ, _NAMES | _NODE_RANK)
    if (tasks := _tasks_here(environ, found)) is not None:
        # The script of a job that was submitted within a step still sees the variables of that step.
        ranks_here = environ.get("SLURM_GTIDS", "")
        if re.fullmatch(r"[0-9]+(,[0-9]+)*", ranks_here) and ranks_here.count(",") + 1 != tasks.value:
            return None
        found["local_world_size"] = tasks
    return build(
        "slurm",
        found,
        address=functools.partial(_address, dict(environ)),
        master_port=_port(integer(environ, "SLURM_JOB_ID"), integer(environ, "SLURM_STEP_ID")),
        # Set by srun --mpi=pmi2 or pmix; without, each task is an MPI world of its own.
        mpi=any(environ.get(name) == environ["SLURM_PROCID"] for name in ("PMI_RANK", "PMIX_RANK")),
        host=environ.get("SLURMD_NODENAME"),
    )


def expand(nodelist: str) -> list[str]:
    """Return the hosts of a node list as ``scontrol`` does, or without it where it is missing or fails.

    Raises:
        ValueError: it is not a node list.
    """
    command = ["scontrol", "show", "hostnames", nodelist]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SCONTROL_TIMEOUT, check=True)
    except (OSError, subprocess.SubprocessError):
        return expand_hosts(nodelist)
    return done.stdout.split() or expand_hosts(nodelist)  # for an invalid list it prints nothing and exits with 0


def expand_hosts(nodelist: str) -> list[str]:
    """Return the hosts of a node list, in its order.

    Args:
        nodelist: entries separated by commas, each with any number of groups in brackets, which contain numbers and
            ranges. A range is padded with zeros to the width of its first number.

    Raises:
        ValueError: it is not a node list.

    >>> expand_hosts("node[098-100,7],login")
    ['node098', 'node099', 'node100', 'node7', 'login']
    >>> expand_hosts("rack[1-2]n[1-2]")
    ['rack1n1', 'rack1n2', 'rack2n1', 'rack2n2']
    """
    hosts = []
    for entry in _COMMA_OUTSIDE_BRACKETS.split("".join(nodelist.split())):
        parts = _BRACKETS.split(entry)  # text, group, text, group, ..., text
        if any("[" in text or "]" in text for text in parts[::2]):
            raise ValueError(f"unbalanced bracket in node list {nodelist!r}")
        if entry not in ("", "[]"):
            choices = [_expand_group(part, nodelist) if index % 2 else [part] for index, part in enumerate(parts)]
            hosts += ["".join(chosen) for chosen in itertools.product(*choices)]
    return hosts


def _expand_group(group: str, nodelist: str) -> list[str]:
    found = []
    for part in group.split(","):
        if (match := _RANGE.fullmatch(part)) is None:
            raise ValueError(f"expected a number or a range in the brackets of {nodelist!r}, got {part!r}")
        first, last = match[1], match[2] or match[1]
        if int(first) > int(last):
            raise ValueError(f"range {part!r} in {nodelist!r} is empty")
        found += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return list(dict.fromkeys(found))


def _tasks_here(environ: Mapping[str, str], found: Mapping[str, Number]) -> Number | None:
    """Return the number of tasks on this node, if a variable contains it that fits the other numbers."""
    node_rank = found["node_rank"].value if "node_rank" in found else -1
    for name in _TASKS_PER_NODE:
        counts = _counts(name, environ[name]) if name in environ and "node_rank" in found else []
        fits = (sum(counts), len(counts)) == (found["world_size"].value, found["num_nodes"].value)
        if fits and 0 <= node_rank < len(counts):
            return Number(counts[node_rank], f"{name}={environ[name]}")
    return None


def _counts(name: str, text: str) -> list[int]:
    """Expand ``2(x2),1`` to ``[2, 2, 1]``."""
    matches = [_TASK_COUNT.fullmatch(part) for part in text.split(",")]
    if None in matches:
        raise RuntimeError(f"environment variable {name} must be tasks per node such as '2(x2),1', got {text!r}")
    return [int(match[1]) for match in matches if match is not None for _ in range(int(match[2] or 1))]


def _port(job: int, step: int) -> int:
    """Return a port that is not the one of another step of this job, nor of the jobs before and after it."""
    # All are below the range that systems use for outgoing connections.
    return 15_000 + job % 10_000 if step == 0 else 25_000 + (100 * job + step) % 7_000


def _address(environ: Mapping[str, str]) -> str:
    name = next(name for name in _NODELIST if name in environ)
    try:
        hosts = expand(environ[name])
    except ValueError as error:
        raise RuntimeError(f"environment variable {name} is not a node list: {error}") from error
    if not hosts:
        raise RuntimeError(f"environment variable {name} must name a host, got {environ[name]!r}")
    try:
        socket.getaddrinfo(hosts[0], None)
    except (OSError, UnicodeError):  # node names need not be host names; the best guess is the host of srun
        return environ.get("SLURM_LAUNCH_NODE_IPADDR") or hosts[0]
    return hosts[0]
