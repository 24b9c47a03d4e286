"""Print what the query functions return on each rank, one line of JSON per rank.

torchrun --nproc-per-node 2 -m tests.torchrun.answers
"""

from __future__ import annotations

import json
import os
import sys

import camshaft.distributed as idist
from tests.limits import TIMEOUT


def answers() -> dict[str, object]:
    return {
        "rank": idist.get_rank(),
        "world_size": idist.get_world_size(),
        "local_rank": idist.get_local_rank(),
        "nproc_per_node": idist.get_nproc_per_node(),
        "node_rank": idist.get_node_rank(),
        "nnodes": idist.get_nnodes(),
        "backend": idist.backend(),
        "model_name": idist.model_name(),
        "device": idist.device().type,
    }


def main(*options: str) -> None:
    assert options in ((), (f"--local-rank={os.environ['LOCAL_RANK']}",)), options
    for _ in range(3):  # torchrun's store outlives each group
        idist.initialize("gloo", timeout=TIMEOUT)
        record = answers()
        assert idist.all_gather(idist.get_rank()) == list(range(idist.get_world_size()))
        idist.finalize()
        assert (idist.get_world_size(), idist.backend()) == (1, None)
    print(f"{json.dumps(record)}\n", end="", flush=True)  # one write, because the ranks share the output


if __name__ == "__main__":
    main(*sys.argv[1:])
