"""Run jobs of which one rank fails, under any launcher, and judge how they end."""

from __future__ import annotations

import os
import re
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, Protocol

from camshaft.distributed.failures.record import find, read
from camshaft.distributed.launch import work
from tests.faults import faulty
from tests.limits import HANG, SOON
from tests.machines import PYTHON, Machine, connect
from tests.mpi.checking import MPI_VARIABLES
from tests.ranks import context
from tests.torchrun.launching import Launched, torchrun

TAIL = 100  # lines at the end of the output, with one traceback, that a user reads
MODULE = "tests.faults.faulty"


# --- what is to happen ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A fault, and what the end of the output must contain.

    Args:
        name: of the option ``--fault``.
        title: for the documentation.
        shows: patterns, in which ``{rank}`` is the rank that fails.
        mark: the line that the output must name, by its comment ``# FAULT``; ``None`` if the process cannot tell.
        timeout: for faults that nobody can tell from a slow rank.
        needs_debug: whether only the debug mode names the cause, as the collectives complete, if with wrong results.
        launchers: those under which it is possible.
    """

    name: str
    title: str
    shows: tuple[str, ...]
    mark: str | None = None
    timeout: float | None = None
    needs_debug: bool = False
    launchers: tuple[str, ...] = ("spawn", "torchrun", "mpirun", "srun")

    @property
    def line(self) -> str | None:
        """A pattern for the source line, as in tables or as in tracebacks."""
        if self.mark is None:
            return None
        lines = Path(faulty.__file__).read_text().splitlines()
        (number,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"# FAULT {self.mark}")]
        return rf'faulty\.py(:|", line ){number}\b'


_ERROR = "ValueError: (the fault|Caught ValueError)"
RAISED = (rf"rank {{rank}} failed first: {_ERROR}|process {{rank}} failed(.|\n)*{_ERROR}", "ValueError: the fault")
# the last two: torchrun and MPICH kill the other ranks within a tenth of a second of a killed one
ENDED = (
    r"Rank(Failed|Divergence)Error: rank {rank}\b"
    r"|process {rank} (exited|was terminated)"
    r"|rank +: {rank} .*\n *exitcode +: -?[1-9]"
    r"|rank {rank}'s process was killed or crashed",
)
# torchrun may end the rank that logs the table before it raises; gloo may abort one whose tensor is smaller
DIVERGED = (
    r"RankDivergenceError|the ranks call different things|crashed \(Aborted\)(.|\n)*A library aborts",
    r"rank {rank} .*{line}",
)
# gloo may abort the rank that did not fail, in its backward pass
BOTH = (
    r"RankDivergenceError|process was killed or crashed \(Aborted\)",
    r"backward \(gradient reduction\)",
    r"rank {rank}( .*|'s last call was )all_reduce",
)
STOPPED = (r"RankDivergenceError: rank {rank} stopped alone",)
STUCK = (r"rank {rank} has not run any Python",)
ABSENT = (r"missing: {rank}\b|rank {rank} did not connect|ranks came to make a group",)

FAULTS = {
    fault.name: fault
    for fault in (
        Fault("step", "exception in the step", RAISED, "step"),
        Fault("handler", "exception in a handler", RAISED, "handler"),
        Fault("worker", "exception in a data loader worker", RAISED, "worker"),
        Fault(
            "worker-killed",
            "data loader worker killed",
            (r"DataLoader worker .*(is killed|exited)|ConnectionReset|EOFError",),  # whichever torch notices first
        ),
        Fault("collate", "exception in the collate function", RAISED, "collate"),
        Fault("save", "exception while saving", RAISED, "save"),
        Fault("evaluation", "exception in the evaluation", RAISED, "evaluation"),
        Fault("exit-0", "`sys.exit(0)`", ENDED),
        Fault("exit-3", "`sys.exit(3)`", ENDED),
        Fault("os._exit", "`os._exit(0)`", ENDED),
        Fault("SIGINT", "SIGINT", (r"rank {rank} failed first: KeyboardInterrupt|process {rank} failed", "Interrupt")),
        Fault("SIGTERM", "SIGTERM", ENDED),
        Fault("SIGKILL", "SIGKILL", ENDED),
        Fault("SIGSEGV", "SIGSEGV", ENDED),
        Fault("SIGSTOP", "SIGSTOP", STUCK, timeout=20),
        Fault("gil", "C call that holds the GIL", STUCK, timeout=20),
        Fault("alone", "collective on one rank only", DIVERGED, "alone"),
        Fault("order", "collectives in another order", DIVERGED, "order"),
        Fault("shape", "another shape", DIVERGED, "shape"),
        # torchrun ends the other rank within a tenth of a second of the one that gloo aborts
        Fault("dtype", "another dtype", (f"{DIVERGED[0]}|Received data size doesn't match",)),
        Fault("root", "another root", DIVERGED, "root", timeout=20, needs_debug=True),
        Fault("reduction", "another reduction", DIVERGED, "reduction", needs_debug=True),
        Fault("skipped-step", "step skipped under DDP", BOTH),
        Fault("uneven", "uneven iterators", BOTH, "uneven"),
        Fault("terminate", "`terminate()` on one rank", STOPPED, "terminate"),
        Fault("swallowed", "exception swallowed on one rank", (*STOPPED, "ValueError: the fault"), "step"),
        # only an operation that has failed proves that a node is lost which does not serve the store
        Fault("lost-node", "lost node", (r"RankFailedError: rank {rank}\b",), timeout=20, launchers=("hosts",)),
        Fault(
            "never-arrives",
            "rank that does not arrive at `initialize`",
            ABSENT,
            timeout=15,
            launchers=("spawn", "torchrun", "srun"),  # MPI itself waits for it
        ),
    )
}


@dataclass(frozen=True)
class Case:
    """A cell of the matrix."""

    fault: Fault
    launcher: str
    is_debug: bool = False
    rank: int = 1

    @classmethod
    def named(cls, name: str) -> Case:
        """Return a case by its name, as ``str`` returns it."""
        found = re.fullmatch(r"(.+)-(\w+)-rank(\d)(-debug)?", name)
        assert found is not None, f"not the name of a case: {name!r}"
        return cls(FAULTS[found[1]], found[2], found[4] is not None, int(found[3]))

    @property
    def is_reported(self) -> bool:
        """Whether the output is to name the cause."""
        return self.is_debug or not self.fault.needs_debug

    def __str__(self) -> str:
        return f"{self.fault.name}-{self.launcher}-rank{self.rank}{'-debug' if self.is_debug else ''}"


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Args:
        case: what was run.
        seconds: from the fault to the end of the last rank's process; ``None`` if a process or the launcher hung.
        code: exit code of the launcher.
        output: of all processes.
    """

    case: Case
    seconds: float | None
    code: int | None
    output: str

    @property
    def tail(self) -> str:
        """The last lines of the output."""
        return "\n".join(self.output.splitlines()[-TAIL:])

    def problems(self) -> list[str]:
        """Return what is wrong; nothing if the job ended as it should."""
        fault, found = self.case.fault, []
        if self.seconds is None:
            found.append("hangs")
        if self.code == 0:
            found.append("exit code 0")
        for pattern in fault.shows:
            filled = pattern.replace("{rank}", str(self.case.rank)).replace("{line}", fault.line or "")
            if not re.search(filled, self.tail):
                found.append(f"no {filled!r}")
        if fault.line is not None and not re.search(fault.line, self.tail):
            found.append(f"no {fault.line!r}")
        return found

    def report(self) -> str:
        """Describe the outcome with its output."""
        seconds = "hangs" if self.seconds is None else f"{self.seconds:.1f} s"
        return f"{self.case}: {seconds}, exit code {self.code}, {self.problems() or 'as expected'}\n{self.output}"


# --- launchers --------------------------------------------------------------------------------------------------------


class Job(Protocol):
    """A launcher that was started."""

    @property
    def output(self) -> str:
        """The output of all processes so far."""

    def poll(self) -> int | None:
        """Return the exit code, ``None`` as long as it runs."""


class Forked:
    """Call ``spawn`` in a process that has torch imported; a ``with`` block, at the end of which all are killed."""

    def __init__(self, arguments: list[str]) -> None:
        self._arguments = arguments

    def __enter__(self) -> Forked:
        self._file = tempfile.NamedTemporaryFile()
        self._process = context.Process(target=_run_forked, args=(self._arguments, self._file.name))
        self._process.start()
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # also the ranks, if they have lost their parent
        self._process.kill()
        self._process.join()
        self._process.close()
        self._file.close()

    @property
    def output(self) -> str:
        return Path(self._file.name).read_text(errors="replace")

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code


def _run_forked(arguments: list[str], path: str) -> None:
    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if "--timeout" not in arguments:
        work.GRACE = SOON  # a rank may be slow to report
    faulty.main(arguments)


def _spawn(arguments: list[str], debug: dict[str, str]) -> AbstractContextManager[Job]:
    return Forked([*arguments, "--nproc_per_node", "2", *(["--debug"] if debug else [])])


def _torchrun(arguments: list[str], debug: dict[str, str]) -> AbstractContextManager[Job]:
    return torchrun("--standalone", "--nproc-per-node=2", "-m", MODULE, *arguments, **debug)


def _mpirun(arguments: list[str], debug: dict[str, str]) -> AbstractContextManager[Job]:
    mpirun = (str(Path(sys.executable).parent / "mpirun"), "-np", "2", sys.executable)
    return Launched("-m", MODULE, *arguments, "--backend", "mpi", program=mpirun, **MPI_VARIABLES, **debug)


Launch = Callable[[list[str], dict[str, str]], AbstractContextManager[Job]]
"""Called with the arguments of ``faulty.py`` and the environment variables of the debug mode."""


@contextmanager
def slurm() -> Iterator[Launch]:
    """Run Slurm, which requires root and Debian's packages, and yield the launcher."""
    from tests.slurm.cluster import Cluster

    with Cluster() as cluster:
        yield partial(srun, cluster)


class Hosts:
    """Run torchrun on two hosts, of which one loses power at the time of the fault: it does not close connections."""

    def __init__(self, arguments: list[str], debug: dict[str, str]) -> None:
        self._folder, self._lost = Path(arguments[0]), int(arguments[arguments.index("--rank") + 1])
        self._arguments, self._debug = arguments, debug
        self._is_lost = False

    def __enter__(self) -> Hosts:
        launcher = [*PYTHON, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        launcher += ["--master-addr=10.77.0.1", "--master-port=29500"]
        with ExitStack() as stack:
            self._hosts = [stack.enter_context(Machine(name)) for name in ("alpha", "beta")]
            connect(self._hosts[0], self._hosts[1])
            self._programs = []
            for node, host in enumerate(self._hosts):
                command = [*launcher, f"--node-rank={node}", "-m", MODULE, *self._arguments]
                self._programs.append(stack.enter_context(host.start(*command, **self._debug)))
            self._closing = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closing.close()

    @property
    def output(self) -> str:
        return "".join(program.output for program in self._programs)

    def poll(self) -> int | None:
        if not self._is_lost and (self._folder / "fault").exists():
            self._is_lost = True
            self._hosts[self._lost].check("ip", "link", "set", "eth0", "down")
            self._hosts[self._lost].run("kill", "-KILL", "-1")
        return self._programs[1 - self._lost].poll()


def srun(cluster: Any, arguments: list[str], debug: dict[str, str]) -> AbstractContextManager[Job]:
    """Start a step on one node of a cluster."""
    # by default, srun waits for a process that was stopped, or does something else for ever
    options = ["--kill-on-bad-exit=1"] if "--timeout" in arguments else []
    program: AbstractContextManager[Job] = cluster.start(
        "srun", "--ntasks=2", *options, sys.executable, "-m", MODULE, *arguments, **debug
    )
    return program


LAUNCHERS: dict[str, Launch] = {"spawn": _spawn, "torchrun": _torchrun, "mpirun": _mpirun, "hosts": Hosts}


# --- running ----------------------------------------------------------------------------------------------------------


def run_case(case: Case, launch: Launch, stop: Event | None = None) -> Outcome:
    """Run a job to its end; kill it if it hangs, or once ``stop`` is set."""
    fault, stop = case.fault, stop or Event()

    def before(deadline: float) -> bool:
        return not stop.wait(0.02) and time.monotonic() < deadline

    with tempfile.TemporaryDirectory(prefix="camshaft-faults-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        arguments = [name, "--fault", fault.name, "--rank", str(case.rank)]
        if fault.timeout is not None:
            arguments += ["--timeout", str(fault.timeout), "--hang_report_after", str(0.6 * fault.timeout)]
        try:
            with launch(arguments, {"CAMSHAFT_DEBUG": "1"} if case.is_debug else {}) as job:
                began = time.monotonic()
                while not (folder / "fault").exists() and job.poll() is None and before(began + HANG):
                    pass
                began = float((folder / "fault").read_text()) if (folder / "fault").exists() else time.monotonic()
                ended = code = None
                while (ended is None or code is None) and before(began + HANG):
                    code = job.poll()  # it may end before its processes, or after them
                    if ended is None and not _running(folder):
                        ended = time.monotonic()
                seconds = None if ended is None or code is None else ended - began
                return Outcome(case, seconds, code, job.output)
        finally:
            _remove_records(folder)


def _remove_records(folder: Path) -> None:
    """Remove the flight records of a job, which outlive processes that fail or are killed."""
    pids = {file.read_text().strip() for file in folder.glob("rank-[0-9]")}
    for path in find():
        if path.name.split("-")[1] in pids and (snapshot := read(path)) is not None and not snapshot.is_alive:
            path.unlink(missing_ok=True)


def _running(folder: Path) -> list[str]:
    """Return the ranks whose processes exist: the lock of a process ends with it, also in another namespace."""
    return [file.name for file in folder.glob("rank-[0-9]") if faulty.is_locked(file)]


def run_all(cases: Iterable[Case], launchers: dict[str, Launch], at_once: int = 4) -> Iterator[Outcome]:
    """Run several jobs at once, as they mostly wait; yield their outcomes in the order of the cases."""
    stop = Event()
    with ThreadPoolExecutor(at_once) as pool:
        jobs = [pool.submit(run_case, case, launchers[case.launcher], stop) for case in cases]
        try:
            yield from (job.result() for job in jobs)
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


# --- the table --------------------------------------------------------------------------------------------------------


def table(outcomes: list[Outcome]) -> str:
    """Return a Markdown table of the seconds from the fault to the end of every rank, without and with debug mode."""
    by_cell: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        by_cell.setdefault((outcome.case.fault.name, outcome.case.launcher), []).append(outcome)
    launchers = list(dict.fromkeys(launcher for _, launcher in by_cell))
    lines = [f"| fault | {' | '.join(launchers)} |", f"|{'---|' * (len(launchers) + 1)}"]
    for name in dict.fromkeys(name for name, _ in by_cell):
        cells = [" / ".join(map(_cell, by_cell.get((name, launcher), []))) for launcher in launchers]
        lines.append(f"| {FAULTS[name].title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(outcome: Outcome) -> str:
    seconds = "hangs" if outcome.seconds is None else f"{outcome.seconds:.1f}"
    return f"{seconds}{'' if not outcome.problems() else ' (!)' if outcome.case.is_reported else '*'}"
