"""Each process computes with its share of the cores, unless the user or the launcher has decided."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from camshaft.distributed import cores, job
from tests.distributed.failures.stand_in import StoreOnly


@pytest.fixture
def node(monkeypatch):
    """Return a function that sets the cores of the node and of this process, and the threads of torch."""

    def be(of_node, of_process, threads, **variables):
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        chosen = [threads]
        monkeypatch.setattr(os, "cpu_count", lambda: of_node)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(of_process), raising=False)
        monkeypatch.setattr(torch, "get_num_threads", lambda: chosen[-1])
        monkeypatch.setattr(torch, "set_num_threads", chosen.append)
        return chosen

    return be


@pytest.mark.parametrize(
    ("of_node", "of_process", "present", "ranks", "variables", "expected"),
    [
        (64, 64, 64, 4, {}, 16),  # nothing limits the ranks
        (64, 16, 16, 4, {}, 16),  # the launcher has given each rank cores of its own
        (64, 1, 1, 4, {}, 1),
        (64, 32, 32, 8, {}, 8),  # or half of the node to each, as Open MPI does
        (64, 64, 7, 4, {}, 7),  # torch.set_num_threads(7)
        (64, 64, 64, 4, {"OMP_NUM_THREADS": "64"}, 64),
        (64, 64, 64, 4, {"MKL_NUM_THREADS": "64"}, 64),
        (64, 64, 64, 1, {}, 64),
    ],
)
def test_ranks_share_the_cores_of_their_node(
    node, monkeypatch, of_node, of_process, present, ranks, variables, expected
):
    monkeypatch.setattr(job.failures, "Record", lambda *place: (_ for _ in ()).throw(OSError("not under test")))
    threads = node(of_node, of_process, present, **variables)
    job.install(lambda: StoreOnly(dist.HashStore(), ranks - 1, ranks))
    job.abandon()
    assert threads[-1] == expected


@pytest.mark.parametrize(("is_smt", "expected"), [("1", 8), ("0", 32)])
def test_torch_leaves_out_virtual_cores_by_itself(node, monkeypatch, is_smt, expected):
    threads = node(64, 64, 32)
    monkeypatch.setattr(cores.Path, "read_text", lambda path: f"{is_smt}\n")
    cores.limit(cores.share(8, 64))
    assert threads[-1] == expected
