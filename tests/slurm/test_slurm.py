"""Tasks started by a real Slurm connect to each other, on one node and on two."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests import cluster_page
from tests.distributed.conformance import CHECKS
from tests.examples.ten_steps import assert_ten_steps
from tests.faults.jobs import FAULTS, Case, run_case, srun
from tests.guards import content, outlasting
from tests.limits import wait_until
from tests.machines import DEFAULTS, PYTHON, Program
from tests.slurm.cluster import Cluster
from tests.torchrun.preempted import check_samples

PLACE = (*PYTHON, "-m", "tests.slurm.place")


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    """Start Slurm for all tests; turn SIGTERM into an exit that stops it and removes its folder."""
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.exit("terminated by a signal", returncode=143))
    with Cluster() as cluster:
        yield cluster
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def cluster(slurm: Cluster) -> Iterator[Cluster]:
    """Return the cluster; fail if the test leaves jobs behind."""
    yield slurm
    if jobs := outlasting(slurm.jobs):
        slurm.cancel_all()
        pytest.fail(f"jobs are left:\n{jobs}")


def places(program: Program) -> list[dict[str, object]]:
    """Return what the ranks of a successful program printed, in rank order."""
    assert program.returncode == 0, program.output
    printed = [json.loads(line) for line in program.output.splitlines() if line.startswith("{")]
    return sorted(printed, key=lambda place: (str(place["step"]), place["rank"]))


def expected(nodes: list[str], step: str | None = "0") -> list[dict[str, object]]:
    """Return what ranks on these nodes are expected to print."""
    names = list(dict.fromkeys(nodes))
    return [
        {
            "rank": rank,
            "world_size": len(nodes),
            "local_rank": nodes[:rank].count(node),
            "nproc_per_node": nodes.count(node),
            "node_rank": names.index(node),
            "nnodes": len(names),
            "backend": "gloo",
            "model_name": "native-dist",
            "ranks": list(range(len(nodes))),
            "hosts": nodes,
            "step": step,
        }
        for rank, node in enumerate(nodes)
    ]


@pytest.mark.parametrize(
    ("options", "nodes"),
    [
        ("--ntasks=1", ["n1"]),
        ("--ntasks=2", ["n1", "n1"]),
        ("--ntasks=2 --mpi=pmi2", ["n1", "n1"]),
        ("--nodes=2 --ntasks=2", ["n1", "n2"]),
        ("--nodes=2 --ntasks=4 --ntasks-per-node=2", ["n1", "n1", "n2", "n2"]),
        ("--nodes=2 --ntasks=4 --ntasks-per-node=2 --distribution=cyclic", ["n1", "n2", "n1", "n2"]),
        ("--nodes=2 --ntasks=3", ["n1", "n1", "n2"]),
    ],
)
def test_srun_tasks_know_their_places(cluster, options, nodes):
    assert places(cluster.run("srun", *options.split(), *PLACE)) == expected(nodes)


def test_a_step_on_one_node_of_the_job_has_its_own_ranks(cluster):
    step = shlex.join(["srun", "--nodes=1", "--relative=1", "--ntasks=2", *PLACE])
    run = cluster.run("salloc", "--nodes=2", "--ntasks-per-node=2", "bash", "-c", step)
    assert places(run) == expected(["n2", "n2"])


def test_concurrent_steps_do_not_interfere(cluster, tmp_path):
    """Each step waits until the other one has started on the same node."""
    step = shlex.join(["srun", "--exact", "--nodes=1", "--relative=0", "--ntasks=2", *PLACE, "--meet", str(tmp_path)])
    run = cluster.run(
        "salloc", "--nodes=1", "--ntasks=4", "bash", "-c", f"{step} & {step}; result=$?; wait $! && exit $result"
    )
    assert places(run) == expected(["n1", "n1"], step="0") + expected(["n1", "n1"], step="1")


def test_torchrun_under_srun_takes_precedence(cluster):
    """Two tasks with two workers each: a world size of 2 for srun, and of 4 for torchrun."""
    torchrun = (
        "-m torch.distributed.run --nnodes=$SLURM_NNODES --nproc-per-node=2 --node-rank=$SLURM_NODEID "
        "--master-addr=$SLURM_LAUNCH_NODE_IPADDR --master-port=29500 -m tests.slurm.place"
    )
    task = f"exec {shlex.join(PYTHON)} {torchrun}"
    run = cluster.run("srun", "--nodes=2", "--ntasks-per-node=1", "bash", "-c", task)
    assert places(run) == expected(["n1", "n1", "n2", "n2"])


def sbatch(cluster: Cluster, folder: Path, *command: str) -> Program:
    """Run a command as one process in the batch script of a job with two tasks, outside of a step."""
    output, status = folder / "output", folder / "status"
    script = f"{shlex.join(command)} >{output} 2>&1; echo $? >{status}"
    submit = shlex.join(["sbatch", "--ntasks=2", f"--output={output}", "--wrap", script])
    # not sbatch --wait, which polls after 2 seconds and then after 40
    return cluster.run(
        "bash", "-c", f"{submit} && until [ -s {status} ]; do sleep 0.1; done; cat {output}; exit $(<{status})"
    )


def salloc(cluster: Cluster, folder: Path, *command: str) -> Program:
    return cluster.run("salloc", "--ntasks=2", *command)


@pytest.mark.parametrize("allocate", [sbatch, salloc])
def test_a_process_without_srun_is_a_single_rank(cluster, tmp_path, allocate):
    run = allocate(cluster, tmp_path, *PLACE)
    assert places(run) == expected(["n1"], step=None)


@pytest.mark.parametrize("allocate", [sbatch, salloc])
def test_spawn_works_inside_a_job(cluster, tmp_path, allocate):
    run = allocate(cluster, tmp_path, *PLACE, "--spawn", "2")
    assert places(run) == expected(["n1", "n1"], step=None)


def test_rank_and_world_size_come_from_slurm(cluster):
    run = cluster.run("srun", "--ntasks=2", *PLACE, '{"rank": 0, "world_size": 2}')
    assert run.returncode == 1
    message = "ValueError: rank and world_size come from Slurm, got rank=0 and world_size=2"
    assert run.output.count(message) == 2, run.output


FAILING = """
import camshaft.distributed as idist
idist.initialize("gloo")
if idist.get_rank() == 1:
    raise LookupError("the cause")
idist.barrier()
"""


def test_a_failing_task_ends_the_step(cluster):
    """On both nodes, without srun's --kill-on-bad-exit."""
    run = cluster.run("srun", "--nodes=2", "--ntasks=2", *PYTHON, "-c", FAILING)
    assert run.returncode == 1
    assert "RankFailedError: rank 1 failed first: LookupError: the cause" in run.output, run.output


@pytest.mark.parametrize("name", ["step", "SIGKILL", "shape", "terminate"])
def test_a_fault_ends_the_step_and_is_named(cluster, name):
    outcome = run_case(Case(FAULTS[name], "srun"), partial(srun, cluster))
    assert not outcome.problems(), outcome.report()


KILLED = """
import os, time
import camshaft.distributed as idist
idist.initialize("mpi")
idist.barrier()
if idist.get_rank() == 1:
    os.kill(os.getpid(), 9)
time.sleep(2)
"""


def test_a_rank_of_mpi_does_not_wait_at_its_end_for_one_that_was_killed(cluster):
    run = cluster.run("srun", "--ntasks=2", "--nodes=1", "--mpi=pmi2", *PYTHON, "-c", KILLED)
    assert run.returncode != 0
    assert "MPI cannot be finalized, as ranks [1] were killed" in run.output, run.output


def test_node_names_that_do_not_resolve_are_not_needed(cluster):
    """The tasks use the address of srun's host, here the first node; without it, gloo would listen on loopback."""
    nameless = f"umount /etc/hosts && exec {shlex.join(PLACE)}"
    run = cluster.run("srun", "--nodes=2", "--ntasks=2", "unshare", "--mount", "bash", "-c", nameless)
    assert places(run) == expected(["n1", "n2"])


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_conformance_checks_pass(cluster, nodes):
    conformance = [*PYTHON, "-m", "tests.distributed.run_conformance", "--backend", "gloo"]
    run = cluster.run("srun", f"--nodes={nodes}", "--ntasks=2", *conformance)
    assert run.returncode == 0, run.output
    assert set(re.findall(r"^passed (\w+)$", run.output, re.MULTILINE)) == set(CHECKS)


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_example_matches_one_process(cluster, nodes):
    launch = [*cluster.entrance, "srun", f"--nodes={nodes}", "--ntasks=2", PYTHON[0]]
    shows = "world size 2 on cpu with gloo"
    assert_ten_steps(launch, "--backend", "gloo", shows=shows, environment=DEFAULTS | cluster.variables)


def test_the_job_of_the_clusters_page_resumes_after_a_failure(cluster, tmp_path):
    cluster_page.write(tmp_path, "train.py")
    log, status = tmp_path / "log", tmp_path / "status"
    submit = f"sbatch --time=30 --output={log} --open-mode=append"
    last = shlex.join([*submit.split(), "--dependency=singleton", "--job-name=train", "--wrap", f"echo $? >{status}"])
    (tmp_path / "failing.sh").write_text(cluster_page.text("job.sh").replace("train.py", "train.py --fail"))
    run = cluster.run(
        "bash", "-c", f"cd {tmp_path} && {submit} failing.sh && {last} && until [ -s {status} ]; do sleep 0.1; done"
    )
    assert run.returncode == 0, run.output
    lines = re.findall(r"^(.*): world size 4, nodes 2$", log.read_text(), re.MULTILINE)
    assert lines == ["started at iteration 0", "resumed at iteration 40", "finished at iteration 80"], log.read_text()


def process_of(job: str, rank: int) -> int:
    """Return the process of a rank, whose id differs on its node; not its data loader, which it has started itself."""
    variables = {f"SLURM_JOB_ID={job}", f"SLURM_PROCID={rank}"}
    pids = {int(entry) for entry in os.listdir("/proc") if entry.isdigit()}
    found = {pid for pid in pids if variables <= set(content(Path(f"/proc/{pid}/environ")).split("\0"))}
    stats = {pid: content(Path(f"/proc/{pid}/stat")) for pid in found}
    (first,) = (pid for pid, stat in stats.items() if stat and int(stat.rpartition(")")[2].split()[1]) not in found)
    return first


def test_a_preempted_job_is_requeued_and_resumes_with_the_next_sample(cluster, tmp_path):
    signals = int(os.environ.get("SIGNALS", "2"))
    program = shlex.join([*PYTHON, "-m", "tests.torchrun.preempted", str(tmp_path), "requeue"])
    # One file per rank and stream: srun cuts long lines into parts, and writes those of others in between.
    streams = f"--open-mode=append --output={tmp_path}/rank%t --error={tmp_path}/errors%t"
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\nsrun --nodes=2 --ntasks=2 {streams} {program}\n")
    options = ["--nodes=2", "--ntasks-per-node=1", "--requeue", "--open-mode=append", f"--output={tmp_path}/errors"]
    job = cluster.run("sbatch", "--parsable", *options, str(tmp_path / "job.sh")).output.strip()

    def lines(what):
        each = (line for file in sorted(tmp_path.glob("rank*")) for line in file.read_text().splitlines())
        return [line for line in each if line.startswith(f'{{"what": "{what}"')]

    def count(what):
        return len(lines(what))

    def errors():
        return "".join(file.read_text() for file in sorted(tmp_path.glob("errors*")))

    for number in range(1, signals + 1):
        wait_until(lambda number=number: count("begin") == 2 * number, errors)
        time.sleep(random.Random(number).uniform(0, 2))
        if number % 2:
            cluster.run("scancel", "--signal=USR1", job)  # to all processes of the step, as before the time limit
        else:
            os.kill(process_of(job, rank=1), signal.SIGUSR1)
        wait_until(lambda number=number: count("end") == 2 * number, errors)
        wait_until(lambda: "PD" in cluster.run("squeue", "--noheader", "--states=pending").output)
        cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")  # not in two minutes
    wait_until(lambda: count("begin") == 2 * signals + 2)
    (tmp_path / "stop").touch()
    wait_until(lambda: count("end") == 2 * signals + 2 and not cluster.jobs())
    ends = sorted((json.loads(line) for line in lines("end")), key=lambda end: end["first"])
    check_samples(ends)
    assert [line["signal"] for line in ends] == [signal.SIGUSR1] * 2 * signals + [None] * 2
