"""The machines of the other tests leave nothing behind, however the tests end."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from tests.guards import link_target
from tests.limits import SOON
from tests.machines import Machine, connect

MACHINE_AND_PROGRAM = """
import sys, time
from tests.machines import Machine
with Machine("alpha") as alpha, alpha.start("sleep", "9000"):
    print(alpha.pid, flush=True)
    time.sleep(9000)
"""


def test_a_machine_ends_with_its_parent_process():
    with subprocess.Popen([sys.executable, "-c", MACHINE_AND_PROGRAM], stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        first = os.pidfd_open(int(maker.stdout.readline()))
        maker.kill()
    ended, _, _ = select.select([first], [], [], SOON)
    os.close(first)
    assert ended


def test_processes_on_a_machine_end_with_it():
    with Machine("alpha") as alpha:
        number = alpha.check("bash", "-c", "setsid sleep 9000 >/dev/null 2>&1 & readlink /proc/$!/ns/net")
        assert processes_in(number.strip())
    assert not processes_in(number.strip())


def processes_in(network: str) -> list[str]:
    """Return the processes in a network namespace."""
    return [str(link) for link in Path("/proc").glob("[0-9]*/ns/net") if link_target(str(link)) == network]


def test_machines_see_only_each_other():
    with Machine("alpha") as alpha, Machine("beta", "10.77.0.1 alpha") as beta:
        connect(alpha, beta)
        interfaces = beta.check("ip", "-brief", "address")
        assert [line.split()[0].partition("@")[0] for line in interfaces.splitlines()] == ["lo", "eth0"]
        assert beta.check("hostname") == "beta\n"
        assert "10.77.0.1" in beta.check("getent", "hosts", "alpha")


def test_a_program_that_does_not_exit_is_killed():
    with Machine("alpha") as alpha, pytest.raises(pytest.fail.Exception, match="did not end within 0.1 s"):
        alpha.run("sleep", "9000", seconds=0.1)
