from __future__ import annotations

import json
import os
import subprocess
import sys

from camshaft.distributed.environments import detect

WORKER = """
import json, os, sys
from pathlib import Path

Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps(dict(os.environ)))
"""


def test_the_workers_of_torchrun_are_recognised(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run(
        [*command, str(script), str(tmp_path)], check=True, timeout=50, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    launches = [detect(json.loads((tmp_path / rank).read_text())) for rank in "01"]
    assert [(launch.launcher, launch.agent_store) for launch in launches] == [("torchrun", True)] * 2
    assert [str(launch.topology) for launch in launches] == [
        f"rank={rank}, world_size=2, local_rank={rank}, local_world_size=2, node_rank=0, num_nodes=1"
        for rank in range(2)
    ]
    assert [launch.assumed for launch in launches] == [(), ()]
    assert launches[0].master_addr
    assert launches[0].master_port
    assert (launches[0].master_addr, launches[0].master_port) == (launches[1].master_addr, launches[1].master_port)
