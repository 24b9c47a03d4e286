"""The query functions under torchrun, started in different ways."""

from __future__ import annotations

from typing import Any

import pytest

from tests.torchrun.launching import Launched, free_port, lines, torchrun

pytestmark = pytest.mark.jobs
ANSWERS = ("-m", "tests.torchrun.answers")


def expected(rank: int, **others: Any) -> dict[str, Any]:
    """Return the record of one of two ranks on one node, with changes."""
    one_node = {"local_rank": rank, "nproc_per_node": 2, "node_rank": 0, "nnodes": 1}
    always = {"backend": "gloo", "model_name": "native-dist", "device": "cpu"}
    return {"rank": rank, "world_size": 2, **one_node, **always, **others}


@pytest.mark.parametrize(
    "launcher",
    [
        ("torch.distributed.run", "--standalone", "--nproc-per-node=2", *ANSWERS),
        pytest.param(("torch.distributed.launch", "--nproc-per-node=2", "--use-env", *ANSWERS)),
        pytest.param(("torch.distributed.launch", "--nproc-per-node=2", *ANSWERS)),
    ],
    ids=["torchrun", "launch_use_env", "launch"],
)
def test_two_ranks_on_one_node(launcher: tuple[str, ...]) -> None:
    port = () if "--standalone" in launcher else (f"--master-port={free_port()}",)
    with Launched("-m", launcher[0], *port, *launcher[1:]) as run:
        assert run.wait() == 0, run.output
        assert lines(run.output) == [expected(0), expected(1)]


@pytest.mark.jobs
def test_two_torchruns_are_two_nodes() -> None:
    common = ("--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}")
    with (
        torchrun(*common, "--node-rank=0", *ANSWERS) as first,
        torchrun(*common, "--node-rank=1", *ANSWERS) as second,
    ):
        assert (first.wait(), second.wait()) == (0, 0), first.output + second.output
        each = {"local_rank": 0, "nproc_per_node": 1, "nnodes": 2}
        assert lines(first.output) == [expected(0, node_rank=0, **each)]
        assert lines(second.output) == [expected(1, node_rank=1, **each)]
