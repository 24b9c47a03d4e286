"""Run Slurm on two nodes, each an isolated machine on this host."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

from tests.limits import wait_until
from tests.machines import Machine, Program, connect

HOSTS = "10.77.0.1 n1\n10.77.0.2 n2"
CPUS = 4  # per node, whatever this host has
CONFIGURATION = """
ClusterName=camshaft
SlurmctldHost=n1
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MessageTimeout=60
BatchStartTimeout=900
SlurmdTimeout=900
NodeName=n[1-2] CPUs={cpus}
PartitionName=all Nodes=ALL Default=YES MaxTime=30
"""


class Cluster:
    """Run Slurm within the ``with`` block; commands run on the first node.

    Attributes:
        variables: environment variables that Slurm's commands need.
        entrance: the command prefix that runs a command on the first node.
    """

    def __enter__(self) -> Cluster:
        with ExitStack() as stack:
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="camshaft-slurm-")))
            for name in ("state", "n1", "n2"):
                (self.folder / name).mkdir()
            configuration = self.folder / "slurm.conf"
            configuration.write_text(CONFIGURATION.format(folder=self.folder, cpus=CPUS))
            self.variables = {"SLURM_CONF": str(configuration)}
            self._node, other = (stack.enter_context(Machine(name, HOSTS)) for name in ("n1", "n2"))
            connect(self._node, other)
            self.entrance = self._node.entrance
            daemons = [
                stack.enter_context(machine.start(*command, **self.variables))
                for machine, command in (
                    (self._node, ("slurmctld", "-D", "-c")),
                    (self._node, ("slurmd", "-D")),
                    (other, ("slurmd", "-D")),
                )
            ]
            self._wait_until_idle(daemons)
            self._closing = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closing.close()

    def _wait_until_idle(self, daemons: list[Program]) -> None:
        def are_idle() -> bool:
            return len(self.run("sinfo", "--noheader", "--Node", "--states=idle").output.splitlines()) == 2

        wait_until(are_idle, lambda: "Slurm did not start\n" + "\n".join(daemon.output for daemon in daemons))

    def start(self, *command: str, **variables: str) -> Program:
        """Start a command, such as ``srun``, on the first node."""
        return self._node.start(*command, **self.variables, **variables)

    def run(self, *command: str, **variables: str) -> Program:
        """Run a command, such as ``srun``, and wait for it."""
        with self.start(*command, **variables) as program:
            return program.wait()

    def jobs(self) -> str:
        """List running and pending jobs, without those that are only being cleaned up."""
        return self.run("squeue", "--noheader", "--states=running,pending,suspended").output

    def cancel_all(self) -> None:
        """Cancel all jobs."""
        self.run("scancel", "--user=root")
