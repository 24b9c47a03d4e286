"""What `python -m camshaft.distributed` tells: alone, under real launchers, and when something is wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from camshaft.distributed import __main__ as program
from camshaft.distributed.__main__ import backends, devices, inspect, jobs_text, main
from camshaft.distributed.backends import registry
from camshaft.distributed.failures.record import Snapshot, find, read
from camshaft.text import Look
from tests.distributed.observed import see
from tests.limits import HANG
from tests.mpi.checking import ROOT, mpirun

MODULE = ("-m", "camshaft.distributed")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, timeout=HANG, capture_output=True, text=True)


def objects(output: str) -> list[dict[str, Any]]:
    """Read the lines that hold an object; other libraries may write between them."""
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def test_a_single_process_reports_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    said = capsys.readouterr().out
    assert re.match(r"rank 0 of 1 on \S+\n-+\nlauncher +none found\nbackend 'auto' +a single process, as ", said)
    assert re.search(rf"\ntorch +{re.escape(torch.__version__)}\n", said)
    assert re.search(r"\ncpu +\d+ cores, of which torch uses \d+\n", said)
    assert re.search(rf"\ngloo +yes +torch {re.escape(torch.__version__)} +-\n", said)
    assert re.search(r"\nmpi +yes +mpi4py [\d.]+ +-\n", said)


@pytest.mark.jobs
def test_with_a_backend_rank_0_reports_all_ranks_in_order() -> None:
    done = python(*TORCHRUN, *MODULE, "--backend", "gloo")
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^rank \d of \d", done.stdout, re.MULTILINE) == ["rank 0 of 2", "rank 1 of 2"]
    assert done.stdout.count("tried           gloo, all_reduce of 1 over 2 ranks gave 2, on cpu\n") == 2
    sources = re.findall(r"^rank +\d +RANK=\d", done.stdout, re.MULTILINE)
    assert [source.split() for source in sources] == [["rank", "0", "RANK=0"], ["rank", "1", "RANK=1"]]


@pytest.mark.jobs
def test_under_mpirun_the_backend_is_mpi() -> None:
    done = mpirun(2, *MODULE, "--backend", "mpi", "--json")
    assert done.returncode == 0, done.stdout
    reports = objects(done.stdout)
    assert [report["topology"]["rank"] for report in reports] == [0, 1]
    assert [report["launcher"] in ("mpich", "openmpi") for report in reports] == [True, True]
    assert [report["auto"].partition(",")[0] for report in reports] == ["mpi", "mpi"]
    assert [report["proof"] for report in reports] == ["mpi, all_reduce of 1 over 2 ranks gave 2, on cpu"] * 2


def test_a_contradictory_environment_is_part_of_the_report(monkeypatch: Any, capsys: Any) -> None:
    for name, value in {"PMI_RANK": "1", "PMI_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    assert main(["--backend", "gloo"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("a process on ")  # of no rank
    assert "error: the environment is contradictory: mpich and environment disagree" in said
    assert "rank        PMI_RANK=1  RANK=0\n" in said
    assert re.search(r"\ngloo +yes", said)


@pytest.mark.jobs
def test_a_backend_that_fails_is_part_of_the_report() -> None:
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    done = python(*MODULE, "--backend", "gloo", "--timeout", "0.5", **alone)
    assert done.returncode == 1
    assert "error: backend 'gloo': not all ranks arrived within 0.5 s" in done.stdout
    assert "rank 0 of 2" in done.stdout
    assert "Traceback" not in done.stderr


def test_numbers_without_a_variable_are_reported_as_assumed_or_derived() -> None:
    report = inspect({"PMI_RANK": "1", "PMI_SIZE": "4"})
    assert report["sources"]["rank"] == "PMI_RANK=1"
    assert report["sources"]["num_nodes"] == "assumed, as no variable sets it"
    one_node = inspect({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    assert one_node["sources"]["num_nodes"] == "derived from the others"


def test_missing_libraries_are_reported_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "has_xla_support", False)
    report = inspect({})
    missing = "needs pip install 'camshaft[xla]'"
    assert report["backends"]["xla-tpu"] == {"available": False, "version": None, "missing": missing}
    assert re.search(r"\nxla-tpu +no +- +needs pip install 'camshaft\[xla\]'\n", program.as_text(report, Look()))


def test_versions_are_reported_without_importing_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(sys.modules)
    monkeypatch.setattr(program, "lack_of", lambda name: None)
    monkeypatch.setattr(program.importlib.metadata, "version", lambda distribution: f"9 of {distribution}")
    found = backends()
    assert found["xla-tpu"] == {"available": True, "version": "torch_xla 9 of torch_xla", "missing": None}
    assert found["horovod"] == {"available": True, "version": "horovod 9 of horovod", "missing": None}
    assert found["nccl"]["missing"] == "needs a device of type cuda"
    assert not {"torch_xla", "horovod", "mpi4py"} & (set(sys.modules) - before)


def test_accelerators_are_reported_with_name_and_memory_or_else_without(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, "cuda", 2)
    properties = SimpleNamespace(name="Big GPU", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert [devices()[name] for name in ("cuda:0", "cuda:1")] == ["Big GPU, 80.0 GiB"] * 2
    monkeypatch.delattr(torch.cuda, "get_device_properties")
    assert "cuda:1" in devices()


RANK = """
import sys, time
from camshaft.distributed.failures.record import Record
rank, job = int(sys.argv[1]), sys.argv[2]
record = Record(rank, 3)
engine = {"line": "a.py:1 in main", "number": 1, "event": "ITERATION_STARTED", "epoch": 2, "iteration": 41 + rank}
stack = [f"{name}.py:{number} in f" for number, name in enumerate("abcdefgh")]
now = time.monotonic()
wait = {"what": "all_reduce", "value": "torch.float32 [3, 4]", "ranks": "0-1", "began": now - 5}
status = {"time": now, "engines": [{**engine, "epoch": 9}, engine], "stack": stack, "waits": [wait][rank // 2 :]}
record.write_status(status)
record.job = job
print("ready", flush=True)
time.sleep(9000)
"""


def records_of(job: str) -> list[Path]:
    return [path for path in find() if (found := read(path)) is not None and found.job == job]


@pytest.fixture
def job() -> Iterator[str]:
    """A job of three processes that wrote records; rank 1 was killed, and rank 2 aborted."""
    name = f"test-{uuid.uuid4().hex}"
    with ExitStack() as stack:
        processes = []
        for rank in range(3):
            command = [sys.executable, "-c", RANK, str(rank), name]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(process.kill)
            processes.append(process)
        stack.callback(lambda: [path.unlink() for path in records_of(name)])
        assert [process.stdout.readline() for process in processes if process.stdout] == [b"ready\n"] * 3
        for process, kill in ((processes[1], signal.SIGKILL), (processes[2], signal.SIGABRT)):
            process.send_signal(kill)
            process.wait()
        yield name


@pytest.mark.jobs
def test_inspect_tells_what_ranks_are_doing_and_what_those_that_were_killed_did(
    job: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--inspect"]) == 0
    said = capsys.readouterr().out
    (text,) = [part for part in re.split(r"\n(?=job )", f"\n{said}") if part.startswith(f"job {job}:")]
    assert re.match(rf"job {job}: 1 of 3 ranks of -c run on \S+\n-+\n +pid +process ", text)
    engine = "ITERATION_STARTED +2 +"  # of the innermost engine
    waiting = r" +all_reduce torch.float32 \[3, 4\] of ranks 0-1 +{} s +a.py:0 in f\n"
    assert re.search(rf"\nrank 0 +\d+ +alive +[\d.]+ s old +{engine}41{waiting.format('[0-9]+')}", text)
    assert re.search(rf"\nrank 1 +\d+ +dead +- +{engine}42{waiting.format('5')}", text)
    assert re.search(rf"\nrank 2 +\d+ +dead +- +{engine}43 +- +- +a.py:0 in f\n", text)
    assert "\nmain thread of rank 0, 1, 2, innermost first:\n    a.py:0 in f\n    b.py:1 in f\n" in text
    assert "    e.py:4 in f\n" in text
    assert "f.py" not in text
    assert main(["--inspect", "--json"]) == 0
    found = sorted((one for one in objects(capsys.readouterr().out) if one["job"] == job), key=lambda one: one["rank"])
    assert [one["is_alive"] for one in found] == [True, False, False]
    assert [len(one["status"]["waits"]) for one in found] == [1, 1, 0]
    assert {Path(one["path"]) for one in found} == set(records_of(job))
    assert all((again := read(Path(one["path"]))) is not None and again.pid == one["pid"] for one in found)


def test_inspect_tells_if_there_are_no_records(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(program.failures, "inspect", list)
    assert main(["--inspect"]) == 0
    assert re.match(r"no rank on \S+ is running, or was killed in the last 24 hours\n$", capsys.readouterr().out)
    assert main(["--inspect", "--json"]) == 0
    assert capsys.readouterr().out == ""


def test_inspect_shows_failures_departures_and_different_stacks_of_each_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program.time, "monotonic", lambda: 3670.5)
    one = Snapshot(Path("a"), "first", 0, 2, 11, False, "here", {"time": 5.0, "stack": ["a.py:1 in f"]}, "", "train.py")
    failure = {"error": "ValueError: text", "where": "in handler 'log' on ITERATION_COMPLETED"}
    failed = replace(one, rank=1, status={"time": 5.0, "failure": failure, "stack": ["b.py:2 in g"]})
    left = replace(one, job="second", status={"time": 3.0, "left": "has left the run without an error"})
    unnamed = replace(one, job="", status={}, pid=12, script="")
    text = jobs_text([one, failed, left, unnamed, replace(unnamed, pid=13)], Look(), with_ended=True)
    assert re.findall(r"^job .*", text, re.MULTILINE) == [
        "job not known yet to process 12: 1 of 2 ranks ran on here",
        "job not known yet to process 13: 1 of 2 ranks ran on here",
        "job second: 1 of 2 ranks of train.py ran on here, last seen 1:01:07 ago",
        "job first: 2 of 2 ranks of train.py ran on here, last seen 1:01:05 ago",
    ]
    assert "\nrank 1 failed: ValueError: text, in handler 'log' on ITERATION_COMPLETED\n" in text
    assert "\nrank 0 has left the run without an error\n" in text
    assert "\nmain thread of rank 0, innermost first:\n    a.py:1 in f\n" in text
    assert "\nmain thread of rank 1, innermost first:\n    b.py:2 in g\n" in text


def test_inspect_shows_the_jobs_that_run_and_if_there_are_none_the_latest() -> None:
    def shown(*snapshots: Snapshot) -> list[str]:
        return re.findall(r"^job \w+|^\d+ older.*", jobs_text(snapshots, Look()), re.MULTILINE)

    ended = [Snapshot(Path(), f"job{n}", 0, 1, n, False, "here", {"time": float(n)}) for n in (1, 3, 2)]
    assert shown(*ended) == ["job job3", "2 older jobs: add --all to see them"]
    assert shown(*ended[:1]) == ["job job1"]
    one = replace(ended[0], is_alive=True)
    assert shown(one, *ended[1:], replace(one, rank=1, is_alive=False), replace(one, job="job4")) == [
        "job job1",
        "job job4",
        "2 older jobs: add --all to see them",
    ]


def test_all_jobs_are_shown_only_of_records(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--all"])
    assert "error: --all needs --inspect" in capsys.readouterr().err
