"""The start and the devices of a run of torch.distributed."""

from __future__ import annotations

from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import camshaft.distributed as idist
from camshaft.distributed.backends.torch_distributed import NativeBackend, check_options, create, device_of
from camshaft.distributed.topology import Launch, Topology
from tests.distributed.observed import see
from tests.distributed.test_job import use_fresh_adoption
from tests.ranks import on_ranks


@pytest.fixture(autouse=True)
def ends():
    """Whatever a test leaves, the next one finds nothing."""
    yield
    idist.finalize()


@pytest.mark.parametrize(
    ("kind", "count", "config", "local_rank", "device"),
    [
        ("cuda", 4, "cuda:nccl", 3, "cuda:3"),
        ("cuda", 1, "cuda:nccl", 3, "cuda:0"),  # each process sees its own GPU alone
        ("cuda", 4, "cpu:gloo,cuda:nccl", 2, "cuda:2"),
        ("hpu", 2, "hpu:hccl", 1, "hpu:1"),
        ("xpu", 4, "cpu:gloo,cuda:gloo", 2, "cpu"),
        ("mps", 1, "cpu:gloo,cuda:gloo", 0, "cpu"),
        (None, 0, "cpu:gloo,cuda:gloo", 0, "cpu"),
    ],
)
def test_a_process_uses_one_of_the_accelerators_that_it_sees(monkeypatch, kind, count, config, local_rank, device):
    see(monkeypatch, kind, count)
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: config)
    assert device_of(local_rank) == torch.device(device)


@on_ranks(2)
def test_ranks_that_see_only_their_own_gpu_adopt_a_group_or_start_a_run_on_it(tmp_path):
    dist.barrier()
    rank, chosen, gpu = dist.get_rank(), [], torch.device("cuda", 0)
    with pytest.MonkeyPatch.context() as monkeypatch:
        see(monkeypatch, "cuda", 1)
        with use_fresh_adoption():
            assert (idist.get_rank(), idist.get_local_rank(), idist.device()) == (rank, rank, gpu)
        idist.finalize()
        monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
        place = {"rank": rank, "world_size": 2}
        monkeypatch.setattr(NativeBackend, "barrier", lambda backend, group: None)
        idist.initialize("gloo", init_method=f"file://{tmp_path}/store", **place)
        assert chosen == [idist.device()] == [gpu]
        assert (idist.get_nnodes(), idist.get_nproc_per_node(), idist.get_local_rank()) == (1, 2, rank)
        idist.finalize()
        monkeypatch.setattr(NativeBackend, "barrier", mock.Mock(side_effect=dist.DistBackendError("Duplicate GPU")))
        with pytest.raises(dist.DistBackendError, match="Duplicate GPU"):
            idist.initialize("gloo", init_method=f"file://{tmp_path}/another", **place)
        assert not dist.is_initialized()


@on_ranks(2)
def test_a_rank_with_an_incomplete_environment_reads_the_hosts_of_the_others(tmp_path):
    dist.barrier()
    rank = dist.get_rank()
    idist.finalize()
    if rank == 0:
        launch = Launch("horovodrun", Topology(world_size=2, local_world_size=2), host="n")
    else:
        launch = Launch("horovodrun", Topology(rank=1, world_size=2), assumed=("num_nodes",), host="n")
    backend = create("gloo", launch, init_method=f"file://{tmp_path}/store")
    assert backend.topology == Topology(rank, 2, rank, 2, 0, 1)
    backend.barrier(None)
    backend.close()


@pytest.mark.parametrize(("kind", "device"), [("xpu", "xpu"), ("cuda", "cuda"), ("mps", "mps"), (None, "cpu")])
def test_a_single_process_uses_the_accelerator_of_the_machine(monkeypatch, kind, device):
    see(monkeypatch, kind, 1)
    assert idist.device() == torch.device(device)


def test_a_backend_without_its_devices_is_refused(monkeypatch):
    see(monkeypatch, "xpu", 1)
    with pytest.raises(RuntimeError, match="backend 'nccl' needs a CUDA device, and none was found"):
        check_options("nccl", {})
    check_options("xccl", {})
    see(monkeypatch, None, 0)
    with pytest.raises(RuntimeError, match="backend 'xccl' needs a xpu device"):
        check_options("xccl", {})


def test_groups_have_the_timeout_of_the_run():
    idist.initialize("gloo", timeout=timedelta(seconds=33))
    options = idist.new_group([0])._get_backend(torch.device("cpu")).options
    assert options._timeout == timedelta(seconds=33)
