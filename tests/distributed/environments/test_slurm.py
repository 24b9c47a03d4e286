from __future__ import annotations

import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from camshaft.distributed.environments import detect, slurm
from camshaft.distributed.environments.slurm import expand_hosts
from tests.distributed.environments.observed import by_hand, rendezvous, step

DOCUMENTED = {
    "SLURM_JOB_ID": "12345",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "c1,c2",
}


@pytest.fixture(autouse=True)
def every_host_has_an_address(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [])


def three(launch):
    return launch.topology.rank, launch.topology.local_rank, launch.topology.world_size


def address(launch):
    return launch.master_addr, launch.master_port


def test_the_documented_variables_are_enough_and_the_rest_is_assumed():
    launch = detect(DOCUMENTED)
    assert str(launch.topology) == "rank=3, world_size=4, local_rank=1, local_world_size=2, node_rank=1, num_nodes=2"
    assert launch.assumed == ("local_world_size", "node_rank")
    assert address(launch) == ("c1", 17345)


@pytest.mark.parametrize("name", sorted(DOCUMENTED.keys() - {"SLURM_STEP_ID", "SLURM_PROCID"}))
def test_a_step_with_a_missing_variable_is_refused_by_its_name(name):
    with pytest.raises(RuntimeError, match=f"some of srun's variables, but not {name}"):
        detect({other: value for other, value in DOCUMENTED.items() if other != name})


@pytest.mark.parametrize("name", ["SLURM_STEP_ID", "SLURM_PROCID"])
def test_without_step_and_rank_there_is_no_launch(name):
    assert detect({other: value for other, value in DOCUMENTED.items() if other != name}) is None


def test_a_step_on_a_part_of_the_job_counts_only_its_own_nodes_and_tasks():
    of_the_job = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)"}
    launch = detect(step(0, 0, [1], SLURM_STEP_NODELIST="n2", **of_the_job, SLURM_NTASKS="4"))
    assert (launch.topology.world_size, launch.topology.num_nodes, launch.master_addr) == (1, 1, "n2")


@pytest.mark.parametrize(
    ("tasks_per_node", "here"),
    [("3(x2),1", 3), ("3,3,1", 3), ("1,3(x1),3", 3), ("3,1,3", 1)],
)
def test_the_tasks_of_this_node_are_those_of_its_place_in_the_list(tasks_per_node, here):
    launch = detect(
        step(3, 0, [3, 3, 1], node=1, SLURM_STEP_TASKS_PER_NODE=tasks_per_node, SLURM_GTIDS=",".join("3" * here))
    )
    assert (launch.topology.local_world_size, launch.assumed) == (here, ())


def test_tasks_per_node_that_do_not_fit_the_step_are_not_believed():
    environ = step(3, 1, [2, 2], node=1, SLURM_TASKS_PER_NODE="9")
    assert detect(environ).assumed == ()
    del environ["SLURM_STEP_TASKS_PER_NODE"]
    assert detect(environ).assumed == ("local_world_size",)


def test_ranks_may_go_round_the_nodes():
    launch = detect(step(2, 1, [2, 2], node=0, SLURM_GTIDS="0,2"))
    assert str(launch.topology) == "rank=2, world_size=4, local_rank=1, local_world_size=2, node_rank=0, num_nodes=2"


@pytest.mark.parametrize(
    ("environ", "by_hand", "launcher", "place"),
    [
        (step(1, 1, [2]), rendezvous(1, 1, 2), "slurm", (1, 1, 2)),
        (step(3, 1, [2, 2], node=1), rendezvous(3, 1, 4), "slurm", (3, 1, 4)),
        (step(0, 0, [1]), rendezvous(2, 2, 4), "environment", (2, 2, 4)),  # a launcher in the only task
        (step(1, 1, [2]), rendezvous(3, 1, 4), "environment", (3, 1, 4)),
        (step(1, 0, [1, 1], node=1), rendezvous(3, 1, 4), "environment", (3, 1, 4)),  # in the one of each node
    ],
)
def test_all_five_variables_of_a_rendezvous_count_if_they_fit_the_step(environ, by_hand, launcher, place):
    launch = detect(environ | by_hand)
    assert (launch.launcher, three(launch), address(launch)) == (launcher, place, ("10.0.0.9", 4000))


@pytest.mark.parametrize(
    ("environ", "by_hand"),
    [
        (step(3, 1, [3, 3], node=1), rendezvous(1, 1, 2)),
        (step(3, 1, [2, 2], node=1), rendezvous(3, 1, 8)),  # several nodes with several tasks must say the same
        (step(3, 1, [2, 2], node=1), rendezvous(2, 1, 4)),
        (step(1, 1, [2]), rendezvous(0, 1, 2)),
        (step(1, 1, [2]), rendezvous(1, 0, 2)),
        (step(1, 1, [4]), rendezvous(1, 1, 2)),
        (step(1, 0, [1, 1], node=1), rendezvous(0, 0, 2)),
    ],
)
def test_all_five_variables_of_a_rendezvous_that_do_not_fit_are_refused_with_both(environ, by_hand):
    with pytest.raises(RuntimeError, match="the environment is contradictory") as refusal:
        detect(environ | by_hand)
    for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
        assert f" {name}={(environ | by_hand)[name]}" in str(refusal.value)


@pytest.mark.parametrize(
    ("some", "missing"),
    [
        ({"WORLD_SIZE": "8"}, "RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "7"}, "RANK, LOCAL_RANK, WORLD_SIZE"),
        (by_hand(0, 0, 1), "MASTER_ADDR, MASTER_PORT"),
    ],
)
def test_some_of_the_five_are_ignored_with_a_warning_that_names_them(some, missing):
    ignored = ", ".join(
        name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name in some
    )
    with pytest.warns(UserWarning, match=f"{ignored} in the environment ignored, as {missing} is not set;"):
        launch = detect(step(1, 1, [2]) | some)
    assert (three(launch), address(launch)) == ((1, 1, 2), ("n1", 17345))


@pytest.mark.parametrize(("job", "port"), [("12345", 17345), ("7", 15007), ("123450000", 15000), ("9999", 24999)])
def test_the_port_follows_from_the_last_four_digits_of_the_job(job, port):
    assert detect(step(0, 0, [1], SLURM_JOB_ID=job)).master_port == port


def test_steps_of_a_job_and_of_its_neighbours_take_different_ports():
    ports = [
        detect(step(0, 0, [1], SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(number))).master_port
        for job in range(9_990, 10_010)
        for number in range(100)
    ]
    assert len(set(ports)) == len(ports)
    assert all(15_000 <= port < 32_768 for port in ports)


def test_the_address_is_looked_up_once_and_only_when_it_is_read(monkeypatch):
    asked = []

    monkeypatch.setattr(slurm, "expand", lambda nodelist: asked.append(nodelist) or ["n1"])
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, _: asked.append(host))
    launch = detect(step(1, 1, [2]))
    assert three(launch) == (1, 1, 2)
    assert asked == []
    assert launch.master_addr == launch.master_addr == "n1"
    assert asked == ["n[1-1]", "n1"]


def test_a_node_name_without_an_address_gives_way_to_the_host_of_srun(monkeypatch):
    environ = step(0, 0, [1, 1])
    assert detect(environ).master_addr == "n1"

    def unknown(*_):
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert detect(environ).master_addr == "10.0.0.1"
    assert detect(environ | {"SLURM_STEP_NODELIST": "x" * 64}).master_addr == "10.0.0.1"
    del environ["SLURM_LAUNCH_NODE_IPADDR"]
    assert detect(environ).master_addr == "n1"


@pytest.mark.parametrize(
    ("nodelist", "message"), [("[]", r"must name a host, got '\[\]'"), ("n[1", "is not a node list")]
)
def test_a_list_without_hosts_is_refused(nodelist, message):
    with pytest.raises(RuntimeError, match=f"SLURM_STEP_NODELIST {message}"):
        detect(step(0, 0, [1], SLURM_STEP_NODELIST=nodelist)).master_addr  # noqa: B018  # it is looked up here


SCONTROL = {
    "missing": None,
    "works": 'echo "$*" | tr " " "\\n"',
    "fails": "echo n7; exit 1",
    "cannot read the list": "exit 0",
}


@pytest.mark.parametrize(
    ("how", "hosts"),
    [
        ("missing", ["n1", "n2"]),
        ("works", ["show", "hostnames", "n[1-2]"]),
        ("fails", ["n1", "n2"]),
        ("cannot read the list", ["n1", "n2"]),
    ],
)
def test_scontrol_lists_the_hosts_where_it_can(tmp_path, monkeypatch, how, hosts):
    if (body := SCONTROL[how]) is not None:
        script = tmp_path / "scontrol"
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) + (os.pathsep + os.environ["PATH"] if how == "works" else ""))
    assert slurm.expand("n[1-2]") == hosts


def test_a_scontrol_that_hangs_is_not_waited_for(tmp_path, monkeypatch):
    script = tmp_path / "scontrol"
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + os.environ["PATH"])
    monkeypatch.setattr(slurm, "_SCONTROL_TIMEOUT", 0.1)
    assert slurm.expand("n[1-2]") == ["n1", "n2"]


# --- lists of hosts ---


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("", ""),
        ("[]", ""),
        ("localhost", "localhost"),
        ("node[1,2,3]", "node1 node2 node3"),
        ("quartz[4-8]", "quartz4 quartz5 quartz6 quartz7 quartz8"),
        ("c1001a-[11,17]", "c1001a-11 c1001a-17"),
        ("c1001a-11,c1001a-17", "c1001a-11 c1001a-17"),
        ("machine2-[02-4]vm1", "machine2-02vm1 machine2-03vm1 machine2-04vm1"),
        ("machine2-[009-11]vm1", "machine2-009vm1 machine2-010vm1 machine2-011vm1"),
        ("b[3-4],a1,c[1,2]x", "b3 b4 a1 c1x c2x"),
        (" n[1, 2] , m ", "n1 n2 m"),
        ("n1,,n2,", "n1 n2"),
        ("node[0-3]", "node0 node1 node2 node3"),  # each range is padded to the width of its first number
        ("n[00-02]", "n00 n01 n02"),
        ("node[098-101]", "node098 node099 node100 node101"),
        ("n[8-10,008]", "n8 n9 n10 n008"),
        ("n[18-19,1-2]", "n18 n19 n1 n2"),  # in the order given
        ("n[2,1-3,2]", "n2 n1 n3"),
        ("rack[1-2]n[01-02]", "rack1n01 rack1n02 rack2n01 rack2n02"),
        ("r[1]s[2]t[3]", "r1s2t3"),
        ("[1-2]", "1 2"),
    ],
)
def test_a_list_of_hosts_is_expanded_in_its_order(nodelist, hosts):
    assert expand_hosts(nodelist) == hosts.split()


@pytest.mark.parametrize(
    ("nodelist", "reason"),
    [
        ("x[]", "got ''"),
        ("x[1,,2]", "got ''"),
        ("x[a-b]", "got 'a-b'"),
        ("x[1-2-3]", "got '1-2-3'"),
        ("x[-1]", "got '-1'"),
        ("x[٣]", "got '٣'"),
        ("x[3-1]", "'3-1' in .* is empty"),
        ("x[1", "unbalanced bracket"),
        ("x1]", "unbalanced bracket"),
        ("x[1[2]]", "unbalanced bracket"),
        ("x[1,2", "unbalanced bracket"),
    ],
)
def test_what_is_no_list_of_hosts_is_refused(nodelist, reason):
    with pytest.raises(ValueError, match=reason):
        expand_hosts(nodelist)


def fold(hosts):
    """Write hosts that end in a number as Slurm does: neighbours become a range."""
    runs = []
    for prefix, width, number in hosts:
        if runs and runs[-1][:2] == (prefix, width) and runs[-1][3] == number - 1 and len(str(number)) <= width:
            runs[-1] = (*runs[-1][:3], number)
        else:
            runs.append((prefix, width, number, number))
    return ",".join(
        f"{prefix}[{first:0{width}d}-{last:0{width}d}]" if last > first else f"{prefix}{first:0{width}d}"
        for prefix, width, first, last in runs
    )


HOSTS = st.lists(
    st.tuples(st.sampled_from(["n", "gpu-", "r1c"]), st.integers(1, 4), st.integers(0, 300)), max_size=30, unique=True
)


@given(HOSTS, st.booleans())
def test_expanding_undoes_folding(hosts, neighbours):
    if neighbours:
        hosts = sorted(hosts)
    assert expand_hosts(fold(hosts)) == [f"{prefix}{number:0{width}d}" for prefix, width, number in hosts]
