"""The Kubernetes manifest of docs/how-to/clusters.md is consistent, and torchrun accepts its command."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import yaml
from torch.distributed.run import parse_args

from tests import cluster_page


@pytest.fixture
def manifest() -> dict[str, Any]:
    """Return the objects of the page's manifest by kind."""
    return {found["kind"]: found for found in yaml.safe_load_all(cluster_page.text("job.yaml"))}


def test_the_service_names_the_pods_of_the_job(manifest):
    service, job = manifest["Service"], manifest["Job"]["spec"]
    pod = job["template"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"]
    assert pod["spec"]["restartPolicy"] == "OnFailure"


def test_mounted_volumes_are_defined(manifest):
    pod = manifest["Job"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert [mount["name"] for mount in container["volumeMounts"]] == [volume["name"] for volume in pod["volumes"]]


def test_torchrun_accepts_the_command(manifest):
    name, job = manifest["Job"]["metadata"]["name"], manifest["Job"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["sh", "-c"]
    (command,) = container["args"]
    assert "\n" not in command
    launcher, *arguments = shlex.split(command.replace("$JOB_COMPLETION_INDEX", "1"))[1:]
    taken = parse_args(arguments)
    assert launcher == "torchrun"
    assert (int(taken.nnodes), taken.node_rank) == (job["completions"], 1)
    assert taken.master_addr == f"{name}-0.{pod['subdomain']}"
    assert int(taken.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert taken.training_script == "train.py"
    output = taken.training_script_args[taken.training_script_args.index("--output") + 1]
    assert output in [mount["mountPath"] for mount in container["volumeMounts"]]
