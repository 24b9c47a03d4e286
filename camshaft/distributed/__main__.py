"""Print what this process, or each rank of a launcher, sees of its distributed configuration.

python -m camshaft.distributed
torchrun --nproc-per-node 2 -m camshaft.distributed --backend gloo
python -m camshaft.distributed --inspect  # what the ranks on this machine are doing, or did before they died
python -m camshaft.distributed --inspect --all  # also those of jobs that have ended
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from camshaft.distributed import failures
from camshaft.distributed.backends.contract import accelerator
from camshaft.distributed.backends.registry import choose, known_backends, lack_of
from camshaft.distributed.collectives.api import all_reduce, gather
from camshaft.distributed.environments import detect
from camshaft.distributed.failures import Snapshot, user_line
from camshaft.distributed.job import current, finalize, initialize
from camshaft.distributed.topology import Topology
from camshaft.text import BOLD, GREEN, RED, Look, counted, table
from camshaft.version import __version__

Report = dict[str, Any]
"""What one process sees; the keys are those of ``--json``."""

_GIB = 2**30
_STACK = 5  # innermost lines of a stack to show
_STYLES = {"yes": GREEN, "alive": GREEN, "dead": RED}
_LIBRARIES = {"mpi": "mpi4py", "xla-tpu": "torch_xla", "horovod": "horovod"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the reports, and return the exit code: 1 if something is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m camshaft.distributed",
        description="Print what this process sees: backends, devices, launcher, and its place in the job. Under a "
        "launcher each rank prints its own.",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--backend", help="initialize this backend; rank 0 prints what each rank reports")
    what.add_argument(
        "--inspect",
        action="store_true",
        help="print what the ranks on this machine are doing, and what those that were killed did last: of the jobs "
        "that run, or else of the latest one",
    )
    parser.add_argument("--all", action="store_true", help="with --inspect: print all jobs of the last 24 hours")
    parser.add_argument("--timeout", type=float, default=60, help="seconds that --backend may take (default: 60)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per rank and line")
    options = parser.parse_args(arguments)
    if options.all and not options.inspect:
        parser.error("--all needs --inspect")
    look = Look.of(sys.stdout)
    if options.inspect:
        snapshots = failures.inspect()
        sys.stdout.write(as_json(snapshots) if options.json else jobs_text(snapshots, look, options.all))
        return 0

    def show(reports: Sequence[Report]) -> None:  # in one write, as the ranks share the output
        sys.stdout.write("".join(f"{json.dumps(one) if options.json else as_text(one, look)}\n" for one in reports))
        sys.stdout.flush()

    def fail(reason: str) -> NoReturn:
        show([{**report, "error": f"backend {options.backend!r}: {reason}"}])
        os._exit(1)  # without waiting for the other ranks, which may not exist

    report = inspect(os.environ)
    if report["error"] is not None or options.backend is None:
        show([report])
        return 0 if report["error"] is None else 1
    late = f"not all ranks arrived within {options.timeout:g} s; the launcher must start this command on each of them"
    watchdog = threading.Timer(options.timeout, fail, [late])
    watchdog.daemon = True
    watchdog.start()
    try:
        reports = try_backend(report, options.backend)
    except Exception as error:
        fail(f"{type(error).__name__}: {error}")
    watchdog.cancel()
    show(reports)
    return 0


def inspect(environ: Mapping[str, str]) -> Report:
    """Report what a process with this environment sees, without any communication.

    >>> print(inspect({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"})["sources"]["rank"])
    RANK=1
    """
    versions = {"camshaft": __version__, "Python": platform.python_version(), "torch": torch.__version__}
    report: Report = {"host": socket.gethostname(), "versions": versions, "devices": devices(), "backends": backends()}
    report |= dict.fromkeys(("launcher", "address", "auto", "proof", "error", "topology")) | {"sources": {}}
    try:
        launch = detect(environ)
        host = None if launch is None else launch.master_addr  # that of Slurm is looked up
    except RuntimeError as error:
        return {**report, "error": str(error)}
    available = [name for name, backend in report["backends"].items() if backend["available"]]
    auto, why = choose(environ, launch, None, available)
    report |= {"auto": f"{auto or 'a single process'}, as {why}", "topology": asdict(Topology())}
    if launch is None:
        return report
    follows = dict.fromkeys(asdict(launch.topology), "derived from the others")
    assumed = dict.fromkeys(launch.assumed, "assumed, as no variable sets it")
    return report | {
        "launcher": launch.launcher,
        "address": f"{host}:{launch.master_port}" if host else None,
        "topology": asdict(launch.topology),
        "sources": {**follows, **assumed, **launch.sources},
    }


def try_backend(report: Report, name: str) -> list[Report]:
    """Initialize a backend, reduce a number, and gather the reports of all ranks; every rank calls this.

    Returns:
        On rank 0 the reports, completed with what the backend found; an empty list on the other ranks.

    Raises:
        Exception: what the backend raises.
    """
    initialize(name)
    topology = current().topology
    size = topology.world_size
    if (total := all_reduce(1)) != size:
        raise RuntimeError(f"the sum of 1 over {counted(size, 'rank')} must be {size}, got {total}")
    proof = f"{name}, all_reduce of 1 over {counted(size, 'rank')} gave {total}, on {current().device}"
    sources = {number: report["sources"].get(number, f"found by {name}") for number in asdict(topology)}
    reports = gather({**report, "topology": asdict(topology), "sources": sources, "proof": proof})
    finalize()
    return reports or []


def as_text(report: Report, look: Look) -> str:
    """Return a report as tables."""
    place, backends = report["topology"], report["backends"]
    who = f"rank {place['rank']} of {place['world_size']}" if place else "a process"
    title = f"{who} on {report['host']}"
    where = f", rank 0 listens on {report['address']}" if report["address"] else ""
    remarks = {
        "launcher": f"{report['launcher'] or 'none found'}{where}" if place else None,
        "backend 'auto'": report["auto"],
        "tried": report["proof"],
    }
    texts = [look.styled(title, BOLD), "-" * len(title)]
    if known := {what: text for what, text in remarks.items() if text}:
        texts.append(table({"": known}, look))
    if report["error"]:
        texts.append(f"{look.styled('error:', RED)} {report['error']}")
    numbers = {name: str(value) for name, value in (place or {}).items()}
    tables = [{"value": numbers, "from": report["sources"]}] if place else []
    tables += [{"version": report["versions"]}, {"device": report["devices"]}]
    tables.append(
        {
            "available": {name: "yes" if one["available"] else "no" for name, one in backends.items()},
            "version": {name: one["version"] or "-" for name, one in backends.items()},
            "missing": {name: one["missing"] or "-" for name, one in backends.items()},
        }
    )
    shown = [table(one, look, _STYLES) for one in tables]
    return "\n\n".join(["\n".join(texts), *shown]) + "\n"


def as_json(snapshots: Iterable[Snapshot]) -> str:
    """Return one line with a JSON object per record."""
    return "".join(f"{json.dumps({**asdict(one), 'path': os.fspath(one.path)})}\n" for one in snapshots)


def jobs_text(snapshots: Iterable[Snapshot], look: Look, with_ended: bool = False) -> str:
    """Return for each job the table of its ranks on this machine and their stacks; the latest job is the last one.

    Args:
        snapshots: of all jobs.
        look: of the output.
        with_ended: whether to include jobs that have ended; otherwise there is only the latest, and only if none runs.
    """
    jobs = defaultdict[str, list[Snapshot]](list)
    for one in sorted(snapshots, key=lambda one: one.rank):
        jobs[one.job or f"not known yet to process {one.pid}"].append(one)
    latest = sorted(jobs, key=lambda job: max(one.status.get("time", 0) for one in jobs[job]))
    running = [job for job in latest if any(one.is_alive for one in jobs[job])]
    shown = latest if with_ended else running or latest[-1:]
    texts = [_job_text(job, jobs[job], look) for job in shown]
    if hidden := len(latest) - len(shown):
        texts.append(f"{counted(hidden, 'older job')}: add --all to see {'it' if hidden == 1 else 'them'}\n")
    return "\n".join(texts) or f"no rank on {socket.gethostname()} is running, or was killed in the last 24 hours\n"


def _job_text(job: str, ranks: Sequence[Snapshot], look: Look) -> str:
    alive = sum(one.is_alive for one in ranks)
    last = max(one.status.get("time", 0) for one in ranks)
    title = f"job {job}: {alive or len(ranks)} of {counted(ranks[0].world_size, 'rank')}"
    title += f" of {ranks[0].script}" if ranks[0].script else ""
    title += f" {'run' if alive else 'ran'} on {ranks[0].host}"
    if last and not alive:
        title += f", last seen {timedelta(seconds=max(0, int(time.monotonic() - last)))} ago"
    rows = {f"rank {one.rank}": _facts(one) for one in ranks}
    names = dict.fromkeys(name for row in rows.values() for name in row)
    columns = {name: {rank: row.get(name) or "-" for rank, row in rows.items()} for name in names}
    parts = [f"{look.styled(title, BOLD)}\n{'-' * len(title)}\n{table(columns, look, _STYLES)}"]
    for one in ranks:
        status = one.status
        if failure := status.get("failure"):
            texts = (failure.get("error"), failure.get("where"))
            parts.append(f"{look.styled(f'rank {one.rank} failed:', RED)} {', '.join(filter(None, texts))}")
        elif left := status.get("left"):
            parts.append(f"rank {one.rank} {left}")
    stacks = defaultdict[tuple[str, ...], list[int]](list)  # most ranks do the same
    for one in ranks:
        stacks[tuple(one.status.get("stack", ())[:_STACK])].append(one.rank)
    for stack, where in stacks.items():
        if stack:
            lines = "".join(f"\n    {line}" for line in stack)
            parts.append(f"main thread of rank {', '.join(map(str, where))}, innermost first:{lines}")
    return "\n\n".join(parts) + "\n"


def _facts(one: Snapshot) -> dict[str, str]:
    """Return what a rank is doing, or did last, as cells of a table."""
    facts = {"pid": str(one.pid), "process": "alive" if one.is_alive else "dead"}
    if one.is_alive and "time" in one.status:  # it can be stopped, or in code that blocks all its threads
        facts["status"] = f"{max(0.0, time.monotonic() - one.status['time']):.1f} s old"
    if engines := one.status.get("engines"):
        facts |= {name: str(engines[-1].get(name)) for name in ("event", "epoch", "iteration")}
    for wait in one.status.get("waits", ())[:1]:
        now = time.monotonic() if one.is_alive else one.status["time"]
        call = " ".join(filter(None, (wait["what"], wait["value"])))
        facts |= {"waits in": f"{call} of ranks {wait['ranks']}", "for": f"{now - wait['began']:.0f} s"}
    return facts | {"line": user_line(one.status.get("stack", ()))}


def devices() -> dict[str, str]:
    """Return a description of each device that torch sees.

    >>> "cpu" in devices()
    True
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = {"cpu": f"{cores} cores, of which torch uses {torch.get_num_threads()}"}
    if (here := accelerator()) is not None:
        properties_of = getattr(torch.get_device_module(here.type), "get_device_properties", None)
        for index in range(torch.accelerator.device_count()):
            properties = properties_of and properties_of(index)  # some kinds of devices have none
            text = f"{properties.name}, {properties.total_memory / _GIB:.1f} GiB" if properties else "one device"
            found[f"{here.type}:{index}"] = text
    return found


def backends() -> dict[str, dict[str, Any]]:
    """Return for each backend its version, and what is missing, without importing optional libraries."""
    found = {"serial": (f"camshaft {__version__}", None)} | {name: _status(name) for name in known_backends()}
    return {
        name: {"available": missing is None, "version": version, "missing": missing}
        for name, (version, missing) in found.items()
    }


def _status(name: str) -> tuple[str | None, str | None]:
    """Return the version of the library of a backend, and what is missing."""
    if lack := lack_of(name):
        return None, lack
    if (library := _LIBRARIES.get(name)) and not (name == "mpi" and dist.is_mpi_available()):
        return f"{library} {importlib.metadata.version(library)}", None
    kinds, here = dist.Backend.backend_capability.get(name, ["cpu"]), accelerator()
    is_here = "cpu" in kinds or (here is not None and here.type in kinds)
    return f"torch {torch.__version__}", None if is_here else f"needs a device of type {' or '.join(kinds)}"


if __name__ == "__main__":
    sys.exit(main())
