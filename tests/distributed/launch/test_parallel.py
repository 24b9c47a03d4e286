"""`Parallel` runs one function in one process, in those of a launcher, or in new ones, and puts everything back."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from datetime import timedelta
from functools import partial, wraps
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import camshaft.distributed as idist
from camshaft.distributed.backends.registry import choose
from camshaft.distributed.environments import detect
from camshaft.distributed.launch import spawn as launch
from camshaft.distributed.topology import Launch, Topology
from tests.distributed.observed import horovod, mpich, open_mpi, see, step, torchrun
from tests.limits import HANG, TIMEOUT
from tests.ranks import run_on_ranks

ROOT = Path(__file__).resolve().parents[3]
LOGGER = "camshaft.distributed.launcher.Parallel"
SPAWN = "camshaft.distributed.launch.parallel.spawn"
LAUNCHERS = ("TORCHELASTIC", "SLURM", "OMPI", "PMI", "MPI", "HOROVOD", "PJRT", "RANK", "WORLD", "LOCAL", "MASTER")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in os.environ:
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)


def give(local_rank, *args, **kwargs):
    return local_rank, idist.get_rank(), idist.get_world_size(), idist.backend(), args, kwargs


def lines(caplog):
    """What was logged, level and name checked."""
    assert {(record.levelno, record.name) for record in caplog.records} <= {(logging.INFO, LOGGER)}
    return [record.getMessage() for record in caplog.records]


# --- one process -------------------------------------------------------------------------------------------------


def test_without_a_backend_the_function_runs_here_and_its_value_is_given():
    with idist.Parallel(init_method="tcp://a:1", start_method="fork", unknown=3) as parallel:  # which play no part
        assert parallel.run(give, 1, more=2) == (0, 0, 1, None, (1,), {"more": 2})
        assert parallel.run(give) == (0, 0, 1, None, (), {})


def test_one_process_may_have_a_backend():
    assert idist.Parallel().init_method is None
    with idist.Parallel("gloo", init_method="env://", timeout=TIMEOUT) as parallel:
        assert (parallel.backend, parallel.init_method) == ("gloo", "env://")
        assert parallel.run(give, 5) == (0, 0, 1, "gloo", (5,), {})
    assert not dist.is_initialized()
    assert idist.backend() is None


@pytest.mark.parametrize("error", [ValueError("no data"), SystemExit(0)])
def test_an_error_leaves_nothing_initialized_and_comes_out_as_it_is(error):
    def fail(local_rank):
        raise error

    with pytest.raises(type(error)) as caught, idist.Parallel("gloo") as parallel:
        parallel.run(fail)
    assert caught.value is error
    assert (idist.backend(), dist.is_initialized()) == (None, False)


def test_run_is_for_a_block_that_was_entered():
    parallel = idist.Parallel()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="within the block"):
            parallel.run(give)
        with parallel:
            assert parallel.run(give)[0] == 0
    parallel = idist.Parallel("gloo", rank=0)
    with pytest.raises(ValueError, match="world_size"), parallel:
        pass
    with pytest.raises(RuntimeError, match="within the block"):
        parallel.run(give)
    assert idist.backend() is None


@pytest.mark.jobs
def test_within_a_run_that_the_user_began_the_function_runs_on_each_rank():
    assert run_on_ranks(2, in_a_run) == [(0, 0, 2, "gloo", (), {}), (1, 1, 2, "gloo", (), {})]


def in_a_run():
    with idist.Parallel() as parallel:
        return parallel.run(give)


def test_an_init_method_needs_no_launcher(tmp_path):
    assert run_on_ranks(2, meet_at, f"file://{tmp_path}/meeting") == [(1, 2), (1, 2)]
    assert list(tmp_path.iterdir()) == []


def meet_at(where):
    rank = dist.get_rank()
    dist.destroy_process_group()
    options = {"rank": rank, "world_size": 2, "timeout": TIMEOUT}
    with idist.Parallel("gloo", init_method=where, **options) as parallel:
        found = parallel.run(lambda local_rank: (idist.all_reduce(rank), idist.get_world_size()))
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the test destroys one
    return found


# --- new processes -----------------------------------------------------------------------------------------------


def write(local_rank, folder, text):
    Path(folder, str(idist.get_rank())).write_text(f"{text} {idist.all_reduce(1)}")


def test_new_processes_run_the_function(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger=LOGGER)
    with idist.Parallel("gloo", nproc_per_node=2, start_method="forkserver") as parallel:
        assert idist.backend() is None
        for text in "ab":
            assert parallel.run(write, str(tmp_path), text=text) is None
            assert [(tmp_path / rank).read_text() for rank in "01"] == [f"{text} 2"] * 2
    begin, *parameters = lines(caplog)[:3]
    assert "'gloo'" in begin
    assert [line.strip() for line in parameters] == ["nproc_per_node: 2", "start_method: forkserver"]
    assert ["starts in 2 new processes" in line for line in lines(caplog)[3:]] == [True, False, True, False]


def test_spawn_gets_what_was_given_and_nothing_else_and_only_the_first_node_logs(monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger=LOGGER)
    calls = []
    monkeypatch.setattr(SPAWN, lambda *args, **kwargs: calls.append((args, kwargs)))
    nodes = {"nnodes": 3, "node_rank": 1, "master_addr": "a", "master_port": "5", "start_method": "fork"}
    with idist.Parallel("gloo", 2, **nodes) as parallel:
        parallel.run(give, 1, b=2)
    assert lines(caplog) == []
    with idist.Parallel("gloo", 2, nnodes=2, node_rank=0, init_method="file:///a") as parallel:
        parallel.run(give)
    assert "starts in 4 new processes" in lines(caplog)[5]
    with idist.Parallel("gloo", nproc_per_node=1) as parallel:
        parallel.run(give)
    assert calls[0] == (("gloo", give, (1,), {"b": 2}, 2), nodes)
    assert calls[2] == (("gloo", give, (), {}, 1), {})


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"backend": "unknown"},
        {"backend": 3, "nproc_per_node": 1},
        *({name: 0} for name in ("nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port")),
    ],
)
def test_without_a_known_backend_nothing_is_started(arguments):
    with pytest.raises(ValueError, match="backend must be"):
        idist.Parallel(**arguments)


IMPOSSIBLE_NODES = [  # and the argument that the message names
    ({"nproc_per_node": 0}, "nproc_per_node"),
    ({"nproc_per_node": 2.0}, "nproc_per_node"),
    ({"nproc_per_node": True}, "nproc_per_node"),
    ({"nnodes": -1}, "nnodes"),
    ({"nnodes": 2}, "node_rank must be given"),
    ({"nnodes": 2, "node_rank": 2}, "node_rank"),
    ({"node_rank": -1}, "node_rank"),
    ({"node_rank": False}, "node_rank"),
    ({"nnodes": 2, "node_rank": 0, "master_addr": "a"}, "master_addr and master_port, or init_method, must be given"),
    ({"nnodes": 2, "node_rank": 0, "master_port": 1}, "master_addr and master_port, or init_method, must be given"),
    ({"master_port": "a"}, "master_port"),
    ({"master_port": 0}, "master_port"),
    ({"master_port": 70000}, "master_port"),
    ({"master_addr": "a", "init_method": "tcp://a:1"}, "must not be given with init_method"),
    ({"init_method": 3}, "init_method"),
]


@pytest.mark.parametrize(("arguments", "message"), IMPOSSIBLE_NODES)
def test_nodes_that_cannot_be_are_refused_at_once(arguments, message):
    with pytest.raises(ValueError, match=message):
        idist.Parallel("auto", **{"nproc_per_node": 1, **arguments})


@pytest.mark.parametrize("arguments", [{}, {"nproc_per_node": 1}])
@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_an_unknown_option_is_refused_at_once(backend, arguments):
    if backend not in idist.available_backends():
        pytest.skip(f"{backend} is not installed")
    with pytest.raises(TypeError, match=r"\['nproc'\]; it accepts .*'nproc_per_node'.*'timeout'"):
        idist.Parallel(backend, nproc=2, **arguments)
    known = {"debug": True, "hang_report_after": 3.0, "timeout": timedelta(seconds=3), "device": "cpu"}
    idist.Parallel(backend, **known, **arguments)


def test_what_is_for_new_processes_is_ignored_with_a_warning_that_names_the_line():
    with pytest.warns(UserWarning, match="nnodes, master_port, start_method ignored without nproc_per_node") as caught:
        parallel = idist.Parallel("gloo", nnodes=2, master_port="x", start_method="spawn", timeout=TIMEOUT)
    assert [warning.filename for warning in caught] == [__file__]
    with parallel:
        assert parallel.run(give)[3] == "gloo"


@pytest.mark.parametrize(
    ("name", "environ", "nnodes", "is_refused"),
    [
        ("torchrun", torchrun(1, 1, [2]), None, True),
        ("mpirun", open_mpi(0, 2, 0, 2), None, True),
        ("mpirun", mpich(1, 2, 1, 2), None, True),
        ("horovodrun", horovod(0, 2, 0, 2, 0, 1), None, True),
        ("srun", step(0, 0, [1, 1]), None, True),
        ("srun", step(0, 0, [1, 1]), 3, True),
        ("srun", step(0, 0, [1, 1]), 2, False),  # one process on each node starts those of the node
        ("mpirun", {"OMPI_COMM_WORLD_RANK": "0"}, None, False),  # nothing that counts
        ("a worker of torchrun", torchrun(1, 1, [2]), None, False),
    ],
)
def test_no_process_of_a_launcher_starts_processes_that_are_there(monkeypatch, name, environ, nnodes, is_refused):
    for variable, value in environ.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(launch.environments, "torchrun_agent", lambda environ: 1 if name == "torchrun" else None)
    monkeypatch.setattr(launch, "_spawn", wraps(launch._spawn)(lambda *args, **kwargs: "started"))
    where = {} if nnodes is None else {"nnodes": nnodes, "node_rank": 0, "init_method": "file:///tmp/a"}
    for start in (partial(idist.Parallel, "gloo"), partial(idist.spawn, "gloo", print, ())):
        if is_refused:
            with pytest.raises(RuntimeError, match=f"^{name} has already started 2 processes: omit nproc_per_node"):
                start(nproc_per_node=2, **where)
        else:
            assert start(nproc_per_node=2, **where)


# --- the log -----------------------------------------------------------------------------------------------------


def test_the_log_tells_what_happens(caplog):
    assert (logging.getLogger(LOGGER).handlers, logging.getLogger(LOGGER).level) == ([], logging.NOTSET)
    caplog.set_level(logging.INFO, logger=LOGGER)
    with idist.Parallel("gloo") as parallel:
        parallel.run(give)
    begin, starts, has_ended, end = lines(caplog)
    assert (begin, end) == ("'gloo' is initialized, with 1 process", "'gloo' is finalized")
    assert "give" in starts
    assert "starts in 1 process" in starts
    assert "give" in has_ended


# --- backend="auto" ----------------------------------------------------------------------------------------------

TORCHRUN = torchrun(1, 1, [2])
OPEN_MPI = open_mpi(0, 2, 0, 2)
HOROVODRUN = horovod(0, 2, 0, 2, 0, 1)
ALL = ("nccl", "gloo", "mpi", "xla-tpu", "horovod")
WITHOUT_NCCL = ("gloo", "mpi")
ONE_MPS = (
    "there is 1 mps device for 1 process"
    if "mps" in torch.distributed.Backend.default_device_backend_map
    else "torch has no backend for mps"  # 2.7
)


@pytest.mark.parametrize(
    ("environ", "nproc", "devices", "available", "backend", "why"),
    [
        ({}, None, None, ALL, None, "no launcher started this process, and nproc_per_node is not given"),
        ({}, 2, None, ALL, "gloo", "there is no accelerator"),
        ({}, 2, ("cuda", 2), ALL, "nccl", "there are 2 cuda devices for 2 processes"),
        ({}, 2, ("cuda", 2), WITHOUT_NCCL, "gloo", "'nccl' is not available for cuda"),
        ({}, 1, ("mps", 1), ALL, "gloo", ONE_MPS),
        ({}, 1, ("xpu", 4), (*ALL, "xccl"), "xccl", "there are 4 xpu devices for 1 process"),
        ({}, 1, ("vulkan", 1), ALL, "gloo", "torch has no backend for vulkan"),
        (TORCHRUN, None, None, ALL, "gloo", "there is no accelerator"),
        (TORCHRUN, None, ("cuda", 8), ALL, "nccl", "there are 8 cuda devices for 2 processes"),
        (TORCHRUN, None, ("cuda", 1), ALL, "gloo", "there is 1 cuda device for 2 processes"),
        (OPEN_MPI, None, None, ALL, "mpi", "openmpi started this process, for MPI"),
        (OPEN_MPI, None, None, ("gloo",), "gloo", "there is no accelerator"),
        (HOROVODRUN, None, None, ALL, "horovod", "horovodrun started this process"),
        (HOROVODRUN, None, None, ("gloo",), "gloo", "there is no accelerator"),
        ({"PJRT_DEVICE": "TPU"}, 4, None, ALL, "xla-tpu", "PJRT_DEVICE=TPU is set, and torch_xla is installed"),
        ({"PJRT_DEVICE": "TPU"}, 4, None, ("gloo",), "gloo", "there is no accelerator"),
    ],
)
def test_auto_chooses_by_launcher_and_devices(monkeypatch, environ, nproc, devices, available, backend, why):
    see(monkeypatch, *(devices or (None, 0)))
    assert choose(environ, detect(environ), nproc, available) == (backend, why)
    step = Launch("slurm", Topology(world_size=2, local_world_size=2), mpi=True)  # that serves MPI
    assert choose({}, step, None, ALL) == ("mpi", "slurm started this process, for MPI")


def test_auto_says_why_and_runs_in_one_process_when_nothing_asks_for_more(caplog):
    caplog.set_level(logging.INFO, logger=LOGGER)
    with pytest.warns(UserWarning, match="nnodes ignored without nproc_per_node"):
        parallel = idist.Parallel("auto", nnodes=2)
    with parallel:
        assert parallel.run(give)[2:4] == (1, None)
    assert lines(caplog)[0].startswith("backend 'auto' is None: no launcher started this process")
    assert parallel.backend is None
    assert idist.Parallel("auto", nproc_per_node=2).backend is not None


# --- a real launcher ---------------------------------------------------------------------------------------------

SCRIPT = """
import json, logging, os
import camshaft.distributed as idist

def training(local_rank, start):
    total = idist.all_reduce(idist.get_rank() + start)
    os.write(1, (json.dumps([local_rank, idist.get_world_size(), idist.backend(), total]) + "\\n").encode())
    idist.barrier()  # the first rank that fails ends the other, which must have written until then
    return total

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="LOG " + os.environ["RANK"] + " %(name)s: %(message)s")
    with idist.Parallel("gloo") as parallel:
        assert parallel.run(training, 10) == 21
    assert idist.backend() is None
    with idist.Parallel("auto") as parallel:
        assert parallel.run(training, 20) == 41
        parallel.run(lambda local_rank: 1 / local_rank)
"""


@pytest.mark.jobs
def test_under_torchrun_the_processes_that_are_there_run_the_function_and_fail_with_it(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, str(tmp_path / "script.py")], env=environment, capture_output=True, text=True, timeout=HANG
    )
    told = sorted(json.loads(line) for line in done.stdout.splitlines())
    assert told == [[rank, 2, "gloo", total] for rank in (0, 1) for total in (21, 41)]
    logged = [line for line in done.stderr.splitlines() if line.startswith("LOG ") and LOGGER in line]
    assert f"LOG 0 {LOGGER}: backend 'auto' is 'gloo': there is no accelerator" in logged
    assert f"LOG 0 {LOGGER}: 'gloo' is initialized, with 2 processes" in logged
    assert {line.split()[1] for line in logged} == {"0"}
    assert done.returncode != 0
    assert "ZeroDivisionError" in done.stderr


def test_without_a_backend_a_process_of_several_is_told_that_it_runs_alone(monkeypatch):
    for name, value in mpich(1, 2, 1, 2).items():
        monkeypatch.setenv(name, value)
    with pytest.warns(UserWarning, match="a launcher started 2 processes, but backend is None") as caught:
        parallel = idist.Parallel().__enter__()
    assert caught[0].filename == __file__
    assert parallel.run(give)[:3] == (0, 0, 1)


def test_auto_model_in_a_process_of_several_without_a_backend_says_that_it_runs_alone(monkeypatch):
    idist.auto_model(torch.nn.Linear(1, 1))
    for name, value in mpich(1, 2, 1, 2).items():
        monkeypatch.setenv(name, value)
    with pytest.warns(UserWarning, match="a launcher started 2 processes, but no backend is initialized") as caught:
        idist.auto_model(torch.nn.Linear(1, 1))
    assert caught[0].filename == __file__
