"""Each launcher is recognized, also within another one, and contradictory variables are refused."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType
from unittest import mock

import pytest

from camshaft.distributed import environments
from camshaft.distributed.environments import detect, first_host, torchrun_agent
from tests.distributed.observed import batch, by_hand, horovod, job, mpich, open_mpi, rendezvous, step, torchrun

ROOT = Path(__file__).resolve().parents[2]
NODES = ("num_nodes", "node_rank")
SECOND_OF_TWO = {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}


def found(environ):
    """Detect the launcher in an environment that cannot be written to."""
    return detect(MappingProxyType(environ))


def place(launch):
    one = launch.topology
    return (one.rank, one.world_size), (one.local_rank, one.local_world_size), (one.node_rank, one.num_nodes)


DOCUMENTED = {
    "SLURM_JOB_ID": "12345",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "c1,c2",
}
OF_JOB = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_NTASKS": "4"}
PART_OF_JOB = step(0, 0, [1], SLURM_STEP_NODELIST="n2", SLURM_JOB_NUM_NODES="2", **OF_JOB)
ONE_LAUNCHER = [
    # what is set, who started it, (rank, of), (local rank, of), (node, of), what of it is assumed
    (torchrun(1, 1, [2]), "torchrun", (1, 2), (1, 2), (0, 1), ()),
    (torchrun(1, 1, [2, 1]), "torchrun", (1, 3), (1, 2), (0, 2), ()),
    (torchrun(2, 0, [2, 1], node=1), "torchrun", (2, 3), (0, 1), (1, 2), ()),
    (torchrun(5, 2, [1, 2, 3], node=2), "torchrun", (5, 6), (2, 3), (2, 3), ()),
    (by_hand(0, 0, 1), "environment", (0, 1), (0, 1), (0, 1), ()),
    (by_hand(1, 1, 4, LOCAL_WORLD_SIZE="2"), "environment", (1, 4), (1, 2), (0, 2), NODES),
    (by_hand(3, 3, 4), "environment", (3, 4), (3, 4), (0, 1), ("local_world_size", *NODES)),
    (by_hand(5, 1, 8), "environment", (5, 8), (1, 4), (1, 2), ("local_world_size", *NODES)),
    (by_hand(2, 0, 3, LOCAL_WORLD_SIZE="1", **SECOND_OF_TWO), "environment", (2, 3), (0, 1), (1, 2), ()),
    (step(1, 1, [2]), "slurm", (1, 2), (1, 2), (0, 1), ()),
    (step(1, 0, [1, 1], node=1), "slurm", (1, 2), (0, 1), (1, 2), ()),
    (step(2, 0, [2, 1], node=1), "slurm", (2, 3), (0, 1), (1, 2), ()),
    (step(4, 0, [2, 2, 1], node=2), "slurm", (4, 5), (0, 1), (2, 3), ()),
    (step(2, 1, [2, 2], node=0, SLURM_GTIDS="0,2"), "slurm", (2, 4), (1, 2), (0, 2), ()),  # round the nodes
    (PART_OF_JOB, "slurm", (0, 1), (0, 1), (0, 1), ()),
    (DOCUMENTED, "slurm", (3, 4), (1, 2), (1, 2), ("local_world_size", "node_rank")),
    (open_mpi(1, 2, 1, 2), "openmpi", (1, 2), (1, 2), (0, 1), ()),
    (open_mpi(3, 4, 1, 2), "openmpi", (3, 4), (1, 2), (1, 2), NODES),
    (open_mpi(2, 3, 0, 1), "openmpi", (2, 3), (0, 1), (2, 3), NODES),  # uneven, so wrong, and it says so
    (mpich(1, 2, 1, 2), "mpich", (1, 2), (1, 2), (0, 1), ()),
    (mpich(2, 4, 0, 2), "mpich", (2, 4), (0, 2), (1, 2), NODES),
    ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "mpich", (1, 2), (1, 2), (0, 1), ("local_world_size", "local_rank", *NODES)),
    (horovod(1, 2, 1, 2, 0, 1), "horovodrun", (1, 2), (1, 2), (0, 1), ()),
    (horovod(1, 3, 0, 2, 1, 2), "horovodrun", (1, 3), (0, 2), (1, 2), ()),
    (horovod(2, 3, 1, 2, 0, 1), "horovodrun", (2, 3), (1, 2), (1, 2), NODES),  # "cross" counts few nodes here
]


def test_the_shell_of_a_step_with_a_terminal_is_not_one_of_several_processes(monkeypatch):
    for task, has_terminal, is_launch in (
        (["-zsh"], True, False),
        (["bash"], False, True),  # each reads the same script from srun
        (["bash", "-c", "python train.py"], True, True),
        (["python", "train.py"], True, True),
        ([], True, True),  # nobody knows
    ):
        monkeypatch.setattr(environments, "_task_of_step", lambda task=task: task)
        environ = step(0, 0, [4]) | ({"SLURM_PTY_PORT": "4711"} if has_terminal else {})
        assert (found(environ) is not None) == is_launch, task


def test_the_task_is_the_child_of_the_daemon_of_the_step(tmp_path):
    """A script under a program that calls itself as the daemon does."""
    script = "import os, subprocess, sys; from pathlib import Path; Path('/proc/self/comm').write_text('slurmstepd');"
    ask = "from camshaft.distributed import environments; print(environments._task_of_step())"
    script += f"subprocess.run(['sh', '-c', '{sys.executable} -c \"{ask}\"; true'])"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    words = eval(done.stdout)
    assert words[:2] == ["sh", "-c"]
    assert ask in words[2]


@pytest.mark.parametrize(("environ", "launcher", "rank", "local_rank", "node_rank", "assumed"), ONE_LAUNCHER)
def test_each_launcher_is_recognised_and_says_where_the_process_stands(
    environ, launcher, rank, local_rank, node_rank, assumed
):
    launch = found(environ)
    assert (launch.launcher, *place(launch), launch.assumed) == (launcher, rank, local_rank, node_rank, assumed)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"PATH": "/bin", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "8"},
        job([2, 2]),  # under salloc
        batch([2, 2]),
        step(0, 0, [4], SLURM_STEP_ID="4294967290"),  # the shell that salloc opens
        {"TORCHELASTIC_RUN_ID": "none"},  # a process for which a worker took the rest away
        {name: value for name, value in DOCUMENTED.items() if name != "SLURM_STEP_ID"},
        {name: value for name, value in DOCUMENTED.items() if name != "SLURM_PROCID"},
    ],
)
def test_what_nobody_launched_stands_alone(environ):
    assert found(environ) is None


NESTED = [
    (torchrun(3, 1, [2, 2], node=1) | step(1, 0, [1, 1], node=1), "torchrun", (3, 4)),
    (torchrun(0, 0, [2]) | step(1, 1, [2]), "torchrun", (0, 2)),  # a torchrun of its own in each task
    (torchrun(3, 1, [2, 2], node=1) | open_mpi(1, 2, 0, 1), "torchrun", (3, 4)),
    (torchrun(1, 1, [2]) | batch([1]), "torchrun", (1, 2)),
    (open_mpi(1, 4, 1, 4) | batch([4]), "openmpi", (1, 4)),
    (open_mpi(0, 4, 0, 2) | step(1, 0, [1, 1], node=1), "openmpi", (0, 4)),  # srun began mpirun's daemons
    (mpich(1, 2, 1, 2) | step(0, 0, [1]), "mpich", (1, 2)),
    (horovod(1, 2, 1, 2, 0, 1) | step(0, 0, [1]), "horovodrun", (1, 2)),
    (horovod(1, 2, 1, 2, 0, 1) | open_mpi(0, 1, 0, 1), "horovodrun", (1, 2)),
    (mpich(1, 2, 1, 2) | open_mpi(1, 2, 1, 2), "openmpi", (1, 2)),
    (by_hand(1, 1, 2) | batch([4]), "environment", (1, 2)),
    (by_hand(1, 1, 2) | open_mpi(0, 1, 0, 1), "environment", (1, 2)),  # started by the one process of mpirun
    (by_hand(3, 1, 4) | mpich(1, 2, 0, 1), "environment", (3, 4)),  # or by the one on each node
    (by_hand(1, 1, 2) | mpich(1, 2, 1, 2), "mpich", (1, 2)),
    (by_hand(1, 1, 2) | horovod(1, 2, 1, 2, 0, 1), "horovodrun", (1, 2)),
    (step(1, 1, [2]) | rendezvous(1, 1, 2), "slurm", (1, 2)),
    (step(3, 1, [2, 2], node=1) | rendezvous(3, 1, 4), "slurm", (3, 4)),
    (step(0, 0, [1]) | rendezvous(2, 2, 4), "environment", (2, 4)),  # a launcher in the only task
    (step(1, 1, [2]) | rendezvous(3, 1, 4), "environment", (3, 4)),
    (step(1, 0, [1, 1], node=1) | rendezvous(3, 1, 4), "environment", (3, 4)),  # in the one of each node
]


@pytest.mark.parametrize(("environ", "launcher", "rank"), NESTED)
def test_launchers_nest_and_the_innermost_counts(environ, launcher, rank):
    launch = found(environ)
    assert (launch.launcher, place(launch)[0]) == (launcher, rank)


OF_BOTH = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "RANK", "LOCAL_RANK", "WORLD_SIZE")


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        (by_hand(0, 0, 1) | open_mpi(1, 2, 1, 2), ("RANK", "OMPI_COMM_WORLD_RANK")),
        (by_hand(1, 1, 4) | mpich(0, 4, 0, 2), ("RANK", "PMI_RANK")),  # two on each node cannot start one more
        (step(3, 1, [3, 3], node=1) | rendezvous(1, 1, 2), OF_BOTH),
        (step(3, 1, [2, 2], node=1) | rendezvous(3, 1, 8), OF_BOTH),  # several nodes with several tasks must agree
        (step(1, 1, [2]) | rendezvous(0, 1, 2), OF_BOTH),
        (step(1, 1, [4]) | rendezvous(1, 1, 2), OF_BOTH),
        (step(1, 0, [1, 1], node=1) | rendezvous(0, 0, 2), OF_BOTH),
    ],
)
def test_launchers_that_contradict_each_other_are_refused_with_what_each_says(environ, named):
    with pytest.raises(RuntimeError, match="the environment is contradictory") as refusal:
        found(environ)
    for name in named:
        assert re.search(rf"(^|\s){name}={environ[name]}(\s|$)", str(refusal.value))


def test_the_refusal_is_a_table_with_a_column_for_each_source():
    with pytest.raises(RuntimeError) as refusal:
        found(rendezvous(3, 3, 2) | {"WORLD_SIZE": "4"} | open_mpi(1, 8, 1, 2))
    assert str(refusal.value).split("\n", 1)[1] == (
        "                  openmpi                       environment\n"
        "rank              OMPI_COMM_WORLD_RANK=1        RANK=3\n"
        "world_size        OMPI_COMM_WORLD_SIZE=8        WORLD_SIZE=4\n"
        "local_rank        OMPI_COMM_WORLD_LOCAL_RANK=1  LOCAL_RANK=3\n"
        "local_world_size  OMPI_COMM_WORLD_LOCAL_SIZE=2  -"
    )


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (by_hand(2, 0, 2), r"rank must be in \[0, world_size\).*RANK=2.*WORLD_SIZE=2"),
        (by_hand(2, 2, 4, LOCAL_WORLD_SIZE="2"), r"local_rank must be .*LOCAL_RANK=2.*LOCAL_WORLD_SIZE=2"),
        (torchrun(0, 0, [1]) | {"LOCAL_RANK": "1"}, r"local_rank must be .*torchrun|LOCAL_RANK=1"),
        (torchrun(0, 0, [2, 1]) | {"GROUP_WORLD_SIZE": "3"}, "every node must have a process.*GROUP_WORLD_SIZE=3"),
        (open_mpi(2, 2, 0, 2), "rank must be.*OMPI_COMM_WORLD_RANK=2"),
        (mpich(0, 2, 2, 2), "local_rank must be.*MPI_LOCALRANKID=2"),
        (horovod(0, 2, 0, 1, 2, 2), "node_rank must be.*HOROVOD_CROSS_RANK=2"),
        (step(0, 0, [2], SLURM_NODEID="1"), "node_rank must be.*SLURM_NODEID=1"),
        *(
            (environ | {name: value}, rf"variable {name} must be .*{re.escape(repr(value))}")
            for environ, name, value in (
                (rendezvous(0, 0, 1), "RANK", ""),
                (torchrun(0, 0, [1]), "LOCAL_WORLD_SIZE", "0x1"),
                (open_mpi(0, 1, 0, 1), "OMPI_COMM_WORLD_LOCAL_RANK", "abc"),
                (mpich(0, 1, 0, 1), "PMI_SIZE", "abc"),
                (horovod(0, 1, 0, 1, 0, 1), "HOROVOD_CROSS_SIZE", "abc"),
                (step(0, 0, [1]), "SLURM_PROCID", "abc"),
            )
        ),
        (rendezvous(0, 0, 1) | {"MASTER_PORT": "abc"}, "MASTER_PORT must be .*abc"),
        (rendezvous(0, 0, 1) | {"MASTER_PORT": "65536"}, "MASTER_PORT must be .*65536"),
        ({"RANK": "1"}, "the environment has RANK=1 but not WORLD_SIZE, LOCAL_RANK"),
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "has WORLD_SIZE=2, LOCAL_RANK=0 but not RANK"),
        ({"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2"}, "has RANK=0, WORLD_SIZE=2 but not LOCAL_RANK"),
        ({"PMI_RANK": "0"}, "has PMI_RANK=0 but not PMI_SIZE"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "has OMPI_COMM_WORLD_SIZE=2 but not OMPI_COMM_WORLD_RANK"),
        ({"HOROVOD_SIZE": "2"}, "has HOROVOD_SIZE=2 but not HOROVOD_RANK"),
        *(
            ({other: DOCUMENTED[other] for other in DOCUMENTED if other != name}, f"srun's variables, but not {name}")
            for name in sorted(DOCUMENTED.keys() - {"SLURM_STEP_ID", "SLURM_PROCID"})
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_variables(environ, message):
    with pytest.raises(RuntimeError, match=f"(?s){message}"):
        found(environ)


@pytest.mark.parametrize(
    ("launched", "some", "missing"),
    [
        (open_mpi(1, 2, 1, 2), {"WORLD_SIZE": "7"}, "RANK, LOCAL_RANK"),
        (step(1, 1, [2]), {"MASTER_ADDR": "a", "MASTER_PORT": "7"}, "RANK, WORLD_SIZE, LOCAL_RANK"),
        (step(1, 1, [2]), by_hand(0, 0, 1), "MASTER_ADDR, MASTER_PORT"),
    ],
)
def test_some_variables_set_by_hand_beside_a_launcher_are_ignored_with_a_warning_that_names_them(
    launched, some, missing
):
    given = ", ".join(sorted(some, key=["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"].index))
    with pytest.warns(UserWarning, match=f"{given} in the environment ignored, as {missing} is not set;"):
        launch = found(launched | some)
    assert (place(launch), address(launch)) == (place(found(launched)), address(found(launched)))


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (torchrun(0, 0, [1]), ("localhost", 29611)),
        (rendezvous(0, 0, 1), ("10.0.0.9", 4000)),
        (by_hand(0, 0, 1), (None, None)),
        (open_mpi(0, 1, 0, 1) | {"MASTER_ADDR": "a", "MASTER_PORT": "7"}, ("a", 7)),
        (mpich(0, 1, 0, 1) | {"MASTER_PORT": "0"}, (None, 0)),
        (horovod(0, 1, 0, 1, 0, 1) | {"MASTER_ADDR": "a"}, ("a", None)),
        (step(0, 0, [1]), ("n1", 17345)),
        (DOCUMENTED, ("c1", 17345)),
        (PART_OF_JOB, ("n2", 17345)),
        (step(1, 1, [2]) | rendezvous(1, 1, 2), ("10.0.0.9", 4000)),
    ],
)
def test_the_address_is_that_of_the_variables_and_of_slurm(environ, expected):
    assert address(found(environ)) == expected


@pytest.mark.parametrize(
    ("environ", "mpi", "host", "agent_store"),
    [
        (by_hand(0, 0, 1), False, None, False),
        (torchrun(0, 0, [1]), False, None, True),
        (torchrun(0, 0, [1], TORCHELASTIC_USE_AGENT_STORE="False"), False, None, False),
        (open_mpi(0, 1, 0, 1), True, "vm", False),
        (mpich(0, 1, 0, 1), True, "vm", False),
        (horovod(0, 1, 0, 1, 0, 1), False, "vm", False),
        (step(1, 0, [1, 1], node=1), False, "n2", False),
        (step(1, 0, [1, 1], node=1, PMI_RANK="1", PMI_SIZE="2", PMI_JOBID="8.0"), True, "n2", False),  # --mpi=pmi2
        (step(1, 0, [1, 1], node=1, PMIX_RANK="1"), True, "n2", False),
    ],
)
def test_it_is_told_what_joins_the_ranks_and_what_the_node_is_called(environ, mpi, host, agent_store):
    launch = found(environ)
    assert (launch.mpi, launch.host, launch.agent_store) == (mpi, host, agent_store)
    assert launch.sources["rank"] in [f"{name}={value}" for name, value in environ.items()]


# --- Slurm --------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def every_host_has_an_address(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [])


def address(launch):
    return launch.master_addr, launch.master_port


def test_the_port_depends_on_the_job_and_the_step():
    def port_of(job_id, step_id=0):
        return found(step(0, 0, [1], SLURM_JOB_ID=str(job_id), SLURM_STEP_ID=str(step_id))).master_port

    for job_id, port in ((12345, 17345), (7, 15007), (123450000, 15000), (9999, 24999)):
        assert port_of(job_id) == port
    ports = [port_of(job_id, step_id) for job_id in range(9_990, 10_010) for step_id in range(100)]
    assert len(set(ports)) == len(ports)
    assert all(15_000 <= port < 32_768 for port in ports)


def test_the_address_is_looked_up_once_and_only_when_it_is_read(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", look_up := mock.Mock())
    launch = found(step(1, 1, [2]))
    assert place(launch)[0] == (1, 2)
    assert not look_up.called
    assert launch.master_addr == launch.master_addr == "n1"
    look_up.assert_called_once_with("n1", None)


def test_a_node_name_without_an_address_gives_way_to_the_host_of_srun(monkeypatch):
    environ = step(0, 0, [1, 1])
    assert found(environ).master_addr == "n1"
    monkeypatch.setattr(socket, "getaddrinfo", mock.Mock(side_effect=socket.gaierror("Name or service not known")))
    assert found(environ).master_addr == "10.0.0.1"
    assert found(environ | {"SLURM_STEP_NODELIST": "x" * 64}).master_addr == "10.0.0.1"
    del environ["SLURM_LAUNCH_NODE_IPADDR"]
    assert found(environ).master_addr == "n1"


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("c1001a-11,c1001a-17", "c1001a-11"),
        ("machine2-[02-4]vm1", "machine2-02vm1"),
        ("b[3-4],a1,c[1,2]x", "b3"),
        (" n[ 1, 2] , m ", "n1"),
        ("n[18-19,1-2]", "n18"),
        ("rack[1-2]n[01-02]", "rack1n01"),
        ("[1-2]", "1"),
    ],
)
def test_the_first_host_of_a_list_keeps_its_zeros(nodelist, host):
    assert first_host(nodelist) == host


@pytest.mark.parametrize("nodelist", ["", "[]", "x[]", "x[a-b]", "x[-1]", "x[1", "x1]", "x[1[2]]"])
def test_a_list_without_a_first_host_is_refused(nodelist):
    with pytest.raises(RuntimeError, match=f"node list must name hosts, .* got {re.escape(repr(nodelist))}"):
        first_host(nodelist)


# --- torchrun -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc").exists(), reason="without /proc")
@pytest.mark.parametrize(
    ("words", "is_agent"),
    [
        (("-c", "echo; read line", "-m", "torch.distributed.run", "train.py"), True),
        (("-c", "echo; read line", "-m", "torch.distributed.launch"), True),
        (("torchrun", "train.py"), True),
        (("-c", "echo; read line", "train.py", "--launcher", "torchrun"), False),  # a worker
        (("-c", "echo; read line", "-m", "torch.distributed.runner"), False),
    ],
)
def test_the_parent_is_recognised_as_torchrun_by_its_command_line(monkeypatch, tmp_path, words, is_agent):
    (tmp_path / "torchrun").write_text("echo; read line")
    worker = {"TORCHELASTIC_RUN_ID": "none"}
    assert torchrun_agent(worker) is None
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(["sh", *words], cwd=tmp_path, **pipes) as other:
        monkeypatch.setattr(os, "getppid", lambda: other.pid)
        other.stdout.readline()
        assert torchrun_agent(worker) == (other.pid if is_agent else None)
        assert torchrun_agent({"RANK": "0"}) is None
        other.communicate(b"\n")
    assert torchrun_agent(worker) is None  # it has ended


def test_the_place_of_a_worker_of_ray_train():
    variables = {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for more, node_rank, assumed in (
        ({"NODE_RANK": "1"}, 1, ("num_nodes",)),
        ({"NODE_RANK": "7"}, 2, ("num_nodes", "node_rank")),  # of something else
        ({"NODE_RANK": "first"}, 2, ("num_nodes", "node_rank")),
        (SECOND_OF_TWO | {"NODE_RANK": "0"}, 1, ()),  # of torchrun
    ):
        topology, found_assumed = environments.infer(variables | more, 2, 3)
        assert (topology.local_rank, topology.local_world_size, topology.node_rank) == (0, 1, node_rank)
        assert found_assumed == assumed
