"""Simulated machines, each with its own network, processes, host name, ``/etc/hosts``, and shared memory.

They are Linux namespaces. A machine ends with all of its processes and its network when it is closed, or when the test
process ends in any way; nothing of it has a name that could stay behind. They require root, or
``unshare --map-root-user make test-hosts``.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.limits import HANG

ROOT = Path(__file__).resolve().parent.parent
BOOT = r"""
set -e
hostname "$1"
printf '%s\n' "127.0.0.1 localhost" "$2" >"$3"
mount --bind "$3" /etc/hosts
mount -t tmpfs shm /dev/shm
ip link set lo up
echo ready
sleep infinity &
wait  # also reaps orphaned processes
"""


class Machine:
    """A machine that exists within the ``with`` block.

    Args:
        name: the host name.
        hosts: lines of its ``/etc/hosts``, in addition to localhost.
    """

    def __init__(self, name: str, hosts: str = "") -> None:
        self.name = name
        self._hosts = hosts

    def __enter__(self) -> Machine:
        with tempfile.NamedTemporaryFile(prefix="camshaft-hosts-") as hosts:  # the mounted file survives without a name
            namespaces = ["unshare", "--net", "--uts", "--pid", "--mount-proc", "--fork", "--kill-child"]
            boot = ["bash", "-c", BOOT, "boot", self.name, self._hosts, hosts.name]
            self._holder = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *namespaces, *boot],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            assert self._holder.stdout is not None
            output_of_boot = self._holder.stdout.readline().decode()
        if output_of_boot != "ready\n":
            output_of_boot += self._holder.stdout.read().decode()
            self._leave()
            pytest.fail(f"these tests need root and Linux namespaces: {output_of_boot}", pytrace=False)
        self.pid = int(Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text())
        self._ends = os.pidfd_open(self.pid)
        return self

    def __exit__(self, *exception: object) -> None:
        self._holder.kill()
        select.select([self._ends], [], [])  # its first process ends last
        os.close(self._ends)
        self._leave()

    def _leave(self) -> None:
        self._holder.kill()
        self._holder.wait()
        assert self._holder.stdout is not None
        self._holder.stdout.close()

    @property
    def entrance(self) -> list[str]:
        """The command prefix that runs a command on this machine."""
        return ["nsenter", f"--target={self.pid}", *_ENTERED, f"--wd={ROOT}", "--"]

    def start(self, *command: str, **variables: str) -> Program:
        """Start a command in the project folder, with additional environment variables."""
        return Program([*self.entrance, *command], variables)

    def run(self, *command: str, seconds: float = HANG, **variables: str) -> Program:
        """Run a command and wait for it."""
        with self.start(*command, **variables) as program:
            return program.wait(seconds)

    def check(self, *command: str) -> str:
        """Run a command that must succeed, and return its output."""
        done = self.run(*command)
        assert done.returncode == 0, f"{command}: {done.output}"
        return done.output


_ENTERED = ("--net", "--uts", "--pid", "--mount")


def connect(one: Machine, other: Machine, network: str = "10.77.0") -> None:
    """Connect two machines with a cable: ``eth0`` on both, with the addresses .1 and .2 of the network."""
    cable = f"ip link add name eth0 netns {one.pid} type veth peer name eth0 netns {other.pid}"
    subprocess.run(cable.split(), check=True)
    for number, machine in enumerate((one, other), start=1):
        machine.check(*f"ip address add {network}.{number}/24 dev eth0".split())
        machine.check("ip", "link", "set", "eth0", "up")


class Program:
    """A command that runs within the ``with`` block, at the end of which its process group is killed.

    Attributes:
        returncode: the exit code of the command, once it has ended.
    """

    def __init__(self, command: list[str], variables: dict[str, str]) -> None:
        self._command = command
        self._variables = variables
        self.returncode: int | None = None

    def __enter__(self) -> Program:
        self._file = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            self._command,
            env={**os.environ, **DEFAULTS, **self._variables},
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        return self

    def __exit__(self, *exception: object) -> None:
        self.output  # noqa: B018 - reads the rest
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._file.close()

    @property
    def output(self) -> str:
        """The output so far."""
        if not self._file.closed:
            size = os.fstat(self._file.fileno()).st_size
            self._output = os.pread(self._file.fileno(), size, 0).decode(errors="replace")
        return self._output

    def poll(self) -> int | None:
        """Return the exit code, ``None`` as long as the command runs."""
        return self._process.poll()

    def wait(self, seconds: float = HANG) -> Program:
        """Wait for the command, which must end within the time limit."""
        self._wait(lambda: self._process.poll() is not None, seconds, "did not end")
        self.returncode = self._process.returncode
        return self

    def wait_for(self, text: str, seconds: float = HANG) -> None:
        """Wait until the output contains a text, which the command must write before it ends."""
        self._wait(lambda: text in self.output or self.poll() is not None, seconds, f"did not write {text!r}")
        if text not in self.output:
            pytest.fail(f"{self._command} ended without {text!r}:\n{self.output}", pytrace=False)

    def _wait(self, condition: Callable[[], bool], seconds: float, failure: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"{self._command} {failure} within {seconds} s:\n{self.output}", pytrace=False)
            time.sleep(0.02)


# There are more ranks than cores, and failing tests must show all output.
DEFAULTS = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
PYTHON = (sys.executable, "-W", "error::UserWarning")
