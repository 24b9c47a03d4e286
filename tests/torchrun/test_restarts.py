"""Restarts and changes of membership; they take minutes and run in `make test-restarts` only."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.limits import HANG
from tests.torchrun.launching import Launched, free_port, lines, torchrun

pytestmark = pytest.mark.restarts
TRAINING = ("-m", "tests.torchrun.training")
# Without it, a torchrun that joins a running one waits forever for the address of the workers' store.
FOR_GROWTH = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def elastic(nodes: str, last_call: int, folder: Path, port: int) -> tuple[str, ...]:
    """Return arguments of torchrun for nodes that may join and leave."""
    patience = f"timeout=900,last_call_timeout={last_call},keep_alive_interval=1,keep_alive_max_attempt=6"
    rendezvous = (f"--rdzv-endpoint=localhost:{port}", "--rdzv-backend=c10d", f"--rdzv-conf={patience}")
    return (f"--nnodes={nodes}", "--max-restarts=5", f"--rdzv-id={folder.name}", *rendezvous)


def starts(run: Launched) -> list[dict[str, Any]]:
    return [line for line in lines(run.output) if line["what"] == "begin"]


def wait_until(condition: Callable[[], bool], *runs: Launched) -> None:
    deadline = time.monotonic() + HANG
    while not condition():
        outputs = "\n".join(run.output for run in runs)
        assert all(run.process.poll() is None for run in runs), outputs
        assert time.monotonic() < deadline, outputs
        time.sleep(0.1)


def is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("run", range(2))
def test_training_resumes_after_each_of_twenty_restarts(run: int, tmp_path: Path) -> None:
    start = ("--standalone", "--nproc-per-node=2", "--max-restarts=20")
    with torchrun(*start, *TRAINING, str(tmp_path), "killed_in_turn") as launched:
        assert launched.wait() == 0, launched.output
        records = lines(launched.output)
    for rank in (0, 1):
        mine = [line for line in records if line["rank"] == rank and line["what"] == "begin"]
        assert [(line["attempt"], line["step"]) for line in mine] == [(count, 3 * count) for count in range(21)]
    assert [(line["step"], line["weight"]) for line in records if line["what"] == "end"] == [
        (63, pytest.approx(63.0))
    ] * 2


def test_a_restart_counted_by_one_node_only(tmp_path: Path) -> None:
    node = ("--nproc-per-node=1", *TRAINING, str(tmp_path), "killed_while_the_other_computes")
    common = elastic("2", 60, tmp_path, free_port())
    with torchrun(*common, *node) as one, torchrun(*common, *node) as other:
        assert (one.wait(), other.wait()) == (0, 0), one.output + other.output
        records = lines(one.output, other.output)
    resumed = [
        (line["rank"], line["attempt"], line["step"]) for line in records if line["what"] == "begin" and line["step"]
    ]
    assert resumed == [(0, 0, 1), (1, 1, 1)]
    assert [(line["step"], line["weight"]) for line in records if line["what"] == "end"] == [
        (2, pytest.approx(2.0))
    ] * 2


def test_two_nodes_restart_together_with_static_rendezvous(tmp_path: Path) -> None:
    common = ("--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}")
    task = ("--max-restarts=5", *TRAINING, str(tmp_path), "killed_in_turn")
    with torchrun(*common, "--node-rank=0", *task) as first, torchrun(*common, "--node-rank=1", *task) as second:
        assert (first.wait(), second.wait()) == (0, 0), first.output + second.output
        records = lines(first.output, second.output)
    assert [line["attempt"] for line in records if line["what"] == "begin"] == [*range(6), *range(6)]
    assert [(line["step"], line["weight"]) for line in records if line["what"] == "end"] == [
        (18, pytest.approx(18.0))
    ] * 2


def test_a_node_joins_leaves_and_joins_again(tmp_path: Path) -> None:
    node = ("--nproc-per-node=1", *TRAINING, str(tmp_path), "until_stopped")
    common = elastic("1:2", 3, tmp_path, free_port())

    def worlds() -> list[int]:
        return [line["world_size"] for line in sorted(starts(stays), key=lambda line: line["step"])]

    with torchrun(*common, *node, **FOR_GROWTH) as stays:
        wait_until(lambda: worlds() == [1], stays)
        with torchrun(*common, *node, **FOR_GROWTH) as comes:
            wait_until(lambda: worlds() == [1, 2], stays, comes)
        wait_until(lambda: worlds() == [1, 2, 1], stays)
        with torchrun(*common, *node, **FOR_GROWTH) as comes:
            wait_until(lambda: worlds() == [1, 2, 1, 2], stays, comes)
            (tmp_path / "stop").touch()
            assert (stays.wait(), comes.wait()) == (0, 0), stays.output + comes.output
            ends = [line for line in lines(stays.output, comes.output) if line["what"] == "end"]
        steps = [line["step"] for line in starts(stays)]
    assert len(set(steps)) == len(steps)
    assert len({line["step"] for line in ends}) == 1
    assert [line["weight"] for line in ends] == [pytest.approx(line["step"]) for line in ends]


def test_the_remaining_node_reuses_the_store_after_a_node_leaves(tmp_path: Path) -> None:
    node = ("--nproc-per-node=2", *TRAINING, str(tmp_path), "until_stopped")
    port = free_port()
    common = elastic("1:2", 20, tmp_path, port)
    with torchrun(*common, *node) as stays:
        wait_until(lambda: is_open(port), stays)  # so that this node, which stays, hosts the rendezvous
        with torchrun(*common, *node) as goes:
            wait_until(lambda: len(starts(stays)) == 2, stays, goes)
        wait_until(lambda: len(starts(stays)) == 4, stays)
        (tmp_path / "stop").touch()
        assert stays.wait() == 0, stays.output
        ends = [line for line in lines(stays.output) if line["what"] == "end"]
        assert [line["world_size"] for line in sorted(starts(stays), key=lambda line: line["step"])] == [4, 4, 2, 2]
    assert [line["weight"] for line in ends] == [pytest.approx(line["step"]) for line in ends]
