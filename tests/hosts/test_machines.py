"""What the other tests here stand on: machines that leave nothing, however the tests end."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from tests.guards import link_target
from tests.machines import Machine, connect

HELD = """
import sys, time
from tests.machines import Machine
with Machine("alpha") as alpha, alpha.start("sleep", "100"):
    print(alpha.pid, flush=True)
    time.sleep(100)
"""


def test_a_machine_ends_with_the_process_that_made_it():
    with subprocess.Popen([sys.executable, "-c", HELD], stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        first = os.pidfd_open(int(maker.stdout.readline()))
        maker.kill()
    ended, _, _ = select.select([first], [], [], 10)
    os.close(first)
    assert ended


def test_what_runs_on_a_machine_ends_with_it():
    with Machine("alpha") as alpha:
        number = alpha.check("bash", "-c", "setsid sleep 100 >/dev/null 2>&1 & readlink /proc/$!/ns/net")
        assert holders(number.strip())
    assert not holders(number.strip())


def holders(network: str) -> list[str]:
    """Find the processes that a network has."""
    return [str(link) for link in Path("/proc").glob("[0-9]*/ns/net") if link_target(str(link)) == network]


def test_machines_see_only_each_other():
    with Machine("alpha") as alpha, Machine("beta", "10.77.0.1 alpha") as beta:
        connect(alpha, beta)
        interfaces = beta.check("ip", "-brief", "address")
        assert [line.split()[0].partition("@")[0] for line in interfaces.splitlines()] == ["lo", "eth0"]
        assert beta.check("hostname") == "beta\n"
        assert "10.77.0.1" in beta.check("getent", "hosts", "alpha")


def test_a_program_that_does_not_end_is_ended():
    with Machine("alpha") as alpha, pytest.raises(pytest.fail.Exception, match="did not end within 0.1 s"):
        alpha.run("sleep", "100", seconds=0.1)
