"""Initializing XLA, adopting a running XLA runtime, and spawning processes; each test uses a new process."""

from __future__ import annotations

import logging
import os
import sys
import traceback

import pytest
import torch
import torch.distributed as dist
import torch_xla
import torch_xla.distributed.xla_multiprocessing as multiprocessing

import camshaft.distributed as idist
from camshaft.distributed.job import current
from camshaft.distributed.launch import spawn as launch
from camshaft.utils import manual_seed
from tests.xla.processes import call_alone, run


def context():
    return idist.model_name(), idist.backend(), idist.device().type, idist.get_rank(), idist.get_world_size()


SERIAL = ("serial", None, "cpu", 0, 1)
ON_XLA = ("xla-dist", "xla-tpu", "xla", 0, 1)


def runs():
    return torch_xla._XLAC._xla_runtime_is_initialized()


def check_adoption():
    assert context() == SERIAL, "importing torch_xla must not initialize XLA"
    manual_seed(3)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert context() == ("native-dist", "gloo", "cpu", 0, 1)
    dist.destroy_process_group()
    assert context() == SERIAL
    assert not runs()

    torch.ones(1).to("xla")
    assert context() == ON_XLA
    assert idist.device() == torch.device("xla:0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert context()[0] == "native-dist"
    dist.destroy_process_group()
    assert context() == ON_XLA

    dist.init_process_group("xla", init_method="xla://")
    assert context() == ON_XLA, "a process group over XLA counts as XLA"
    assert "xla" not in idist.available_backends()
    assert idist.all_gather({"a": 1}) == [{"a": 1}]
    dist.destroy_process_group()

    idist.finalize()
    idist.sync()
    assert context() == SERIAL, "the runtime keeps running but must not be adopted after finalize"
    idist.initialize("xla-tpu")
    assert context() == ON_XLA
    idist.finalize()


def test_only_a_running_runtime_is_adopted():
    call_alone(check_adoption)


def initialize():
    with pytest.raises(TypeError, match=r"backend 'xla-tpu' got unknown options \['timeout'\]; it accepts \['spmd'\]"):
        idist.initialize("xla-tpu", timeout=3)
    with pytest.raises(TypeError, match=r"spawn on backend 'xla-tpu' got unknown options \['join'\]; it accepts"):
        idist.spawn("xla-tpu", print, (), join=False)
    with pytest.raises(ValueError, match=r"nproc_per_node must be 1 on CPUs, got 2; spmd=True"):
        idist.spawn("xla-tpu", print, (), nproc_per_node=2)
    with pytest.raises(ValueError, match=r"nproc_per_node must be 1 with spmd=True, got 2"):
        idist.spawn("xla-tpu", print, (), nproc_per_node=2, spmd=True)
    assert context() == SERIAL
    assert not runs()

    manual_seed(5)
    idist.initialize("xla-tpu")
    drawn = torch.rand(3, device=idist.device()).tolist()
    with pytest.raises(RuntimeError, match="already initialized with"):
        idist.initialize("xla-tpu")
    manual_seed(6)
    assert torch.rand(3, device=idist.device()).tolist() != drawn
    manual_seed(5)
    assert torch.rand(3, device=idist.device()).tolist() == drawn, "the seed set before initialize applies"
    idist.finalize()
    idist.initialize("xla-tpu")
    assert torch.rand(3, device=idist.device()).tolist() != drawn, "a generator already in use is not reseeded"
    idist.finalize()
    with pytest.raises(RuntimeError, match="spmd=True must be set before the runtime of XLA starts"):
        idist.initialize("xla-tpu", spmd=True)
    assert context() == SERIAL


def test_initialize_refuses_unknown_options_and_keeps_the_seed():
    call_alone(initialize)


def print_context(local_rank, *names, fail=False):
    assert local_rank == idist.get_local_rank()
    if fail:
        raise OSError(f"the disk of {names} is full")
    print("context", os.getpid(), *names, *context(), flush=True)


def spawn_here_and_elsewhere():
    idist.spawn("xla-tpu", print_context, ("a",), {"fail": False}, nproc_per_node=1, nnodes=1, node_rank=0)
    with idist.Parallel("xla-tpu", nproc_per_node=1) as parallel:
        parallel.run(print_context, "b")
    with pytest.raises(OSError, match=r"the disk of \('c',\) is full") as failure:
        idist.spawn("xla-tpu", print_context, ("c",), {"fail": True})
    assert "in print_context" in "".join(traceback.format_exception(failure.value))
    assert context() == SERIAL
    with idist.Parallel("xla-tpu") as parallel:
        parallel.run(print_context, "d")
    assert context() == SERIAL


def spawn_in_debug_mode():
    with pytest.raises(AssertionError, match="debug is on"):
        idist.spawn("xla-tpu", assert_debug_is_off, (), debug=True)
    idist.spawn("xla-tpu", assert_debug_is_off, (), debug=False)


def assert_debug_is_off(local_rank):
    assert not current().job.compares_collectives, "debug is on"


def test_debug_mode_reaches_the_function():
    call_alone(spawn_in_debug_mode)


def test_spawn_runs_the_function_in_this_process_with_one_device():
    output = call_alone(spawn_here_and_elsewhere)
    lines = [line.split() for line in output.splitlines() if line.startswith("context")]
    assert [line[2:] for line in lines] == [[name, *map(str, ON_XLA)] for name in "abd"]
    assert len({line[1] for line in lines}) == 1


def spawn_new():
    for wanted in ((1, 1), (2, 1), (1, 2)):
        task = ("xla-tpu", (print_context, ("new",), {}, {}, {"spmd": False}), wanted)
        print("parent", os.getpid())
        if wanted == (1, 1):
            multiprocessing.spawn(launch._run_xla_rank, task, start_method="fork")
        else:
            with pytest.raises(
                ValueError, match=r"must be 1 or 1, and nnodes 1, to match the devices that XLA found, got \d and"
            ):
                multiprocessing.spawn(launch._run_xla_rank, task, start_method="fork")
    assert not runs()


def test_new_processes_check_their_number():
    lines = [line.split() for line in call_alone(spawn_new).splitlines()]
    parents, children = ({line[1] for line in lines if line[:1] == [word]} for word in ("parent", "context"))
    assert (len(parents), len(children)) == (1, 1)
    assert parents != children


def initialize_under_a_launcher():
    logging.basicConfig(level=logging.INFO)
    with idist.Parallel("xla-tpu"):
        print("never")


def test_processes_that_xla_cannot_connect_are_refused():
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python")
    code = f"from {__name__} import initialize_under_a_launcher as function; function()"
    completed = run(*launcher, sys.executable, "-c", code)
    assert completed.returncode != 0
    assert "torchrun started 2 processes, which XLA does not connect on devices of type 'CPU'" in completed.stdout
    assert "never" not in completed.stdout


def test_manual_seed_seeds_the_xla_generator():
    drawn = [torch.ones(1, device="xla").tolist()]
    for seed in (1, 2, 1):
        manual_seed(seed)
        drawn.append(torch.rand(2, device="xla").tolist())
    assert drawn[1] == drawn[3] != drawn[2]
