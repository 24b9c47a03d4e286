#!/usr/bin/env python3
"""How many seconds pass from a killed worker, or a lost node, to the next finished step, by launcher?

python benchmarks/restarts.py --only "torchrun, static" Slurm
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this clone, installed or not

from benchmarks.measuring import Spread, report
from tests import cluster_page
from tests.machines import Machine, Program, connect
from tests.slurm.cluster import CONFIGURATION, CPUS, HOSTS

SCRIPT = Path(__file__).resolve().parent / "stamping.py"
STEPS = 10  # finished before the fault
LIMIT = 900.0  # seconds to wait at most
FAULTS = ("killed worker", "lost node")
TUNED = "last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=5"
SLURMD_TIMEOUT = 30  # seconds without an answer after which Slurm takes a node for lost; its default is 300
BIN = Path(sys.executable).parent
TORCHRUN = f"{sys.executable} -m torch.distributed.run"
# without it, a torchrun that joins a running one waits forever for the address of the workers' store
FOR_GROWTH = "env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
# UCX would use shared memory, as the simulated hosts have the same kernel
OVER_TCP = "env UCX_TLS=tcp,self UCX_NET_DEVICES=eth0"
# a process that sleeps keeps the simulated host
KILL_ALL = """
for one in /proc/[0-9]*; do
    [ "$(cat $one/comm)" = sleep ] || [ ${one#/proc/} = $$ ] || kill -KILL ${one#/proc/}
done
"""


@dataclass(frozen=True)
class Launcher:
    """How a job starts on two hosts, and starts again.

    Args:
        first: commands of the first host.
        second: commands of the second host, also when it returns.
        needs: commands and modules.
        notices: a command of the first host that succeeds once the second one may return; ``None`` if the job goes on
            without it.
    """

    first: Sequence[str]
    second: Sequence[str]
    needs: Sequence[str] = ()
    notices: str | None = "! kill -0 {survivor}"

    def missing(self) -> str:
        return ", ".join(name for name in self.needs if not (shutil.which(name) or find_spec(name)))


def launchers(folder: Path, timeout: float) -> dict[str, Launcher]:
    """Return the launchers by name.

    Args:
        folder: shared by the hosts.
        timeout: seconds that a collective waits at most.
    """
    script = training(folder, timeout)
    static = "--nnodes 2 --node-rank {} --nproc-per-node 1 --max-restarts 20 --master-addr n1 --master-port 29500"
    static = f"{TORCHRUN} {static} {script}"
    elastic = "--nnodes 1:2 --nproc-per-node 1 --max-restarts 20 --rdzv-id job --rdzv-backend c10d"
    elastic = f"{FOR_GROWTH} {TORCHRUN} {elastic} --rdzv-endpoint n1:29400 {{}} {script}"
    plain, tuned = elastic.format(""), elastic.format(f"--rdzv-conf {TUNED}")
    pod = cluster_page.text("job.yaml").partition("exec torchrun")[2].partition("train.py")[0]
    pod = until(f"{TORCHRUN} {' '.join(pod.split())} {script}").replace("per-node 4", "per-node 1")
    pods = [f"export JOB_COMPLETION_INDEX={index}; {pod.replace('train-0.train', 'n1')}" for index in (0, 1)]
    submit = f"until [ $(sinfo -hN -t idle | wc -l) = 2 ]; do sleep 0.1; done; sbatch -o {folder}/log {folder}/job.sh"
    server = "$(which sshd) -D -f /dev/null -o StrictModes=no -o PidFile=none"
    server = f"mkdir -p /run/sshd; {server} -h {folder}/key -o AuthorizedKeysFile={folder}/key.pub"
    mpirun = f"{OVER_TCP} {BIN}/mpirun -launcher ssh -launcher-exec {folder}/ssh -np 2 -ppn 1 -hosts n1,n2"
    ray = f"{BIN}/ray start --block --disable-usage-stats --num-cpus 1"
    head = f"{ray} --head --node-ip-address 10.77.0.1 --include-dashboard false --temp-dir {folder}/ray"
    worker = f"{ray} --node-ip-address 10.77.0.2 --address 10.77.0.1:6379"
    is_down = "sinfo -hN -t down | grep -q n2"
    return {
        "torchrun, static": Launcher([static.format(0)], [static.format(1)]),
        "torchrun, elastic": Launcher([plain], [plain], notices=None),
        "torchrun, elastic, tuned": Launcher([tuned], [tuned], notices=None),
        "Slurm": Launcher(["slurmctld -D -c", "slurmd -D", submit], ["slurmd -D"], ["slurmctld", "slurmd"], is_down),
        "MPI": Launcher([until(f"{mpirun} {sys.executable} {script} --backend mpi")], [server], ["mpi4py", "sshd"]),
        "Kubernetes, simulated": Launcher(pods[:1], pods[1:]),
        "Ray": Launcher(list(map(until, (head, f"{sys.executable} {script} --ray"))), [until(worker)], ["ray"]),
    }


def training(folder: Path, timeout: float) -> str:
    return f"{SCRIPT} {folder} --timeout {timeout}"


def until(command: str) -> str:
    return f"until {command}; do sleep 1; done"


def prepare(folder: Path, timeout: float) -> None:
    """Write the files of Slurm, and of SSH."""
    for name in ("state", "n1", "n2"):
        (folder / "slurm" / name).mkdir(parents=True)
    configuration = CONFIGURATION.replace("SlurmdTimeout=900", f"SlurmdTimeout={SLURMD_TIMEOUT}\nReturnToService=2")
    (folder / "slurm.conf").write_text(configuration.format(folder=folder / "slurm", cpus=CPUS))
    job = cluster_page.text("job.sh").replace("tasks-per-node=2", "tasks-per-node=1").replace("8:00:00", "0:30:00")
    before, _, after = job.partition("python train.py")
    job = f"{before}{sys.executable} {training(folder, timeout)} &&{after.partition('&&')[2]}"
    (folder / "job.sh").write_text(job)
    if shutil.which("ssh-keygen"):
        subprocess.run(["ssh-keygen", "-q", "-N", "", "-f", str(folder / "key")], check=True)
        options = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o ServerAliveInterval=5"
        (folder / "ssh").write_text(f'#!/bin/sh\nexec ssh -q -i {folder}/key {options} "$@"\n')
        (folder / "ssh").chmod(0o755)


def steps(folder: Path) -> list[tuple[int, float, float]]:
    """Return the number of each finished step, when it was finished, and when its process was started."""
    path = folder / "steps"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [(int(number), float(at), float(started)) for number, at, started in map(str.split, lines)]


def recovery(name: str, fault: str, options: argparse.Namespace) -> tuple[float, float]:
    """Return the seconds from a fault to the next finished step, and how many of these a process took to start."""
    with tempfile.TemporaryDirectory(prefix="restarts-") as path, ExitStack() as stack:
        folder = Path(path)
        prepare(folder, options.timeout)
        launcher, variables = launchers(folder, options.timeout)[name], {"SLURM_CONF": f"{folder}/slurm.conf"}
        programs = list[Program]()

        def start(host: Machine, commands: Sequence[str]) -> None:
            for command in commands:
                programs.append(stack.enter_context(host.start("bash", "-c", command, **variables)))

        def wait_until(condition: Callable[[], object]) -> None:
            deadline = time.monotonic() + LIMIT
            while not condition():
                if time.monotonic() > deadline:
                    outputs = "\n".join(program.output for program in programs)
                    raise RuntimeError(f"{name} did not recover from a {fault} within {LIMIT:g} s:\n{outputs}")
                time.sleep(0.05)

        first, second = (stack.enter_context(Machine(host, HOSTS)) for host in ("n1", "n2"))
        connect(first, second)
        for host in (first, second):
            host.check("sysctl", "-w", f"net.ipv4.tcp_retries2={options.retries}")
        start(first, launcher.first)
        start(second, launcher.second)
        wait_until(lambda: len(steps(folder)) >= STEPS)
        survivor, victim = ((folder / host).read_text() for host in ("n1", "n2"))
        if fault == "killed worker":
            killed = time.time()
            second.check("kill", "-KILL", victim)
        else:
            second.check("ip", "link", "set", "eth0", "down")
            killed = time.time()
            second.run("bash", "-c", KILL_ALL)
            if launcher.notices is not None:
                notices = f"export SLURM_CONF={folder}/slurm.conf; {launcher.notices.format(survivor=survivor)}"
                wait_until(lambda: first.run("bash", "-c", notices).returncode == 0)
                second.check("ip", "link", "set", "eth0", "up")
                start(second, launcher.second)

        def further() -> list[tuple[int, float, float]]:
            done = max(number for number, _, started in steps(folder) if started < killed)
            return [one for one in steps(folder) if one[2] > killed and one[0] > done]

        wait_until(further)
        _, finished, started = further()[0]
        return finished - killed, finished - started


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    rows, skipped = list[dict[str, Any]](), dict[str, str]()
    for name, launcher in launchers(Path(), options.timeout).items():
        if options.only and name not in options.only:
            continue
        if missing := launcher.missing():
            skipped[name] = f"not installed: {missing}"
            continue
        row: dict[str, Any] = {"what": name}
        starts = list[float]()
        for fault in options.faults:
            measured = [recovery(name, fault, options) for _ in range(options.repetitions)]
            row[fault] = Spread.of([total for total, _ in measured])
            starts += [start for _, start in measured]
        row["start-up"] = Spread.of(starts)
        rows.append(row)
        print(*row.values(), sep=" | ", file=sys.stderr)
    head = ["seconds", *options.faults, "of which start-up"]
    lines = [[str(cell) for cell in row.values()] for row in rows]
    report("restarts", head, lines, skipped, retries=options.retries, timeout=options.timeout, rows=rows)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="launchers")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS)
    parser.add_argument("--repetitions", type=int, default=3, help="jobs of each launcher and fault (%(default)s)")
    parser.add_argument("--timeout", type=float, default=600, help="of the collectives, in seconds (%(default)s)")
    parser.add_argument("--retries", type=int, default=5, help="tcp_retries2 of the hosts (%(default)s)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
