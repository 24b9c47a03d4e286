"""Runs on two hosts joined by a cable: training, a cut cable, and dead hosts."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator

import pytest
import torch

from tests.hosts.train import RATE, batches, gradient
from tests.limits import HANG
from tests.machines import PYTHON, Machine, Program, connect

FIRST = "10.77.0.1"
SHORT_TIMEOUT = 40  # seconds that a collective waits for a rank that is slow, or that the test has cut off
LAST = 5  # the last iteration of a complete run

Hosts = tuple[Machine, Machine]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Create two hosts without name resolution, not even of their own names, with which gloo would use loopback."""
    with Machine("alpha") as alpha, Machine("beta") as beta:
        connect(alpha, beta)
        yield alpha, beta


def train(
    host: Machine,
    *launcher: str,
    last: int = LAST,
    timeout: float = HANG,
    **options: object,
) -> Program:
    """Start the training on one host, with options for ``Parallel``."""
    arguments = json.dumps({"timeout": timeout, **options}), str(last)
    return host.start(*PYTHON, *launcher, "-m", "tests.hosts.train", *arguments)


def torchrun(host: Machine, node: int, workers: int = 1, master: str = FIRST, **options: object) -> Program:
    number, first = f"--node-rank={node}", [f"--master-addr={master}", "--master-port=29500"]
    launcher = ["-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={workers}", number, *first]
    return train(host, *launcher, **options)


def tcp(host: Machine, node: int, workers: int = 1) -> Program:
    return train(host, init_method=f"tcp://{FIRST}:29500", rank=node, world_size=2)


def spawn(host: Machine, node: int, workers: int = 1) -> Program:
    nodes = {"nnodes": 2, "node_rank": node, "nproc_per_node": workers}
    return train(host, master_addr=FIRST, master_port=29500, **nodes)


def train_on_one_process() -> torch.Tensor:
    """Return the weights of training on one process."""
    weight = torch.zeros(3)
    for batch in batches(0, 1, LAST):
        weight -= RATE * gradient(weight, batch)
    return weight


def check_result(programs: tuple[Program, Program], workers: int) -> None:
    """Assert that both programs succeeded, and that all ranks have the right place and the same weights."""
    output = "".join(program.wait().output for program in programs)
    assert [program.returncode for program in programs] == [0, 0], output
    results = {int(match[1]): match for match in re.finditer(r"rank (\d) of \d: (.*), learned \[(.*)\]", output)}
    last = 2 * workers - 1
    for rank in range(last + 1):
        ends = last if rank in (0, last) else rank
        place = f"node {rank // workers} of 2, local rank {rank % workers}"
        assert results[rank][2] == f"{place}, ends {ends}, left None", output
        torch.testing.assert_close(
            torch.tensor([float(x) for x in results[rank][3].split(",")]), train_on_one_process()
        )


@pytest.mark.parametrize(("start", "workers"), [(torchrun, 2), (spawn, 2), (tcp, 1)])
def test_training_on_two_hosts_matches_one_process(hosts, start, workers):
    with start(hosts[0], 0, workers) as first, start(hosts[1], 1, workers) as second:
        check_result((first, second), workers)


def test_a_host_whose_name_resolves_to_loopback_is_reachable():
    """Debian maps the host name to 127.0.1.1; the other host resolves it to the network address.

    With gloo, the higher address connects to the lower one; here, the network address is above 127.0.1.1.
    """
    network = "192.168.77"
    own, other = "127.0.1.1 alpha", f"127.0.1.1 beta\n{network}.1 alpha"
    with Machine("alpha", own) as alpha, Machine("beta", other) as beta:
        connect(alpha, beta, network)
        with torchrun(alpha, 0, master="alpha") as first, torchrun(beta, 1, master="alpha") as second:
            check_result((first, second), 1)


def start_training(hosts: Hosts) -> tuple[Program, Program]:
    return tuple(torchrun(host, node, timeout=SHORT_TIMEOUT, last=10_000) for node, host in enumerate(hosts))


def wait_for_training(programs: tuple[Program, Program]) -> None:
    for rank, program in enumerate(programs):
        program.wait_for(f"rank {rank} did iteration 3\n")


def test_a_cut_cable_raises_on_both_sides(hosts):
    """It closes no connections, so requests to the store are repeated for a quarter of an hour if nobody ends that."""
    first = torchrun(hosts[0], 0, timeout=SHORT_TIMEOUT, last=10_000)
    second = torchrun(hosts[1], 1, last=10_000)
    with first, second:
        second.wait_for("rank 1 did iteration 100\n")  # some rounds of its watcher
        hosts[0].check("ip", "link", "set", "eth0", "down")
        for rank, program in enumerate((first, second)):
            text = f"rank {1 - rank} does not answer, nor does its node; rank {rank} waits for it in all_reduce"
            assert f"RankFailedError: {text}" in program.wait().output
            assert program.returncode == 1


@pytest.mark.parametrize("dead", [0, 1])
def test_a_dead_host_ends_the_run_on_the_other(hosts, dead):
    first, second = programs = start_training(hosts)
    with first, second:
        wait_for_training(programs)
        hosts[dead].run("kill", "-KILL", "-1")
        rank, program = 1 - dead, programs[1 - dead]
        output = program.wait().output
        assert program.returncode == 1
        closed = "RuntimeError: .*Connection (reset|closed) by peer"
        silent = f"RankFailedError: rank {dead} does not answer, nor does its node"  # if its network ends, too
        assert re.search(rf"\[rank{rank}\]: (\w+\.)*({closed}|{silent})", output), output
        if sys.version_info >= (3, 11):  # older versions do not print notes
            assert f"[rank{rank}]: in all_reduce on rank {rank}, among the ranks [0, 1]\n" in output
