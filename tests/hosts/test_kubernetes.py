"""The command of the Kubernetes Job in docs/how-to/clusters.md, on two machines named like its pods."""

from __future__ import annotations

import re
import shlex

from tests import cluster_page
from tests.machines import PYTHON, Machine, Program, connect

PODS = "10.77.0.1 train-0.train train-0\n10.77.0.2 train-1.train train-1"
# like the kubelet with restartPolicy: OnFailure, but without its growing back-off
RESTARTING = "cd {folder}; until sh -c {command}; do echo restarted; sleep 1; done"


def start(pod: Machine, index: int, folder: str) -> Program:
    """Start the command with one process instead of four GPUs, and with a failure on rank 1."""
    (command,) = re.findall(r"exec (torchrun .*?)\n +resources:", cluster_page.text("job.yaml"), re.DOTALL)
    launcher = shlex.join([*PYTHON, "-m", "torch.distributed.run"])
    changes = {
        "torchrun": launcher,
        "per-node 4": "per-node 1",
        "nccl": "gloo",
        "/checkpoints": f"{folder}/saved --fail",
    }
    for before, after in changes.items():
        assert command.count(before) == 1
        command = command.replace(before, after)
    script = RESTARTING.format(folder=folder, command=shlex.quote(f"exec {' '.join(command.split())}"))
    return pod.start("sh", "-c", script, JOB_COMPLETION_INDEX=str(index))


def test_failed_pods_restart_and_resume(tmp_path):
    cluster_page.write(tmp_path, "train.py")
    with Machine("train-0", PODS) as zero, Machine("train-1", PODS) as one:
        connect(zero, one)
        with start(zero, 0, str(tmp_path)) as first, start(one, 1, str(tmp_path)) as second:
            output = first.wait().output
            assert second.wait().returncode == first.returncode == 0, output + second.output
    printed = re.findall(r"^(.*): world size 2, nodes 2$", output, re.MULTILINE)
    assert printed == ["started at iteration 0", "resumed at iteration 40", "finished at iteration 80"]
    assert "simulated failure" in second.output
